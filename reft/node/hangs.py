"""Which trainers stand still, and whose fault it is. Pure: told of what was seen, and when.

A trainer is quiet while its page does not change. The limit within a step is ``hang_factor`` times
the longest of its last 64 steps. Elsewhere (before a step was measured, in an evaluation, a save,
the script's own code between two steps) it is ``hang_timeout_secs``, or ``hang_factor`` times the
longest that this took. Time is counted from look to look, so that a watcher that stood still
itself, or a clock that jumps, accuses nobody.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from reft.node.progress import Phase, StepPhase, TrainerView, find_phase

LEAST_STEP_SECS = 0.75
"""Steps count as no shorter: a machine that is busy with something else delays them by seconds."""
_MOST_BETWEEN_LOOKS_SECS = 2.0
STOPPED, TRACED = "T", "t"
_STATES = {STOPPED: ", stopped", "D": ", waits in the kernel", "": ", gone", "Z": ", gone"}
_LOADING = ("LoadMicroBatch",)  # the script's data: as slow as it may be at times


@dataclass(frozen=True)
class TrainerActivity:
    """A trainer at the last look, and for how long its page had not changed; ``node``: "" until its
    launcher has told."""

    seen: TrainerView
    quiet_secs: float
    node: str = ""

    @property
    def suspected(self) -> bool:
        limit = limit_secs(self.seen)
        return limit is not None and self.quiet_secs > limit

    @property
    def quiet(self) -> bool:
        """For longer than a step may take, whatever it is at: its node tells the others of it."""
        return self.seen.hang_factor > 0 and self.quiet_secs > step_limit_secs(self.seen)

    @property
    def communicates(self) -> bool:
        """It is in an instruction in which a rank may wait for another one."""
        return find_phase(self.seen.instruction) not in (StepPhase.COMPUTE, StepPhase.OTHER)

    def __str__(self) -> str:
        seen = self.seen
        where = f"{self.node} " if self.node else ""
        where += seen.phase.name.lower().replace("_", " ")
        at = f", {seen.instruction} ({seen.position})" if seen.instruction else ""
        quiet = f"quiet for {self.quiet_secs:.1f} s{_STATES.get(seen.state, '')}"
        return f"rank {seen.rank}: {where} after step {seen.step}{at}, {quiet}"


WAITING = TypeAdapter(list[TrainerActivity])


def step_limit_secs(seen: TrainerView) -> float:
    """How long a step may be quiet; before one was measured, as short as any may be."""
    return seen.hang_factor * max(LEAST_STEP_SECS, seen.step_secs)


def limit_secs(seen: TrainerView) -> float | None:
    """How long a trainer may be quiet at what it is at; None: it is not watched."""
    if seen.hang_factor == 0 or seen.state == TRACED or seen.phase in (Phase.PAUSED, Phase.ENDED):
        return None
    in_step = seen.phase is Phase.STEP and seen.step_secs > 0 and seen.instruction not in _LOADING
    if in_step or seen.state == STOPPED:
        return step_limit_secs(seen)
    return max(seen.hang_timeout_secs, seen.hang_factor * seen.phase_secs)


@dataclass
class ChangeTimer:
    """For how long something has not changed."""

    _mark: Hashable = None
    secs: float = 0.0

    def update(self, mark: Hashable, elapsed_secs: float) -> float:
        """The seconds. ``elapsed_secs``: since the last look."""
        self.secs = (
            self.secs + min(elapsed_secs, _MOST_BETWEEN_LOOKS_SECS) if mark == self._mark else 0.0
        )
        self._mark = mark
        return self.secs


class ActivityTracker:
    def __init__(self) -> None:
        self._still: dict[int, ChangeTimer] = {}

    def poll(self, trainers: Iterable[TrainerView], elapsed_secs: float) -> list[TrainerActivity]:
        seen = list(trainers)
        self._still = {s.local_rank: self._still.get(s.local_rank, ChangeTimer()) for s in seen}
        return [
            TrainerActivity(s, self._still[s.local_rank].update((s.pid, s.nanos), elapsed_secs))
            for s in seen
        ]

    def clear(self) -> None:
        """The trainers are others: what the ones before were suspected of does not count."""
        self._still.clear()


@dataclass(frozen=True)
class HangDiagnosis:
    """Whose fault it is that the job stands still; no ranks: every trainer waits for another."""

    ranks: tuple[int, ...]
    reason: str


def name_culprit(waiting: Sequence[TrainerActivity]) -> HangDiagnosis | None:
    """Compare what each rank waits for; None: the job does not stand still, or waits for one that
    may still take its time."""
    if not any(w.suspected for w in waiting):
        return None
    outside = [w for w in waiting if not w.communicates]
    waited_for = any(w.suspected and w.communicates for w in waiting)
    for found, why in (
        ([w for w in waiting if w.suspected and w.seen.state == STOPPED], "stopped"),
        ([w for w in waiting if w.suspected and w.seen.state in ("", "Z")], "gone"),
        # What the script does between two steps, on all ranks, may last while nobody waits for it.
        (
            [
                w
                for w in outside
                if w.suspected and (waited_for or w.seen.phase is not Phase.BETWEEN)
            ],
            "in no communication",
        ),
    ):
        if found:
            return _accuse(found, why)
    if outside or not all(w.suspected for w in waiting):
        return None
    newest = max(w.seen.step for w in waiting)
    oldest = min(w.seen.step for w in waiting)
    if oldest < newest:
        return _accuse([w for w in waiting if w.seen.step == oldest], "behind the others")
    return HangDiagnosis(
        (), f"all ranks wait for each other, none is behind: is a link dead? ({_all(waiting)})"
    )


def _accuse(found: Sequence[TrainerActivity], why: str) -> HangDiagnosis:
    ranks = tuple(sorted(w.seen.rank for w in found))
    who = (
        f"rank {ranks[0]} hangs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hang"
    )
    return HangDiagnosis(ranks, f"{who}: {why} ({_all(found)})")


def _all(waiting: Iterable[TrainerActivity]) -> str:
    return "; ".join(map(str, sorted(waiting, key=lambda w: w.seen.rank)))
