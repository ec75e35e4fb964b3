"""How often: CheckFreq's published numbers, the invariants of its completed algorithm, a rate that follows, that
what a checkpoint costs is found although the machine drifts and stumbles (simulated steps), the best interval for
storage against draws, and the bound on lost steps where the interval changes."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.grid import VersionId
from reft.node.history import RoundReport
from reft.pacing.schedule import Bandwidth, HasLimits, Interval, plan_schedule
from reft.policy.agreed import AgreedRates
from reft.policy.rate import (
    DAY_SECS,
    CopyMode,
    DueSteps,
    OverheadEstimator,
    Rate,
    RateReason,
    adapt,
    best_interval,
    best_interval_secs,
    choose_copy_mode,
    effective_part,
    learned_losses_per_sec,
    memory_losses_per_sec,
)
from reft.protect.placement import losses_within
from reft.snapshot.extension import VoteResult

parts = st.floats(0.005, 1.0)
steps_secs = st.floats(0.01, 100.0)
times = st.floats(0.0, 1e4)


# -- the algorithm (REFERENCE, section 2) -----------------------------------------------------------------


def test_published_example_of_an_interval() -> None:
    """To = Ti = 1, p = 5 %: k = 20."""
    assert best_interval(1.0, 1.0, 1.0, max_overhead=0.05) == (20, RateReason.OVERHEAD)


@given(steps_secs, times, times, parts)
def test_completed_algorithm_keeps_its_invariants(
    ti: float, to: float, after: float, p: float
) -> None:
    """To <= p k Ti, k Ti + To >= Tc + Ts, and k at least 1; and no smaller k does."""
    background = to + after
    k, _ = best_interval(ti, to, background, max_overhead=p)
    assert k >= 1

    def keeps(steps: float) -> bool:
        more = 1 + 2e-9
        return to <= p * steps * ti * more and (steps * ti + to) * more >= background

    assert keeps(k)
    assert k == 1 or not keeps((k - 1) * (1 - 1e-6))


@given(steps_secs, times, times, parts, st.floats(0.0, 50.0))
def test_lost_work_is_at_most_two_intervals(
    ti: float, to: float, after: float, p: float, cycles: float
) -> None:
    """0 <= R <= 2 k Ti, wherever the failure falls, after a checkpoint was resumed from."""
    k, _ = best_interval(ti, to, to + after, max_overhead=p)
    cycle = k * ti + to
    taken, within = divmod(cycles * cycle, cycle)
    made = taken * k + min(k, within // ti)
    lost = made - max(0.0, (cycles * cycle - after) // cycle) * k
    assert 0 <= lost <= 2 * k


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_overhead_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.035"):
        best_interval(1.0, 0.0, 0.0, max_overhead=p)


# -- the mode of copying (REFERENCE, section 2) -----------------------------------------------------------


@given(steps_secs, st.floats(0.0, 1.0), times)
def test_what_is_left_over_without_windows_is_the_overhead_of_a_copy_to_the_host(
    ti: float, updating: float, tc: float
) -> None:
    """Toc = max(0, Tc - (Ti - Tw))."""
    tw, rate = updating * ti, 1e9
    plan = plan_schedule(
        {"owned": round(tc * rate)},
        [],
        Bandwidth(rate, rate),
        step_secs=ti,
        computing=[Interval(0.0, ti - tw)],
        limits=HasLimits(compute_share=1.0),
    )
    assert plan.left_over_secs == pytest.approx(max(0.0, tc - (ti - tw)), abs=1e-8)


@pytest.mark.parametrize(
    ("toc", "tog", "mode"),
    [
        (1.0, 0.5, CopyMode.DEVICE),
        (1.0, 1.0, CopyMode.DEVICE),
        (1.0, 1.1, CopyMode.HOST),
        (1.0, math.inf, CopyMode.HOST),  # unknown, or without memory
        (0.0, 0.1, CopyMode.HOST),
    ],
)
def test_the_mode_that_delays_training_least_is_chosen(
    toc: float, tog: float, mode: CopyMode
) -> None:
    assert choose_copy_mode(toc, tog) is mode


def test_the_slowest_rank_decides_on_the_mode_of_all(caplog: pytest.LogCaptureFixture) -> None:
    copies = [SimpleNamespace(copy_overheads=None, stages=False) for _ in range(3)]
    ranks = [AgreedRates(lambda: 1, copies=rank) for rank in copies]

    def vote(*overheads: tuple[float, float] | None) -> bool:
        for rank, own in zip(copies, overheads, strict=True):
            rank.copy_overheads = own
        numbers = tuple(map(max, *(rank.ballot(None, None) for rank in ranks)))
        for rank in ranks:
            rank.voted(VoteResult(VersionId(1, 1), True, True, True), numbers)
        assert len({rank.stages for rank in copies}) == 1
        return copies[0].stages

    caplog.set_level("INFO")
    assert not vote(None, None, None)
    assert not vote((0.0, 0.0), (0.0, 0.0), None)
    assert not caplog.records, "there was nothing to choose"
    # To one rank nothing is left over, one has no plan yet.
    assert vote((0.0, 0.0), (0.02, 0.001), None)
    assert vote((0.0, 0.0), (0.02, 0.001), (0.01, 0.002))
    assert len(caplog.records) == 3, "once for each rank"
    assert "through spare device memory" in caplog.text
    assert "wait 20.0 ms for a copy to the host; for one within the device: 1.0 ms" in caplog.text
    assert vote((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), "no mode costs anything"
    assert not vote((0.0, 0.0), (0.02, 0.001), (0.01, math.inf))
    assert "for one within the device: there is no memory" in caplog.text
    assert vote((0.02, 0.02), (0.01, 0.001), (0.01, 0.001)), "a tie"
    assert not vote((0.02, 0.03), (0.01, 0.001), (0.01, 0.001))


def test_ranks_that_read_no_data_learn_the_length_of_an_epoch_from_the_others() -> None:
    known = [0, 300, 0]
    ranks = [AgreedRates(lambda: 1, epoch_steps=lambda steps=steps: steps) for steps in known]
    numbers = tuple(map(max, *(rank.ballot(None, None) for rank in ranks)))
    for rank in ranks:
        rank.voted(VoteResult(VersionId(1, 1), True, True, True), numbers)
    assert [rank.epoch_steps for rank in ranks] == [300, 300, 300]


# -- the adaptive rate ------------------------------------------------------------------------------------


def after(rate: Rate, cost: float, p: float = 0.035, **limits: int | float | None) -> Rate:
    """A window at steps of a second."""
    return adapt(rate, cost_secs=cost, plain_secs=1.0, max_overhead=p, **limits)


def test_published_trace_of_the_adaptive_rate_simulated() -> None:
    """A second job on the same disk: 5 % becomes 35 % at a static k, and 5 % again when adapted. When the
    other job ends, the interval comes back."""
    rate, seen = Rate(20), []
    for cost in [1.0] * 2 + [7.0] * 3 + [1.0] * 12:
        before, rate = rate.interval_steps, after(rate, cost, 0.05)
        seen.append((before, rate.overhead))
    assert seen[:5] == [
        (k, pytest.approx(o)) for k, o in ((20, 0.05), (20, 0.05), (20, 0.35), *2 * [(140, 0.05)])
    ]
    intervals = [k for k, _ in seen[5:]]
    assert (
        intervals[-1] <= 40
    )  # at or below half of the allowed overhead it is calm, above it stays
    assert intervals == sorted(intervals, reverse=True)
    assert all(overhead <= 0.05 + 1e-12 for _, overhead in seen[3:])


limits = st.tuples(st.floats(0.005, 0.5), st.integers(1, 50), st.none() | st.integers(0, 10_000))
"""p, the shortest interval, and by how much the longest one is longer."""


def clamped(k: int, least: int, most: int | None) -> int:
    return max(least, min(k, most or k))


@given(limits, st.integers(1, 1000), st.lists(st.floats(0.0, 500.0), min_size=1, max_size=40))
def test_the_rate_stays_within_its_limits(
    kept: tuple[float, int, int | None], start: int, cost_secs: list[float]
) -> None:
    """The bound on lost steps is kept whatever is observed, and a reason is there when it holds the rate."""
    p, least, more = kept
    most = None if more is None else least + more
    rate = Rate(clamped(start, least, most))
    for cost in cost_secs:
        k = rate.interval_steps
        rate = after(rate, cost, p, least_steps=least, most_steps=most)
        assert rate.interval_steps == clamped(rate.interval_steps, least, most)
        if cost / k > p:
            assert rate.interval_steps >= k
            within = cost / rate.interval_steps <= p * (1 + 1e-6)
            assert within or rate.why is RateReason.EXCLUDED or rate.interval_steps == most


@given(limits, st.integers(1, 1000), st.floats(0.0, 20.0))
def test_under_a_constant_cost_the_rate_settles(
    kept: tuple[float, int, int | None], start: int, cost: float
) -> None:
    """It does not swing: after some windows it stays, between what p asks for and twice of it."""
    p, least, more = kept
    most = None if more is None else least + more
    rate, intervals = Rate(clamped(start, least, most)), []
    for _ in range(80):
        rate = after(rate, cost, p, least_steps=least, most_steps=most)
        intervals.append(rate.interval_steps)
    assert len(set(intervals[-10:])) == 1
    wanted = clamped(max(1, math.ceil(cost / p - 1e-9)), least, most)
    assert wanted <= intervals[-1] <= clamped(max(2 * wanted + 1, least), least, most)
    assert all(b <= a for a, b in pairwise(intervals))  # only the first window may make it longer


@pytest.mark.parametrize(
    ("rate", "cost", "limits", "steps", "why"),
    [
        pytest.param(
            Rate(5), 0.0, {"write_secs": 12.0}, 12, RateReason.WRITING, id="late on storage"
        ),
        pytest.param(
            Rate(10), 10.0, {"most_steps": 25}, 25, RateReason.EXCLUDED, id="bound on lost steps"
        ),
        pytest.param(Rate(20, calm=1), 0.1, {}, 20, RateReason.HELD, id="not calm for long enough"),
        # Half of an odd number of steps, rounded down, would cost more than p.
        pytest.param(
            Rate(5, calm=2), 2.4 * 0.035, {}, 3, RateReason.CALM, id="shorter, but not too short"
        ),
    ],
)
def test_why_an_interval_changes(
    rate: Rate, cost: float, limits: dict, steps: int, why: RateReason
) -> None:
    found = after(rate, cost, **limits)
    assert (found.interval_steps, found.why) == (steps, why)


# -- what a checkpoint costs ------------------------------------------------------------------------------


def simulated(
    pairs: OverheadEstimator,
    every: int,
    versions: int,
    *,
    cost: float,
    noise: float = 0.0,
    drift: float = 0.0,
) -> None:
    """Steps of a second, one of ``every`` of which is beside a checkpoint."""
    rng = random.Random(3)
    for i in range(versions * every):
        beside = i % every == 0
        secs = 1.0 + drift * i + noise * rng.gauss(0, 1) + cost * beside
        pairs.step(secs, begins=beside, beside=beside)


@pytest.mark.parametrize(
    ("every", "drawn", "error_secs"),
    [
        # Steps become slower by 60 % in the end.
        (5, {"cost": 0.05, "noise": 0.02, "drift": 0.002}, 0.005),
        (4, {"cost": 0.0, "noise": 0.2}, 0.05),
    ],
)
def test_the_cost_is_found_within_its_own_error(
    every: int, drawn: dict[str, float], error_secs: float
) -> None:
    pairs = OverheadEstimator()
    simulated(pairs, every, 60, **drawn)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(drawn["cost"], abs=3 * found.error_secs)
    assert found.error_secs < error_secs


def test_an_evaluation_and_a_hiccup_are_no_cost() -> None:
    pairs = OverheadEstimator()
    simulated(pairs, 5, 12, cost=0.05)
    pairs.step(500.0, begins=True, beside=True)
    pairs.step(1.9, begins=True, beside=True)
    simulated(pairs, 5, 12, cost=0.05)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.05, abs=1e-9)


def test_training_that_becomes_much_slower_for_good_is_learned_anew() -> None:
    pairs = OverheadEstimator()
    simulated(pairs, 5, 12, cost=0.05)
    pairs.forget()
    for i in range(60):
        pairs.step(30.0 + 2.0 * (i % 5 == 0), begins=i % 5 == 0, beside=i % 5 == 0)
    found = pairs.cost()
    assert found is not None
    assert (found.plain_secs, found.secs) == (30.0, pytest.approx(2.0))


def test_checkpoints_that_touch_each_other_tell_nothing() -> None:
    pairs = OverheadEstimator()
    for i in range(50):
        pairs.step(1.1 if i % 10 else 1.0, begins=bool(i % 10), beside=bool(i % 10))
    assert pairs.cost() is None
    assert pairs.plain_secs() == 1.0


def test_one_that_takes_several_steps_costs_all_of_them() -> None:
    pairs = OverheadEstimator()
    for _ in range(6):
        for i in range(6):
            pairs.step(1.0 + 0.1 * (i < 3), begins=i == 0, beside=i < 3)
    found = pairs.cost()
    assert found is not None
    assert found.secs == pytest.approx(0.3)
    assert found.plain_secs == 1.0
    pairs.forget()
    assert pairs.count == 0


mtbfs = st.floats(600.0, 864_000.0)
measured = st.tuples(st.floats(0.05, 60.0), st.floats(0.0, 60.0), st.floats(0.0, 2000.0))
"""Seconds of a step, by which a checkpoint makes training longer, and until it is on storage."""


# -- the optimum ----------------------------------------------------------------------------------------


@given(st.floats(0.01, 600.0), mtbfs)
def test_no_interval_is_better_than_the_best(cost: float, mtbf: float) -> None:
    best = best_interval_secs(cost, mtbf)
    top = effective_part(best, cost, mtbf)
    around = best * np.geomspace(0.01, 100.0, 400)
    assert max(effective_part(float(t), cost, mtbf) for t in around) <= top * (1 + 1e-9)


@pytest.mark.parametrize(
    ("interval", "cost", "mtbf"), [(60.0, 1.0, 600.0), (600.0, 20.0, 3600.0), (3000.0, 5.0, 900.0)]
)
def test_effective_part_is_what_draws_give_simulated(
    interval: float, cost: float, mtbf: float
) -> None:
    lives = np.random.default_rng(0).exponential(mtbf, 400_000)
    drawn = (interval * (lives // (interval + cost))).sum() / lives.sum()
    assert effective_part(interval, cost, mtbf) == pytest.approx(drawn, rel=0.02)


# -- how often memory fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "tolerance"), [(4, 0), (4, 1), (5, 1), (6, 2)])
def test_memory_losses_are_what_draws_give_simulated(size: int, tolerance: int) -> None:
    """Losses of a group's nodes, one after the other; each is repaired after a fixed time."""
    survived = losses_within(size, tolerance)
    rate, repair, rng = 1e-4, 1000.0, np.random.default_rng(1)
    draws = 200_000
    others = rng.random((draws, size - 1)) < -math.expm1(-rate * repair)
    lost = 1 + others.sum(axis=1)
    fatal = np.array([1 - survived[j] / math.comb(size, j) for j in range(1, size + 1)])
    drawn = size * rate * fatal[lost - 1].mean()
    assert memory_losses_per_sec(rate, size, survived, repair) == pytest.approx(drawn, rel=0.03)


