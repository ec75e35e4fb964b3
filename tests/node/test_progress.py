"""A trainer's page tells what it is at, whoever has died, and whatever lies there."""

from __future__ import annotations

import csv
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import exp
from pathlib import Path

import pytest

from reft.node.advice import (
    Advice,
    AdvisedAction,
    JobSituation,
    Memory,
    SpeedSample,
    advise,
    dropping_pays,
    estimate_gain,
    scale_plan,
)
from reft.node.hangs import ActivityTracker, TrainerActivity, limit_secs, name_culprit
from reft.node.memory_watch import MemoryUse
from reft.node.progress import (
    Phase,
    ProgressPage,
    RankSteps,
    TrainerView,
    read_pages,
    read_times,
)
from reft.node.step_clock import StepTimes
from reft.node.stragglers import SlownessKind, SlowTest, SpeedWatch, Straggler
from tests.machine import Clock


def test_a_page_tells_what_its_trainer_is_at(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path, 1, 5, 10.0, 600.0)
    forward, backward = page.number_of("ForwardPass"), page.number_of("BackwardPass")
    (seen,) = read_pages(tmp_path)
    assert (seen.local_rank, seen.rank, seen.pid) == (1, 5, os.getpid())
    assert (seen.hang_factor, seen.hang_timeout_secs) == (10.0, 600.0)
    assert (seen.phase, seen.instruction, seen.step_secs) == (Phase.LOADING, "", 0.0)
    page.begin_step()
    page.instruction(forward)
    (first,) = read_pages(tmp_path)
    assert (first.phase, first.instruction, first.position) == (Phase.FIRST_STEP, "ForwardPass", 1)
    assert first.nanos > seen.nanos
    page.end_step(1)
    page.begin_step()
    page.instruction(forward)
    page.instruction(backward)
    (second,) = read_pages(tmp_path)
    assert (second.phase, second.step, second.instruction) == (Phase.STEP, 1, "BackwardPass")
    assert second.step_secs == 0.0, "the first step is none to measure others by"
    page.end_step(2)
    (third,) = read_pages(tmp_path)
    assert (third.phase, third.step) == (Phase.BETWEEN, 2)
    assert third.step_secs > 0
    page.close()
    assert read_pages(tmp_path) == []


def test_what_has_limits_of_its_own_does_not_count_as_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**9
    monkeypatch.setattr("reft.node.progress.time.monotonic_ns", lambda: now)
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)
    page.begin_step()
    with page.during(Phase.EVALUATION):
        with page.during(Phase.PAUSED):
            assert read_pages(tmp_path)[0].phase is Phase.PAUSED
            now += 10**10
        (inside,) = read_pages(tmp_path)
    assert inside.phase is Phase.EVALUATION
    now += 5 * 10**8
    page.end_step(2)
    (seen,) = read_pages(tmp_path)
    assert seen.step_secs == 0.5
    page.close()


def test_p6_what_is_no_page_or_cannot_be_made_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.progress").write_bytes(b"x" * 4096)
    (tmp_path / "1.progress").write_bytes(b"")
    (tmp_path / "2.progress").mkdir()
    (tmp_path / "x.progress").symlink_to("/dev/zero")
    assert read_pages(tmp_path) == []
    with caplog.at_level(logging.WARNING):
        page = ProgressPage(tmp_path / "missing", 0, 0, 10.0, 600.0)
    page.begin_step()
    page.end_step(1)
    page.close()
    assert "this trainer trains without hang detection" in caplog.text


# -- what a step consisted of ---------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("reft.node.progress.time", clock)
    monkeypatch.setattr("reft.node.step_clock.time", clock)
    return clock


def run_step(
    page: ProgressPage, clock: Clock, number: int, *instructions: tuple[str, float]
) -> None:
    page.begin_step()
    clock.sleep(0.001)
    for name, millis in instructions:
        page.instruction(page.number_of(name))
        clock.sleep(millis / 1000)
    page.end_step(number)
    clock.sleep(0.005)


