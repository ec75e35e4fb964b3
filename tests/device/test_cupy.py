"""What reft hands to CuPy's kernels, without CuPy: its kernels run on the simulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reft.protect import backend as backend_module
from reft.protect.backend import CupyBackend, NumpyBackend
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, Row, parity_rows
from tests.device.simulated import NAME, Simulated
from tests.protect.backends import compile_for_host

ROWS: dict[str, tuple[Row, ...]] = {"xor": ((1, 1, 1),), "rs": parity_rows(2, 3)}


class SimulatedCupy:
    """The part of CuPy that reft calls. A kernel takes NumPy's scalars, as CuPy's kernels do."""

    def __init__(self, sim: Simulated) -> None:
        self._sim = sim
        self.cuda = SimpleNamespace(
            Device=lambda index: nullcontext(),
            ExternalStream=lambda address: nullcontext(),
            Stream=SimpleNamespace(),
            runtime=SimpleNamespace(getDeviceProperties=lambda index: {"multiProcessorCount": 1}),
        )

    def RawKernel(self, source: str, name: str) -> Any:  # noqa: N802
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            assert all(type(value) is np.uintp for value in arguments)
            words, *addresses = map(int, arguments)
            nbytes, *buffers = addresses
            kernel = compile_for_host(source, len(buffers))
            counts = ctypes.c_ulonglong(words), ctypes.c_ulonglong(nbytes)
            pointers = [ctypes.c_void_p(address) for address in buffers]
            self._sim.launch(lambda: kernel(*grid, *block, *counts, *pointers))

        return launch


@pytest.fixture
def cupy(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyBackend]:
    stand_in = SimulatedCupy(sim)
    monkeypatch.setattr(backend_module, "_usable_cupy", lambda: stand_in)
    monkeypatch.setattr(CupyBackend, "_wrapped", lambda self, stream: nullcontext())
    for cached in (backend_module._compiled, backend_module._processors):
        cached.cache_clear()
    yield CupyBackend()
    for cached in (backend_module._compiled, backend_module._processors):
        cached.cache_clear()


@pytest.mark.process
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("shift", [0, 16, 1])
def test_a_kernel_gets_the_addresses_of_its_buffers(
    cupy: CupyBackend, kind: str, shift: int
) -> None:
    rows, nbytes = ROWS[kind], CELL_BYTES + GRAIN_BYTES
    random = np.random.default_rng(0)
    host = [random.integers(0, 256, nbytes, dtype=np.uint8) for _ in rows[0]]
    expected = [np.zeros(nbytes, np.uint8) for _ in rows]
    NumpyBackend().combine(rows, host, expected)
    sources = []
    for data in host:
        buffer = torch.zeros(shift + nbytes, dtype=torch.uint8, device=NAME)[shift:]
        sources.append(buffer.copy_(torch.from_numpy(data)))
    targets = [torch.zeros(nbytes, dtype=torch.uint8, device=NAME) for _ in rows]
    cupy.combine(rows, sources, targets)
    for target, data in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target.cpu().numpy(), data)