def test_groups_must_fill_the_nodes() -> None:
    with pytest.raises(ConfigError, match="groups of 4"):
        memory_losses_per_sec(1e-6, 6, losses_within(4, 1), 1.0)


def _rounds(*losses: int) -> list[RoundReport]:
    return [
        RoundReport(i + 1, i * DAY_SECS, [f"n{j}" for j in range(4)], lost=["x"] * count)
        for i, count in enumerate(losses)
    ]


def learned_days(rounds: list[RoundReport], now_unix_secs: float) -> float:
    return 1 / (learned_losses_per_sec(rounds, now_unix_secs, 100.0) * DAY_SECS)


def test_the_rate_is_learned_from_the_jobs_own_losses() -> None:
    assert learned_days([], 0.0) == pytest.approx(100.0)
    assert learned_days(_rounds(0), DAY_SECS) == pytest.approx(
        104.0
    )  # four node-days without a loss
    assert learned_days(_rounds(0, *[1] * 29), 30 * DAY_SECS) == pytest.approx(220 / 30)
    # A trainer that failed lost no node: memory has it all.
    crashed = _rounds(0, 0)
    crashed[1].failures = ["rank 1: SIGSEGV"]
    assert learned_days(crashed, 2 * DAY_SECS) == pytest.approx(108.0)
    # A clock that went back makes no negative time.
    assert learned_days(_rounds(0, 0), 0.0) == pytest.approx(104.0)


