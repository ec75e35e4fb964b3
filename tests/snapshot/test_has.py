"""The HAS planner: tiers in order, nothing lost, nothing beyond a room or the deadline; and what it learns."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.errors import ConfigError
from reft.snapshot.copying.gate import BandwidthModel
from reft.snapshot.schedule import (
    SHORTEST_WINDOW_SECS,
    Bandwidth,
    HasSchedule,
    Interval,
    Limits,
    Overflow,
    Window,
    WindowKind,
    advised_interval,
    plan_schedule,
)

MIB = 2**20
sizes = st.integers(0, 2**36)
rates = st.floats(1e6, 1e11)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[list[Window], list[Interval], float]:
    """Windows and computation taking turns until the optimizer step."""
    lengths = draw(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=12))
    at, windows, computing = 0.0, [], []
    for i, length in enumerate(lengths):
        if i % 2:
            windows.append(Window(WindowKind.OTHER, at, at + length, i))
        else:
            computing.append(Interval(at, at + length))
        at += length
    return windows, computing, at


@st.composite
def plans(draw: st.DrawFn) -> HasSchedule:
    windows, computing, step_secs = draw(timelines())
    return plan_schedule(
        {"replicated": draw(sizes), "owned": draw(sizes)},
        windows,
        Bandwidth(draw(rates), draw(rates), draw(rates)),
        step_secs=step_secs,
        computing=computing,
        communicating=computing[:1],
        limits=Limits(compute_share=draw(st.floats(0, 1)), separate_links=draw(st.booleans())),
    )


@given(plans())
def test_every_byte_is_planned_once_in_the_first_tier_that_has_room_before_the_deadline(
    plan: HasSchedule,
) -> None:
    assert sum(plan.tier_bytes.values()) == plan.total_bytes
    assert plan.fits == (plan.tier_bytes[0] == 0)
    assert all(p.length_secs >= SHORTEST_WINDOW_SECS for p in plan.windows)
    tiers = [plan.windows, plan.computing, plan.communicating]
    for number, tier in enumerate(tiers):
        assert all(0 <= p.nbytes <= p.capacity_bytes and p.stop_secs <= plan.step_secs for p in tier)
        if sum(p.nbytes for t in tiers[number + 1 :] for p in t) + plan.left_over_bytes:
            assert all(p.nbytes == p.capacity_bytes for p in tier)


@given(plans())
def test_tier_2_is_spread_evenly(plan: HasSchedule) -> None:
    share = plan.compute_share(1e9)
    assert 0 <= share <= 1
    rooms = [p for p in plan.computing if p.capacity_bytes]
    whole = sum(p.nbytes for p in rooms) / max(1, sum(p.capacity_bytes for p in rooms))
    # All to the same degree, the last ones rounded off by a byte each.
    assert all(abs(p.nbytes - whole * p.capacity_bytes) <= len(rooms) + 1 for p in rooms)


@given(st.floats(1e-6, 1e3), st.floats(1e-3, 1e3), st.floats(0.001, 1.0))
def test_the_advised_interval_is_the_smallest_that_keeps_the_overhead(
    stall: float, step: float, share: float
) -> None:
    k = advised_interval(stall, step, share)
    assert stall <= share * k * step * (1 + 1e-9)
    assert k == 1 or stall > share * (k - 1) * step * (1 - 1e-9)


def test_the_rest_is_visible_with_its_policy() -> None:
    def plan(policy: Overflow, staging: int = 0) -> HasSchedule:
        return plan_schedule(
            {"owned": 1000},
            [Window(WindowKind.MID, 0.0, 1.0, 3)],
            Bandwidth(100.0, 100.0),
            step_secs=10.0,
            limits=Limits(overflow=policy, max_overhead=0.1, staging_bytes=staging),
        )

    stall, staged = plan(Overflow.STALL), plan(Overflow.STAGING, 10_000)
    assert (stall.left_over_bytes, stall.left_over_secs) == (900, 9.0)
    assert stall.advised_interval_steps == 9
    # 900 bytes leave the device at 100 a step: the next staging copy has room after ten steps.
    assert staged.staged_bytes == 900
    assert staged.advised_interval_steps == 10
    with pytest.raises(ConfigError, match="write 'stall' or 'interval'"):
        plan(Overflow.STAGING)


observations = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=50)


@given(observations)
def test_learning_is_bounded_and_goes_the_right_way(steps: list[tuple[float, float, bool]]) -> None:
    model = BandwidthModel()
    for open_secs, overrun_secs, full in steps:
        before = model.factor(7)
        model.observe_window(7, open_secs=open_secs, overrun_secs=overrun_secs, full=full)
        after = model.factor(7)
        assert model.LOWEST <= after <= model.HIGHEST
        if overrun_secs > 0.1 * max(open_secs, SHORTEST_WINDOW_SECS):
            assert after <= before
        elif full:
            assert after >= before
        else:
            assert after == before
    assert model.factor(8) == 1.0


@pytest.mark.parametrize("tier", [1, 2, 3])
@pytest.mark.parametrize("first", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("rate", [1e5, 1e9, 1e11])
def test_within_20_versions_the_bandwidth_is_what_is_measured_whatever_was_guessed_or_measured_first(
    tier: int, first: float, rate: float
) -> None:
    model, expected = BandwidthModel(), list[Any](astuple(BandwidthModel())[:3])
    for measured in (first * rate, *[rate] * 19):
        model.observe_copy(tier, int(measured), 1.0)
        model.observe_copy(tier, 0, 1.0)
        model.observe_copy(tier, 10, 0.0)
    expected[tier - 1] = pytest.approx(rate, rel=0.1)
    assert list(astuple(model)[:3]) == expected


def test_an_overrun_window_gets_fewer_bytes_and_recovers() -> None:
    model, window = BandwidthModel(1e9, 1e9), [Window(WindowKind.MID, 0.0, 1.0, 3)]

    def planned() -> int:
        return plan_schedule({"owned": 10**12}, window, model, step_secs=2.0).windows[0].nbytes

    at_first = planned()
    for _ in range(20):
        model.observe_window(3, open_secs=1.0, overrun_secs=1.0, full=False)
    shrunk = planned()
    for _ in range(40):
        model.observe_window(3, open_secs=1.0, overrun_secs=0.0, full=True)
    assert shrunk < at_first / 2
    assert planned() > at_first
