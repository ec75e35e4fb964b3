"""``reft advise``: from what a job's nodes have noted to a plan that an operator reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from reft.cli import EXIT_WELL
from reft.memory.jobdir import JobDir, write_json
from reft.node.advice import Speed, situation
from reft.node.report import BOARD_FILE, RESUMED, STARTED, Board, NodeReport, note, read_board
from tests.commands import Answer, command


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three nodes and a spare; it began with two, and one is lost again and again."""
    path = JobDir.open_or_create(tmp_path / "memory", "job", node="a", secret=b"s" * 32).path
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for nodes, newest, lost in (
        ("ab", -1, ""),
        ("abc", 150, ""),
        ("abc", 300, "c"),
        ("abc", 320, "c"),
        ("abc", 330, "c"),
    ):
        facts: dict[str, Any] = {"round": 1, "nodes": list(nodes), "lost": list(lost), "newest_step": newest}
        note(path, STARTED, failures=[], joined=[], **facts)
        now[0] += 20.0
        note(path, RESUMED, source="memory", step=max(newest, 0), secs=20.0, times={})
        now[0] += 100.0
    monkeypatch.undo()
    nodes = [NodeReport(node=n, domain=n, steps_per_sec=1.9) for n in "abc"]
    nodes.append(NodeReport(node="s", domain="s", spare=True))
    board = Board(job_id="job", nodes=tuple(nodes), written_unix_secs=time.time())
    write_json(path / BOARD_FILE, board.model_dump(mode="json"))
    return path


def told(job: Path, *options: str) -> Answer:
    answer = command("advise", "--memory-dir", job.parent, *options)
    assert answer.code == EXIT_WELL
    return answer


def test_what_the_nodes_have_noted_is_understood(job: Path) -> None:
    seen = situation([job], read_board(job), 4)
    assert (seen.nodes, seen.spares) == (("a", "b", "c"), ("s",))
    assert seen.losses == {"c": 3}
    # 150 steps with two nodes in 120 s, of which training takes what the start left; then as told now.
    assert [speed.workers for speed in seen.speeds] == [2, 3, 3]
    assert 150 / 120 <= seen.speeds[0].per_sec <= 150 / 99
    assert seen.speeds[-1] == Speed(3, 1.9)
    assert seen.memory[0].node == "a"


def test_it_is_told_to_people_as_json_and_as_yaml(job: Path) -> None:
    assert "replace c: it was lost 3 times, of 3 in all" in told(job).out
    assert "add to 4 nodes" in told(job, "--max-nodes", "4").out
    found = told(job, "--json", "--max-nodes", "4").json
    assert [a["action"] for a in found["advice"] if a["action"] != "memory"] == ["replace", "add"]
    spec = found["scale_plan"]["spec"]
    assert spec["removePods"] == [{"name": "c", "type": "worker"}]
    assert spec["replicaResourceSpecs"]["worker"]["replicas"] == 4
    assert told(job, "--yaml", "--max-nodes", "4").json == found["scale_plan"]


def test_stragglers_that_the_job_names_are_replaced(job: Path) -> None:
    board = read_board(job)
    assert board is not None
    slow = {
        **{"kind": "node", "name": "node b", "ranks": (1,), "nodes": ("b",), "since_step": 3},
        **{"factor": 1.5, "cost_secs": 0.1, "cost_share": 0.3, "why": "it computes"},
    }
    write_json(job / BOARD_FILE, board.model_dump(mode="json") | {"slow": [slow]})
    said = "replace b: node b takes 1.50 times as long as its peers (it computes); spare s is waiting"
    assert said in told(job).out
