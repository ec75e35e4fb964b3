"""A device that is not there: streams are threads, events are points in their queues.

It stands in for ``torch.cuda`` inside :mod:`reft.snapshot.copying.cuda`, so that the engine's own logic
(who waits for what, what is pinned, what happens when the driver refuses) is tested on any machine.
Its memory is host memory; kernels are calls queued on a stream. What only a real driver can show is
left to the tests that need one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reft.snapshot.copying import cuda as copy_cuda
from reft.snapshot.copying.cuda import Driver

POOL = 3  # Streams of torch's pool, as few as on ROCm to come; 32 on CUDA


class SimulatedStream:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def put(self, kernel: Callable[[], None]) -> None:
        self._queue.put(kernel)

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.point is not None:
            self.put(event.point.wait)

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        done.wait()


class _Point:
    """Where an event was recorded."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.secs = 0.0

    def reach(self) -> None:
        self.secs = time.perf_counter()
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()

    def passed(self) -> bool:
        return self._reached.is_set()


class SimulatedEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed = enable_timing
        self.point: _Point | None = None

    def record(self, stream: SimulatedStream) -> None:
        self.point = _Point()
        stream.put(self.point.reach)

    def query(self) -> bool:
        return self.point is None or self.point.passed()

    def synchronize(self) -> None:
        if self.point is not None:
            self.point.wait()

    def elapsed_time(self, other: SimulatedEvent) -> float:
        if not (self.timed and other.timed and self.point and other.point):
            raise ValueError("both events must be timed and recorded")
        if not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return (other.point.secs - self.point.secs) * 1e3


class SimulatedRuntime:
    """The driver's calls for host memory, as strict as the real ones."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuse = False
        self.calls: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, nbytes))
        overlaps = any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        if self.refuse or not nbytes:
            return 1
        if overlaps:
            return 712
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"simulated error {error}"


class CudaModule:
    """The part of ``torch.cuda`` that is alike on every simulated device."""

    def __init__(self, compute: Any) -> None:
        self.compute = compute
        self.runtime = SimulatedRuntime()
        self.free_bytes, self.total_bytes = 6 * 2**30, 8 * 2**30
        self._current = threading.local()

    def current_stream(self, device: Any = None) -> Any:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def cudart(self) -> SimulatedRuntime:
        return self.runtime


class SimulatedCuda(CudaModule):
    Event = SimulatedEvent

    def __init__(self) -> None:
        super().__init__(SimulatedStream())
        self.pool: list[SimulatedStream] = []
        """torch's: streams are handed out in turns, to reft and to communicators alike."""
        self.own: dict[int, SimulatedStream] = {}  # Made by the driver, and not destroyed yet
        self._taken = 0

    def Stream(self, device: Any = None, priority: int = 0) -> SimulatedStream:  # noqa: N802
        if len(self.pool) < POOL:
            self.pool.append(SimulatedStream())
        self._taken += 1
        return self.pool[(self._taken - 1) % POOL]

    def ExternalStream(self, address: int, device: Any = None) -> SimulatedStream:  # noqa: N802
        return self.own[address]

    def create_stream(self) -> int:
        self.own[address := 4096 + len(self.own)] = SimulatedStream()
        return address


class SimulatedCudaEngine(copy_cuda.CudaCopyEngine):
    """The real engine; only the transfer itself and what tells device memory from host memory differ."""

    simulated: SimulatedCuda
    transfer_secs = 0.0

    def _driver(self) -> Driver:
        made: SimulatedCuda = copy_cuda.cuda
        return Driver(made.create_stream, made.own.pop)

    def _on_device(self, source: torch.Tensor) -> bool:
        return True

    def _dma(self, source: torch.Tensor, target: torch.Tensor) -> None:
        def transfer() -> None:
            time.sleep(self.transfer_secs)
            target.copy_(source)

        self.simulated.current_stream().put(transfer)

    def _duplicate(self, source: torch.Tensor, place: torch.Tensor) -> None:
        self.simulated.current_stream().put(lambda: place.copy_(source))

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)
