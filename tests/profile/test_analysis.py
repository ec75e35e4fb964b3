"""What the profiler finds in pipelines whose idle time is known (simulated)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from dataclasses import replace
from io import StringIO
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.schedules import (
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
)
from reft import cli
from reft.config import Variant, explain, parse_block
from reft.device import VENDORS
from reft.env import ENV_PROFILE
from reft.errors import ConfigError
from reft.node.progress import ProgressPage
from reft.pacing.schedule import AnalyticEstimator, InstructionRecord, StepTrace, WindowKind
from reft.pacing.tracer import Tracer
from reft.pacing.weave import Weaver
from reft.profile.analysis import analyse
from reft.profile.clocks import ClockOffset, DeviceClock, estimate
from reft.profile.figure import draw
from reft.profile.findings import advice, verdict
from reft.profile.profiler import note_taken, write
from reft.profile.result import Activity, Overlap, ProfileError, ProfileResult
from reft.profile.table import show
from reft.profile.traces import RankTraces, assign_chunks, decode, encode, only_group_calls
from reft.snapshot.gate import ChunkRecord
from reft.tools import profile as cli_profile
from tests.commands import command as reft
from tests.device.conftest import sim
from tests.device.simulated import NAME, Simulated
from tests.profile.simulated import (
    BACKWARD,
    FACTS,
    FORWARD,
    OPTIMIZER,
    REDUCE,
    Idle,
    a_profile,
    costs,
    found_idle,
    run,
    train_schedule,
    with_chunks,
)

UNEQUAL = Costs(
    forward_secs=(2e-3, 3e-3, 1e-3),
    backward_secs=(4e-3, 3e-3, 5e-3),
    load_secs=1e-4,
    link_latency_secs=1e-4,
    reduce_secs=(1e-3,) * 3,
    optimizer_secs=(2e-3,) * 3,
)


def assert_true_idle(
    ranks: list[RankTraces], idle: Idle, result: ProfileResult, but: str = ""
) -> None:
    """``but``: instructions whose waits are not compared."""
    names = {
        (r.pp, t.step, i.position): i.name for r in ranks for t in r.traces for i in t.instructions
    }
    found = found_idle(result)
    for place in {*found, *idle}:
        if names[place] != but:
            assert found.get(place, 0.0) == pytest.approx(idle.get(place, 0.0), abs=1e-8), place


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 8),
    secs=st.lists(st.integers(1, 9), min_size=10, max_size=10),
    transfer=st.integers(0, 20),
    ahead=st.none() | st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5),
)
def test_true_idle_is_told_from_transfers_on_unaligned_clocks(
    stages, micro_batches, secs, transfer, ahead
):
    """Sends hold their device until the receiver is there; on one clock they are buffered."""
    blocking, clocks = ahead is not None, [0.0, *(ahead or [0.0] * 5)][:stages]
    forward, backward = (tuple(s * 1e-3 for s in part[:stages]) for part in (secs[:5], secs[5:]))
    unequal = Costs(forward, backward, link_latency_secs=transfer * 1e-4, blocking_sends=blocking)
    schedule = train_schedule(stages, micro_batches)
    ranks, idle = run(schedule, unequal, clock_secs=clocks)
    result = analyse(ranks, *FACTS)
    assert_true_idle(ranks, idle, result, but="OptimizerStep")
    for stage in result.stages:
        transfers = sum(i.name[:4] in ("Send", "Recv") for i in schedule.streams[stage.stage_id])
        moved = stage.secs[Activity.TRANSFER].p50 if Activity.TRANSFER in stage.secs else 0.0
        assert moved <= transfers * transfer * 1e-4 + 1e-7
        assert not blocking or moved == pytest.approx(transfers * transfer * 1e-4, abs=1e-7)


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(3, 5), gpipe(3, 4), interleaved(3, 6, 2), zero_bubble_h1(3, 6)],
    ids=lambda schedule: schedule.name,
)
def test_every_wait_of_a_simulated_schedule_is_found(schedule: Schedule):
    ranks, idle = run(schedule, UNEQUAL)
    assert idle
    assert_true_idle(ranks, idle, analyse(ranks, *FACTS), but="OptimizerStep")


def test_queued_transfers_are_not_overstated():
    """Four stages: both inner ones send as many as the other receives, but not to each other."""
    unequal = Costs((2e-3, 3e-3, 1e-3, 2e-3), (4e-3, 3e-3, 5e-3, 2e-3), link_latency_secs=1e-4)
    ranks, idle = run(dual_pipe_v(4, 10), unequal)
    result = analyse(ranks, *FACTS)
    found = found_idle(result)
    segments = [s for rank in result.timelines for s in rank.segments]
    assert {s.name for s in segments if s.activity is Activity.WAIT} == {"CommitP2P"}
    assert sum(found.values()) > 0.4 * sum(idle.values())
    for place, secs in found.items():
        assert secs <= idle.get(place, 0.0) + unequal.link_latency_secs + 1e-9


def test_windows_are_those_of_the_analytic_estimator():
    """Equal stages, free transfers. The drain, which DeepSpeed spends behind the schedule, is the optimizer's here."""
    stages, micro_batches = 4, 8
    ranks, _ = run(train_schedule(stages, micro_batches), Costs.equal(stages, FORWARD, BACKWARD), 4)
    result = analyse(ranks, *FACTS)
    analytic = AnalyticEstimator(stages, micro_batches, FORWARD, BACKWARD)
    for stage in result.stages:
        expected = [w for w in analytic.windows(stage.stage_id) if w.kind is not WindowKind.DRAIN]
        assert [(w.kind, w.position) for w in stage.windows] == [
            (w.kind, w.position) for w in expected
        ]
        for window, true in zip(stage.windows, expected, strict=True):
            assert window.start_secs == pytest.approx(true.start_secs, abs=1e-8)
            assert window.stop_secs == pytest.approx(true.stop_secs, abs=1e-8)
    windows = result.windows(0)
    assert sum(w.length_secs for w in windows) == pytest.approx((stages - 1) * (FORWARD + BACKWARD))


