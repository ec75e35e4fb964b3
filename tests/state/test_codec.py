"""P8/P11: host state comes back bit for bit, and decoding builds data, never runs code."""

from __future__ import annotations

import enum
import math
import os
import pickle
import struct
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.engine.identity import Identity
from reft.errors import FingerprintError, UnsupportedStateError
from reft.memory.jobdir import JobDir, record_fingerprint
from reft.naming import Label
from reft.state.codec import DecodeError, decode, encode
from reft.state.fingerprint import Fingerprint, changed, differences, facts_of_arguments, require_same


class Colour(enum.StrEnum):
    RED = "red"


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(bits(a) == bits(b))


def bits(value: Any) -> Any:
    """Something to compare that tells -0.0 from 0.0 and one NaN from another."""
    if isinstance(value, (float, complex)) and not isinstance(value, np.generic):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.shape, value.tobytes()
    return value


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of arbitrary bits: NaN payloads, infinities, negative zeros, denormals."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(b & 1 for b in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(["<f4", "<f8", ">i4", "<u2", "|b1", "<c8", "<M8[ns]", "<U3"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    count = math.prod(shape)
    if dtype.kind == "U":
        return np.array(
            draw(st.lists(st.text("abc", max_size=3), min_size=count, max_size=count)), dtype
        ).reshape(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(b & 1 for b in raw)
    return np.frombuffer(raw, dtype).reshape(shape).copy()


text = st.text(st.characters(), max_size=8)  # lone surrogates too
floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | text | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
leaves = (
    keys
    | floats
    | st.builds(complex, floats, floats)
    | tensors()
    | arrays()
    | st.frozensets(keys, max_size=4)
    | st.sets(keys, max_size=4)
    | st.binary(max_size=9).map(bytearray)
    | st.sampled_from(
        [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), Colour.RED, Path("/a/b"), range(3)]
    )
    | st.sampled_from([np.float32(-0.0), np.int8(-3), np.bool_(True), np.dtype("<f8"), slice(1, None, 2)])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(lambda v: deque(v, 4))
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(st.tuples(keys, inner), max_size=4).map(OrderedDict)
        | st.dictionaries(st.text("ab_", max_size=3), inner, max_size=4).map(lambda v: Namespace(**v))
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(values)
def test_every_value_comes_back_with_the_same_types_and_bits(value: object) -> None:
    data = encode(value)
    assert same(decode(data), value)
    assert encode(decode(data)) == data


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(values, st.data())
def test_damaged_bytes_are_refused_or_give_a_value_but_nothing_else(
    value: object, data: st.DataObject
) -> None:
    encoded = bytearray(encode(value))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(encoded), bytes(encoded[:at])):
        with suppress(DecodeError):
            decode(damaged)


def test_decoded_tensors_alias_nothing() -> None:
    data = bytearray(encode([torch.ones(4), np.ones(4)]))
    tensor, array = decode(data)
    for i in range(len(data)):
        data[i] = 0
    tensor += 1
    array += 1
    assert tensor.tolist() == [2.0] * 4
    assert array.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, object()]}, ["state['a'][1]", "builtins.object"]),
        ({"f": lambda: 1}, ["state['f']", "function"]),
        ((1, {Path: 2}), ["key", "type"]),
        (np.array([object()]), ["dtype('O')"]),
        (np.zeros(2, dtype=[("a", "i4")]), ["fields"]),
        (torch.eye(2).to_sparse(), ["sparse"]),
        (torch.empty(2, device="meta"), ["meta"]),
        (type("Named", (tuple,), {})((1,)), ["Named"]),
        (type("Sub", (dict,), {})(), ["Sub"]),
    ],
)
def test_unknown_classes_are_named_with_the_path_to_them(value: object, words: list[str]) -> None:
    with pytest.raises(UnsupportedStateError) as error:
        encode(value)
    for word in words:
        assert word in str(error.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        encode(value)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/reft-test-evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        msgpack.packb(msgpack.ExtType(99, b"x")),
        msgpack.packb(msgpack.ExtType(15, msgpack.packb(["antigravity", "anything", "x"]))),
        msgpack.packb(msgpack.ExtType(15, msgpack.packb(["os", "system", "x"]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["|O", b"12345678"]))),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["O", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(8, msgpack.packb(["load", [1], b"1234"]))),
        msgpack.packb(msgpack.ExtType(8, msgpack.packb(["torch.float32", [2**40], b"1234"]))),
        b"",
    ],
)
def test_p11_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)
    assert "antigravity" not in sys.modules
    assert not Path("/tmp/reft-test-evil").exists()


