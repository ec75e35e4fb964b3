"""Which trainer stands still, by what all of them do, and nobody else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from reft.node.hangs import ActivityTracker, TrainerActivity, limit_secs, name_culprit
from reft.node.progress import (
    Phase,
    TrainerView,
)

STEP_LIMIT = 7.5


OTHER_LIMIT = 600.0


SEEN = TrainerView(
    local_rank=0,
    rank=0,
    pid=100,
    phase=Phase.STEP,
    step=8,
    position=3,
    instruction="ForwardPass",
    nanos=1,
    hang_factor=10.0,
    hang_timeout_secs=OTHER_LIMIT,
    step_secs=0.3,
    phase_secs=0.0,
    stack_signal=0,
    state="S",
)


def named(*waiting: TrainerActivity) -> tuple[int, ...] | None:
    """The ranks; none of them where all wait, and None where nobody is accused."""
    verdict = name_culprit(list(waiting))
    return None if verdict is None else verdict.ranks


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_limit_of_its_own(phase: Phase) -> None:
    seen = replace(SEEN, phase=phase)
    wanted = {Phase.STEP: STEP_LIMIT, Phase.PAUSED: None, Phase.ENDED: None}.get(phase, OTHER_LIMIT)
    assert limit_secs(seen) == wanted
    assert limit_secs(replace(seen, state="t")) is None, "somebody looks at it with a debugger"
    assert limit_secs(replace(seen, hang_factor=0.0, state="T")) is None
    unpaused = phase not in (Phase.PAUSED, Phase.ENDED)
    assert limit_secs(replace(seen, state="T")) == (STEP_LIMIT if unpaused else None), (
        "nothing goes on in it"
    )


def test_before_a_step_was_measured_its_limit_is_the_first_ones() -> None:
    unmeasured = replace(SEEN, step_secs=0.0)
    assert limit_secs(unmeasured) == OTHER_LIMIT
    assert limit_secs(replace(unmeasured, state="T")) == STEP_LIMIT, "nothing goes on in it"
    assert TrainerActivity(unmeasured, STEP_LIMIT + 1).stalled, "others hear of it"
    # Of two that wait, one has made a step more, and measured it; the other's may take longer than that.
    behind = replace(unmeasured, rank=1, step=1, instruction="Backward")
    ahead = replace(SEEN, step=2, instruction="Backward")
    assert named(TrainerActivity(ahead, 9.0), TrainerActivity(behind, 9.0)) is None
    assert named(
        TrainerActivity(ahead, OTHER_LIMIT + 1), TrainerActivity(behind, OTHER_LIMIT + 1)
    ) == (1,)


def test_time_counts_while_nothing_changes_and_somebody_looks() -> None:
    watch = ActivityTracker()
    assert [w.quiet_secs for w in watch.poll([SEEN], 0.25)] == [0.0]
    for _ in range(40):
        (waiting,) = watch.poll([SEEN], 0.25)
    assert (waiting.quiet_secs, waiting.suspected) == (10.0, True)
    (waiting,) = watch.poll([replace(SEEN, nanos=2)], 0.25)
    assert (waiting.quiet_secs, waiting.suspected) == (0.0, False)
    # This process stood still, or the clock was set: nobody hangs for that.
    (waiting,) = watch.poll([replace(SEEN, nanos=2)], 1e6)
    assert not waiting.suspected


def test_a_suspicion_ends_with_the_round() -> None:
    watch = ActivityTracker()
    for _ in range(10):
        (waiting,) = watch.poll([SEEN], 1.0)
    assert waiting.suspected
    watch.clear()
    (waiting,) = watch.poll([SEEN], 1.0)
    assert waiting.quiet_secs == 0.0
    watch.poll([SEEN], 1.0)
    assert not any(w.stalled for w in watch.poll([replace(SEEN, pid=101)], 1.0)), "another trainer"


AT = {
    "waits": dict(instruction="RecvActivation"),
    "computes": dict(instruction="BackwardPass"),
    "loads": dict(instruction="LoadMicroBatch"),
    "between": dict(phase=Phase.BETWEEN, instruction=""),
    "saves": dict(phase=Phase.SAVING, instruction=""),
    "evaluates": dict(phase=Phase.EVALUATION, instruction="ForwardPass"),
    "first": dict(phase=Phase.FIRST_STEP, instruction="ForwardPass"),
    "paused": dict(phase=Phase.PAUSED, instruction=""),
    "stopped": dict(state="T", instruction="RecvGrad"),
    "gone": dict(state="", instruction="RecvGrad"),
}


def rank_at(rank: int, what: str, quiet_secs: float, step: int = 8) -> TrainerActivity:
    return TrainerActivity(replace(SEEN, rank=rank, step=step, **AT[what]), quiet_secs)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_is_named_in_every_combination(ranks: int) -> None:
    for combination in product(AT, repeat=ranks):
        waiting = [rank_at(rank, what, STEP_LIMIT + 1) for rank, what in enumerate(combination)]
        ranks_at = {what: tuple(r for r, at in enumerate(combination) if at == what) for what in AT}
        stopped, gone, computing = (ranks_at[what] for what in ("stopped", "gone", "computes"))
        nobody = () if set(combination) == {"waits"} else None  # who takes its time may
        assert named(*waiting) == (stopped or gone or computing or nobody), combination


def test_nobody_is_named_while_a_rank_goes_on_or_before_the_limit() -> None:
    for what in AT:
        assert named(rank_at(0, "waits", STEP_LIMIT + 1), rank_at(1, what, 0.1)) is None, what
        assert named(rank_at(0, "waits", 1.0), rank_at(1, what, STEP_LIMIT - 1)) is None, what


def test_what_takes_too_long_at_anything_is_named() -> None:
    for what in ("loads", "between", "saves", "evaluates", "first"):
        assert named(rank_at(0, "waits", OTHER_LIMIT + 1), rank_at(1, what, OTHER_LIMIT + 1)) == (
            1,
        ), what
    assert named(rank_at(0, "waits", 1e6), rank_at(1, "paused", 1e6)) is None


def test_what_all_ranks_do_between_two_steps_may_last() -> None:
    """The last step may have been the last."""
    assert named(rank_at(0, "between", 1e6), rank_at(1, "between", 1e6)) is None
    assert named(rank_at(0, "between", 1e6), rank_at(1, "stopped", STEP_LIMIT + 1)) == (1,)


def test_of_ranks_that_all_wait_the_one_behind_is_named() -> None:
    waiting = [rank_at(rank, "waits", 9.0, step) for rank, step in enumerate((9, 8, 9))]
    verdict = name_culprit(waiting)
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert "rank 1 hangs: behind the others (rank 1: step after step 8" in verdict.reason
