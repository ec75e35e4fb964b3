"""Which trainers stand still, and which of them the others wait for.

No clock and no file is read here. A trainer is quiet while its progress page does not change.
Within a step its limit is ``hang_factor`` times the longest of its last 64 steps. Elsewhere (before
a step was measured, in an evaluation, a save, the script's code between two steps) it is
``hang_timeout_secs``, or ``hang_factor`` times the longest time that this took. Time is counted
from poll to poll, so that a watcher that stood still itself, or a clock that jumps, suspects no
trainer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from reft.node.progress import Phase, TrainerView
from reft.node.step_clock import StepPhase, find_phase

# Shorter steps count as this long: a machine that is busy with other work delays them by seconds.
MIN_STEP_SECS = 0.75
_MAX_GAP_SECS = 2.0  # between two polls; the rest of a longer gap is not counted
STOPPED, TRACED = "T", "t"
_STATES = {STOPPED: ", stopped", "D": ", waits in the kernel", "": ", gone", "Z": ", gone"}
_LOADING = ("LoadMicroBatch",)  # reading the script's data may take long at times


@dataclass(frozen=True)
class TrainerActivity:
    seen: TrainerView  # its page when it was last read
    quiet_secs: float  # how long the page had not changed
    node: str = ""  # set by the node's launcher

    @property
    def suspected(self) -> bool:
        """It was quiet for longer than what it does may take."""
        limit = limit_secs(self.seen)
        return limit is not None and self.quiet_secs > limit

    @property
    def quiet(self) -> bool:
        """It was quiet for longer than a step may take, whatever it does: its node reports it."""
        return self.seen.hang_factor > 0 and self.quiet_secs > step_limit_secs(self.seen)

    @property
    def communicates(self) -> bool:
        """It is in an instruction in which a rank may wait for another rank."""
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
    """How long a trainer may be quiet in a step; until a step was measured, the least limit."""
    return seen.hang_factor * max(MIN_STEP_SECS, seen.step_secs)


def limit_secs(seen: TrainerView) -> float | None:
    """How long a trainer may be quiet in what it does; None if it is not watched."""
    if seen.hang_factor == 0 or seen.state == TRACED or seen.phase in (Phase.PAUSED, Phase.ENDED):
        return None
    in_step = seen.phase is Phase.STEP and seen.step_secs > 0 and seen.instruction not in _LOADING
    if in_step or seen.state == STOPPED:
        return step_limit_secs(seen)
    return max(seen.hang_timeout_secs, seen.hang_factor * seen.phase_secs)


@dataclass
class ChangeTimer:
    """For how long something has not changed."""

    secs: float = 0.0
    _mark: Hashable = None

    def update(self, mark: Hashable, elapsed_secs: float) -> float:
        """Count the time since the last call.

        Args:
            mark: differs from the last one if the thing has changed.
            elapsed_secs: since the last call.

        Returns:
            ``secs``.
        """
        if mark == self._mark:
            self.secs += min(elapsed_secs, _MAX_GAP_SECS)
        else:
            self.secs = 0.0
        self._mark = mark
        return self.secs


class ActivityTracker:
    """For how long the trainers of a node have been quiet."""

    def __init__(self) -> None:
        self._timers: dict[int, ChangeTimer] = {}  # by local rank

    def poll(self, pages: Iterable[TrainerView], elapsed_secs: float) -> list[TrainerActivity]:
        """The trainers' activities. ``elapsed_secs``: since the last poll."""
        before = self._timers
        self._timers = {}
        activities = []
        for page in pages:
            timer = self._timers[page.local_rank] = before.get(page.local_rank, ChangeTimer())
            quiet_secs = timer.update((page.pid, page.nanos), elapsed_secs)
            activities.append(TrainerActivity(page, quiet_secs))
        return activities

    def clear(self) -> None:
        """Forget the trainers: others follow."""
        self._timers.clear()


@dataclass(frozen=True)
class HangDiagnosis:
    """Why the job stands still."""

    ranks: tuple[int, ...]  # that the others wait for; none if every trainer waits for another
    reason: str


def name_culprit(activities: Sequence[TrainerActivity]) -> HangDiagnosis | None:
    """Compare what the ranks wait for.

    Returns:
        None if the job does not stand still, or waits for a rank that is within its limit.
    """
    suspects = [a for a in activities if a.suspected]
    if not suspects:
        return None
    stopped = [a for a in suspects if a.seen.state == STOPPED]
    gone = [a for a in suspects if a.seen.state in ("", "Z")]
    # What the script does between two steps may take long on all ranks, while none waits for it.
    any_waits = any(a.communicates for a in suspects)
    outside = [a for a in suspects if not a.communicates]
    outside = [a for a in outside if any_waits or a.seen.phase is not Phase.BETWEEN]
    for culprits, why in (
        (stopped, "stopped"),
        (gone, "gone"),
        (outside, "in no communication"),
    ):
        if culprits:
            return _accuse(culprits, why)
    if not all(a.suspected and a.communicates for a in activities):
        return None
    newest = max(a.seen.step for a in activities)
    behind = [a for a in activities if a.seen.step < newest]
    if behind:
        oldest = min(a.seen.step for a in behind)
        return _accuse([a for a in behind if a.seen.step == oldest], "behind the others")
    return HangDiagnosis(
        (),
        f"all ranks wait for each other, none is behind: is a link dead? ({_join(activities)})",
    )


def _accuse(culprits: Sequence[TrainerActivity], why: str) -> HangDiagnosis:
    ranks = tuple(sorted(a.seen.rank for a in culprits))
    who = f"rank {ranks[0]} hangs"
    if len(ranks) > 1:
        who = f"ranks {', '.join(map(str, ranks))} hang"
    return HangDiagnosis(ranks, f"{who}: {why} ({_join(culprits)})")


def _join(activities: Iterable[TrainerActivity]) -> str:
    return "; ".join(map(str, sorted(activities, key=lambda a: a.seen.rank)))
