"""How much slower one core computes while the other one copies: what no schedule of copies can hide
here.

One process multiplies matrices, another copies and hashes chunks as a snapshot does, each on its
own core; the copying is switched on and off in turns. On real cores with memory bandwidth to spare
nothing is lost. Virtual cores are often two threads of one core: there an idle neighbour is no free
resource, but what a computing one lives on, and every copy in a pipeline's idle time slows the
stage that computes meanwhile.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from typing import Any

import torch
from results import estimate

from reft.memory.header import checksum

CHUNK_BYTES = 256 * 2**10
_SLICE_SECS = 0.15
_LONGEST_SLICE_SECS = 5.0
"""On a busy machine the neighbour may not run at all for a slice: so long it is waited for."""
_START_SECS = 60.0
_SIZE = 512

Pair = tuple[float, float, float]
"""Two slices, one after the other: products per second alone, and beside the neighbour; and the
bytes per second that the neighbour copied meanwhile."""


def copy_when_told(core: int, nbytes: int, on: Event, end: Event, copied: Any) -> None:
    """The copying neighbour: into shared pages, a chunk at a time, hashed while it is in the
    cache."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    target = mmap.mmap(-1, nbytes)
    view = torch.frombuffer(target, dtype=torch.uint8)
    while not end.is_set():
        if not on.wait(0.5):
            continue
        for start in range(0, nbytes, CHUNK_BYTES):
            if not on.is_set():
                break
            part = view[start : start + CHUNK_BYTES]
            part.copy_(source[start : start + CHUNK_BYTES])
            checksum(part.numpy().data)
            copied.value += part.numel()


def measure(nbytes: int, rounds: int = 60) -> dict[str, Any] | None:
    """Alternate in one run.

    Args:
        nbytes: bytes of a snapshot of one rank.
        rounds: pairs of slices.

    Returns:
        ``slowdown``: by how much of its time the computing core is slower; ``copy_bytes_per_sec``
        of the neighbour; ``extra_secs``: what a snapshot so costs the stage that computes
        meanwhile. None where there is one core only, or the neighbour never ran.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    context = multiprocessing.get_context("spawn")
    on, end, copied = context.Event(), context.Event(), context.Value("q", 0, lock=False)
    neighbour = context.Process(
        target=copy_when_told, args=(cores[1], nbytes, on, end, copied), daemon=True
    )
    neighbour.start()
    os.sched_setaffinity(0, {cores[0]})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)

    def speed(copied_before: int | None = None) -> float:
        """Products per second in one slice; in one that is beside the neighbour, until that has
        copied."""
        count, began, secs = 0, time.perf_counter(), 0.0
        while (
            not count
            or secs < _SLICE_SECS
            or (copied.value == copied_before and secs < _LONGEST_SLICE_SECS)
        ):
            torch.mm(left, right)
            count += 1
            secs = time.perf_counter() - began
        return count / secs

    pairs: list[Pair] = []
    try:
        on.set()
        deadline = time.perf_counter() + _START_SECS
        while not copied.value and neighbour.is_alive() and time.perf_counter() < deadline:
            time.sleep(0.05)
        for _ in range(rounds if copied.value else 0):
            on.clear()
            alone = speed()
            before, began = copied.value, time.perf_counter()
            on.set()
            beside = speed(before)
            pairs.append((alone, beside, (copied.value - before) / (time.perf_counter() - began)))
            on.clear()
    finally:
        end.set()
        on.set()
        neighbour.join(5)
        neighbour.kill()
        os.sched_setaffinity(0, set(cores))
        torch.set_num_threads(threads)
    return summary(nbytes, pairs)


def summary(nbytes: int, pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """What pairs of slices say; see :func:`measure`. Those in which nothing was copied say
    nothing."""
    told = [pair for pair in pairs if pair[2] > 0]
    if not told:
        return None
    slowdown, rate = (
        estimate([alone / beside - 1 for alone, beside, _ in told]),
        estimate([p[2] for p in told]),
    )
    secs = nbytes / rate.median
    return {
        "bytes": nbytes,
        "slowdown": slowdown.to_json(),
        "copy_bytes_per_sec": rate.to_json(),
        "copy_secs": secs,
        # A slice of copying that lasts t lets the other core do t / (1 + s) of its work.
        "extra_secs": secs * slowdown.median / (1 + slowdown.median),
    }


if __name__ == "__main__":
    print(json.dumps(measure(64 * 2**20), indent=2))