def test_a_step_is_split_by_its_instructions(tmp_path: Path, clock: Clock) -> None:
    page = ProgressPage(tmp_path, 0, 3, 10.0, 600.0)
    page.set_place((1, 2, 0))
    run_step(page, clock, 1, ("ForwardPass", 999))
    instructions = (
        *(("RecvActivation", 7), ("ForwardPass", 10), ("SendActivation", 2), ("RecvGrad", 9)),
        *(("RecvActivation", 3), ("BackwardPass", 20), ("SendGrad", 4), ("LoadMicroBatch", 6)),
        *(("ReduceGrads", 8), ("OptimizerStep", 11), ("AggregateTotalLoss", 5)),
    )
    run_step(page, clock, 2, *instructions)
    (timed,) = read_times(tmp_path)
    assert (timed.rank, timed.at) == (3, (1, 2, 0))
    (step,) = timed.steps
    assert step.step == 2, "the first step is none to measure by"
    assert step.whole == pytest.approx(0.086)
    assert (step.compute, step.linked, step.collective) == pytest.approx((0.030, 0.025, 0.013))
    assert step.optimizer == pytest.approx(0.011)
    assert (step.previous, step.next, step.transfers) == (0.003, 0.002, 5)
    page.close()
    assert read_times(tmp_path) == []


def test_micro_batches_are_parts_of_one_step(tmp_path: Path, clock: Clock) -> None:
    """A plain engine is called once for each; the optimizer steps behind the last of them."""
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    page.set_step(7)  # restored
    for step in (8, 9, 10):
        for micro_batch in range(4):
            page.begin_step()
            (at,) = read_pages(tmp_path)
            assert at.phase is (Phase.FIRST_STEP if step == 8 else Phase.STEP), (step, micro_batch)
            assert (at.step_secs > 0) == (step == 10), (
                "measured is the second step, when it is whole"
            )
            page.instruction(page.number_of("Forward"))
            clock.sleep(0.01)
            if micro_batch == 3:
                page.instruction(page.number_of("Step"))
                clock.sleep(0.06)
            page.end_step(step if micro_batch == 3 else step - 1)
            assert read_pages(tmp_path)[0].phase is Phase.BETWEEN
            clock.sleep(0.005)
            with page.during(Phase.EVALUATION):
                clock.sleep(0.5)
    (seen,) = read_pages(tmp_path)
    assert seen.step == 10
    assert seen.step_secs == pytest.approx(0.100)
    steps = read_times(tmp_path)[0].steps
    assert [step.step for step in steps] == [9, 10]
    for made in steps:
        assert (made.whole, made.compute, made.optimizer) == pytest.approx((0.100, 0.040, 0.060))


def test_waiting_for_a_core_is_no_computing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = {"nanos": 0}
    monkeypatch.setattr(
        "reft.node.step_clock.os.pread", lambda *_: f"5 {waited['nanos']} 1".encode()
    )
    page = ProgressPage(tmp_path, 0, 0, 10.0, 600.0)
    page.set_place((0, 0, 0))
    run_step(page, clock, 1)
    page.begin_step()
    page.instruction(page.number_of("ForwardPass"))
    clock.sleep(0.01)
    waited["nanos"] += 4_000_000
    page.instruction(page.number_of("SendActivation"))
    waited["nanos"] += 1_000_000
    clock.sleep(0.001)
    page.end_step(2)
    monkeypatch.undo()
    (step,) = read_times(tmp_path)[0].steps
    assert (step.compute, step.busy, step.linked) == pytest.approx((0.006, 0.004, 0.001))


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
    assert TrainerActivity(unmeasured, STEP_LIMIT + 1).quiet, "others hear of it"
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
    assert not any(w.quiet for w in watch.poll([replace(SEEN, pid=101)], 1.0)), "another trainer"


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


NOISE = Path(__file__).with_name("noise.csv")
"""1,000 undisturbed steps of two stages with two replicas on two cores, which other work kept busy (load
average 15 to 33): the whole step, and each rank's computing and its wait for a core, in microseconds."""
Place = tuple[int, int, int]
RANKS: tuple[Place, ...] = tuple((pp, dp, 0) for pp in (0, 1) for dp in (0, 1))
Of = Callable[[int], StepTimes]


def took(
    step: int,
    compute: float,
    *,
    whole: float = 0.1,
    busy: float = 0.0,
    previous: float = 0,
    next: float = 0,
) -> StepTimes:
    """Seconds; two milliseconds of transfers, collectives and the optimizer each."""
    return StepTimes(step, whole, compute, busy, 0.002, 0.002, 0.002, previous, next, 8)


def tell(
    watch: SpeedWatch,
    steps: range,
    ranks: dict[Place, Of],
    *,
    node: Callable[[int], str] = "node{}".format,
    pid: int = 7,
) -> None:
    """The watch sees these steps, a few at a time; every rank is a node unless ``node`` says else."""
    for first in range(steps.start, steps.stop, 8):
        seen = range(max(steps.start, first - 16), min(first + 8, steps.stop))
        watch.poll(
            (node(rank), RankSteps(rank, pid, at, tuple(of(step) for step in seen)))
            for rank, (at, of) in enumerate(ranks.items())
        )