def test_without_a_partner_the_fastest_observation_never_overstates_idle_time():
    ranks, idle = run(train_schedule(3, 6), replace(costs(3), blocking_sends=True), 8, jitter=0.2)
    result = analyse([rank for rank in ranks if rank.pp != 1], *FACTS)
    assert result.matched_share == 0
    found = {place: secs for place, secs in found_idle(result).items() if place[0] == 0}
    assert found
    assert all(secs <= idle.get(place, 0.0) + 1e-9 for place, secs in found.items())
    assert max(found.values()) > 0.5 * max(idle.get(place, 0.0) for place in found)


def changed(trace: StepTrace, name: str, end: float, **more: Any) -> StepTrace:
    """With the calls of a name ended so much later."""
    calls = tuple(
        replace(i, end_secs=i.end_secs + end) if i.name == name else i for i in trace.instructions
    )
    return replace(trace, instructions=calls, **more)


def test_data_parallel_peers_wait_for_the_last_in_the_reduction():
    def one(backward: float) -> RankTraces:
        return run(train_schedule(1, 2), Costs((0.0,), (backward,), reduce_secs=(REDUCE,)), 1)[0][0]

    # The fast one ends its reduction when the slow one does.
    fast, slow = one(2e-3), one(3e-3)
    fast = replace(fast, traces=(changed(fast.traces[0], "ReduceGrads", end=2e-3),))
    slow = replace(
        slow, rank=1, dp=1, complete=False, traces=tuple(only_group_calls(t) for t in slow.traces)
    )
    result = analyse([fast, slow], *FACTS)
    assert list(found_idle(result).values()) == [pytest.approx(2e-3)]
    assert result.stages[0].secs[Activity.REDUCE].p50 == pytest.approx(REDUCE)


