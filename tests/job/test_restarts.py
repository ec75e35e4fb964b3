"""Without ``--max-restarts`` a job goes on as long as its lives bring new versions, and no longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reft.cli import main
from reft.node.report import PARTS, note, read_history

from .cluster import WatchedCluster, cluster, deepspeed_json

LIVES = 4  # More than the restarts that are allowed without a new version


def one_node(directory: Path, script: str, *args: str):
    options = ("--keep-memory",)
    return cluster(directory, script, *args, nodes=1, options=options, external_rendezvous=False)


def restarts_used(job: WatchedCluster) -> list[int]:
    return [event["restarts_used"] for event in job.launcher_events("round")]


@pytest.mark.nightly
def test_trainers_that_make_progress_may_be_killed_any_number_of_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_node(tmp_path, "relapse.py", deepspeed_json(tmp_path), str(LIVES)) as job:
        assert job.wait(300) == {0: 0}
        assert restarts_used(job) == [0] + [1] * LIVES
        began = [int(line) for line in (job.events_dir / "lives").read_text().split()]
        first, *later = read_history(job.job_dir(0))
        where = ("--memory-dir", str(job.current[0].memory_dir))
        assert main(["history", *where, "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert main(["history", *where]) == 0
        assert "SIGKILL" in capsys.readouterr().out
        main(["status", *where, "--json"])
        (status,) = json.loads(capsys.readouterr().out)["here"]
    assert (first.resumed_from, first.failures, first.nodes) == (None, [], ["node0"])
    assert [row.resumed_step for row in later] == began[1:]
    for row in later:
        assert row.failures == ["node0, rank 0, local rank 0: killed by SIGKILL"]
        assert (row.resumed_from or "").startswith("memory, ")
        assert list(row.secs) == list(PARTS), "one record of what the launcher and the trainer have seen"
        assert min(row.secs.values()) >= 0
        assert row.failed_unix_secs is not None
        assert (row.resumed_step or 0) >= row.newest_step > 0
    assert told["rounds"] == [vars(row) for row in (first, *later)]
    assert status["last_recovery"] == later[-1].to_json()
    assert status["restarts"] == f"{LIVES}; the last: node0, rank 0, local rank 0: killed by SIGKILL"
    assert began == sorted(set(began)), "every life resumed from a newer version"


@pytest.mark.process
@pytest.mark.integration
def test_the_same_error_twice_before_the_first_version_ends_the_job(tmp_path: Path) -> None:
    with one_node(tmp_path, "light.py", "raise") as job:
        assert job.wait(300) == {0: 1}
        assert restarts_used(job) == [0, 1]
        last = read_history(job.job_dir(0))[-1]
        assert last.failures == ["node0, rank 0, local rank 0: ValueError: a bad sample"]
        assert last.ended == "local rank 0: ValueError: a bad sample"
        assert "the same error twice, and no version was committed: the job ends" in job.log(0)


def test_p6_a_history_that_is_torn_or_cannot_be_written_costs_a_line_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_history(tmp_path) == []
    facts = {"nodes": ["a"], "failures": [], "lost": [], "joined": [], "newest_step": -1}
    note(tmp_path, "stepped")  # of a round whose start was not noted
    note(tmp_path, "started", round=1, gathering_secs=None, **facts)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "resu\n[]\n')
    note(tmp_path, "started", round=2, gathering_secs=1.5, **{**facts, "lost": ["b"], "newest_step": 7})
    note(tmp_path, "resumed", source="disk, /d", step=5, secs=0.0)
    first, second = read_history(tmp_path)
    assert (first.round, first.secs) == (1, {})
    assert (second.lost, second.resumed_step, second.secs["gathering"]) == (["b"], 5, 1.5)
    note(tmp_path / "gone", "stepped")
    assert "the restart history in" in caplog.text
