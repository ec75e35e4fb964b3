"""A job goes on from memory with fewer replicas, and with more again, as a job of that layout would."""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reft
from reft.engine.attach import find_session
from reft.engine.load_memory import MemoryRestorer
from reft.engine.refused_batch import find_refusal
from reft.grid import Degrees
from reft.recover.inventory import ArenaStore
from tests.engine.ranks import Mlp, be_a_rank, groups, images_of, run_life
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE

RANK_GIVEN = "RANK" in os.environ
RANK = int(os.environ.get("RANK", "0"))
STEPS = 3  # of every life
BATCH, MICRO = 12, 2
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2-offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero1-bf16": {**BF16, "zero_optimization": {"stage": 1}},
    "zero1-bf16-accumulated": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
if BF16_OPTIMIZER_IS_NEVER_MADE:
    del CASES["zero1-bf16"]
ONE_DEGREE: dict[str, dict[str, Any]] = {
    "round_robin_gradients": {"stage": 1, "round_robin_gradients": True},
}
"""What is refused at another degree, by the words that say so."""
LIFE = json.loads((Path(sys.argv[1]) / "life.json").read_text()) if RANK_GIVEN else {}
DISK = LIFE.get("disk", False)
WIDTH = 16


def config(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40}},
        "gradient_clipping": 0.1,
        "steps_per_print": None,
        **case,
        **more,
    }


def block(root: Path, case: str) -> dict[str, Any]:
    # Blocks that cut the partitions at odd places.
    memory = str(root / case / (f"memory{RANK}" + f"-{LIFE.get('until')}" * DISK))
    return {
        "enabled": True,
        "job_id": case,
        "memory_dir": memory,
        "block_bytes": 4096,
        "tolerance": 0,
    }


def make(settings: dict[str, Any]) -> Any:
    model = Mlp(
        WIDTH, 301
    )  # two groups of odd sizes: their parts are padded, and differently at every degree
    if "offload_optimizer" in settings.get("zero_optimization", {}):
        # No step uses it: a version holds its gradient, which stays with the old degree.
        model.spare_weight = torch.nn.Parameter(torch.ones(5))
    return reft.initialize(model=model, model_parameters=groups(model), config=settings)[0]


def batches(engine: Any) -> Iterator[torch.Tensor]:
    """This rank's micro-batches of the next step; those of all ranks are the same twelve samples at every
    degree."""
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    samples = torch.randn(BATCH, WIDTH, generator=generator)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for first in range(0, BATCH, MICRO * dist.get_world_size()):
        at = first + MICRO * RANK
        yield samples[at : at + MICRO].to(dtype)


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        total = torch.zeros(1)
        for batch in list(batches(engine)):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(f"{float(total).hex()} {engine.global_samples} {engine.get_lr()}")
    return losses