@pytest.mark.parametrize("meets", [True, False])
def test_an_optimizer_step_is_a_meeting_point_only_if_its_times_say_so(meets):
    """The step lasts long enough to overlap on all stages either way."""
    ranks, idle = run(train_schedule(3, 4), costs(3, optimizer_secs=20e-3), 20, jitter=0.1)
    if not meets:
        # Each rank's takes as long as the shortest of all, from where it comes to it.
        def shortened(rank: RankTraces, t: StepTrace) -> StepTrace:
            waited = idle.get((rank.pp, t.step, len(t.instructions) - 1), 0.0)
            return changed(t, "OptimizerStep", end=-waited)

        ranks = [
            replace(rank, traces=tuple(shortened(rank, t) for t in rank.traces)) for rank in ranks
        ]
    result = analyse(ranks, *FACTS)
    segments = [(r.stage_id, s) for r in result.timelines for s in r.segments]
    waits = [
        stage for stage, s in segments if (s.activity, s.name) == (Activity.WAIT, "OptimizerStep")
    ]
    if not meets:
        assert not waits
        return
    assert_true_idle(ranks, idle, result)
    assert waits
    drains = [w for stage in result.stages for w in stage.windows if w.name == "OptimizerStep"]
    assert drains
    assert all(w.kind is WindowKind.DRAIN and not w.usable for w in drains)


def test_the_fence_and_what_beginning_a_snapshot_takes_are_shown():
    """Waiting before the optimizer step, and between it and the next instruction."""
    (rank,), _ = run(train_schedule(1, 2), costs(1), 2)
    late = tuple(changed(t, "OptimizerStep", 2e-3, fence_secs=2e-3) for t in rank.traces)

    def with_loss_of(t: StepTrace) -> StepTrace:
        last, end = t.instructions[-1], t.instructions[-1].end_secs
        after = {"position": len(t.instructions), "begin_secs": end + 5e-3, "end_secs": end + 6e-3}
        return replace(
            t, instructions=(*t.instructions, replace(last, name="AggregateTotalLoss", **after))
        )

    chunks = [ChunkRecord(1, 1000, 1e-4, 2e-4, 0, "replicated")]
    with_loss = replace(rank, traces=tuple(map(with_loss_of, late)))
    stage = analyse(with_chunks([with_loss], {0: chunks}), *FACTS).stages[0]
    assert stage.secs[Activity.FENCE].p50 == pytest.approx(2e-3)
    assert stage.secs[Activity.OPTIMIZER].p50 == pytest.approx(OPTIMIZER)
    assert stage.secs[Activity.CAPTURE].p50 == pytest.approx(5e-3)
    assert stage.held_up_secs == pytest.approx(7e-3)
    without = analyse([with_loss], *FACTS).stages[0]
    assert without.held_up_secs == pytest.approx(2e-3), "there was no snapshot to begin"


def profiled_with_chunks() -> ProfileResult:
    ranks, _ = run(train_schedule(2, 4), costs(2), 6, jitter=0.05)
    begins = (5.0e-3, 6.0e-3)
    in_mid = [ChunkRecord(1, 2_000_000, at, at + 0.9e-3, 0, "replicated") for at in begins]
    beside = [ChunkRecord(2, 1_000_000, 12e-3, 13e-3, None, "owned")]
    return analyse(with_chunks(ranks, {0: in_mid, 1: beside}), *FACTS)


def test_bytes_that_fit_follow_from_the_bandwidth_of_chunks_in_idle_time():
    result = profiled_with_chunks()
    assert result.bandwidth_bytes_per_sec == pytest.approx(2_000_000 / 0.9e-3)
    for stage in result.stages:
        for window in stage.windows:
            assert window.bytes_fit == pytest.approx(
                window.length_secs.p50 * 2_000_000 / 0.9e-3, abs=2
            )
    first, second = result.stages
    assert first.copied == {1: 4_000_000}
    assert second.copied == {2: 1_000_000}
    assert first.copying_secs[Overlap.IDLE] == pytest.approx(1.8e-3, rel=0.2)


