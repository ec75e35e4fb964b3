"""Fingerprints: what differs is said by name; and records of several nodes, one of them back with old memory (P7)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft.engine.fingerprint import (
    Fingerprint,
    changed,
    differences,
    read_argument_facts,
    require_same,
)
from reft.engine.identity import Identity
from reft.errors import FingerprintError
from reft.grid import VersionId
from reft.memory.fingerprint_record import record_fingerprint
from reft.memory.jobdir import JobDir

ONE = Fingerprint(
    {"config.optimizer.params.lr": 0.01, "layout.dp": 2, "script": "/a/train.py", "seed": 7}
)


def with_facts(**facts: object) -> Fingerprint:
    return Fingerprint(
        {**ONE.facts, **{name.replace("__", "."): fact for name, fact in facts.items()}}
    )


def test_p7_every_difference_is_named_with_what_was_and_what_is() -> None:
    other = Fingerprint({k: v for k, v in with_facts(layout__dp=4).facts.items() if k != "seed"})
    assert differences(ONE, other) == ["layout.dp: was 2, is 4", "seed: was 7, is not set"]
    assert differences(ONE, ONE) == []


def test_p7_a_number_may_be_written_as_another_type_but_not_as_a_truth_value() -> None:
    assert changed(with_facts(x=1), with_facts(x=1.0)) == []
    assert changed(with_facts(x=1), with_facts(x=True)) == ["x"]
    assert changed(with_facts(x=None), ONE) == ["x"]


def test_p7_a_refusal_says_what_differs_and_what_to_do() -> None:
    with pytest.raises(FingerprintError) as refusal:
        require_same(
            ONE, with_facts(config__optimizer__params__lr=0.1), of="the memory of job train"
        )
    message = str(refusal.value)
    assert "the memory of job train was written by a job that differs" in message
    assert "config.optimizer.params.lr: was 0.01, is 0.1" in message
    assert '"accept_changes": ["config.optimizer.params.lr"]' in message
    assert "--job-id" in message
    assert "reft clean" in message


def test_p7_what_is_accepted_may_differ_with_all_under_it_and_nothing_beside() -> None:
    other = with_facts(config__optimizer__params__lr=0.1, layout__dp=4)
    require_same(ONE, other, of="it", accepted=["config", "layout.dp"])
    for accepted in (["config"], ["config.opt", "layout"], []):
        with pytest.raises(FingerprintError):
            require_same(ONE, other, of="it", accepted=accepted)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"format": 2, "facts": {}}', b'{"format": 1, "facts": {"a": []}}']
)
def test_p7_what_is_not_a_fingerprint_is_refused(data: bytes) -> None:
    with pytest.raises(FingerprintError, match="cannot be read"):
        Fingerprint.decode(data)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ("--lr 0.1 --seed=3", {"lr": "0.1", "seed": "3"}),
        ("small --dropout -0.5 --flag", {"positional": "small", "dropout": "-0.5", "flag": ""}),
        ("--steps 10 --save-dir out --log_interval 5 --ckpt x --max-iters 9 --local_rank=0", {}),
        ("--data /corpus/a --model 7b", {"data": "a", "model": "7b"}),
        (
            "--data-path 0.3 /b/wiki 0.7 /c/books/ --out /x/y --script-root /z",
            {"data-path": "0.3 wiki 0.7 books"},
        ),
        (
            "model.layers=4 trainer.max_steps=9 data.name=c4",
            {"model.layers": "4", "data.name": "c4"},
        ),
        ("--drop-out 0.1 --lora_rank 8 --local_rank 1", {"drop-out": "0.1"}),
        ('--deepspeed_config ds.json --overrides {"a":1}', {}),
        ("--layers 2 4 --learning-steps-per-print 1", {"layers": "2 4"}),
        ("", {}),
    ],
)
def test_arguments_that_may_change_the_numbers_are_facts(
    arguments: str, facts: dict[str, str]
) -> None:
    assert read_argument_facts(arguments.split()) == {f"arguments.{k}": v for k, v in facts.items()}


# Names of options of transformers' TrainingArguments and run_clm, Megatron-DeepSpeed and DeepSpeed-Chat.
DECIDE = """
    learning_rate lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-fraction
    min-lr warmup warmup_steps num_warmup_steps lr_scheduler_type gradient_accumulation_steps
    micro-batch-size global-batch-size rampup-batch-size per_device_train_batch_size weight_decay
    start-weight-decay clip-grad adam_beta1 adam-eps optimizer optim seed data_seed data-path data_path
    dataset_name dataset_config_name train_file train-data-path vocab-file merge-file tokenizer-type
    tokenizer_name model_name_or_path model-config split data_split max_seq_len seq-length hidden-size
    num-layers attention-dropout lora_dim label_smoothing_factor neftune_noise_alpha bf16 fp16 dtype
    mask-prob max_train_samples init-method-std dataloader-type
