"""DeepSpeed on the simulated device: its accelerator, and process groups over gloo."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from itertools import count
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
    """Gloo's collectives on copies in host memory, for ranks that share a real device. Each is done
    when its call returns: gloo's own work hangs when it is waited for twice."""

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


class Queued(dist.ProcessGroup):
    """Gloo's collectives as NCCL's: queued on a stream of the group, after what the caller's stream
    has queued. The host goes on at once; :meth:`QueuedWork.wait` makes a stream wait, not the host.

    Calls without a tensor of the device (barriers, tensors of the host) take their turn on the same
    stream, since gloo pairs the calls of ranks by their order; the host waits for them.
    """

    _ids = count(100)  # Between the ids of torch's pool and those that the driver hands out

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sim = simulated()
        self._stream = self._sim.ExternalStream(next(self._ids))

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def __getattribute__(self, name: str) -> Any:
        if name in _COLLECTIVES:
            return partial(self._queue, getattr(self._gloo, _COLLECTIVES[name]))
        return super().__getattribute__(name)

    def _queue(self, collective: Any, *args: Any, **options: Any) -> dist.Work:
        tensors: list[torch.Tensor] = []  # They stay allocated until the collective has run.
        given = [_host_views(value, tensors) for value in args]
        on_device = bool(tensors)

        def run() -> None:
            try:
                collective(*given, **options).wait()
            except Exception as error:
                self._sim.fail(f"{type(error).__name__}: {error}")
            given.clear()
            tensors.clear()

        before = self._sim.current_stream().record_event()
        self._stream.wait_event(before)
        with self._sim.stream(self._stream):
            self._sim.launch(run)
        ended = self._stream.record_event()
        if not on_device:
            ended.synchronize()
        return QueuedWork(self._sim, ended, args[0] if args else None)


class QueuedWork(dist.Work):
    def __init__(self, sim: Simulated, ended: torch.Event, result: Any) -> None:
        super().__init__()
        self._sim, self._ended, self._result = sim, ended, result

    def wait(self, timeout: Any = None) -> bool:
        self._sim.current_stream().wait_event(self._ended)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.query()

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


def _host_views(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same memory as tensors of the host; those of the device are added to ``tensors``."""
    if isinstance(value, list | tuple):
        return [_host_views(item, tensors) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    tensors.append(value)
    if not value.is_contiguous():
        raise ValueError("a collective takes contiguous tensors")
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_ubyte * value.nbytes).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


def use_simulated() -> Simulated:
    sim = simulated()
    set_accelerator(Accelerator(sim))
    dist.Backend.register_backend(BACKEND, Queued, devices=[NAME, "cpu"])
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
