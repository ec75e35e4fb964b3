"""DeepSpeed on the simulated device: its accelerator, and a process group that goes through host memory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from reft.device import VENDORS
from tests.device.simulated import NAME, Simulated, SimulatedVendor, simulated

BACKEND = "staged"
_COLLECTIVES = {
    **{
        name: name
        for name in ("allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "gather")
    },
    **{
        name: name
        for name in (
            "reduce_scatter",
            "_reduce_scatter_base",
            "scatter",
            "alltoall",
            "alltoall_base",
        )
    },
    **{name: name for name in ("barrier", "send", "recv")},
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""gloo's names of a group's calls; torch 2.13 has others for the last three."""


class Accelerator(CPU_Accelerator):
    """As DeepSpeed's of CUDA, where it differs from the CPU's."""

    def __init__(self, sim: Simulated) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, BACKEND
        for name in (
            *(
                "Stream",
                "stream",
                "current_stream",
                "default_stream",
                "Event",
                "synchronize",
                "get_rng_state",
            ),
            *("set_rng_state", "manual_seed", "manual_seed_all", "current_device", "device_count"),
        ):
            self.__dict__[name] = getattr(sim, name)
        for name in ("is_synchronized_device", "use_host_timers", "resolves_data_dependency"):
            self.__dict__[name] = lambda: False
        self._sim = sim

    Stream = Event = None  # The CPU's are properties

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(NAME, 0)

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def initial_seed(self) -> int:
        return int(self._sim.settings.rng_seed)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._sim.settings.allocated_bytes)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._sim.settings.peak_bytes)

    def total_memory(self, device_index: int | None = None) -> int:
        return int(self._sim.settings.total_bytes)

    def available_memory(self, device_index: int | None = None) -> int:
        return self._sim.mem_get_info()[0]

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def create_op_builder(self, op_name: str) -> None:
        """None is compiled for it."""


class Staged(dist.ProcessGroup):
    """Gloo's collectives on copies in host memory. Each is done when its call returns: gloo's own work hangs when it
    is waited for twice."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def __getattribute__(self, name: str) -> Any:
        if name in _COLLECTIVES:
            return partial(_staged, getattr(self.gloo, _COLLECTIVES[name]))
        return super().__getattribute__(name)


def _staged(collective: Any, *args: Any, **options: Any) -> Any:
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [on_host(item) for item in value]
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        staged.append((value, value.cpu()))
        return staged[-1][1]

    collective(*map(on_host, args), **options).wait()
    for live, host in staged:
        live.copy_(host)
    future: Future[Any] = Future()
    future.set_result(args[0] if args else None)
    return _create_work_from_future(future)


def use_simulated() -> Simulated:
    sim = simulated()
    set_accelerator(Accelerator(sim))
    dist.Backend.register_backend(BACKEND, Staged, devices=[NAME, "cpu"])
    return sim


def use_device(name: str) -> str:
    """Have DeepSpeed train on ``cuda`` or the simulated device, which ranks may share: NCCL would refuse that.
    Returns the backend; the group is made without DeepSpeed, which would bind it to a device of CUDA."""
    if name == NAME:
        VENDORS[NAME] = SimulatedVendor(use_simulated())
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.Backend.register_backend(BACKEND, Staged, devices=[name, "cpu"])
    dist.init_process_group(BACKEND)
    return BACKEND