def test_what_is_no_profile_is_refused_with_what_was_found(tmp_path):
    with pytest.raises(ProfileError, match="found format None"):
        ProfileResult.from_json({"steps": []})
    data = profiled_with_chunks().to_json()
    del data["stages"]
    with pytest.raises(ProfileError, match="stages"):
        ProfileResult.from_json(data)
    with pytest.raises(ProfileError, match="cannot read the profile"):
        ProfileResult.load(tmp_path / "none.json")


def test_traces_survive_the_wire_exactly():
    ranks, _ = run(train_schedule(2, 3), costs(2), 2, jitter=0.3)
    for rank in with_chunks(ranks, {0: [ChunkRecord(1, 7, 0.1, 0.2, None, "owned")]}):
        assert decode(encode(rank)) == rank
    with pytest.raises(ProfileError, match="cannot be read"):
        decode(b"\x93\x01\x02\x03")


__all__ = ["sim"]

seconds = st.floats(0, 0.1)


@given(
    ahead=st.floats(-1e4, 1e4),
    calls=st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=10),
)
def test_the_true_offset_is_within_the_bound(ahead, calls):
    """Whoever comes first, and whatever the two ways of a call take."""
    begin, ours, theirs = 100.0, [], []
    for first, second, there, back in calls:
        t0, s0 = begin + first, begin + second
        ours.append((t0, max(t0, s0 + back)))
        theirs.append((s0 + ahead, max(s0, t0 + there) + ahead))
        begin += 1
    offset = estimate(ours, theirs)
    assert abs(offset.secs + ahead) <= offset.error_secs + 1e-9
    lasted = [(t1 - t0 + s1 - s0) / 2 for (t0, t1), (s0, s1) in zip(ours, theirs, strict=True)]
    assert offset.error_secs <= min(lasted) + 1e-9


@given(first=st.floats(-10, 10), drift=st.floats(-1e-3, 1e-3), at=st.floats(0, 1))
def test_drift_between_two_measurements_is_part_of_the_bound(first, drift, at):
    before, after = ClockOffset(first, 1e-6, 1), ClockOffset(first + drift, 2e-6, 1)
    middle = before.until(after)
    assert abs(middle.secs - (first + at * drift)) <= middle.error_secs
    assert middle.clock == 1


def test_a_device_clock_tells_when_the_device_got_there_not_when_the_call_returned(
    sim: Simulated,
) -> None:
    clock = DeviceClock(VENDORS[NAME])
    clock.begin()
    go = sim.hold()
    marks, truth = [], []
    for _ in range(3):
        marks.append(clock.mark())
        sim.launch(lambda: truth.append(time.perf_counter()))
        sim.sleep(0.01)
    # Marking did not wait for the device, which cannot go on yet.
    marked_at = time.perf_counter()
    go()
    found = clock.resolve(marks)
    assert found[0] > marked_at - clock.error_secs
    # Each mark lies between its neighbours on the device, however long the host lets the device wait.
    for mark, after in zip(found, truth, strict=True):
        assert mark <= after + clock.error_secs
    for mark, before in zip(found[1:], truth, strict=False):
        assert mark >= before + 0.01 - clock.error_secs


def a_trace(step: int, chunks: tuple[ChunkRecord, ...] = ()) -> StepTrace:
    records = tuple(
        InstructionRecord(n, "ForwardPass", n, step + n * 0.1, step + n * 0.1 + 0.1)
        for n in range(3)
    )
    return StepTrace(step, 0, 0, float(step), step + 0.9, records, chunks, 0.0)