# -- the choice -----------------------------------------------------------------------------------------


@given(measured, mtbfs, st.none() | st.floats(0.005, 0.5), st.none() | st.integers(1, 2500))
def test_wishes_are_kept_or_it_is_said(
    costs: tuple[float, float, float], mtbf: float, overhead: float | None, most: int | None
) -> None:
    step, cost, write = costs
    steps, why = best_interval(*costs, max_overhead=overhead, mtbf_secs=mtbf, most_steps=most)
    assert steps >= 1
    # Never more often than storage can take it.
    assert steps * step + cost >= write - 1e-9 * max(1.0, write)
    if most is not None and steps > most:
        assert why is RateReason.WRITING
    if overhead is not None and cost / (steps * step) > overhead * (1 + 1e-9):
        assert why in (RateReason.BOUND, RateReason.WRITING)


@given(measured, mtbfs)
def test_without_wishes_no_whole_number_of_steps_is_better(
    costs: tuple[float, float, float], mtbf: float
) -> None:
    step, cost, write = costs
    found, _ = best_interval(*costs, mtbf_secs=mtbf)

    def effective(steps: int) -> float:
        return effective_part(steps * step, cost, mtbf)

    least = max(1, math.ceil((write - cost) / step - 1e-9))
    near = {max(least, round(found * f)) for f in (0.25, 0.5, 0.9, 1.1, 2, 4)}
    near |= {found + 1, max(least, found - 1)}
    assert max(map(effective, near)) <= effective(found) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({}, (199, RateReason.FAILURES)),
        ({"max_overhead": 0.005}, (400, RateReason.OVERHEAD)),
        ({"survival_secs": 100.0}, (100, RateReason.SURVIVAL)),
        ({"most_steps": 30}, (30, RateReason.BOUND)),
        ({"most_steps": 30, "max_overhead": 0.035}, (30, RateReason.BOUND)),
        ({"most_steps": 5}, (18, RateReason.WRITING)),
        ({"mtbf_secs": math.inf, "survival_secs": 5000.0}, (5000, RateReason.SURVIVAL)),
        # As often as the costs allow, as for memory.
        ({"mtbf_secs": 0.0, "max_overhead": 0.5}, (18, RateReason.WRITING)),
    ],
)
def test_why_an_interval_is_what_it_is(
    wishes: dict[str, float], expected: tuple[int, RateReason]
) -> None:
    assert best_interval(1.0, 2.0, 20.0, **{"mtbf_secs": 10_000.0, **wishes}) == expected


