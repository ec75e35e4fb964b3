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

from reft import kernels, optim
from reft.protect import backend as backend_module
from reft.protect.backend import CupyBackend, NumpyBackend
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, Row, parity_rows
from tests.device.simulated import NAME, Simulated, SimulatedVendor
from tests.protect.backends import compile_adam_for_host, compile_for_host
from tests.test_optim import COUNT, exact, numbers, same_bits, weights

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
        if name == optim.KERNEL_NAME:
            return self._adam_kernel(source)

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            assert all(type(value) is np.uintp for value in arguments)
            words, *addresses = map(int, arguments)
            nbytes, *buffers = addresses
            kernel = compile_for_host(source, len(buffers))
            counts = ctypes.c_ulonglong(words), ctypes.c_ulonglong(nbytes)
            pointers = [ctypes.c_void_p(address) for address in buffers]
            self._sim.launch(lambda: kernel(*grid, *block, *counts, *pointers))

        return launch

    def _adam_kernel(self, source: str) -> Any:
        kernel = compile_adam_for_host(source)

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            pointers = [ctypes.c_void_p(int(address)) for address in arguments[:4]]
            count = ctypes.c_ulonglong(int(arguments[4]))
            assert all(type(value) is np.float32 for value in arguments[5:])
            scalars = [ctypes.c_float(float(value)) for value in arguments[5:]]
            self._sim.launch(lambda: kernel(*grid, *block, *pointers, count, *scalars))

        return launch


@pytest.fixture
def cupy(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyBackend]:
    stand_in = SimulatedCupy(sim)
    for module in (backend_module, kernels, optim):
        monkeypatch.setattr(module, "usable_cupy", lambda: stand_in)
    monkeypatch.setattr(kernels, "wrap_stream", lambda stream: nullcontext())
    caches = (backend_module._compiled, kernels.processors, optim._kernel, optim.is_fused)
    for cached in caches:
        cached.cache_clear()
    yield CupyBackend()
    for cached in caches:
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


@pytest.mark.process
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_the_fused_step_of_exact_adam_has_the_bits_of_the_host(
    cupy: CupyBackend, monkeypatch: pytest.MonkeyPatch, decoupled: bool
) -> None:
    monkeypatch.setattr(SimulatedVendor, "has_cupy", True)
    assert optim.is_fused(torch.device(NAME))
    parameters = [torch.nn.Parameter(weights().to(place)) for place in ("cpu", NAME)]
    optimizers = [exact([p], decoupled_weight_decay=decoupled) for p in parameters]
    with monkeypatch.context() as patch:
        patch.setattr(optim, "slices", _refuse_devices(optim.slices))
        for step in range(1, 6):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.grad = numbers(step, COUNT).to(parameter.device)
                optimizer.step()
    states = [
        [p.detach().cpu(), *(o.state[p][name].cpu() for name in ("exp_avg", "exp_avg_sq"))]
        for p, o in zip(parameters, optimizers, strict=True)
    ]
    assert same_bits(states[1], states[0])


@pytest.mark.process
@pytest.mark.parametrize("line", ["if (keep != 1.0f)", "if (decay != 0.0f)"], ids=["AdamW", "Adam"])
def test_a_fused_step_that_decays_weights_wrongly_is_not_used(
    cupy: CupyBackend, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(SimulatedVendor, "has_cupy", True)
    assert line in optim.KERNEL
    monkeypatch.setattr(optim, "KERNEL", optim.KERNEL.replace(line, "if (false)"))
    assert not optim.is_fused(torch.device(NAME))


def _refuse_devices(original: Any) -> Any:
    def slices(*tensors: torch.Tensor) -> Any:
        assert tensors[0].device.type == "cpu", "the device took the single operations"
        return original(*tensors)

    return slices