def recorded() -> Iterator[tuple[int, float, dict[Place, tuple[float, float]]]]:
    """Step, seconds of it, and by rank the seconds of computing and of waiting for a core."""
    with NOISE.open() as file:
        rows = csv.reader(file)
        next(rows)
        for step, whole, *numbers in rows:
            secs = [int(n) / 1e6 for n in numbers]
            ranks = {at: (secs[2 * i], secs[2 * i + 1]) for i, at in enumerate(RANKS)}
            yield int(step), int(whole) / 1e6, ranks


def noisy(rank: int, secs: float, *, slow_from: int = 10**9) -> Of:
    """Computing with Laplace noise of three percent, always the same; slower by a fifth from a step on."""

    def of(step: int) -> StepTimes:
        source = random.Random(1000 * step + rank)
        noise = source.expovariate(33.0) - source.expovariate(33.0)
        return took(step, secs * exp(noise) * (1.2 if step >= slow_from else 1.0))

    return of


def test_a_rank_that_is_slower_by_a_fifth_is_named_within_20_steps() -> None:
    watch = SpeedWatch()
    ranks = {
        at: noisy(i, 0.04, slow_from=100 if at == (1, 1, 0) else 10**9)
        for i, at in enumerate(RANKS)
    }
    tell(watch, range(1, 100), ranks)
    assert watch.slow() == ()
    tell(watch, range(100, 120), ranks)
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks) == (SlownessKind.RANK, "rank 3 (node3)", (3,))
    assert abs(named.since_step - 100) <= 3
    assert named.factor == pytest.approx(1.2, rel=0.05)
    assert named.cost_secs == pytest.approx(0.008, rel=0.3)
    assert named.cost_share == pytest.approx(0.08, rel=0.3)
    # As quick as the others again, it is named no more.
    tell(watch, range(120, 170), {at: noisy(i, 0.04) for i, at in enumerate(RANKS)})
    assert watch.slow() == ()


def test_only_equals_are_compared() -> None:
    """A stage that has more to do is not slow, and one replica has no equals."""
    watch = SpeedWatch()
    tell(
        watch, range(1, 300), {at: noisy(i, 0.02 if at[0] else 0.06) for i, at in enumerate(RANKS)}
    )
    assert watch.slow() == ()
    assert {s.rank: round(s.compute_secs, 2) for s in watch.speeds()} == {
        0: 0.06,
        1: 0.06,
        2: 0.02,
        3: 0.02,
    }
    alone = SpeedWatch()
    tell(alone, range(1, 200), {(pp, 0, 0): noisy(pp, 0.02 * (1 + pp)) for pp in (0, 1)})
    assert alone.slow() == ()
    assert len(alone.speeds()) == 2


def test_no_rank_is_named_in_1000_recorded_steps_of_a_busy_machine() -> None:
    known = {step: (whole, ranks) for step, whole, ranks in recorded()}
    assert len(known) > 990

    def of(at: Place, step: int) -> StepTimes:
        whole, ranks = known[step]
        return took(step, ranks[at][0], whole=whole, busy=ranks[at][1])

    watch = SpeedWatch()
    for first in range(min(known), max(known) - 8, 8):
        chunk = range(first, first + 8)
        if all(step in known for step in chunk):
            tell(watch, chunk, {at: partial(of, at) for at in RANKS})
            assert watch.slow() == ()


def test_a_busy_machine_does_not_hide_who_is_slower_by_a_third() -> None:
    """In most of the recorded steps, whenever it begins: named within 30 steps, and never its peer."""
    steps = list(recorded())
    named, cases = 0, 0
    for start in range(100, 900, 50):
        for pp in (0, 1):
            mine, peer = SlowTest(4), SlowTest(4)
            for step, whole, ranks in steps[: start + 30]:
                slower = 4 / 3 if step >= steps[start][0] else 1.0
                one, other = slower * ranks[pp, 0, 0][0], ranks[pp, 1, 0][0]
                mine.add(step, one, other, whole)
                peer.add(step, other, one, whole)
            cases += 1
            named += mine.since_step is not None
            assert peer.since_step is None
    assert named >= 0.9 * cases


def test_a_burst_is_no_slowness_and_what_costs_little_is_not_named() -> None:
    watch = SpeedWatch()
    ranks = {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), ranks)
    tell(watch, range(100, 107), ranks | {RANKS[0]: noisy(0, 0.12)})
    tell(watch, range(107, 140), ranks)
    assert watch.slow() == ()
    little = {at: (lambda step: took(step, 0.002)) for at in RANKS}
    little[RANKS[0]] = lambda step: took(step, 0.0025)
    tell(watch, range(140, 240), little)
    assert watch.slow() == ()


