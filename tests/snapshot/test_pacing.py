"""The pacer, without an engine: windows are measured, kinds told apart, plans made and learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.config import HasConfig
from reft.errors import ConfigError
from reft.pacing.gate import HostGate
from reft.pacing.pacer import (
    BandwidthModel,
    Pacer,
    StepObservation,
    Wait,
    WindowMeter,
    waits,
    window_kind,
)
from reft.pacing.schedule import (
    SHORTEST_WINDOW_SECS,
    Bandwidth,
    HasLimits,
    HasSchedule,
    Interval,
    Overflow,
    Window,
    WindowKind,
    advised_interval,
    instructions,
    plan_schedule,
)
from reft.snapshot.gate import ChunkRecord, Gate

STAGES, MICRO_BATCHES, FORWARD, BACKWARD = 4, 8, 1.0, 2.0


def stream(stage: int) -> list[str]:
    return [name for name, _ in instructions(STAGES, MICRO_BATCHES, stage)]


def observed(
    names: list[str], waits: dict[int, tuple[float, float]], end: float, at: float = 100.0
) -> StepObservation:
    seen = [Wait(p, at + a, at + b, 0.0, 0) for p, (a, b) in waits.items()]
    return StepObservation("key", names, (at, at + end), seen)


def test_what_is_measured_is_what_was_seen_after_a_few_steps() -> None:
    names = stream(1)
    meter = WindowMeter(names)
    waits = {0: (0.0, 1.0), 5: (3.0, 5.0), len(names): (20.0, 22.0)}
    meter.see(observed(names, {0: (0.0, 50.0)}, 90.0))  # first use of everything: forgotten
    for _ in range(4):
        meter.see(observed(names, waits, 22.0))
    assert meter.step_secs == pytest.approx(22.0)
    assert [(w.position, w.start_secs, w.length_secs) for w in meter.windows()] == [
        (p, pytest.approx(a), pytest.approx(b - a)) for p, (a, b) in waits.items()
    ]
    outlier = observed(names, {**waits, 5: (3.0, 15.0)}, 32.0)
    meter.see(replace(outlier, waits=[w._replace(overrun_secs=0.25) for w in outlier.waits]))
    first, second, _ = (w.length_secs for w in meter.windows())
    assert 2.0 < second < 6.0, "an outlier moves a window by its weight only"
    assert 0.75 < first < 1.0, "a wait for a chunk is no idle time"


@pytest.mark.parametrize("stage", range(STAGES))
def test_windows_of_1f1b_are_told_apart(stage: int) -> None:
    names = stream(stage)
    kinds = [window_kind(names, p) for p, name in enumerate(names) if name.startswith("Recv")]
    assert window_kind(names, len(names)) is WindowKind.DRAIN
    assert (WindowKind.FILL in kinds) == (stage > 0)
    assert (WindowKind.MID in kinds) == (stage < STAGES - 1)
    assert kinds.count(WindowKind.COOL_DOWN) == STAGES - 1 - stage


class Clock:
    """As much of a copy engine as tells the time."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.now, self.asynchronous = 0.0, asynchronous

    def stamp(self) -> float:
        return self.now

    def secs_of(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)


TRAINING = [
    "RecvActivation",
    "ForwardPass",
    "BackwardPass",
    "SendGrad",
    "ReduceGrads",
    "OptimizerStep",
]
EVALUATION = ["RecvActivation", "ForwardPass"]


def make_pacer(
    clock: Clock, gate: Gate | None = None, stages: int = 2, micro: int = 1, **has: Any
) -> Pacer:
    settings = HasConfig.model_validate({"compute_share": 0.0, **has})
    return Pacer(settings, clock, gate=gate, stage_id=1, stages=stages, micro_batches=micro)