def reference(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    """A job of this layout, as DeepSpeed loads it."""
    universal = "zero_optimization" in CASES[case]
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = make(config(CASES[case], **more))
    engine.load_checkpoint(
        str(root / case / "checkpoint"), tag=life["tag"] + "-universal" * universal
    )
    return {"losses": train(engine, life["until"]), "images": images_of(engine)}


def interrupted(root: Path, case: str) -> None:
    """A start that fails when the state is restored, and not protected yet."""

    def fail(self: MemoryRestorer) -> None:
        raise InterruptedError

    engine = make({**config(CASES[case]), "reft": block(root, case)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryRestorer, "protect", fail)
        with pytest.raises(InterruptedError):
            engine.load_checkpoint(str(root / "none"))
    find_session(engine).close()
    dist.barrier()


def refusal(root: Path, case: str, settings: dict[str, Any]) -> str:
    """What a start with these settings says; the memory stays."""
    engine = make({**settings, "reft": block(root, case)})
    with pytest.raises(reft.ReftError) as refused:
        engine.load_checkpoint(saved_in(root, case))
    find_session(engine).close()
    dist.barrier()
    return f"{type(refused.value).__name__}: {refused.value}"


def saved_in(root: Path, case: str) -> str:
    return str(root / case / "checkpoint" if DISK else root / "none")


def undivided(root: Path) -> str:
    with pytest.raises(reft.ConfigError) as refused:
        make({**config({"train_batch_size": 14}), "reft": block(root, "zero1")})
    return str(refused.value)


def refused(root: Path, life: dict[str, Any]) -> dict[str, Any]:
    """What must not be taken up: the memory of ``zero1`` under another global batch and with another model, and
    those of jobs which deal their parameters out by the degree."""
    by_degree = {case: config({"zero_optimization": zero}) for case, zero in ONE_DEGREE.items()}
    if not life["tag"] or life["until"] > 2 * STEPS:
        paths = []
        for case, settings in by_degree.items():
            engine = make({**settings, "reft": block(root, case)})
            paths.append(engine.load_checkpoint(str(root / "none"))[0])
            train(engine, STEPS)
            find_session(engine).flush(60)
            find_session(engine).close()
            dist.barrier()
        return {"paths": paths}
    more = config(CASES["zero1"], gradient_accumulation_steps=2)
    del more["train_batch_size"]
    return {
        "batch": refusal(root, "zero1", more),
        "division": undivided(root),
        "optimizer": refusal(root, "zero1", config(CASES["zero1"], gradient_clipping=0.5)),
        **{case: refusal(root, case, settings) for case, settings in by_degree.items()},
    }


def live(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(100 + RANK)
    random.seed(200 + RANK)
    if life["tag"] and not DISK:
        interrupted(root, case)
    engine = make({**config(CASES[case]), "reft": block(root, case)})
    path, _ = engine.load_checkpoint(saved_in(root, case))
    session = find_session(engine)
    job = session.memory.job_dir
    found = [
        r.header for r in ArenaStore(job.path, "here", job.secret).inventory().arenas if r.usable
    ]
    out = {
        "path": path,
        "begins": engine.global_steps,
        "degrees": sorted({h.degrees.dp for h in found}),
        "losses": train(engine, life["until"]),
        "images": images_of(engine),
        "micro_steps": engine.micro_steps,
    }
    session.flush(60)
    out["committed"] = session.stats.committed_step
    if not DISK:
        session.close()
    dist.barrier()
    engine.save_checkpoint(str(root / case / "checkpoint"), tag=f"step{life['until']}")
    session.close()
    dist.barrier()
    if life["tag"]:
        out["reference"] = reference(root, case, life)
    return out


def resize(root: Path, how: str) -> dict[str, Any]:
    """A start at another degree, or at the same, of a job that scales learning rate and batch."""
    calls: list[list[int]] = []
    settings = {k: v for k, v in config(CASES["zero1"]).items() if k != "scheduler"}
    engine = make({**settings, "reft": block(root, "zero1")})

    def scale(was: Degrees, now: Degrees) -> None:
        calls.append([was.dp, was.world_size, now.dp, now.world_size, engine.global_steps])
        for group in engine.optimizer.param_groups:
            group["lr"] *= now.dp / was.dp
        engine.set_train_batch_size(BATCH * now.dp // was.dp)
        if how == "fails" and RANK == 1:
            raise ValueError("no batch for this degree")

    reft.attach(engine, on_resize=scale)
    session = find_session(engine)
    refusal, path = "", None
    try:
        path, _ = engine.load_checkpoint(str(root / "none"))
    except reft.ConfigError as error:
        refusal = str(error)
    else:
        with pytest.raises(reft.ConfigError, match="after the state was loaded"):
            reft.attach(engine, on_resize=scale)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    if how == "trains":
        train(engine, STEPS)
        session.flush(60)
    session.close()
    batch = engine.train_batch_size()
    return {"calls": calls, "refusal": refusal, "path": path, "rates": rates, "batch": batch}


def main(root: Path) -> dict[str, Any]:
    if "on_resize" in LIFE:
        return resize(root, LIFE["on_resize"])
    out: dict[str, Any] = {} if DISK else {"refused": refused(root, LIFE)}
    if DISK and LIFE["tag"]:
        more = config(CASES["zero0"], gradient_accumulation_steps=4)
        del more["train_batch_size"]
        out["refused"] = refusal(root, "zero0", more)
    return {**out, **{case: live(root, case, LIFE) for case in LIFE["cases"]}}


LIVES = (3, 2, 3)  # Replicas of every life
KEYS_TO_SET = (
    """write "train_batch_size": 12 and "train_micro_batch_size_per_gpu": 2 into DeepSpeed's JSON, and no """
    '"gradient_accumulation_steps"'
)
Lives = list[list[dict[str, Any]]]


def to_universal(root: Path, tag: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    for folder in root.glob("*/checkpoint"):
        if list((folder / tag).glob("*optim_states.pt")):
            ds_to_universal.main(
                Namespace(
                    input_folder=str(folder / tag),
                    output_folder=str(folder / f"{tag}-universal"),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )


def lives_of(root: Path, replicas: tuple[int, ...], cases: tuple[str, ...]) -> Lives:
    """Per life what every rank saw."""
    found, tag = Lives(), ""
    for number, world_size in enumerate(replicas, 1):
        found.append(
            run_life(Path(__file__), root, world_size, until=number * STEPS, tag=tag, cases=cases)
        )
        tag = f"step{number * STEPS}"
        to_universal(root, tag)
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return lives_of(tmp_path_factory.mktemp("lives"), LIVES, tuple(CASES))


@pytest.mark.integration
def test_p1_p3_p7_a_job_of_fewer_replicas_goes_on_where_it_was_and_refuses_what_is_another(
    tmp_path: Path,
) -> None:
    found = lives_of(tmp_path, LIVES[:2], ("zero1",))
    is_as_a_job_of_its_layout(found, "zero1")
    other_settings_are_refused(found)
    by_degree_are_refused(found)


@pytest.mark.integration
def test_a_script_is_told_of_another_degree_once_and_what_it_changes_is_in_the_next_version(
    tmp_path: Path,
) -> None:
    """One replica, then two, of which one fails in the function; then two, and two again."""
    job, path = Path(__file__), f"memory:zero1/{STEPS}"
    (first,) = run_life(job, tmp_path, 1, on_resize="trains")
    assert (first["calls"], first["path"], first["rates"]) == ([], None, [1e-2, 1e-2])
    told = [1, 1, 2, 2, STEPS]
    for rank in run_life(job, tmp_path, 2, on_resize="fails"):
        assert rank["calls"] == [told]
        assert "on_resize raised an error on rank 1" in rank["refusal"]
        assert "from PP1xDP1xTP1 to PP1xDP2xTP1" in rank["refusal"]
        assert "ValueError: no batch for this degree" in rank["refusal"]
    rates = [2e-2, 2e-2]
    for calls in ([told], []):
        for rank in run_life(job, tmp_path, 2, on_resize="scales"):
            assert (rank["calls"], rank["path"]) == (calls, path)
            assert (rank["rates"], rank["batch"]) == (rates, 2 * BATCH)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_p1_p3_a_resized_job_goes_on_where_it_was_as_a_job_of_its_layout(
    lives: Lives, case: str
) -> None:
    is_as_a_job_of_its_layout(lives, case)


def is_as_a_job_of_its_layout(lives: Lives, case: str) -> None:
    """Also after a start that failed before the first version of its degree was committed. Bit for bit, masters and
    moments with their padding too; the first version of the new degree is protected before the first step."""
    for number, (replicas, ranks) in enumerate(zip(LIVES, lives, strict=False)):
        for rank in ranks if number else ():
            found = rank[case]
            assert found["path"] == f"memory:{case}/{number * STEPS}"
            assert found["begins"] == number * STEPS
            assert found["committed"] == (number + 1) * STEPS
            assert replicas in found["degrees"]
            assert len(found["losses"]) == STEPS
            assert found["losses"] == found["reference"]["losses"]
            assert found["images"] == found["reference"]["images"]


@pytest.mark.nightly
def test_p7_what_is_not_this_job_at_another_degree_is_refused(lives: Lives) -> None:
    other_settings_are_refused(lives)


def other_settings_are_refused(lives: Lives) -> None:
    for rank in lives[1]:
        batch, optimizer = rank["refused"]["batch"], rank["refused"]["optimizer"]
        assert "FingerprintError" in batch
        assert "config.train_batch_size: was 12, is 8" in batch
        assert KEYS_TO_SET in batch
        assert "FingerprintError" in optimizer
        assert "config.gradient_clipping: was 0.1, is 0.5" in optimizer
        assert "layout.dp" not in optimizer
        assert "config.gradient_accumulation_steps" not in optimizer


@pytest.mark.nightly
def test_p1_without_zero_a_checkpoint_of_other_replicas_is_one_of_this_layout(
    tmp_path: Path,
) -> None:
    """DeepSpeed loads the files that the script had it save; what reft saved beside them is of a replica each."""
    tag = ""
    for number, replicas in enumerate((3, 2, 3), 1):
        until = number * STEPS
        for rank in run_life(
            Path(__file__), tmp_path, replicas, until=until, tag=tag, cases=["zero0"], disk=True
        ):
            zero0 = rank["zero0"]
            assert len(zero0["losses"]) == STEPS
            if tag:
                assert f"checkpoint/{tag}/" in zero0["path"]
                assert zero0["begins"] == until - STEPS
                assert zero0["losses"] == zero0["reference"]["losses"]
                assert zero0["images"] == zero0["reference"]["images"]
                assert zero0["micro_steps"] == until * 12 // 2 // replicas
                assert "config.train_batch_size: was 12" in rank["refused"]
                assert KEYS_TO_SET in rank["refused"]
        tag = f"step{until}"


@pytest.mark.nightly
def test_a_global_batch_that_the_replicas_cannot_share_is_refused_with_the_degrees_that_can(
    lives: Lives,
) -> None:
    for rank in lives[1]:
        said = rank["refused"]["division"]
        assert '"train_batch_size" 14 cannot be split into micro-batches of 2 samples' in said
        assert "14 != 2 * 3 * 2" in said
        assert "one of these degrees: 1, 7" in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, "degrees: 1, 2, 3, 6"),
        ({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2}, "a multiple of 2"),
        (
            {
                "train_batch_size": 12,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            'degrees: 3, or leave "gradient_accumulation_steps" out',
        ),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}, None),
        (None, None),
    ],
)
def test_degrees_that_share_a_batch(config: dict[str, Any] | None, said: str | None) -> None:
    error = AssertionError("Check batch related parameters. 12 != 2 * 1 * 5")
    refusal = find_refusal(error, config)
    assert refusal is None if said is None else said in str(refusal)
    assert find_refusal(AssertionError("something else"), config) is None


@pytest.mark.nightly
def test_p7_partitions_in_an_order_of_their_degree_are_refused_by_name(lives: Lives) -> None:
    by_degree_are_refused(lives)
    # What was refused is there for a job of the degree that wrote it.
    paths = [f"memory:{case}/3" for case in ONE_DEGREE]
    assert [rank["refused"]["paths"] for rank in lives[2]] == [paths] * 3


def by_degree_are_refused(lives: Lives) -> None:
    for rank in lives[1]:
        for case in ONE_DEGREE:
            assert case in rank["refused"][case]


if __name__ == "__main__":
    be_a_rank(main)
