"""What one node can do, measured: matrices, memory, the link to its devices, a reduction with others."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from reft.tools.check.verdict import Alone

_CPU_SIZE, _DEVICE_SIZE = 512, 8192
_COPY_BYTES = 64 * 2**20
_WARM_UP = 2
_REDUCTIONS = 10


def measure_alone(secs: float) -> Alone:
    """Each measure takes about so many seconds. Of several devices the slowest counts."""
    if not torch.cuda.is_available():
        return Alone(_matmul("cpu", _CPU_SIZE, secs), _memory("cpu", secs))
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return Alone(
        min(_matmul(device, _DEVICE_SIZE, secs) for device in devices),
        min(_memory(device, secs) for device in devices),
        min(_link(device, secs) for device in devices),
    )


def _matmul(device: str, size: int, secs: float) -> float:
    one = torch.ones(size, size, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    out = torch.empty_like(one)
    return 2 * size**3 * _per_sec(lambda: torch.mm(one, one, out=out), device, secs)


def _memory(device: str, secs: float) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _COPY_BYTES * _per_sec(lambda: target.copy_(source), device, secs)


def _link(device: str, secs: float) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.zeros_like(source, device=device)
    return _COPY_BYTES * _per_sec(lambda: target.copy_(source, non_blocking=True), device, secs)


def _per_sec(call: Callable[[], object], device: str, secs: float) -> float:
    """Calls per second of a busy loop; without the time for which this thread had no core."""
    for _ in range(_WARM_UP):
        call()
    _finish(device)
    calls, delayed, began = 0, _delayed_secs(), time.perf_counter()
    while True:
        call()
        calls += 1
        if device != "cpu" and calls % 8 == 0:
            _finish(device)
        took = time.perf_counter() - began
        if took >= secs:
            break
    _finish(device)
    took = time.perf_counter() - began - (_delayed_secs() - delayed)
    return calls / max(took, 1e-9)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _delayed_secs() -> float:
    """For which this thread was ready to run and had no core; 0 where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def measure_reduction(store: Store, rank: int, size: int, *, nbytes: int, timeout_secs: float) -> float:
    """Seconds of one all-reduce over gloo: the median of several.

    Args:
        store: where the ``size`` processes find each other.
        rank: of this one.
        nbytes: reduced.
        timeout_secs: of every wait.

    Raises:
        RuntimeError: another one does not answer, or the network fails.
    """
    group = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_secs))
    data = torch.ones(nbytes // 4)
    took = []
    for _ in range(_WARM_UP + _REDUCTIONS):
        began = time.perf_counter()
        group.allreduce([data]).wait()  # type: ignore[attr-defined]
        took.append(time.perf_counter() - began)
    return sorted(took[_WARM_UP:])[_REDUCTIONS // 2]