def test_ranks_that_are_slow_together_are_named_as_a_node_or_as_tensor_parallel_peers() -> None:
    watch = SpeedWatch()
    ranks = {(0, dp, 0): noisy(dp, 0.06 if dp in (2, 3) else 0.04) for dp in range(6)}
    tell(watch, range(1, 100), ranks, node=lambda rank: f"host{rank // 2}")
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks, named.nodes) == (
        SlownessKind.NODE,
        "host1",
        (2, 3),
        ("host1",),
    )
    watch = SpeedWatch()
    places = [(0, dp, tp) for dp in range(3) for tp in range(2)]
    tell(
        watch,
        range(1, 100),
        {at: noisy(i, 0.06 if at[1] == 1 else 0.04) for i, at in enumerate(places)},
    )
    (named,) = watch.slow()
    assert (named.name, named.ranks) == ("one of ranks 2, 3", (2, 3))


def test_a_slow_link_is_told_from_a_stage_that_waits() -> None:
    watch = SpeedWatch()

    def of(at: Place, step: int) -> StepTimes:
        slow = 0.004 if at[1] == 1 else 0.0005
        # The first stage waits long for the second; whoever comes last sees what the bytes take.
        return took(step, 0.03, next=0.02) if at[0] == 0 else took(step, 0.03, previous=slow)

    tell(watch, range(1, 60), {at: partial(of, at) for at in RANKS})
    (named,) = watch.slow()
    assert (named.kind, named.name) == (SlownessKind.LINK, "rank 1 (node1) - rank 3 (node3)")
    assert named.factor == pytest.approx(8.0, rel=0.1)
    assert named.cost_secs == pytest.approx(8 * 0.0035, rel=0.1)


def test_a_job_that_goes_back_or_starts_again_is_looked_at_anew() -> None:
    watch = SpeedWatch()
    slow = {at: noisy(i, 0.06 if i == 0 else 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), slow)
    assert [s.ranks for s in watch.slow()] == [(0,)]
    tell(watch, range(50, 60), {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}, pid=8)
    assert watch.slow() == ()
    tell(watch, range(20, 120), slow, pid=8)
    assert [s.ranks for s in watch.slow()] == [(0,)], "steps that are made again count"


ABCD = ("a", "b", "c", "d")
GIB = 2**30


def slow(name: str, nodes: tuple[str, ...], factor: float) -> Straggler:
    return Straggler(SlownessKind.NODE, name, (), nodes, 1, factor, 0.0, 0.0, "")


def memory(node: str, used_gib: int) -> Memory:
    return Memory(node, MemoryUse("the host", 0, used_gib * GIB, 100 * GIB))


SLOW_A = (slow("rank 0", ("a",), 3.0), slow("rank 1", ("a",), 2.0))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (JobSituation(ABCD), []),
        # A straggler: a spare takes its place; without one it goes if the others are faster alone.
        (
            JobSituation(ABCD, spares=("s",), slow=(slow("node b", ("b",), 1.1),)),
            [("replace", ("b",), 4)],
        ),
        (JobSituation(ABCD, slow=(slow("node b", ("b",), 1.2),)), [("replace", ("b",), 4)]),
        (JobSituation(ABCD, slow=(slow("node b", ("b",), 1.5),)), [("drop", ("b",), 3)]),
        (JobSituation(("a",), slow=(slow("node a", ("a",), 9.0),)), [("replace", ("a",), 1)]),
        (JobSituation(ABCD, slow=(slow("a link", ("a", "b"), 9.0),)), []),
        # The slowest gets the only spare.
        (
            JobSituation(
                ABCD, spares=("s",), slow=(slow("a", ("a",), 1.5), slow("b", ("b",), 3.0))
            ),
            [("replace", ("b",), 4), ("drop", ("a",), 3)],
        ),
        # Two slow ranks of one node take one spare.
        (
            JobSituation(ABCD, spares=("s", "t"), slow=(*SLOW_A, slow("b", ("b",), 1.5))),
            [("replace", ("a",), 4), ("replace", ("b",), 4)],
        ),
        # One node that is lost again and again.
        (JobSituation(ABCD, losses={"c": 3, "a": 1}), [("replace", ("c",), 4)]),
        (JobSituation(ABCD, losses={"c": 2}), []),
        (JobSituation(ABCD, losses={"c": 3, "a": 2, "b": 2}), []),
        (JobSituation(ABCD, losses={"gone": 5}), []),
        (
            JobSituation(ABCD, losses={"c": 3}, slow=(slow("c", ("c",), 2.0),)),
            [("drop", ("c",), 3)],
        ),
        # Memory that runs out.
        (
            JobSituation(ABCD, memory=(memory("a", 80), memory("b", 95))),
            [("memory", ("b",), 4)],
        ),
        # How many nodes: DLRover's threshold is a fifth.
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9)), most_nodes=8),
            [("add", (), 6)],
        ),
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.2)), most_nodes=5),
            [("add", (), 5)],
        ),
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.19)), most_nodes=8),
            [("remove", (), 2)],
        ),
        (JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9)), most_nodes=4), []),
        (JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9))), []),
        (JobSituation(ABCD, speeds=(SpeedSample(4, 1.9), SpeedSample(2, 1.0)), most_nodes=8), []),
        (JobSituation(ABCD, speeds=(SpeedSample(4, 1.0),), most_nodes=8), []),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_is_advised(
    seen: JobSituation, wanted: list[tuple[str, tuple[str, ...], int]]
) -> None:
    assert [(str(a.action), a.nodes, a.workers) for a in advise(seen)] == wanted
    assert all(a.why and str(a) and json.dumps(a.to_json()) for a in advise(seen))