def due_steps(start: int, intervals: dict[int, int], until: int) -> list[int]:
    due, now, found = DueSteps(start), 1, []
    for step in range(start + 1, until):
        now = intervals.get(step, now)
        if due.is_due(step, now):
            found.append(step)
    return found


def test_a_longer_interval_waits_for_the_due_step() -> None:
    assert due_steps(0, {1: 26, 103: 50}, 200) == [26, 52, 78, 104, 150]
    assert due_steps(0, {1: 5, 9: 8}, 30) == [5, 10, 16, 24]


@given(st.integers(0, 10**6), st.lists(st.integers(1, 60), min_size=1, max_size=400))
def test_no_gap_is_longer_than_the_longest_interval_since_the_due_step(
    start: int, drawn: list[int]
) -> None:
    due, last, allowed = DueSteps(start), start, drawn[0]
    for step, interval in enumerate(drawn, start + 1):
        allowed = min(allowed, interval)
        if due.is_due(step, interval):
            last, allowed = step, interval
        assert step - last < allowed or step == last


@given(st.integers(0, 1000), st.integers(1, 60))
def test_a_fixed_interval_has_its_multiples(start: int, interval: int) -> None:
    until = start + 5 * interval
    multiples = [s for s in range(start + 1, until) if s % interval == 0]
    assert due_steps(start, {start + 1: interval}, until) == multiples


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 50)), min_size=1, max_size=400))
def test_versions_and_storage_keep_the_bound_while_both_intervals_move(
    drawn: list[tuple[int, int]],
) -> None:
    """Bound 50 steps: what is due on storage is one of the versions, as many steps apart as agreed at most."""
    most = 50
    versions, storage, last = DueSteps(0), DueSteps(0), 0
    for step, (every, wanted) in enumerate(drawn, 1):
        agreed = min(-(-wanted // every) * every, most // every * every)
        if versions.is_due(step, every) and storage.is_due(step, agreed, ahead_steps=every):
            last = step
        assert step - last < most


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), min_size=1, max_size=300),
    st.lists(st.integers(0, 9), min_size=300, max_size=300),
)
def test_ranks_that_hear_of_a_change_at_different_steps_agree_again(
    changes: list[tuple[int, int]], fate: list[int]
) -> None:
    """What only one of them takes all give up. Every multiple of an interval that both have known since the
    one before is taken by both."""
    ranks, heard, gave_up = [DueSteps(0), DueSteps(0)], [1, 1], [-1, -1]
    for step, (interval, behind) in enumerate(changes, 1):
        heard = [interval, heard[0] if behind else interval]
        due = [r.is_due(step, k, given_up=g) for r, k, g in zip(ranks, heard, gave_up, strict=True)]
        if heard[0] == heard[1] and step % heard[0] == 0:
            assert due == [True, True]
        for i in range(2):
            if due[i] and (due != [True, True] or fate[step - 1] == 0):
                gave_up[i] = step