def test_chunks_that_were_reported_late_belong_to_the_step_they_ran_in():
    def chunk(at: float) -> ChunkRecord:
        return ChunkRecord(1, 10, at, at + 0.01, 0, "replicated")

    reported = deque(
        [(chunk(0.5),), (chunk(1.2),), (chunk(2.4), chunk(2.2), chunk(1.9)), (chunk(3.1),)]
    )
    traces = [a_trace(step, reported.popleft()) for step in (1, 2, 3, 4)]
    steps = assign_chunks(traces)
    assert [t.step for t in steps] == [1, 2, 3]
    # What began before the first step is not this profile's.
    assert [[c.begin_secs for c in t.chunks] for t in steps] == [[1.2, 1.9], [2.2, 2.4], [3.1]]
    assert [replace(t, chunks=()) for t in steps] == [a_trace(s) for s in (1, 2, 3)]


class _Pacer:
    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


class _Engine:
    def __init__(self) -> None:
        self.executed = []

    def _exec(self, buffer_id: int | None = None) -> None:
        self.executed.append(buffer_id)

    def _aggregate_total_loss(self) -> float:
        return 1.5

    _KINDS = (
        schedule.LoadMicroBatch,
        schedule.ForwardPass,
        schedule.BackwardPass,
        schedule.ReduceGrads,
        schedule.OptimizerStep,
    )
    _INSTRUCTION_MAP = dict.fromkeys(_KINDS, _exec)

    def _exec_schedule(self, steps) -> None:
        for commands in steps:
            for command in commands:
                self._INSTRUCTION_MAP[type(command)](self, **command.kwargs)

    def train_batch(self) -> float:
        self._exec_schedule(schedule.DataParallelSchedule(3, 1, 0))
        return self._aggregate_total_loss()


def test_every_traced_instruction_has_its_marks_and_no_other(tmp_path: Path):
    engine = _Engine()
    page = ProgressPage(tmp_path, 0, 0, 1.0, 60.0)
    tracer = Tracer(rank=0, stage_id=0)
    tracer.traces = deque(maxlen=1)
    session = SimpleNamespace(check_tensors=lambda: None, started=True)
    copying: Any = SimpleNamespace(pacer=_Pacer(), variant=Variant.HAS)
    Weaver(engine, copying, tracer, page, session)
    engine.train_batch()
    assert (len(tracer.records), tracer.marks) == (12, [])
    tracer.records.clear()
    ticks = count()
    tracer.mark = lambda: next(ticks)
    assert engine.train_batch() == 1.5
    assert [r.name for r in tracer.records][-3:] == [
        "ReduceGrads",
        "OptimizerStep",
        "AggregateTotalLoss",
    ]
    assert tracer.marks == [(2 * n, 2 * n + 1) for n in range(len(tracer.records))]
    seen = len(tracer.records)
    tracer.traces = None
    engine.train_batch()
    assert (len(tracer.records), len(tracer.marks)) == (seen, seen)


IN_MID = [
    ChunkRecord(1, 2_000_000, 5.0e-3 + i * 1e-3, 5.9e-3 + i * 1e-3, 0, "replicated")
    for i in range(2)
]
IN_FILL = [ChunkRecord(1, 2_000_000, 1e-5, 9.1e-4, 0, "replicated")]
TOO_MUCH = [
    ChunkRecord(2, 9_000_000, 1e-3 * i, 1e-3 * (i + 1), None, "replicated") for i in range(30)
]


def test_the_table_names_stages_windows_and_what_fits():
    console = Console(width=200, record=True, file=StringIO())
    show(a_profile({0: IN_MID, 1: IN_FILL}), console)
    text = console.export_text()
    assert "pp 2 x dp 1 x tp 1: 6 steps" in text
    assert "mid" in text
    assert "fill" in text
    assert "RecvGrad" in text
    assert "4.0 MB / 0 / 0 / 0" in text


