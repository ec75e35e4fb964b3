"""What ``reft status`` says of a node, from what its daemon wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reft.cli import EXIT_NOT_WELL, EXIT_WELL, main, make_app
from reft.store.history import ENDED, HISTORY_FILE, RESUMED, STARTED, STEPPED, note
from reft.store.jobdir import JobDir
from reft.store.label import Label
from reft.store.status import NodeStatus


@pytest.mark.parametrize("there", [False, True])
def test_without_memory_or_daemon_it_is_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    if there:
        path = JobDir.open_or_create(memory, "job", node="a", secret=b"s" * 32).path
        for file in ("status.json", "daemon.json", "protection.json"):
            (path / file).write_text("{ torn")
    assert main(["status", "--memory-dir", str(memory), "--json"]) == EXIT_NOT_WELL
    out, err = capsys.readouterr()
    if there:
        (node,) = json.loads(out)
        assert (node["daemon_runs"], node["status"], node["protection"]) == (False, None, None)
    else:
        assert json.loads(out) == []
        assert "no job has memory in" in err


def test_a_history_without_memory_is_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--memory-dir", str(tmp_path), "--json"]) == EXIT_NOT_WELL
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "no job has memory in" in err


def test_traffic_and_recomputing_of_all_ranks_of_the_node_are_summed(tmp_path: Path) -> None:
    job_dir = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32)
    status = NodeStatus(job_dir.path, {})
    status.committed(Label(1, 3))
    for rank in (0, 1):
        traffic = {"to_host": {"shard": 2**20, "parity": 512}, "sent": {"host_state": 2048 * rank}}
        status.trainer(rank, stats={"traffic": traffic})
    status.trainer(2, pid=7)  # it has not committed anything yet
    status.write_if_changed()
    ask = ["status", "--memory-dir", str(tmp_path / "memory")]
    shown = " ".join(CliRunner().invoke(make_app(), ask, env={"COLUMNS": "200"}).output.split())
    assert "a version copies │ 2.0 MiB (shard 2.0 MiB, parity 1.0 KiB)" in shown
    assert "and sends to other nodes │ 2.0 KiB (host state 2.0 KiB)" in shown
    told = json.loads(CliRunner().invoke(make_app(), [*ask, "--json"]).output)
    assert told[0]["status"]["trainers"]["1"]["stats"]["traffic"]["sent"] == {"host_state": 2048}
    assert "recomputed" not in shown
    status.trainer(0, stats={"traffic": {"to_host": {}, "sent": {}}, "recomputed": 5})
    resynced = {"recomputed": 4, "resynced": {"it is not what its owner has": 1}}
    status.trainer(1, stats={"traffic": {"to_host": {}, "sent": {}}, **resynced})
    status.write_if_changed()
    shown = " ".join(CliRunner().invoke(make_app(), ask, env={"COLUMNS": "200"}).output.split())
    said = "9 partitions; copied from their owners: 1x it is not what its owner has"
    assert f"recomputed │ {said}" in shown


def test_commits_that_a_restart_did_not_find_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    job_dir = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32)
    facts = {"nodes": ["a"], "failures": [], "joined": [], "gathering_secs": None}
    note(job_dir.path, STARTED, round=1, lost=[], newest_step=-1, **facts)
    for step in (9, 6):
        note(job_dir.path, STARTED, round=2, lost=["b"], newest_step=9, **facts)
        note(job_dir.path, RESUMED, source="disk, /d", step=step, secs=0.5)
    assert main(["history", "--memory-dir", str(tmp_path / "memory")]) == EXIT_WELL
    shown = capsys.readouterr().out
    assert "step 6 (disk, /d); 3 committed steps were lost" in shown
    assert shown.count("were lost") == 1


@pytest.mark.parametrize("event", [STARTED, RESUMED, STEPPED, ENDED])
@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"source": "memory", "step": 3},
        {"source": "memory", "step": "three", "secs": 0.5},
        {
            "reason": ["a"],
            "round": 1,
            "nodes": "a",
            "failures": [],
            "lost": [],
            "joined": [],
            "newest_step": 0,
        },
        {"unix_secs": float("inf"), "reason": "r", "round": 1, "source": "memory", "step": 1, "secs": 1.0},
        {"unix_secs": 1e300, "reason": "r", "round": 1, "source": "memory", "step": 1, "secs": 1.0},
    ],
)
def test_an_event_that_lacks_fields_is_left_out_of_the_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event: str, wrong: dict[str, object]
) -> None:
    """Another release, or a full disk, may have written what this one does not understand."""
    job_dir = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32)
    facts = {"nodes": ["a"], "failures": [], "lost": [], "joined": [], "newest_step": -1}
    note(job_dir.path, STARTED, round=1, gathering_secs=None, **facts)
    said = []
    for lines in (
        "",
        json.dumps({"event": event, "unix_secs": 1.0, **wrong}),
        '[1]\n"x"\n{"event": [1], "unix_secs": 2.0}',
    ):
        with (job_dir.path / HISTORY_FILE).open("a") as file:
            file.write(f"{lines}\n")
        assert main(["history", "--memory-dir", str(tmp_path / "memory")]) == EXIT_WELL
        said.append(capsys.readouterr().out)
        assert main(["status", "--memory-dir", str(tmp_path / "memory")]) == EXIT_NOT_WELL
        capsys.readouterr()
    if event != STEPPED:  # it has nothing but its time
        assert said == said[:1] * 3