@pytest.mark.process
def test_plain_state_needs_no_torch() -> None:
    data = encode({"step": 3, "nested": [(1, 2.5)], "big": 2**90})
    code = (
        "import sys; from reft.state.codec import decode; "
        f"print(decode(bytes.fromhex('{data.hex()}'))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2.5" in done.stdout


ONE = Fingerprint({"config.optimizer.params.lr": 0.01, "layout.dp": 2, "script": "/a/train.py", "seed": 7})


def with_facts(**facts: object) -> Fingerprint:
    return Fingerprint({**ONE.facts, **{name.replace("__", "."): fact for name, fact in facts.items()}})


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
        require_same(ONE, with_facts(config__optimizer__params__lr=0.1), of="the memory of job train")
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
        ("model.layers=4 trainer.max_steps=9 data.name=c4", {"model.layers": "4", "data.name": "c4"}),
        ("--drop-out 0.1 --lora_rank 8 --local_rank 1", {"drop-out": "0.1"}),
        ('--deepspeed_config ds.json --overrides {"a":1}', {}),
        ("--layers 2 4 --learning-steps-per-print 1", {"layers": "2 4"}),
        ("", {}),
    ],
)
def test_arguments_that_may_change_the_numbers_are_facts(arguments: str, facts: dict[str, str]) -> None:
    assert facts_of_arguments(arguments.split()) == {f"arguments.{k}": v for k, v in facts.items()}


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
    num_train_epochs max_steps train-iters train-samples train-tokens exit-interval
    exit-duration-in-mins eval-interval eval-iters eval_steps eval_strategy per_device_eval_batch_size
    do_eval log-interval logging_steps logging_dir tensorboard-dir tensorboard_path wandb-project
    log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard report_to run_name push_to_hub
    hub_model_id disable_tqdm resume_from_checkpoint overwrite_output_dir dataloader_num_workers
    num-workers data_workers local_rank local-rank ddp_timeout deepspeed deepspeed_config
    gradient_checkpointing checkpoint-activations data-cache-path data_output_path validation_file
    valid-data-path test-data-path kill-switch-file print_loss master-port node_rank
"""


@pytest.mark.parametrize("counts", [True, False])
def test_p7_what_decides_the_numbers_counts_and_what_goes_on_around_it_does_not(counts: bool) -> None:
    names = (DECIDE if counts else DO_NOT).split()
    found = {name: facts_of_arguments([f"--{name}", "7"]) for name in names}
    assert found == {name: {f"arguments.{name}": "7"} if counts else {} for name in names}


def test_p7_a_refusal_for_an_argument_says_how_to_leave_them_all_out() -> None:
    was, now = with_facts(arguments__warmth="1"), with_facts(arguments__warmth="2")
    with pytest.raises(FingerprintError, match=r'"accept_changes": \["arguments"\] leaves all of them out'):
        require_same(was, now, of="it")
    require_same(was, now, of="it", accepted=["arguments"])


OLD, NEW = Fingerprint({"seed": 1}), Fingerprint({"seed": 2})


@pytest.fixture
def check(tmp_path: Path) -> Any:
    here, back = (JobDir.open_or_create(tmp_path / n, "job", n) for n in ("here", "back"))
    for directory, known in ((here, {1: OLD, 3: NEW}), (back, {1: OLD})):
        for incarnation, fingerprint in known.items():
            record_fingerprint(directory.path, incarnation, fingerprint)
    config: Any = SimpleNamespace(job_id="job", accept_changes=[])
    control: Any = SimpleNamespace(rank=0)
    job = Identity(NEW, config, control, restarted=False)

    def compare(incarnation: int) -> None:
        told: list[bytes] = []

        def gather(mine: bytes) -> list[bytes]:
            told.append(mine)
            return list(told)

        control.gather_bytes = gather
        label = Label(incarnation, 9)
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