def run_step(
    pacer: Pacer,
    clock: Clock,
    names: list[str] = TRAINING,
    nbytes: int | None = None,
    **secs: float,
) -> dict[int, int]:
    """One schedule, each instruction of which takes 0.1 s or as is said; a version, if any. Which tiers are open
    in each that waits: -1 where none is."""
    tiers, gate = {}, pacer.gate
    assert isinstance(gate, HostGate)
    pacer.begin_step(names[-1])
    for position, name in enumerate(names):
        waits = name.startswith(("Recv", "Send", "Reduce"))
        if waits:
            pacer.open(position, name.startswith("Recv"))
            tiers[position] = gate.opened.tier if gate.opened is not None else -1
        if name == "OptimizerStep":
            pacer.begin_optimizer()
        clock.now += secs.get(name, 0.1)
        if name == "OptimizerStep":
            pacer.end_optimizer()
        if waits:
            pacer.close()
            assert gate.opened is None
    pacer.end_step(names[-1], names)
    if nbytes is not None:
        pacer.version_done({"replicated": nbytes}, ())
    return tiers


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("nbytes", [10**6, 10**9])
def test_tier_3_opens_in_communication_where_links_are_separate_and_the_rest_does_not_suffice(
    separate: bool, nbytes: int
) -> None:
    clock = Clock()
    pacer = make_pacer(clock, separate_links=separate, compute_share=0.0)
    for _ in range(5):
        tiers = run_step(pacer, clock, nbytes=nbytes, SendGrad=0.0001, ReduceGrads=0.2)
    needed = nbytes > pacer.plan.windows[0].capacity_bytes
    assert needed == (nbytes == 10**9)
    # The send is too short to be of use, the reduction is no idle time.
    assert tiers == {0: 1, 3: -1, 4: 3 if separate and needed else -1}
    assert (pacer.plan.tier_bytes[3] > 0) == (separate and needed)


def test_nothing_is_planned_beside_the_optimizer_step() -> None:
    clock = Clock()
    pacer = make_pacer(clock, compute_share=0.5)
    for _ in range(4):
        run_step(pacer, clock, nbytes=10**9, SendGrad=0.0, ReduceGrads=0.0, OptimizerStep=0.6)
    plan = pacer.plan
    assert plan.step_secs == pytest.approx(0.9)
    assert [(p.start_secs, p.stop_secs) for p in plan.computing] == [
        (pytest.approx(0.1), pytest.approx(0.3))
    ]
    # Beside the optimizer step there would have been room for all of it.
    assert plan.left_over_bytes == 10**9 - plan.tier_bytes[1] - plan.tier_bytes[2] > 0


def test_where_there_are_no_windows_what_training_waits_for_teaches_the_bandwidth() -> None:
    clock = Clock()
    pacer = make_pacer(clock, overflow="interval")
    for _ in range(30):
        clock.now += 1.0
        pacer.begin_optimizer()
        pacer.end_optimizer()
        pacer.end_step("step", ())
        pacer.version_done(
            {"replicated": 10**9}, [ChunkRecord(0, 10**9, 0.0, 0.1, None, "replicated")]
        )
    assert pacer.plan.left_over_secs == pytest.approx(0.1, rel=0.01)
    assert pacer.plan.advised_interval_steps == 4  # 0.1 s within 3 % of steps of a second


def test_plans_follow_the_schedule_that_trains_whatever_is_evaluated_between() -> None:
    clock = Clock()
    pacer = make_pacer(clock, compute_share=0.0)
    for _ in range(6):
        run_step(pacer, clock, RecvActivation=0.2)
        for _ in range(20):  # more than are remembered between two versions
            run_step(pacer, clock, EVALUATION, RecvActivation=5.0)
        pacer.version_done({"replicated": 10**6}, ())
    plan = pacer.plan
    assert plan.step_secs == pytest.approx(0.7)
    assert plan.windows[0].length_secs == pytest.approx(0.2)
    assert pacer.gate.patience_secs < 2.0
    assert run_step(pacer, clock)[0] == 1


