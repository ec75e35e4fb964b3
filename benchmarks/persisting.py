"""How fast a version goes from memory to storage, beside a plain copy of the same bytes to the same
place.

One node with one arena, made up. Both end with fsync; they take turns, and each version is compared
with the copies on both sides of it. Prints JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import MIB, parser, progress, scratch
from results import estimate, machine

from reft.config import PersistConfig, ReftConfig
from reft.grid import BlockKey, Coordinate, Degrees, Section, VersionId
from reft.memory.arena import Arena, arena_name
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum
from reft.memory.jobdir import JobDir
from reft.storage.persist import persist_label

BLOCK_BYTES = 4 * MIB


def commit(arena: Arena, step: int) -> None:
    nbytes = arena.data_bytes
    entries = []
    arena.begin(
        ArenaHeader(
            "bench",
            "n0",
            Degrees(1, 1, 1),
            Coordinate(0, 0, 0),
            VersionId(1, step),
            ArenaState.WRITING,
        )
    )
    for number, at in enumerate(range(0, nbytes, BLOCK_BYTES)):
        data = arena.data[at : at + BLOCK_BYTES]
        key = BlockKey(Section.REPLICATED, 0, number)
        entries.append(Entry(key, at, len(data), nbytes, at, checksum(data), owner=True))
    arena.seal(entries)
    arena.commit()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


def copy(arena: Arena, target: Path) -> None:
    """To a file of its own, after which the one before goes: as with versions."""
    made = target.with_suffix(".new")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for at in range(0, arena.data_bytes, BLOCK_BYTES):
            os.write(fd, arena.data[at : at + BLOCK_BYTES])
        os.fsync(fd)
    finally:
        os.close(fd)
    made.replace(target)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--mib", type=int, default=1024, help="size of the version (default 1024)")
    made.add_argument("--rounds", type=int, default=10, help="versions (default 10)")
    options = made.parse_args()
    if options.quick:
        options.mib, options.rounds = 8, 2
    with scratch(options) as space:
        job = JobDir.open_or_create(space.shm, "bench", "n0", bytes(32))
        config = ReftConfig(
            enabled=True, job_id="bench", persist=PersistConfig(dir=space.disk, keep=1)
        )
        blocks = options.mib * MIB // BLOCK_BYTES
        copies: list[tuple[float, float]] = []
        versions: list[tuple[float, float]] = []
        with Arena.create(
            job.path / arena_name(0, 0), options.mib * MIB, blocks, bytes(32)
        ) as arena:
            words = np.frombuffer(arena.data, np.uint64)
            words[:] = np.random.default_rng(0).integers(0, 2**63, len(words), dtype=np.uint64)
            for step in range(1, options.rounds + 1):
                copies.append(timed(lambda: copy(arena, space.disk / "copy")))
                commit(arena, step)
                label = VersionId(1, step)
                versions.append(timed(lambda at=label: persist_label(job, at, config)))
                progress(f"round {step} of {options.rounds}")
            copies.append(timed(lambda: copy(arena, space.disk / "copy")))
    beside = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in pairwise(copies)]
    found: dict[str, Any] = {"benchmark": "persisting", "machine": machine(), "mib": options.mib}
    for number, what in enumerate(("rate", "cpu_secs")):
        ratios = [c[number] / v[number] for c, v in zip(beside, versions, strict=True)]
        found[f"{what}_to_copy" if number == 0 else "copy_cpu_to_own"] = estimate(ratios).to_json()
    found["secs"] = estimate([v[0] for v in versions]).to_json()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
