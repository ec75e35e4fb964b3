"""The arithmetic of the report, from event files as the processes of a job write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reft.tools.demo.history import EventReader, History
from reft.tools.demo.job import Failure, loss_difference, make_report

STEPS = 6


class Recorder:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, prefix: str, rank: int, pid: int, event: str, time: float, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time, "rank": rank, **fields})
        with (self.directory / f"{prefix}-{rank}-{pid}.jsonl").open("a") as file:
            file.write(line + "\n")

    def life(self, number: int, ranks: int, first_pid: int, began: float) -> None:
        for rank in range(ranks):
            fields = dict(incarnation=number, coordinate=f"pp0.dp{rank}.tp0", node=f"node{rank}", tolerance=1)
            self.write("reft", rank, first_pid + rank, "attached", began, **fields)

    def step(self, rank: int, pid: int, step: int, time: float, loss: float | None = None) -> None:
        fields = {} if loss is None else {"loss": loss, "loss_hex": loss.hex()}
        self.write("rank", rank, pid, "step", time, step=step, **fields)

    def commit(self, rank: int, pid: int, step: int, time: float, *, taken: int, stall: float) -> None:
        traffic = {"to_host": {"shard": 400, "copies": 300 + rank}, "sent": {"host_state": 20 * rank}}
        counters = dict(taken=taken, bytes_per_rank=1000 + rank, stall_secs_median=stall, traffic=traffic)
        self.write("reft", rank, pid, "commit", time, step=step, copy_secs=0.1, **counters)

    def restored(self, rank: int, pid: int, time: float, secs: float, **fields: Any) -> None:
        self.write("reft", rank, pid, "restored", time, secs=secs, **fields)


def loss_at(step: int) -> float:
    return 5.0 / step


@pytest.fixture
def reference(tmp_path: Path) -> History:
    recorder = Recorder(tmp_path / "reference")
    for step in range(1, STEPS + 1):
        recorder.step(0, 100, step, 1000.0 + step, loss_at(step))
        recorder.step(1, 101, step, 1000.0 + step)
    return History.of(recorder.directory)


@pytest.fixture
def disturbed(tmp_path: Path) -> Recorder:
    """Two ranks; four steps, three commits; killed in step 5; resumed from step 3, so that step 4 is
    computed twice; then to the end."""
    recorder = Recorder(tmp_path / "training")
    recorder.life(1, 2, 10, 100.0)
    for step in range(1, 5):
        for rank in (0, 1):
            recorder.step(rank, 10 + rank, step, 100.0 + step + rank / 10, None if rank else loss_at(step))
            if step < 4:
                recorder.commit(rank, 10 + rank, step, 100.4 + step, taken=step, stall=0.010 + rank / 100)
    recorder.life(2, 2, 20, 110.0)
    origin = {"version": 3, "incarnation": 1, "source": "memory"}
    recorder.restored(0, 20, 111.0, 0.5, bytes_from={"local": 700, "copy": 0, "peer": 0}, **origin)
    recorder.restored(1, 21, 111.0, 0.8, bytes_from={"local": 0, "copy": 300, "peer": 200}, **origin)
    for rank, (failed, time) in enumerate([(104.9, 114.0), (105.0, 114.1)]):
        secs = {"ending": 1.0, "first_step": time - failed - 1.0}
        recorder.write("reft", rank, 20 + rank, "recovered", time, failed_unix_secs=failed, secs=secs)
    for rank in (0, 1):
        recorder.commit(rank, 20 + rank, 3, 111.5, taken=1, stall=0.030)
        for step in range(4, STEPS + 1):
            recorder.step(rank, 20 + rank, step, 110.0 + step + rank / 10, None if rank else loss_at(step))
            recorder.commit(rank, 20 + rank, step, 110.4 + step, taken=step - 2, stall=0.030)
    recorder.write("reft", 1, 21, "skip", 115.0, step=5, cause="busy")
    return recorder


FAILURES = (Failure(step=4, node=1, kind="node", time=104.5),)


def report_of(recorder: Recorder, reference: History, failures=FAILURES, problem=None):
    return make_report(STEPS, History.of(recorder.directory), reference, failures, problem)


def test_a_recovery_is_measured_from_the_failure_to_the_first_step(disturbed, reference):
    (recovery,) = report_of(disturbed, reference)["recoveries"]
    assert (recovery["source"], recovery["version"]) == ("memory", 3)
    assert recovery["lost_steps"] == 1, "step 4 had been done, but only step 3 was committed"
    assert recovery["load_secs"] == 0.8, "the slowest rank"
    assert recovery["failure_to_step_secs"] == pytest.approx(114.1 - 104.5), "done on all ranks"
    parts = {"detection": 0.5, "ending": 1.0, "first_step": 8.1}
    assert recovery["failure_to_step"] == pytest.approx(parts), "of the node that took longest"
    assert recovery["bytes_from"] == {"local": 700, "copy": 300, "peer": 200, "parity": 0, "disk": 0}


def test_versions_are_summed_over_incarnations_and_equal_bits_are_good(disturbed, reference):
    report = report_of(disturbed, reference)
    versions = report["snapshots"]
    assert (versions["committed"], versions["skipped"]) == (3 + 4, 1)
    assert (versions["bytes_per_rank"], versions["sent_bytes"]) == (1001, 20)
    assert versions["stall_secs_median"] == pytest.approx(0.025), "median of the slowest rank of each life"
    assert (report["good"], report["max_abs_loss_difference"], report["tolerance"]) == (True, 0.0, 1)
    assert report["losses"] == report["reference_losses"] == [loss_at(s) for s in range(1, STEPS + 1)]
    assert {"step": 4, "node": 1, "kind": "node"}.items() <= report["failures"][0].items()
    assert not report_of(disturbed, reference, problem="a launcher failed")["good"]
    missing = report_of(disturbed, History())
    assert (missing["max_abs_loss_difference"], missing["good"]) == (None, False)


@pytest.mark.parametrize(
    ("rank_pid_step", "loss", "difference"),
    [
        ((0, 20, 6), math.nextafter(loss_at(6), 9.0), math.ulp(loss_at(6))),
        # Computed twice, and wrong before the failure only.
        ((0, 10, 4), 7.0, 7.0 - loss_at(4)),
        ((0, 20, 6), math.nan, math.inf),
    ],
)
def test_one_bit_is_a_difference(disturbed, reference, rank_pid_step, loss, difference):
    disturbed.step(*rank_pid_step, 104.2, loss)
    report = report_of(disturbed, reference)
    assert report["max_abs_loss_difference"] == pytest.approx(difference)
    assert not report["good"]


def test_signed_zero_is_a_difference(tmp_path):
    plus, minus = Recorder(tmp_path / "plus"), Recorder(tmp_path / "minus")
    plus.step(0, 1, 1, 1.0, 0.0)
    minus.step(0, 1, 1, 1.0, -0.0)
    difference = loss_difference(History.of(plus.directory), History.of(minus.directory), 1)
    assert difference is not None
    assert difference > 0


def test_a_failure_during_a_recovery_counts_from_the_first(disturbed, reference):
    """A third incarnation was killed before any step: the recovery is one, and took all the time."""
    disturbed.life(3, 2, 30, 116.3)
    disturbed.life(4, 2, 40, 120.0)
    disturbed.restored(0, 40, 121.0, 0.3, version=6, source="memory", bytes_from={"peer": 5})
    disturbed.step(0, 40, 7, 122.0, loss_at(7))
    failures = (*FAILURES, Failure(6, 0, "node", 116.2), Failure(6, 0, "node", 117.0))
    first, second = report_of(disturbed, reference, failures=failures)["recoveries"]
    assert first["failure_to_step_secs"] == pytest.approx(9.6)
    assert second["failure_to_step_secs"] == pytest.approx(122.0 - 116.2)
    assert second["lost_steps"] == 0


def test_a_torn_line_waits_for_its_end(tmp_path):
    """A process that is killed while it writes leaves half a line, which is never read."""
    path = tmp_path / "rank-0-7.jsonl"
    whole = json.dumps({"event": "step", "time": 1.0, "rank": 0, "step": 1}) + "\n"
    reader = EventReader(tmp_path)
    for end in range(len(whole)):
        path.write_text(whole[:end])
        assert reader.poll() == []
    path.write_text(whole + whole[:9])
    assert [event.fields["step"] for event in reader.poll()] == [1]
    assert reader.poll() == []
