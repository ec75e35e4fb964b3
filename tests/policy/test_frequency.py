"""How often: CheckFreq's published numbers, the invariants of its completed algorithm, a rate that follows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.policy.rate import (
    CopyMode,
    Costs,
    Frequency,
    Observed,
    Rate,
    RateLimits,
    Why,
    adapt,
    cheapest_mode,
    frequency,
    most_lost_steps,
    printed_frequency,
)

parts = st.floats(0.005, 1.0)


def lost_steps(costs: Costs, found: Frequency, failed_secs: float) -> int:
    """Steps that a failure rolls back, ``failed_secs`` after a checkpoint on storage was resumed from."""
    k = int(found.interval_steps)
    cycle = k * costs.step_secs + found.overhead_secs
    taken, within = divmod(failed_secs, cycle)
    made = taken * k + min(k, within // costs.step_secs)
    until_written = costs.host_copy_secs + costs.write_secs - found.overhead_secs
    return int(made - max(0.0, (failed_secs - until_written) // cycle) * k)


times = st.floats(0.0, 1e4)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    step = draw(st.floats(0.01, 100.0))
    return Costs(
        step_secs=step,
        update_secs=step * draw(st.floats(0.0, 1.0)),
        host_copy_secs=draw(times),
        device_copy_secs=draw(st.none() | times),
        write_secs=draw(times),
        checkpoint_bytes=draw(st.integers(0, 2**36)),
        spare_device_bytes=draw(st.integers(0, 2**36)),
    )


# -- published (REFERENCE, section 2) -------------------------------------------------------------------


def test_published_example_of_an_interval() -> None:
    """To = Ti = 1, p = 5 %: k = 20, as printed and completed."""
    one = Costs(step_secs=1.0, update_secs=1.0, host_copy_secs=1.0)
    assert cheapest_mode(one) == (CopyMode.CPU, 1.0)
    assert printed_frequency(one, 0.05).interval_steps == frequency(one, 0.05).interval_steps == 20


def simulated_overheads(rate: Rate, limits: RateLimits, costs_secs: list[float]) -> list[tuple[int, float]]:
    """A simulation: windows of one checkpoint at steps of a second, in which it costs so much."""
    seen = []
    for cost in costs_secs:
        k = rate.interval_steps
        window = Observed(steps=k, checkpoints=1, secs=k + cost, plain_step_secs=1.0)
        seen.append((k, window.overhead))
        rate = adapt(rate, window, limits)
    return seen


def test_published_trace_of_the_adaptive_rate_simulated() -> None:
    """A second job on the same disk: 5 % becomes 35 % at a static k, and 5 % again when adapted. When the
    other job ends, the interval comes back."""
    alone, beside = 1.0, 7.0
    trace = simulated_overheads(Rate(20), RateLimits(0.05), [alone] * 2 + [beside] * 3 + [alone] * 12)
    assert trace[:5] == [
        (20, pytest.approx(0.05)),
        (20, pytest.approx(0.05)),
        (20, pytest.approx(0.35)),
        (140, pytest.approx(0.05)),
        (140, pytest.approx(0.05)),
    ]
    intervals = [k for k, _ in trace[5:]]
    assert intervals[-1] <= 40  # at or below half of the allowed overhead it is calm, above it stays
    assert intervals == sorted(intervals, reverse=True)
    assert all(overhead <= 0.05 + 1e-12 for _, overhead in trace[3:])


# -- the algorithm --------------------------------------------------------------------------------------


@given(costs(), parts)
def test_completed_algorithm_keeps_its_invariants(measured: Costs, p: float) -> None:
    """To <= p k Ti, k Ti + To >= Tc + Ts, k a whole number and at least 1; and no smaller k does."""
    found = frequency(measured, p)
    k, to, ti = found.interval_steps, found.overhead_secs, measured.step_secs
    background = measured.host_copy_secs + measured.write_secs
    assert k == int(k) >= 1

    def keeps(steps: float) -> bool:
        more = 1 + 2e-9
        return to <= p * steps * ti * more and (steps * ti + to) * more >= background

    assert keeps(k)
    assert k == 1 or not keeps((k - 1) * (1 - 1e-6))


@given(costs(), parts)
def test_completed_is_the_printed_rounded_up(measured: Costs, p: float) -> None:
    printed, completed = printed_frequency(measured, p), frequency(measured, p)
    assert (printed.mode, printed.overhead_secs) == (completed.mode, completed.overhead_secs)
    assert completed.interval_steps == pytest.approx(max(1, math.ceil(printed.interval_steps - 1e-6)), abs=1)
    assert completed.interval_steps >= printed.interval_steps * (1 - 1e-8)


@given(costs())
def test_copies_within_the_device_only_with_room_and_when_cheaper(measured: Costs) -> None:
    mode, overhead = cheapest_mode(measured)
    hidden = measured.step_secs - measured.update_secs
    on_host = max(0.0, measured.host_copy_secs - hidden)
    assert 0 <= overhead <= on_host
    if mode is CopyMode.GPU:
        assert measured.spare_device_bytes > measured.checkpoint_bytes
        assert overhead == measured.device_copy_secs
    elif measured.spare_device_bytes > measured.checkpoint_bytes and measured.device_copy_secs is not None:
        assert measured.device_copy_secs > on_host


@given(costs(), parts, st.floats(0.0, 50.0))
def test_lost_work_is_at_most_two_intervals(measured: Costs, p: float, cycles: float) -> None:
    """0 <= R <= 2 k Ti, wherever the failure falls."""
    found = frequency(measured, p)
    at = cycles * (found.interval_steps * measured.step_secs + found.overhead_secs)
    assert 0 <= lost_steps(measured, found, at) <= most_lost_steps(int(found.interval_steps))


def test_nearly_two_intervals_are_lost_where_writing_takes_all_of_one() -> None:
    slow = Costs(step_secs=1.0, update_secs=0.0, host_copy_secs=1.0, write_secs=9.0)
    found = frequency(slow, 0.05)
    assert found.interval_steps == 10
    assert max(lost_steps(slow, found, t / 4) for t in range(200)) == 19


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_overhead_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.035"):
        frequency(Costs(step_secs=1.0), p)


# -- the adaptive rate ----------------------------------------------------------------------------------

limits = st.builds(
    lambda p, least, more, calm: RateLimits(p, least, None if more is None else least + more, calm),
    st.floats(0.005, 0.5),
    st.integers(1, 50),
    st.none() | st.integers(0, 10_000),
    st.integers(1, 5),
)


def clamped(k: int, kept: RateLimits) -> int:
    return max(kept.least_steps, min(k, kept.most_steps or k))


@given(limits, st.integers(1, 1000), st.lists(st.floats(0.0, 500.0), min_size=1, max_size=40))
def test_the_rate_stays_within_its_limits(kept: RateLimits, start: int, cost_secs: list[float]) -> None:
    """The bound on lost steps is kept whatever is observed, and a reason is there when it holds the rate."""
    rate = Rate(clamped(start, kept))
    for cost in cost_secs:
        k = rate.interval_steps
        seen = Observed(steps=k, checkpoints=1, secs=k + cost, plain_step_secs=1.0)
        rate = adapt(rate, seen, kept)
        assert kept.least_steps <= rate.interval_steps
        if kept.most_steps is not None:
            assert rate.most_lost_steps <= 2 * kept.most_steps
        if seen.overhead > kept.max_overhead:
            assert rate.interval_steps >= k
            within = cost / rate.interval_steps <= kept.max_overhead * (1 + 1e-6)
            assert within or rate.why is Why.BOUND or rate.interval_steps == kept.most_steps


@given(limits, st.integers(1, 1000), st.floats(0.0, 20.0))
def test_under_a_constant_cost_the_rate_settles(kept: RateLimits, start: int, cost: float) -> None:
    """It does not swing: after some windows it stays, between what p asks for and twice of it."""
    rate, intervals = Rate(clamped(start, kept)), []
    for _ in range(80):
        k = rate.interval_steps
        seen = Observed(steps=k, checkpoints=1, secs=k + cost, plain_step_secs=1.0)
        rate = adapt(rate, seen, kept)
        intervals.append(rate.interval_steps)
    assert len(set(intervals[-10:])) == 1
    wanted = clamped(max(1, math.ceil(cost / kept.max_overhead - 1e-9)), kept)
    assert wanted <= intervals[-1] <= clamped(max(2 * wanted + 1, kept.least_steps), kept)
    assert all(b <= a for a, b in pairwise(intervals))  # only the first window may make it longer


@given(st.integers(1, 500), st.floats(0.0, 0.0174))
def test_one_calm_window_changes_nothing_several_do(start: int, overhead: float) -> None:
    kept, rate = RateLimits(0.035, calm_windows=3), Rate(start)
    for window in range(3):
        assert rate.interval_steps == start, window
        seen = Observed(steps=start, checkpoints=1, secs=start * (1 + overhead), plain_step_secs=1.0)
        rate = adapt(rate, seen, kept)
    assert rate.interval_steps <= start
    assert start // 2 <= rate.interval_steps
    loud = Observed(steps=start, checkpoints=1, secs=start * 1.03, plain_step_secs=1.0)
    assert adapt(Rate(start, calm=2), loud, kept) == Rate(start, Why.HELD, pytest.approx(0.03), 0)


def test_what_is_not_on_storage_in_time_makes_the_interval_longer() -> None:
    rate = adapt(Rate(5), Observed(5, 1, 5.0, 1.0, write_secs=12.0), RateLimits(0.035))
    assert (rate.interval_steps, rate.why) == (12, Why.WRITING)


def test_a_window_without_a_checkpoint_teaches_nothing() -> None:
    rate = Rate(5, calm=2)
    assert adapt(rate, Observed(5, 0, 50.0, 1.0), RateLimits(0.035)) is rate


def test_the_bound_on_lost_steps_wins_and_says_so() -> None:
    rate = adapt(Rate(10), Observed(10, 1, 20.0, 1.0), RateLimits(0.035, most_steps=25))
    assert (rate.interval_steps, rate.why, rate.most_lost_steps) == (25, Why.BOUND, 50)


def test_a_shorter_interval_is_never_shorter_than_the_overhead_allows() -> None:
    """Half of an odd number of steps, rounded down, would cost more than p."""
    cheap = Observed(steps=5, checkpoints=1, secs=5 + 2.4 * 0.035, plain_step_secs=1.0)
    rate = adapt(Rate(5, calm=2), cheap, RateLimits(0.035))
    assert (rate.interval_steps, rate.why, rate.calm) == (3, Why.CALM, 0)
