"""What DeepSpeed's monitor is told of a job's versions, as its files have it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.job.cluster import WatchedCluster, cluster, deepspeed_json
from tests.job.test_scaling import CONFIG

STEPS_PER_PRINT = 2
WAIT_SECS = 300.0
NAMES = {
    f"Reft/{name}"
    for name in (
        "snapshot_seconds",
        "committed_step",
        "commit_lag_steps",
        "tolerance_left",
        "recoveries",
    )
}
Written = dict[str, list[tuple[int, float]]]  # Global samples and value of each event, by its name


@contextmanager
def job(tmp_path: Path, **monitors: dict[str, Any]) -> Iterator[WatchedCluster]:
    """Two nodes that train, until twelve steps more are made than when the body has ended."""
    tmp_path.mkdir(exist_ok=True)
    config = deepspeed_json(tmp_path, **CONFIG, steps_per_print=STEPS_PER_PRINT, **monitors)
    with cluster(tmp_path / "job", "resized.py", config, nodes=2) as made:
        yield made
        made.wait_for("trained", len(made.events("trained", rank=0)) + 12, WAIT_SECS, rank=0)
        made.finish()
        assert made.wait(WAIT_SECS) == {0: 0, 1: 0}
        made.wait_until(made.none_left, WAIT_SECS, "the end of all processes")


def csv_monitor(tmp_path: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}


def by_csv(tmp_path: Path) -> Written:
    found = {}
    for name in NAMES:
        path = tmp_path / "csv" / "run" / f"{name.replace('/', '_')}.csv"
        header, *rows = csv.reader(path.read_text().splitlines())
        assert header == ["step", name.removeprefix("Reft/")]
        found[name] = [(int(samples), float(value)) for samples, value in rows]
    assert all(len(rows) >= 4 for rows in found.values())
    for rows in found.values():
        # Every other step, once for all its micro-batches, by global samples, of which a step has 12.
        wanted = range(rows[0][0], rows[-1][0] + 1, 12 * STEPS_PER_PRINT)
        assert [samples for samples, _ in rows] == list(wanted)
        assert wanted.start in (24, 48, 72), "a version or two may come later than its step"
    assert found["Reft/recoveries"][0][0] == 12 * STEPS_PER_PRINT
    assert found["Reft/tolerance_left"][-1][1] == 1.0
    assert {value for _, value in found["Reft/recoveries"]} == {0.0}
    return found


@pytest.mark.nightly
def test_monitors_are_told_of_every_step_that_they_print(tmp_path: Path) -> None:
    has_board = find_spec("tensorboard") is not None
    board = csv_monitor(tmp_path) | {"enabled": has_board, "output_path": str(tmp_path / "board")}
    with job(tmp_path, csv_monitor=csv_monitor(tmp_path), tensorboard=board):
        pass
    assert by_csv(tmp_path).keys() == NAMES
    for events in (tmp_path / "board" / "run").iterdir() if has_board else ():
        assert [name for name in NAMES if name.encode() not in events.read_bytes()] == []


@pytest.mark.integration
def test_p6_training_goes_on_where_a_writer_fails_and_it_is_said_once(tmp_path: Path) -> None:
    # DeepSpeed's writer of CSV files finds a directory where one of reft's is to be.
    (tmp_path / "csv" / "run" / "Reft_tolerance_left.csv").mkdir(parents=True)
    with job(tmp_path, csv_monitor=csv_monitor(tmp_path)) as made:
        pass
    assert (tmp_path / "csv" / "run" / "Train_Samples_lr.csv").exists()
    said = "".join(made.log(index) for index in (0, 1))
    assert said.count("DeepSpeed's monitor does not accept reft's events (IsADirectoryError") == 1
    assert {event["step"] for event in made.events("begins")} == {0}, "no trainer was started anew"
