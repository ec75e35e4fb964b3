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
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.errors import UnsupportedStateError
from reft.state.codec import DecodeError, decode, encode


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
        return (
            value.dtype,
            value.shape,
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.shape, value.tobytes()
    return value


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


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
    dtype = np.dtype(
        draw(st.sampled_from(["<f4", "<f8", ">i4", "<u2", "|b1", "<c8", "<M8[ns]", "<U3"]))
    )
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
        [
            torch.bfloat16,
            torch.Size([2, 3]),
            torch.device("cpu"),
            Colour.RED,
            Path("/a/b"),
            range(3),
        ]
    )
    | st.sampled_from(
        [np.float32(-0.0), np.int8(-3), np.bool_(True), np.dtype("<f8"), slice(1, None, 2)]
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(lambda v: deque(v, 4))
        | st.dictionaries(st.integers(0, 9), st.integers(0, 3), max_size=3).map(Counter)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(st.tuples(keys, inner), max_size=4).map(OrderedDict)
        | st.dictionaries(st.text("ab_", max_size=3), inner, max_size=4).map(
            lambda v: Namespace(**v)
        )
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