def test_a_node_is_dropped_only_where_the_others_are_faster_without_it() -> None:
    """Simulated: a synchronous step takes as long as its slowest; a node less means more work for the others."""
    for nodes in (2, 3, 4, 8):
        for factor in (1.05, 1.2, 1.4, 1.9, 2.1, 3.0):
            with_it = max([1.0] * (nodes - 1) + [factor]) / nodes
            without = 1.0 / (nodes - 1)
            assert dropping_pays(nodes, factor) == (without < with_it * (1 - 1e-12))


# -- published (REFERENCE, section 3) -------------------------------------------------------------------


def test_published_threshold_of_a_worker_more() -> None:
    """(change of speed / change of workers) / (speed / workers) >= 0.2."""
    assert estimate_gain(SpeedSample(10, 100.0), SpeedSample(12, 104.0)) == pytest.approx(0.2)
    one, two = SpeedSample(1, 10.0), SpeedSample(2, 20.0)
    assert estimate_gain(one, two) == estimate_gain(two, one) == 1


PUBLISHED_PLAN = {
    "apiVersion": "elastic.iml.github.io/v1alpha1",
    "kind": "ScalePlan",
    "metadata": {"labels": {"scale-type": "auto"}, "name": "deepctr-auto-job-scaleplan-2"},
    "spec": {
        "createPods": [],
        "ownerJob": "deepctr-auto-job",
        "removePods": [],
        "replicaResourceSpecs": {
            "worker": {"replicas": 4, "resource": {"cpu": "1", "memory": "4170Mi"}}
        },
    },
}
"""DLRover's example of a plan that its master writes; it also has the addresses of parameter servers."""


def test_published_scale_plan() -> None:
    more = Advice(AdvisedAction.ADD, (), 4, "")
    plan = scale_plan(
        "deepctr-auto-job", 2, [more], workers=2, spares=0, cpu=1, memory_bytes=4170 * 2**20
    )
    spec = dict(plan["spec"])
    assert (spec.pop("migratePods"), spec.pop("psHosts")) == (
        [],
        [],
    )  # of nothing, and no parameter servers
    assert plan | {"spec": spec} == PUBLISHED_PLAN


@pytest.mark.parametrize(
    ("spares", "removed", "migrated", "replicas"),
    [((), "b", "ca", 3), (("s",), "b", "ca", 4), (("s", "t"), "bc", "a", 4)],
)
def test_what_is_advised_becomes_a_plan(
    spares: tuple[str, ...], removed: str, migrated: str, replicas: int
) -> None:
    """b is slow, c is lost again and again, and a lacks memory. Without a spare b is dropped and has no successor;
    the successor of c comes before c goes. The first spare takes b's place, the second c's."""
    found = advise(
        JobSituation(
            ABCD,
            spares,
            slow=(slow("b", ("b",), 2.0),),
            losses={"c": 4},
            memory=(memory("a", 95),),
        )
    )
    spec = scale_plan(
        "job", 1, found, workers=4, spares=len(spares), cpu=8, memory_bytes=100 * GIB
    )["spec"]
    usual, more = ({"cpu": "8", "memory": memory} for memory in ("102400Mi", "121600Mi"))
    assert spec["createPods"] == []
    assert spec["removePods"] == [{"name": node, "type": "worker"} for node in removed]
    assert spec["replicaResourceSpecs"]["worker"] == {"replicas": replicas, "resource": usual}
    assert spec["migratePods"] == [
        {"name": node, "resource": more if node == "a" else usual} for node in migrated
    ]
