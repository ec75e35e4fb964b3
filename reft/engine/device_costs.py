"""What a copy within the device costs, and how much of its memory is left (CheckFreq's Tg, M and Mmax)."""

from __future__ import annotations

from typing import Any

import torch

cuda: Any = torch.cuda
_PROBE_BYTES = 2**26
_TIMES = 3


def device_copy_secs(device: torch.device, nbytes: int) -> float | None:
    """Tg: seconds in which the device copies so many bytes within its own memory, scaled from a small copy.
    Waits for the device. None where there is none, or it gives no memory for it."""
    if device.type != "cuda" or not nbytes:
        return None
    probe = min(nbytes, _PROBE_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    if probe < 2**12:
        return None
    try:
        source, target = (torch.empty(probe, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.cuda.OutOfMemoryError:  # also below what is free: a process may be given a part of it alone
        return None
    best = float("inf")
    for _ in range(_TIMES):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best * nbytes / probe


def device_bytes(device: torch.device) -> tuple[int, int]:
    """M and Mmax - M: the peak that was allocated so far, and what it leaves; zeros without a device."""
    if device.type != "cuda":
        return 0, 0
    peak = torch.cuda.max_memory_reserved(device)
    return peak, max(0, torch.cuda.get_device_properties(device).total_memory - peak)
