"""The arithmetic of the report, from event files as the processes of a job write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.job_events import EventReader
from reft.errors import ConfigError
from reft.tools.demo.command import DemoJob, NodeFailure, deepspeed_config, loss_difference, parse

STEPS = 6


class Recorder:
    """One run of two ranks; its processes are named by their numbers."""

    def __init__(self, directory: Path, name: str) -> None:
        options = parse(["--steps", str(STEPS), "--pp", "1", "--kill", "none"])
        self.said: list[str] = []
        self.job = DemoJob(
            options, name, directory, directory, lambda text, style: self.said.append(text)
        )
        self._events = directory / "events"
        self._events.mkdir()

    def write(
        self, prefix: str, rank: int, pid: int, event: str, time: float, **fields: Any
    ) -> None:
        line = json.dumps({"event": event, "time": time, "rank": rank, **fields})
        with (self._events / f"{prefix}-{rank}-{pid}.jsonl").open("a") as file:
            file.write(line + "\n")

    def step(self, rank: int, pid: int, step: int, time: float, loss: float) -> None:
        self.write("rank", rank, pid, "step", time, step=step, loss=loss, loss_hex=loss.hex())

    def read(self) -> DemoJob:
        self.job.take_in()
        return self.job


def loss_at(step: int) -> float:
    return 5.0 / step


@pytest.fixture
def reference(tmp_path: Path) -> DemoJob:
    recorder = Recorder(tmp_path / "reference", "reference")
    for step in range(1, STEPS + 1):
        for rank in (0, 1):
            recorder.step(rank, 100 + rank, step, 1000.0 + step, loss_at(step))
    return recorder.read()


@pytest.fixture
def disturbed(tmp_path: Path) -> Recorder:
    """Four steps, three commits; killed in step 5; resumed from step 3, so that step 4 is computed twice;
    then to the end."""
    recorder = Recorder(tmp_path / "training", "training")
    recorder.job.failures.append(NodeFailure(step=4, node=1, time=104.5))
    for start, first_pid, steps in ((1, 10, range(1, 5)), (2, 20, range(4, STEPS + 1))):
        for rank in (0, 1):
            began = 100.0 * start
            attached = {"incarnation": start, "tolerance": 1}
            recorder.write("reft", rank, first_pid + rank, "attached", began, **attached)
            for step in steps:
                recorder.step(rank, first_pid + rank, step, began + step, loss_at(step))
                if step != 4 or start == 2:
                    recorder.write(
                        "reft", rank, first_pid + rank, "commit", began + step, step=step
                    )
    for rank, (failed, time) in enumerate([(104.9, 204.2), (105.0, 204.1), (None, 204.3)]):
        told = {
            "round": 2,
            "failures": ["node b"],
            "lost": [],
            "newest_step": 4,
            "failed_unix_secs": failed,
        }
        parts = {"ending": 1.0, "first_step": 98.0}
        resumed = {"resumed_from": "memory, step 3", "resumed_step": 3, "secs": parts}
        recorder.write("reft", rank, 30 + rank, "recovered", time, **told, **resumed)
    started = {
        "round": 1,
        "failures": [],
        "lost": [],
        "newest_step": -1,
        "failed_unix_secs": None,
        "secs": {},
    }
    recorder.write(
        "reft", 0, 30, "recovered", 101.0, resumed_from=None, resumed_step=None, **started
    )
    recorder.write("reft", 0, 21, "skip", 205.0, step=5, cause="busy")
    return recorder


def test_a_recovery_is_measured_from_the_failure_to_the_first_step(
    disturbed: Recorder, reference: DemoJob
):
    (recovery,) = disturbed.read().report(reference.losses, None)["recoveries"]
    assert (recovery["source"], recovery["version"]) == ("memory", 3)
    assert recovery["lost_steps"] == 1, "step 4 was committed, and not found"
    assert recovery["failure_to_step_secs"] == pytest.approx(204.2 - 104.5)
    parts = {"detection": 0.4, "ending": 1.0, "first_step": 98.0}
    assert recovery["failure_to_step"] == pytest.approx(parts), (
        "of the node that took longest, and saw it fail"
    )


def test_versions_are_summed_over_incarnations_and_equal_bits_are_good(
    disturbed: Recorder, reference: DemoJob
):
    report = disturbed.read().report(reference.losses, None)
    assert report["snapshots"] == {"committed": 3 + 3, "skipped": 1}
    assert (report["good"], report["max_abs_loss_difference"], report["tolerance"]) == (
        True,
        0.0,
        1,
    )
    assert (
        report["losses"] == report["reference_losses"] == [loss_at(s) for s in range(1, STEPS + 1)]
    )
    assert report["failures"] == [{"step": 4, "node": 1, "time": 104.5}]
    assert not disturbed.job.report(reference.losses, "a launcher failed")["good"]
    missing = disturbed.job.report({}, None)
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
def test_one_bit_is_a_difference(
    disturbed: Recorder, reference: DemoJob, rank_pid_step, loss, difference
):
    disturbed.step(*rank_pid_step, 104.2, loss)
    report = disturbed.read().report(reference.losses, None)
    assert report["max_abs_loss_difference"] == pytest.approx(difference)
    assert not report["good"]
    assert (loss_difference({1: [(0.0).hex()]}, {1: [(-0.0).hex()]}, 1) or 0.0) > 0, "signed zero"


def test_a_torn_line_waits_for_its_end(tmp_path: Path):
    """A process that is killed while it writes leaves half a line, which is never read."""
    recorder = Recorder(tmp_path / "run", "training")
    path = tmp_path / "run" / "events" / "rank-0-7.jsonl"
    event = {"event": "step", "time": 1.0, "rank": 0, "step": 1, "loss": 1.0, "loss_hex": "0x1p0"}
    whole = json.dumps(event) + "\n"
    reader = EventReader(path.parent)  # that of tests and benchmarks
    for end in range(len(whole)):
        path.write_text(whole[:end])
        assert (recorder.read().losses, reader.poll()) == ({}, [])
    path.write_text(whole + whole[:9])
    assert recorder.read().losses == {1: ["0x1p0"]}
    assert [event.fields["step"] for event in reader.poll()] == [1]
    assert recorder.read().losses == {1: ["0x1p0"]}


def test_default_is_pp2_dp2_on_four_nodes_and_loses_one_of_them():
    options = parse([])
    assert (options.pp, options.dp, options.kills) == (2, 2, (NodeFailure(9, 1),))
    assert parse(["--steps", "1"]).kills == parse(["--kill", "none"]).kills == ()
    assert parse(["--kill", "14:0,9:1,9:3"]).kills == (
        NodeFailure(9, 1),
        NodeFailure(9, 3),
        NodeFailure(14, 0),
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--kill x:1", ("'x:1'", "STEP:NODE")),
        ("--kill 24:1", ("from 1 to 23",)),
        ("--kill 3:4", ("nodes 0 to 3",)),
        ("--kill 3:1,3:1", ("once in a step", "repetition")),
        ("--steps 0", ("--steps is 0",)),
        ("--protection aec --dp 1 --pp 1", ("protection aec", "at least 2", "found 1")),
        ("--protection arc+aec", ("protection arc+aec", "at least 3", "found 2")),
        ("--pp 8 --dp 1", ("layers", "--pp 8")),
        ("--memory-dir /no/such/dir", ("/no/such/dir", "another directory")),
    ],
)
def test_the_impossible_is_refused_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError) as refusal:
        parse(arguments.split())
    for words in said:
        assert words in str(refusal.value)


def test_both_runs_train_the_same_and_only_one_has_the_block():
    options = parse(["--protection", "arc:2"])
    quiet, protected = (deepspeed_config(options, protected=which) for which in (False, True))
    assert protected.pop("reft")["protection"] == "arc:2"
    assert quiet == protected


def test_a_restored_state_is_told_once_with_what_came_from_peers(tmp_path: Path) -> None:
    """The first rank has it in its own memory; that of the lost node is what is worth seeing."""
    recorder = Recorder(tmp_path / "run", "training")
    facts = {"source": "memory", "version": 3}
    came_from = ({"local": 1_510_000, "peer": 0}, {"peer": 500_000, "copy": 1_010_000})
    for rank, (bytes_from, secs) in enumerate(zip(came_from, (0.2, 0.31), strict=True)):
        assert recorder.said == []
        recorder.write(
            "reft", rank, rank, "restored", 200.0 + rank, bytes_from=bytes_from, secs=secs, **facts
        )
        recorder.read()
    (said,) = recorder.said
    assert "step 3 restored from memory in 0.31 s" in said
    assert "1.51 MB from the nodes' own memory, 1.51 MB from peers" in said


def test_the_restored_state_is_no_further_commit(disturbed: Recorder, reference: DemoJob) -> None:
    disturbed.write("reft", 0, 20, "commit", 203.5, step=3)
    report = disturbed.read().report(reference.losses, None)
    assert report["snapshots"]["committed"] == STEPS


def test_what_takes_its_time_is_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", "training")
    job = recorder.job
    assert job.doing() == "launchers start"
    for name in ("node0", "node1"):
        recorder.write(
            "reft", -1, int(name[-1]), "launcher", 99.0, node=name, state="waiting for nodes"
        )
    assert "import torch and DeepSpeed" in recorder.read().doing()
    for name in ("node0", "node1"):
        recorder.write("reft", -1, int(name[-1]), "launcher", 100.0, node=name, state="running")
    assert recorder.read().doing() == "trainers build the model, and meet"
    recorder.step(0, 10, 1, 101.0, 5.0)
    assert recorder.read().doing() == "step 2 is computed"
    recorder.step(0, 10, STEPS, 102.0, 5.0)
    assert recorder.read().doing() == "trainers end"
    recorder.write("reft", -1, 0, "launcher", 103.0, node="node0", state="waiting for nodes")
    assert "import torch and DeepSpeed" in recorder.read().doing()