def test_advice_says_what_fits_and_what_does_not():
    lines = list(advice(a_profile({0: IN_MID, 1: TOO_MUCH})))
    assert any(line.startswith("stage 0: a snapshot of 4.0 MB fits into") for line in lines)
    assert any(line.startswith("stage 1: a snapshot of 270.0 MB does not fit") for line in lines)
    slow = advice(a_profile(given=replace(costs(2), backward_secs=(4e-3, 9e-3))))
    assert any("stage 1 computes" in line and "longer than the mean stage" in line for line in slow)
    ranks, _ = run(train_schedule(2, 4), costs(2), 4)
    chunked = [
        replace(r, snapshot_bytes=4_000_000) for r in with_chunks(ranks, {0: IN_FILL, 1: IN_FILL})
    ]
    rare = advice(analyse(chunked, "job", (2, 1, 1)))
    assert any("snapshots were taken of about 50 % of the measured steps" in line for line in rare)
    assert any("no recurring idle time" in line for line in advice(a_profile(stages=1)))


def test_the_title_says_whether_snapshots_are_free():
    assert verdict(a_profile()) == "No snapshots ran in the profiled steps"
    assert verdict(a_profile({0: IN_MID, 1: IN_FILL})).startswith("Snapshots are free here")
    assert "during computation" in verdict(a_profile({0: IN_MID, 1: TOO_MUCH}))