def test_formulas_are_used_for_the_schedule_that_they_are_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In another one their positions are instructions in which nothing waits."""
    other = [
        "RecvActivation",
        "ForwardPass",
        "ForwardPass",
        "SendActivation",
        "BackwardPass",
        "OptimizerStep",
    ]
    for names in (stream(1), other):
        clock = Clock()
        pacer = make_pacer(
            clock, None, STAGES, MICRO_BATCHES, windows="analytic", compute_share=0.0
        )
        for _ in range(4):
            pacer.begin_step("step")
            pacer.open(0, receives=True)
            clock.now += 0.5
            pacer.close()
            clock.now += 1.0
            pacer.end_step("step", names, [(0.0, 0.01)], [(0.0, 0.02)])
            pacer.version_done({"replicated": 10**6}, ())
        positions = [w.position for w in pacer.plan.windows]
        assert (positions == [0]) == (names is other), positions
    said = [r.getMessage() for r in caplog.records if r.name == "reft.pacing.pacer"]
    assert len(said) == 1
    assert "reft measures its windows instead" in said[0]


QUEUED = [
    "RecvActivation",
    "CommitP2P",
    "ForwardPass",
    "CommitP2P",
    "SendActivation",
    "RecvGrad",
    "CommitP2P",
]


def test_queued_transfers_wait_where_they_are_carried_out() -> None:
    names = [*QUEUED, "BackwardPass", "SendGrad", "CommitP2P", "ReduceGrads", "OptimizerStep"]
    found = [waits(names[: p + 1], queues=True) for p in range(len(names))]
    assert [p for p, (may_wait, _) in enumerate(found) if may_wait] == [1, 6, 9, 10]
    assert [p for p, (_, receives) in enumerate(found) if receives] == [1, 6]
    assert [window_kind(names, p) for p in (1, 6, 9)] == [
        WindowKind.FILL,
        WindowKind.MID,
        WindowKind.DRAIN,
    ]


WINDOW_SECS, BESIDE = 0.02, 0.8


class Link(Gate):
    """A device whose copies are queued: each window's begin where it opens, as fast as the link lets them, and
    run on after it, more slowly. What is left at the fence follows."""

    def __init__(self, clock: Clock, bytes_per_sec: float) -> None:
        self.clock, self.rate = clock, bytes_per_sec
        self.wanted = True
        self.queued: list[tuple[int | None, int, float]] = []

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        self.queued.append((window, nbytes, self.clock.now))

    def copy(self, nbytes: int, chunk_bytes: int, fence_secs: float) -> list[ChunkRecord]:
        records, free = [], 0.0
        for window, budget, opened in [*self.queued, (None, nbytes, fence_secs)]:
            begun, tier = 0, 0 if window is None else 1
            while begun < min(budget, nbytes):
                part = min(chunk_bytes, nbytes - begun)
                begin = max(free, opened)
                waiting = any(0 <= begin - at < WINDOW_SECS for _, _, at in self.queued)
                free = begin + part / (self.rate if waiting else BESIDE * self.rate)
                records.append(ChunkRecord(tier, part, begin, free, window, "replicated"))
                begun += part
            nbytes -= begun
        self.queued.clear()
        return records


@pytest.mark.parametrize("first_guess", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("gigabytes", [0.4, 2.0, 3.5])
@pytest.mark.parametrize("late", [False, True], ids=["", "known a version later"])
def test_on_a_device_plans_come_to_hold_what_the_windows_hold_whatever_was_guessed(
    gigabytes: float, first_guess: float, late: bool
) -> None:
    """Within 20 versions, at 25 GB/s, with two windows of 20 ms in a step of 200 ms, for which the link has 4 GB."""
    rate, nbytes, clock = 25e9, int(gigabytes * 1e9), Clock(asynchronous=True)
    gate = Link(clock, rate)
    pacer = make_pacer(clock, gate, micro=2, compute_share=1.0, overflow="interval")
    pacer.model.window = pacer.model.compute = first_guess * rate
    names = ["RecvActivation", "ForwardPass", "RecvGrad", "BackwardPass", "OptimizerStep"]
    for _ in range(20):
        pacer.begin_step("step")
        for position in (0, 2):
            pacer.open(position, receives=True)
            clock.now += WINDOW_SECS
            pacer.close()
            clock.now += 0.07
        fence_secs = clock.now
        pacer.begin_optimizer()
        clock.now += 0.02
        pacer.end_optimizer()
        chunks = gate.copy(nbytes, 2**25, fence_secs)
        if late:  # the version was committed before the step was over
            pacer.version_done({"replicated": nbytes}, chunks)
        pacer.end_step("step", names)
        if not late:
            pacer.version_done({"replicated": nbytes}, chunks)
    plan = pacer.plan
    assert plan.fits
    assert plan.advised_interval_steps == 1
    held = rate * WINDOW_SECS
    for window in plan.windows:
        assert window.capacity_bytes == pytest.approx(held, rel=0.1)
    if nbytes > 2 * held:
        assert pacer.model.compute == pytest.approx(BESIDE * rate, rel=0.1)


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
        limits=HasLimits(compute_share=draw(st.floats(0, 1)), separate_links=draw(st.booleans())),
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
        assert all(
            0 <= p.nbytes <= p.capacity_bytes and p.stop_secs <= plan.step_secs for p in tier
        )
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
            limits=HasLimits(overflow=policy, max_overhead=0.1, staging_bytes=staging),
        )

    stall, staged = plan(Overflow.STALL), plan(Overflow.STAGING, 10_000)
    assert (stall.left_over_bytes, stall.left_over_secs) == (900, 9.0)
    assert stall.advised_interval_steps == 9
    # 900 bytes leave the device at 100 a step: the next staging copy has room after ten steps.
    assert staged.staged_bytes == 900
    assert staged.advised_interval_steps == 10
    with pytest.raises(ConfigError, match="write 'stall' or 'interval'"):
        plan(Overflow.STAGING)


observations = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=50
)


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
