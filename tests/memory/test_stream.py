"""The compiled copy past the caches is a copy, whatever the sizes and wherever the ranges begin, and the checksum
that it takes on the way is that of the xxhash package, to the bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.device import compiled
from reft.memory import stream
from reft.memory.header import checksum
from reft.memory.stream import (
    EXPONENTS,
    CutRanges,
    HashingCopier,
    PlainHashingCopier,
    copier,
    hashing_copier,
    ranges_of,
)

PAGE = 4096
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 20 * PAGE), st.sampled_from([4 * PAGE, 8 * PAGE]))


@given(nbytes=SIZES, source_at=st.integers(0, 70), target_at=st.integers(0, 70), seed=st.integers(0, 2**32))
def test_a_copy_is_exact_and_touches_nothing_else(
    nbytes: int, source_at: int, target_at: int, seed: int
) -> None:
    source = np.random.default_rng(seed).integers(0, 256, nbytes + source_at, dtype=np.uint8)
    target = np.full(nbytes + target_at + 100, 0xEE, np.uint8)
    copier()(target.ctypes.data + target_at, source.ctypes.data + source_at, nbytes)
    np.testing.assert_array_equal(target[target_at : target_at + nbytes], source[source_at:])
    assert (target[:target_at] == 0xEE).all()
    assert (target[target_at + nbytes :] == 0xEE).all()


HASH_SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 20 * PAGE),
    st.builds(lambda blocks, more: 1024 * blocks + more, st.integers(1, 80), st.integers(-1, 1)),
)
PARTS = st.lists(
    st.tuples(st.one_of(st.integers(0, 1100), st.integers(0, 6 * PAGE)), st.booleans()), max_size=12
)


@pytest.fixture(params=["AVX2", "SSE2", "plain"])
def hasher(request: pytest.FixtureRequest) -> Iterator[HashingCopier]:
    if request.param == "plain":
        yield PlainHashingCopier()
        return
    made = hashing_copier()
    if type(made) is PlainHashingCopier:
        pytest.skip("the loop that hashes was not built: no C++ compiler, or no x86-64")
    use_avx2 = compiled("reft.memory._stream", "reft_use_avx2")
    if use_avx2(request.param == "AVX2") != (request.param == "AVX2"):
        pytest.skip("this processor has no AVX2")
    yield made
    use_avx2(True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=HASH_SIZES,
    parts=PARTS,
    at=st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 2**32)),
    calls=st.integers(1, 4),
)
def test_p5_what_is_copied_is_hashed_in_one_pass_however_it_is_cut(
    hasher: HashingCopier, nbytes: int, parts: list[tuple[int, bool]], at: tuple[int, int, int], calls: int
) -> None:
    """Some parts are hashed only. The same object is used twice: nothing of the first input is left."""
    source_at, target_at, seed = at
    source = np.random.default_rng(seed).integers(0, 256, nbytes + source_at, dtype=np.uint8)
    target = np.full(nbytes + target_at + 100, 0xEE, np.uint8)
    expected = target.copy()
    rows, begin = [], 0
    for wanted, copied in [*parts, (nbytes, True)]:
        size = min(wanted, nbytes - begin)
        place, read = target_at + begin, source_at + begin
        rows.append((copied and target.ctypes.data + place, source.ctypes.data + read, size))
        if copied:
            expected[place : place + size] = source[read : read + size]
        begin += size
    for _ in range(2):
        for call in range(calls):
            hasher.copy(ranges_of(rows[call * len(rows) // calls : (call + 1) * len(rows) // calls]))
        assert hasher.take() == checksum(source[source_at:])
    np.testing.assert_array_equal(target, expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.lists(st.integers(0, 6 * PAGE), min_size=1, max_size=4), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1])), min_size=1, max_size=4),
)
def test_p5_chunks_are_copied_and_hashed_until_another_thread_says_so(
    hasher: HashingCopier, chunks: list[list[int]], steps: list[tuple[int, int | None]]
) -> None:
    source = np.random.default_rng(2).integers(0, 256, sum(map(sum, chunks)), dtype=np.uint8)
    target = np.zeros_like(source)
    rows, at = [], 0
    for sizes in chunks:
        rows.append([])
        for size in sizes:
            rows[-1].append((target.ctypes.data + at, source.ctypes.data + at, size))
            at += size
    cut = CutRanges.of(rows)
    done, number = 0, 0
    while done < len(chunks):
        wanted, flag = steps[number % len(steps)]
        number += 1
        stop = min(len(chunks), done + wanted)
        copied = hasher.copy_chunks(cut, done, stop, None if flag is None else ctypes.c_int(flag))
        assert copied == (1 if flag else stop - done)
        done += copied
        end = cut.nbytes(0, done)
        np.testing.assert_array_equal(target[:end], source[:end])
        assert not target[end:].any()
    assert hasher.take() == checksum(source)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    bits=st.sampled_from(["nan", "inf", "-inf", "largest", "-largest", "0", "ints"]),
    nbytes=st.integers(1, 5 * PAGE).map(lambda n: 8 * n),
    places=st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 200).map(lambda n: 8 * n)),
)
def test_numbers_that_are_not_finite_are_seen_on_the_way(
    hasher: HashingCopier, dtype: str, bits: str, nbytes: int, places: tuple[float, int]
) -> None:
    """Anywhere, and nothing else is: the largest numbers are none, nor are the same bits of integers."""
    kind, (at, before) = getattr(torch, dtype), places
    numbers = (torch.randn(nbytes // 8, dtype=torch.float64) * 1e4).to(kind)
    value = torch.finfo(kind).max * (-1 if bits[0] == "-" else 1) if "largest" in bits else bits
    numbers[int(at * len(numbers))] = float("nan" if bits == "ints" else value)
    source, head = numbers.view(torch.uint8), torch.full((before,), 255, dtype=torch.uint8)
    target = torch.empty_like(source)
    rows = [
        (0, head.data_ptr(), before),
        (target.data_ptr(), source.data_ptr(), len(source), 0 if bits == "ints" else EXPONENTS[dtype]),
    ]
    for _ in range(2):
        hasher.copy(ranges_of(rows))
        assert hasher.take() == checksum(torch.cat([head, source]).numpy().data)
        assert hasher.not_finite == (bits in ("nan", "inf", "-inf"))
    assert torch.equal(target, source)
    hasher.copy(ranges_of([(0, source.data_ptr(), len(source))]))
    hasher.take()
    assert not hasher.not_finite


def test_without_the_compiled_loops_memmove_and_the_package_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reft.device.find_spec", lambda name: None)
    known = (copier, stream.compiled_hash)
    for function in known:
        function.cache_clear()
    try:
        assert copier() is ctypes.memmove
        assert type(hashing_copier()) is PlainHashingCopier
    finally:
        for function in known:
            function.cache_clear()
