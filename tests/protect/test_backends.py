"""One contract for every backend: the same bytes as slow arithmetic, whatever size, alignment, content."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.kernels import usable_cupy
from reft.protect.backend import (
    ChunkedBackend,
    CupyBackend,
    TorchBackend,
    _tried,
    backend_for,
    combine_ragged,
)
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, parity_rows
from tests.device.conftest import sim
from tests.protect.backends import CASES, Case, case_or_skip, has_cupy, slow_combine

__all__ = ["sim"]


MARKS = {"kernel": pytest.mark.process, "torch-device": pytest.mark.gpu, "cupy": pytest.mark.gpu}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "torch-device" and not torch.cuda.is_available():
        request.getfixturevalue("sim")
    return case_or_skip(request.param)


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Fresh bytes that begin ``offset`` bytes after a multiple of 64."""
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + nbytes]


def random_bytes(rng: np.random.Generator, nbytes: int, offset: int = 0) -> np.ndarray:
    made = aligned(nbytes, offset)
    made[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return made


def check(
    case: Case, rows: list[tuple[int, ...]], nbytes: int, offsets: tuple[int, ...] = (0,)
) -> None:
    rng = np.random.default_rng(nbytes + len(rows))
    count = len(rows[0])
    sources = [random_bytes(rng, nbytes, offsets[j % len(offsets)]) for j in range(count)]
    given = [case.put(s) for s in sources]
    # Around every target lie bytes that must stay as they are.
    frames = [case.put(random_bytes(rng, nbytes + 128, offsets[0])) for _ in rows]
    before = [case.get(f).copy() for f in frames]
    case.make().combine(rows, given, [f[64 : 64 + nbytes] for f in frames])
    for row, frame, old in zip(rows, frames, before, strict=True):
        found = case.get(frame)
        assert np.array_equal(found[64 : 64 + nbytes], slow_combine(row, sources)), row
        assert np.array_equal(found[:64], old[:64])
        assert np.array_equal(found[64 + nbytes :], old[64 + nbytes :])
    for source, put in zip(sources, given, strict=True):
        assert np.array_equal(case.get(put), source), "sources are only read"


@pytest.mark.process
@pytest.mark.parametrize(
    "nbytes", [0, 1, 7, 8, 15, 16, 17, 127, 4097, 300_001, 2 * CELL_BYTES + 13]
)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_xor_of_any_number_of_sources_and_any_size(case: Case, nbytes: int, count: int) -> None:
    check(case, [(1,) * count], nbytes)


@pytest.mark.process
@pytest.mark.parametrize("offsets", [(1,), (2,), (4,), (8,), (0, 8), (0, 1, 2), (4, 8, 12), (0, 4)])
def test_any_alignment(case: Case, offsets: tuple[int, ...]) -> None:
    check(case, [(1, 1, 1)], 5003, offsets)
    check(case, list(parity_rows(2, 3)), CELL_BYTES + GRAIN_BYTES, offsets)


@pytest.mark.process
@pytest.mark.parametrize(
    "nbytes", [0, GRAIN_BYTES, 3 * GRAIN_BYTES, CELL_BYTES, 3 * CELL_BYTES + 37 * GRAIN_BYTES]
)
def test_reed_solomon_encoding_of_whole_and_partial_cells(case: Case, nbytes: int) -> None:
    check(case, list(parity_rows(3, 5)), nbytes)


@pytest.mark.process
def test_every_coefficient(case: Case) -> None:
    # Kernels are compiled for their coefficients: a sample has to do, their bit matrices are tested alone.
    every = 1 if isinstance(case.make(), ChunkedBackend) else 9
    for first in range(0, 256, 64):
        check(case, [tuple(range(first, first + 64, every))], GRAIN_BYTES)
    check(case, [(c, 255 - c) for c in range(8)], 2 * GRAIN_BYTES)


@pytest.mark.process
def test_zero_rows_and_unused_sources(case: Case) -> None:
    check(case, [(0, 0, 0), (0, 1, 0), (0, 1, 1)], 1001)
    check(case, [(0, 0, 0), (0, 7, 0), (0, 1, 1)], CELL_BYTES + GRAIN_BYTES)


@pytest.mark.process
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_short_sources_count_as_padded_with_zeros(case: Case, data: st.DataObject) -> None:
    packets = data.draw(st.booleans())
    nbytes = data.draw(st.sampled_from([0, 1, 7, 300, 4096, 4097, 8200])) * GRAIN_BYTES
    rows = list(parity_rows(2, 3)) if packets else [(1, 1, 1)]
    lengths = [data.draw(st.integers(0, nbytes)) for _ in range(3)]
    rng = np.random.default_rng(1)
    sources = [random_bytes(rng, n) for n in lengths]
    targets = [case.put(random_bytes(rng, nbytes)) for _ in rows]
    combine_ragged(case.make(), rows, [case.put(s) for s in sources], targets)
    padded = [np.concatenate([s, np.zeros(nbytes - len(s), np.uint8)]) for s in sources]
    for row, target in zip(rows, targets, strict=True):
        if nbytes:
            assert np.array_equal(case.get(target), slow_combine(row, padded))


def test_wrong_arguments_are_refused_with_what_was_found(case: Case) -> None:
    backend = case.make()
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


def test_the_backend_follows_the_buffer() -> None:
    assert backend_for(np.zeros(1, np.uint8)).name == "numpy"
    assert isinstance(backend_for(torch.zeros(1, dtype=torch.uint8)), TorchBackend)
    with pytest.raises(TypeError, match="bytearray"):
        backend_for(bytearray(1))


class OnDevice:
    """As much of a tensor on a device as is asked where a backend is chosen."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def new_zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


OnDevice.__module__ = "torch"


class Fused(TorchBackend):
    """CuPy's part, where a device is."""

    name = "cupy"


class CannotCompile(Fused):
    def combine(self, rows: Any, sources: Any, targets: Any) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")


class WrongBytes(Fused):
    def combine(self, rows: Any, sources: Any, targets: Any) -> None:
        super().combine(rows, sources, targets)
        targets[-1][-1] ^= 1


@pytest.mark.parametrize(
    "case",
    [
        (100, Fused, "cupy", ""),
        (101, CannotCompile, "torch", "failed to load libnvrtc"),
        (102, WrongBytes, "torch", "other bytes than torch"),
    ],
)
def test_p6_a_cupy_that_does_not_work_leaves_parities_to_torch_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: tuple[int, type[Fused], str, str],
) -> None:
    index, fused, name, said = case
    monkeypatch.setattr("reft.protect.backend.CupyBackend", fused)
    assert [backend_for(OnDevice(index)).name for _ in range(2)] == [name] * 2
    assert len(caplog.messages) == bool(said)
    if said:
        assert said in caplog.text
        assert "reft-ckpt[cuda12]" in caplog.text


@pytest.mark.parametrize("error", [OSError, ImportError, RuntimeError])
def test_p6_a_cupy_that_cannot_be_imported_leaves_parities_to_torch_and_is_named_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    (tmp_path / "cupy.py").write_text(f"raise {error.__name__}('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    usable_cupy.cache_clear()
    buffer = OnDevice(104)
    monkeypatch.delitem(_tried, buffer.device, raising=False)
    assert [backend_for(buffer).name for _ in range(2)] == ["torch"] * 2
    (said,) = caplog.messages
    assert f"{error.__name__}: libcudart.so.12: cannot open" in said


@pytest.mark.skipif(has_cupy(), reason="CuPy is installed")
def test_without_cupy_the_message_names_the_extras() -> None:
    with pytest.raises(ConfigError, match=r"cuda12.*cuda13.*rocm7"):
        CupyBackend()