def check_trace(path, ranks: int) -> None:
    """Loadable, one process per rank, and no two slices of a track at the same time."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"]
            tracks[event["pid"], event["tid"]].append((begin, begin + event["dur"], event["name"]))
    assert {pid for pid, _ in tracks} == set(range(ranks))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[track] for track in tracks} >= {"steps", "instructions"}
    for slices in tracks.values():
        for (_, end, name), (begin, _, following) in pairwise(slices):
            assert begin >= end - 1e-3, f"{following} begins {end - begin} us before {name} ends"


@pytest.mark.process  # matplotlib asks fc-list for fonts, the first time on a machine
def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    result = a_profile({0: IN_MID, 1: IN_FILL})
    draw(result, path)
    # Text is drawn as paths, with the words as comments.
    text = path.read_text()
    assert "stage 1" in text
    assert "Snapshots are free here" in text
    assert "of the copying time is idle time" in text
    assert text.count("of it in idle time") == 2
    assert text.count("4.0 MB to copy") == 1, "bytes and parts of the time stand apart"
    with pytest.raises(ConfigError, match="step 99 was not profiled; the profile has steps"):
        draw(result, path, step=99)


@pytest.mark.process
def test_the_picture_says_what_is_of_its_step_and_what_of_all(tmp_path):
    """A version holds one of the steps up for 10 ms, the others for 2 ms: the cost is 2 ms."""
    pytest.importorskip("matplotlib")
    (rank,), _ = run(train_schedule(1, 2), costs(1), 5)

    def held_up(number: int, t: StepTrace) -> StepTrace:
        secs = 10e-3 if number == 2 else 2e-3
        return replace(changed(t, "OptimizerStep", secs), fence_secs=secs)

    late = tuple(held_up(number, t) for number, t in enumerate(rank.traces))
    chunks = [ChunkRecord(1, 1000, 1e-4, 2e-4, 0, "replicated")]
    result = analyse(with_chunks([replace(rank, traces=late)], {0: chunks}), *FACTS)
    saved, path = tmp_path / "p.json", tmp_path / "figure.svg"
    result.save(saved)
    step = rank.traces[2].step
    assert reft("profile", "--from", saved, "--figure", path, "--figure-step", str(step)).code == 0
    text = path.read_text()
    assert "of a step (median of 5 steps)" in text
    assert f"step {step}" in text
    assert "held up 10.0 ms" in text


@pytest.mark.integration
def test_the_picture_of_the_guide_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    root = Path(__file__).resolve().parents[2]
    words = [
        sys.executable,
        str(root / "benchmarks/profile_picture.py"),
        "--out",
        str(tmp_path / "p.png"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "stage 2: a snapshot of 1.2 GB does not fit its idle time" in done.stdout
    assert (tmp_path / "p.png").stat().st_size > 20_000


@pytest.mark.process
def test_a_job_leaves_profile_trace_and_figure(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    result = a_profile({0: IN_MID})
    write(result, tmp_path)
    assert ProfileResult.load(tmp_path / "profile.json") == result
    check_trace(tmp_path / "trace.json", ranks=2)
    assert (tmp_path / "profile.png").stat().st_size > 5000
    assert "could not be drawn" not in caplog.text


def test_a_saved_profile_is_shown_again(tmp_path, capsys):
    saved, trace, copy = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "again.json"
    result = a_profile({0: IN_MID, 1: IN_FILL})
    result.save(saved)
    code = cli.main(["profile", "--from", str(saved), "--trace", str(trace), "--json", str(copy)])
    assert code == 0
    assert "idle windows of a step" in capsys.readouterr().out
    assert copy.read_text() == saved.read_text()
    check_trace(trace, ranks=2)
    assert cli.main(["profile", "--json", "-", f"--from={saved}"]) == 0
    assert ProfileResult.from_json(json.loads(capsys.readouterr().out)) == result


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0", "train.py"], "--steps is 0; expected at least 1"),
        (["--from", "none.json"], "cannot read the profile"),
        (
            ["--nproc-per-node", "2", "--from", "p.json", "train.py"],
            "remove the script and its launch options",
        ),
    ],
)
def test_wrong_use_is_explained(arguments, says, capsys):
    assert cli.main(["profile", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_block_has_the_keys_and_the_command_sets_them(tmp_path, monkeypatch):
    assert {"profile.steps", "profile.warmup_steps", "profile.dir"} <= {
        doc.key for doc in explain()
    }
    with pytest.raises(ConfigError, match=r'did you mean "warmup_steps"'):
        parse_block({"enabled": True, "profile": {"warmup_step": 3}})
    assert parse_block({}).profile.steps == 0

    started = []
    monkeypatch.setattr("reft.job.launch.launch", lambda options: started.append(options) or 1)
    monkeypatch.setenv(ENV_PROFILE, "")
    command = [
        "--steps",
        "7",
        "--warmup-steps",
        "2",
        "--dir",
        str(tmp_path),
        "--nproc-per-node",
        "2",
    ]
    assert cli_profile.main([*command, "train.py", "--steps", "100"]) == 1
    (options,) = started
    assert options.arguments[-3:] == ("train.py", "--steps", "100")
    assert options.job_id.startswith("profile-")

    block = parse_block({}, os.environ)  # a job without a block
    assert block.enabled
    assert (block.profile.steps, block.profile.warmup_steps, block.profile.then) == (7, 2, "exit")
    assert block.profile.dir == tmp_path


def run_with(monkeypatch, tmp_path, job) -> int:
    monkeypatch.setenv(ENV_PROFILE, "")
    monkeypatch.setattr("reft.job.launch.launch", lambda options: job() or 0)
    return cli_profile.main(["--dir", str(tmp_path), "--steps", "3", "train.py"])


def test_what_the_command_returns_when_this_node_has_no_profile(tmp_path, monkeypatch, capsys):
    assert run_with(monkeypatch, tmp_path, lambda: None) == 1
    assert "fewer than 5 + 3 + 1 steps" in capsys.readouterr().err
    # Another node's rank 0 wrote it.
    assert run_with(monkeypatch, tmp_path, lambda: note_taken(tmp_path, 4)) == 0
    assert "on the node of rank 0" in capsys.readouterr().err
    assert run_with(monkeypatch, tmp_path, lambda: note_taken(tmp_path, 0)) == 1
    assert "the profile could not be made" in capsys.readouterr().err
    # A profile that lay there before is not taken for this job's.
    a_profile().save(tmp_path / "profile.json")
    assert run_with(monkeypatch, tmp_path, lambda: None) == 1
    assert run_with(monkeypatch, tmp_path, lambda: a_profile().save(tmp_path / "profile.json")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
