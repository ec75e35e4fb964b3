"""How much slower one core computes while the other one copies: what no schedule of copies can hide here.

One process multiplies matrices, another copies and hashes chunks as a snapshot does, each on its own core;
the copying is switched on and off in turns. On real cores with memory bandwidth to spare nothing is lost.
Virtual cores are often two threads of one core: there an idle neighbour is no free resource, but what a
computing one lives on, and every copy in a pipeline's idle time slows the stage that computes meanwhile.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from typing import Any

import torch
from results import estimate

from reft.store.header import checksum

CHUNK_BYTES = 256 * 2**10
_SLICE_SECS = 0.15
_SIZE = 512


def copy_when_told(core: int, nbytes: int, on: Event, end: Event, copied: Any) -> None:
    """The copying neighbour: into shared pages, a chunk at a time, hashed while it is in the cache."""
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
        ``slowdown``: by how much of its time the computing core is slower; ``copy_bytes_per_sec`` of the
        neighbour; ``extra_secs``: what a snapshot so costs the stage that computes meanwhile. None where
        there is one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    context = multiprocessing.get_context("spawn")
    on, end, copied = context.Event(), context.Event(), context.Value("q", 0, lock=False)
    neighbour = context.Process(target=copy_when_told, args=(cores[1], nbytes, on, end, copied), daemon=True)
    neighbour.start()
    os.sched_setaffinity(0, {cores[0]})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)

    def speed() -> float:
        """Products per second in one slice."""
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < _SLICE_SECS:
            torch.mm(left, right)
            count += 1
        return count / (time.perf_counter() - began)

    try:
        on.set()
        while not copied.value:
            time.sleep(0.05)
        slower, rates = [], []
        for _ in range(rounds):
            on.clear()
            alone = speed()
            before, began = copied.value, time.perf_counter()
            on.set()
            beside = speed()
            rates.append((copied.value - before) / (time.perf_counter() - began))
            on.clear()
            slower.append(alone / beside - 1)
    finally:
        end.set()
        on.set()
        neighbour.join(5)
        neighbour.kill()
        os.sched_setaffinity(0, set(cores))
        torch.set_num_threads(threads)
    slowdown, rate = estimate(slower), estimate(rates)
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
