"""Units of steps of one training, of kinds that take turns, compared with those on both sides of
them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results import Estimate, estimate

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""For glibc, in the ranks. Else every step of a training on the CPU maps its activations anew:
14,000 page faults of a rank went with 26 to 58 ms of system time in a step of 1.4 s, and that
varies by more than what is measured."""


def run_unit(kind: str, engine: Any, data: Any, session: Any, span: int) -> dict[str, Any]:
    """One step that is not timed, at whose end a version is submitted, and then ``span`` timed
    ones.

    Each of these holds a whole version, the rest of the one before included. At the end none is
    under way.

    Returns:
        One rank's ``kind``, ``secs`` and ``cpu_secs`` of the timed steps, ``stall_secs`` at their
        fences, and ``tier_bytes``: the counters before the last version ran out, which nothing
        hides.
    """
    engine.train_batch(data)
    fences = len(session.stats.stalls_secs)
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(span):
        engine.train_batch(data)
    secs, cpu = time.perf_counter() - begin, time.process_time() - cpu
    tiers = dict(session.stats.tier_bytes)
    session.use("none")
    session.flush(600.0)
    stalls = list(session.stats.stalls_secs)[fences:]
    return {
        "kind": kind,
        "secs": secs,
        "cpu_secs": cpu,
        "stall_secs": sum(stalls),
        "tier_bytes": tiers,
    }


@dataclass(frozen=True)
class Units:
    """What all ranks measured.

    Attributes:
        ranks: results of :func:`run_unit`, by unit and rank.
        span: timed steps of a unit.
    """

    ranks: Sequence[Sequence[Mapping[str, Any]]]
    span: int

    @classmethod
    def of(cls, results: Sequence[Mapping[str, Any]], span: int) -> Units:
        """From what the ranks wrote, each a list ``units``."""
        return cls(list(zip(*(result["units"] for result in results), strict=True)), span)

    @property
    def kinds(self) -> list[str]:
        return [same[0]["kind"] for same in self.ranks]

    @property
    def step_secs(self) -> list[float]:
        """Of the slowest rank, by unit."""
        return [max(u["secs"] for u in same) / self.span for same in self.ranks]

    @property
    def step_cpu_secs(self) -> list[float]:
        """Of a rank, by unit."""
        return [statistics.mean(u["cpu_secs"] for u in same) / self.span for same in self.ranks]

    def between(self, base: str, kind: str) -> list[int]:
        """Numbers of the units of ``kind`` that stand between two of ``base``."""
        kinds, wanted = self.kinds, [base, kind, base]
        return [i for i in range(1, len(kinds) - 1) if kinds[i - 1 : i + 2] == wanted]

    def compare(self, base: str, kind: str) -> dict[str, Estimate]:
        """``kind`` against ``base``, in pairs."""
        mine, secs, cpu = self.between(base, kind), self.step_secs, self.step_cpu_secs
        beside = {i: (secs[i - 1] + secs[i + 1]) / 2 for i in mine}
        return {
            "overhead": estimate([secs[i] / beside[i] - 1 for i in mine]),
            "extra_secs": estimate([secs[i] - beside[i] for i in mine]),
            "extra_cpu_secs_per_rank": estimate(
                [cpu[i] - (cpu[i - 1] + cpu[i + 1]) / 2 for i in mine]
            ),
            "stall_secs": estimate(
                [max(u["stall_secs"] for u in self.ranks[i]) / self.span for i in mine]
            ),
        }