"""
DO_NOT = """
    output_dir save save-interval save_steps save_total_limit load load-tag no-load-optim
    skip-train num_train_epochs max_steps train-iters train-samples train-tokens exit-interval
    exit-duration-in-mins eval-interval eval-iters eval_steps eval_strategy per_device_eval_batch_size
    do_eval log-interval logging_steps logging_dir tensorboard-dir tensorboard_path wandb-project
    log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard report_to run_name push_to_hub
    hub_model_id disable_tqdm resume_from_checkpoint overwrite_output_dir dataloader_num_workers
    num-workers data_workers local_rank local-rank ddp_timeout deepspeed deepspeed_config
    gradient_checkpointing checkpoint-activations data-cache-path data_output_path validation_file
    valid-data-path test-data-path kill-switch-file print_loss master-port node_rank
"""


@pytest.mark.parametrize("counts", [True, False])
def test_p7_what_decides_the_numbers_counts_and_what_goes_on_around_it_does_not(
    counts: bool,
) -> None:
    names = (DECIDE if counts else DO_NOT).split()
    found = {name: read_argument_facts([f"--{name}", "7"]) for name in names}
    assert found == {name: {f"arguments.{name}": "7"} if counts else {} for name in names}


def test_p7_a_refusal_for_an_argument_says_how_to_leave_them_all_out() -> None:
    was, now = with_facts(arguments__warmth="1"), with_facts(arguments__warmth="2")
    with pytest.raises(
        FingerprintError, match=r'"accept_changes": \["arguments"\] leaves all of them out'
    ):
        require_same(was, now, of="it")
    require_same(was, now, of="it", accepted=["arguments"])


OLD, NEW = Fingerprint({"seed": 1}), Fingerprint({"seed": 2})


@pytest.fixture
def check(tmp_path: Path) -> Any:
    here, back = (JobDir.open_or_create(tmp_path / n, "job", n) for n in ("here", "back"))
    for directory, known in ((here, {1: OLD, 3: NEW}), (back, {1: OLD})):
        for incarnation, fingerprint in known.items():
            record_fingerprint(directory.path, incarnation, fingerprint.encode().decode())
    config: Any = SimpleNamespace(job_id="job", accept_changes=[])
    control: Any = SimpleNamespace(rank=0)
    job = Identity(NEW, config, control, restarted=False)

    def compare(incarnation: int) -> None:
        told: list[bytes] = []

        def gather(mine: bytes) -> list[bytes]:
            told.append(mine)
            return list(told)

        control.gather_bytes = gather
        label = VersionId(incarnation, 9)
        try:
            job.check_memory(back.path, label, reads=True)
        except FingerprintError:
            assert len(told) == 1  # alone with its old record
        job.check_memory(here.path, label, reads=True)

    return compare


def test_p7_the_newest_record_that_is_not_newer_than_the_version_counts(check: Any) -> None:
    check(5)
    check(3)
    with pytest.raises(FingerprintError, match="seed: was 1, is 2"):
        check(2)
