"""Finds the trainers that are stalled, and the one that the others wait for.

The input are copies of the trainers' progress pages; no clock and no file is read here. A trainer
is quiet while its page does not change, and suspected once it has been quiet for longer than a
limit:

- Within a step the limit is ``hang_factor`` times the longest of the trainer's last 64 steps.
- Elsewhere (before a step was measured, in an evaluation, a save, or the script's code between two
  steps) it is the larger of ``hang_timeout_secs`` and ``hang_factor`` times the longest time so far
  in that phase.

Time is counted from poll to poll, two seconds at most for each. Thus no trainer becomes suspected
because the watching process was suspended, or because a clock jumped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from reft.node.progress import Phase, TrainerView
from reft.node.step_clock import StepPhase, find_phase

# A trainer's longest step counts as at least this long: a busy machine may delay a step by seconds.
MIN_STEP_SECS = 0.75
_MAX_GAP_SECS = 2.0  # Longest counted time between two polls
STOPPED, TRACED = "T", "t"
_STATES = {STOPPED: ", stopped", "D": ", waits in the kernel", "": ", gone", "Z": ", gone"}
# Instructions to which the limit for a step does not apply, because data may come late
_LOADING = ("LoadMicroBatch",)


@dataclass(frozen=True)
class TrainerActivity:
    """What a trainer is doing, and for how long its progress page has not changed."""

    page: TrainerView  # The trainer's page as last read
    quiet_secs: float  # Time since the page last changed
    node: str = ""  # Id of the node; the node's launcher sets it

    @property
    def suspected(self) -> bool:
        """Whether the trainer has been quiet for longer than its current phase may take."""
        limit = limit_secs(self.page)
        return limit is not None and self.quiet_secs > limit

    @property
    def stalled(self) -> bool:
        """Whether the trainer has been quiet for longer than a step may take, in any phase.

        Its node then reports the trainer to the other nodes.
        """
        return self.page.hang_factor > 0 and self.quiet_secs > step_limit_secs(self.page)

    @property
    def communicates(self) -> bool:
        """Whether the trainer is in an instruction that may wait for another rank."""
        return find_phase(self.page.instruction) not in (StepPhase.COMPUTE, StepPhase.OTHER)

    def __str__(self) -> str:
        page = self.page
        where = f"{self.node} " if self.node else ""
        where += page.phase.name.lower().replace("_", " ")
        at = f", {page.instruction} ({page.position})" if page.instruction else ""
        quiet = f"quiet for {self.quiet_secs:.1f} s{_STATES.get(page.state, '')}"
        return f"rank {page.rank}: {where} after step {page.step}{at}, {quiet}"


WAITING = TypeAdapter(list[TrainerActivity])


def step_limit_secs(page: TrainerView) -> float:
    """Return for how many seconds a trainer may be quiet within a step.

    Until a step was measured, MIN_STEP_SECS counts as the longest step.
    """
    return page.hang_factor * max(MIN_STEP_SECS, page.step_secs)


def limit_secs(page: TrainerView) -> float | None:
    """Return how long a trainer may be quiet in its current phase; None if it is not watched."""
    if page.hang_factor == 0 or page.state == TRACED or page.phase in (Phase.PAUSED, Phase.ENDED):
        return None
    in_step = page.phase is Phase.STEP and page.step_secs > 0 and page.instruction not in _LOADING
    if in_step or page.state == STOPPED:
        return step_limit_secs(page)
    return max(page.hang_timeout_secs, page.hang_factor * page.phase_secs)


@dataclass
class ChangeTimer:
    """Measures for how long a value has not changed."""

    secs: float = 0.0
    _mark: Hashable = None

    def update(self, mark: Hashable, elapsed_secs: float) -> float:
        """Add the time since the last call, or start again at 0 if the value has changed.

        Args:
            mark: the value now.
            elapsed_secs: time since the last call.

        Returns:
            Seconds since the value last changed.
        """
        if mark == self._mark:
            self.secs += min(elapsed_secs, _MAX_GAP_SECS)
        else:
            self.secs = 0.0
        self._mark = mark
        return self.secs


class ActivityTracker:
    """Measures for how long the trainers of a node have been quiet."""

    def __init__(self) -> None:
        self._timers: dict[int, ChangeTimer] = {}  # By local rank

    def poll(self, pages: Iterable[TrainerView], elapsed_secs: float) -> list[TrainerActivity]:
        """Update the timers of the trainers.

        Args:
            pages: the trainers' pages.
            elapsed_secs: time since the last poll.

        Returns:
            One activity for each page.
        """
        before = self._timers
        self._timers = {}
        activities = []
        for page in pages:
            timer = self._timers[page.local_rank] = before.get(page.local_rank, ChangeTimer())
            quiet_secs = timer.update((page.pid, page.nanos), elapsed_secs)
            activities.append(TrainerActivity(page, quiet_secs))
        return activities

    def clear(self) -> None:
        """Forget the trainers, before new ones start."""
        self._timers.clear()


@dataclass(frozen=True)
class HangDiagnosis:
    """The ranks that make the job hang, and why."""

    ranks: tuple[int, ...]  # Ranks that the others wait for; empty if all wait for each other
    reason: str  # Text for users


def name_culprit(activities: Sequence[TrainerActivity]) -> HangDiagnosis | None:
    """Find the ranks that the others wait for, if the job hangs.

    Args:
        activities: activities of all known trainers.

    Returns:
        The ranks and the reason; None if the job does not hang, or waits for a rank that is still
        within its limit.
    """
    suspects = [a for a in activities if a.suspected]
    if not suspects:
        return None
    stopped = [a for a in suspects if a.page.state == STOPPED]
    gone = [a for a in suspects if a.page.state in ("", "Z")]
    # Ranks in the script's code between two steps are suspected only if another rank waits in a
    # communication: all ranks may run such code for long.
    any_waits = any(a.communicates for a in suspects)
    outside = [a for a in suspects if not a.communicates]
    outside = [a for a in outside if any_waits or a.page.phase is not Phase.BETWEEN]
    for culprits, why in (
        (stopped, "stopped"),
        (gone, "gone"),
        (outside, "in no communication"),
    ):
        if culprits:
            return _blame(culprits, why)
    if not all(a.suspected and a.communicates for a in activities):
        return None
    newest = max(a.page.step for a in activities)
    behind = [a for a in activities if a.page.step < newest]
    if behind:
        oldest = min(a.page.step for a in behind)
        return _blame([a for a in behind if a.page.step == oldest], "behind the others")
    return HangDiagnosis(
        (),
        f"all ranks wait for each other, none is behind: is a link dead? ({_join(activities)})",
    )


def _blame(culprits: Sequence[TrainerActivity], why: str) -> HangDiagnosis:
    ranks = tuple(sorted(a.page.rank for a in culprits))
    who = f"rank {ranks[0]} hangs"
    if len(ranks) > 1:
        who = f"ranks {', '.join(map(str, ranks))} hang"
    return HangDiagnosis(ranks, f"{who}: {why} ({_join(culprits)})")


def _join(activities: Iterable[TrainerActivity]) -> str:
    return "; ".join(map(str, sorted(activities, key=lambda a: a.page.rank)))
