"""One contract for every backend: the same bytes as slow arithmetic, whatever size, alignment, content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.protect.backend import Backend, NumpyBackend, TorchBackend, backend_for, combine_ragged
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, parity_rows
from tests.protect.reference import slow_combine


@dataclass(frozen=True)
class Case:
    """A backend, how to hand it bytes, and how to read them."""

    backend: Backend
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


def torch_case(device: str) -> Case:
    def put(data: np.ndarray) -> torch.Tensor:
        # Keep the misalignment of what the test made.
        offset = data.ctypes.data % 64
        buffer = torch.empty(len(data) + offset + 64, dtype=torch.uint8, device=device)
        offset += -buffer.data_ptr() % 64
        buffer[offset : offset + len(data)] = torch.from_numpy(data.copy())
        return buffer[offset : offset + len(data)]

    return Case(TorchBackend(), put, lambda t: t.cpu().numpy())


@pytest.fixture(params=["numpy", "cpu", "cuda"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device for torch")
    if request.param == "numpy":
        return Case(NumpyBackend(), lambda data: data, lambda data: data)
    return torch_case(request.param)


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Fresh bytes that begin ``offset`` bytes after a multiple of 64."""
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + nbytes]


def random_bytes(rng: np.random.Generator, nbytes: int, offset: int = 0) -> np.ndarray:
    made = aligned(nbytes, offset)
    made[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return made


def check(case: Case, rows: list[tuple[int, ...]], nbytes: int, offsets: tuple[int, ...] = (0,)) -> None:
    rng = np.random.default_rng(nbytes + len(rows))
    count = len(rows[0])
    sources = [random_bytes(rng, nbytes, offsets[j % len(offsets)]) for j in range(count)]
    given = [case.put(s) for s in sources]
    # Around every target lie bytes that must stay as they are.
    frames = [case.put(random_bytes(rng, nbytes + 128, offsets[0])) for _ in rows]
    before = [case.get(f).copy() for f in frames]
    case.backend.combine(rows, given, [f[64 : 64 + nbytes] for f in frames])
    for row, frame, old in zip(rows, frames, before, strict=True):
        found = case.get(frame)
        assert np.array_equal(found[64 : 64 + nbytes], slow_combine(row, sources)), row
        assert np.array_equal(found[:64], old[:64])
        assert np.array_equal(found[64 + nbytes :], old[64 + nbytes :])
    for source, put in zip(sources, given, strict=True):
        assert np.array_equal(case.get(put), source), "sources are only read"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_combination_of_any_size_at_any_alignment(case: Case, data: st.DataObject) -> None:
    count, coded = data.draw(st.integers(1, 7)), data.draw(st.booleans())
    if coded:
        grains = st.one_of(st.integers(0, 40), st.just(CELL_BYTES // GRAIN_BYTES + 5))
        nbytes, factors = data.draw(grains) * GRAIN_BYTES, st.integers(0, 255)
    else:
        nbytes, factors = data.draw(st.one_of(st.integers(0, 5003), st.just(300_001))), st.integers(0, 1)
    rows = data.draw(st.lists(st.tuples(*[factors] * count), min_size=1, max_size=3))
    offsets = data.draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 12]), min_size=1, max_size=3))
    check(case, rows, nbytes, tuple(offsets))


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [
        (parity_rows(3, 5), 3 * CELL_BYTES + 37 * GRAIN_BYTES),
        ([(1, 1, 1)], 2 * CELL_BYTES + 13),
        ([(0, 0, 0), (0, 1, 1)], 1001),
        *(([tuple(range(first, first + 64))], GRAIN_BYTES) for first in range(0, 256, 64)),
    ],
)
def test_whole_and_partial_cells_and_every_coefficient(
    case: Case, rows: list[tuple[int, ...]], nbytes: int
) -> None:
    check(case, list(rows), nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_bit_patterns_survive(case: Case, dtype: torch.dtype) -> None:
    """Signalling NaNs, infinities, signed zeros, denormals: what comes back is what was there."""
    rng = np.random.default_rng(0)
    width = torch.empty((), dtype=dtype).element_size()
    special = {2: 0x7C01, 4: 0x7F800001, 8: 0x7FF0000000000001}[width]
    patterns = np.array(
        [special, special | 1 << (8 * width - 1), 0, 1, 1 << (8 * width - 1), 2 ** (8 * width) - 1],
        f"u{width}",
    )
    values = np.concatenate([patterns, rng.integers(0, 2 ** (8 * width), 999, dtype=f"u{width}")])
    tensor = torch.from_numpy(values.view(f"i{width}")).view(dtype)
    lost = tensor.view(torch.uint8).numpy()
    others = [random_bytes(rng, len(lost)) for _ in range(2)]
    parity = case.put(aligned(len(lost)))
    backend = case.backend
    backend.combine([(1, 1, 1)], [case.put(b) for b in (lost, *others)], [parity])
    back = case.put(aligned(len(lost)))
    backend.combine([(1, 1, 1)], [parity, *(case.put(b) for b in others)], [back])
    assert case.get(back).tobytes() == values.tobytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_short_sources_count_as_padded_with_zeros(case: Case, data: st.DataObject) -> None:
    packets = data.draw(st.booleans())
    nbytes = data.draw(st.sampled_from([0, 1, 7, 300, 4096, 4097, 8200])) * GRAIN_BYTES
    rows = list(parity_rows(2, 3)) if packets else [(1, 1, 1)]
    lengths = [data.draw(st.integers(0, nbytes)) for _ in range(3)]
    rng = np.random.default_rng(1)
    sources = [random_bytes(rng, n) for n in lengths]
    targets = [case.put(random_bytes(rng, nbytes)) for _ in rows]
    combine_ragged(case.backend, rows, [case.put(s) for s in sources], targets)
    padded = [np.concatenate([s, np.zeros(nbytes - len(s), np.uint8)]) for s in sources]
    for row, target in zip(rows, targets, strict=True):
        if nbytes:
            assert np.array_equal(case.get(target), slow_combine(row, padded))


def test_wrong_arguments_are_refused_with_what_was_found(case: Case) -> None:
    backend = case.backend
    short, long = case.put(aligned(64)), case.put(aligned(65))
    with pytest.raises(ValueError, match=r"buffers of \[64, 65\] bytes"):
        backend.combine([(1,)], [short], [long])
    with pytest.raises(ValueError, match="multiple of 128"):
        backend.combine([(2,)], [short], [case.put(aligned(64))])
    with pytest.raises(ValueError, match="one row per target"):
        backend.combine([(1,), (1,)], [short], [case.put(aligned(64))])
    with pytest.raises(ValueError, match="from 0 to 255"):
        backend.combine([(256,)], [short], [case.put(aligned(64))])
    with pytest.raises(ValueError, match="none longer"):
        combine_ragged(backend, [(1,)], [long], [short])


def test_a_range_of_whole_cells_can_be_decoded_by_itself() -> None:
    """Blocks of 4 MiB are checked and sent one by one; they need not wait for the whole sub-block."""
    rng = np.random.default_rng(2)
    sources = [random_bytes(rng, 5 * CELL_BYTES) for _ in range(3)]
    whole, part = aligned(5 * CELL_BYTES), aligned(2 * CELL_BYTES)
    NumpyBackend().combine([(1, 2, 4)], sources, [whole])
    cut = slice(CELL_BYTES, 3 * CELL_BYTES)
    NumpyBackend().combine([(1, 2, 4)], [s[cut] for s in sources], [part])
    assert np.array_equal(whole[cut], part)


def test_the_backend_follows_the_buffer() -> None:
    assert backend_for(np.zeros(1, np.uint8)).name == "numpy"
    assert isinstance(backend_for(torch.zeros(1, dtype=torch.uint8)), TorchBackend)
    with pytest.raises(TypeError, match="bytearray"):
        backend_for(bytearray(1))
