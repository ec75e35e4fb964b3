"""A job that follows its own advice: a node that is slowed is replaced by a spare, and no number changes."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from reft.cli import main
from reft.elastic import following
from reft.elastic.agreement import Agreement
from reft.elastic.following import Follower
from reft.elastic.shared_state import Scaling, leaving_of, set_scaling
from reft.policy.advice import Action, Advice
from reft.policy.following import COOL_DOWN_SECS, SUSTAINED_STEPS
from reft.store.daemon import CONFIG_FILE
from reft.store.history import read_history
from reft.store.jobdir import write_json
from reft.store.progress import read_pages
from reft.store.scale_orders import ORDER_FILE, read_order, write_order
from reft.store.signals import Board, NodeReport, Row, read_board

from .cluster import WatchedCluster, cluster
from .slowed import slowed

CONFIG: dict[str, Any] = {
    "train_batch_size": 3072,
    "train_micro_batch_size_per_gpu": 512,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
    "reft": {"enabled": True, "interval_steps": 5},
}
OPTIONS = (
    *("--nnodes", "2:3", "--max-restarts", "0"),
    *("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=6,last_call_timeout=20,join_timeout=120"),
)
ENV = {"TEST_WIDTH": "256", "TEST_HIDDEN": "2048", "TEST_PAUSE_SECS": "0.02"}
SLOWED, FACTOR = 1, 3.0

Losses = dict[tuple[int, int], set[str]]


def job_of(tmp_path: Path, *, follow: bool, nodes: int) -> Any:
    config = tmp_path / "ds.json"
    tmp_path.mkdir(exist_ok=True)
    block = CONFIG["reft"] | {"elastic": {"follow_advice": follow}}
    config.write_text(json.dumps(CONFIG | {"reft": block}))
    return cluster(tmp_path, "resized.py", str(config), nodes=nodes, options=OPTIONS, env=ENV)


def board(job: WatchedCluster) -> Board:
    found = (read_board(job.job_dir(i)) for i in job.current)
    return max((b for b in found if b is not None), key=lambda b: b.number, default=Board(job_id=job.job_id))


def last_step(job: WatchedCluster) -> int:
    return int(max((e["step"] for e in job.events("trained")), default=0))


def losses(job: WatchedCluster) -> Losses:
    found: Losses = {}
    for event in job.events("trained"):
        found.setdefault((event["rank"], event["step"]), set()).add(" ".join(event["losses"]))
    return found


def undisturbed(directory: Path, last: int) -> Losses:
    with job_of(directory, follow=False, nodes=3) as job:
        job.wait_until(lambda: last_step(job) >= last, 300, "the undisturbed job")
        job.finish()
        job.wait(120)
        return losses(job)


def with_spare(job: WatchedCluster) -> tuple[str, int]:
    """Three nodes train and one waits; a node that is not the first one, and its trainer's process."""

    def ready() -> bool:
        rows = [r.report for r in board(job).rows]
        return sum(r.spare for r in rows) == 1 and sum(r.trainers for r in rows) == 3 and last_step(job) >= 10

    job.wait_until(ready, 300, "three nodes and a spare")
    for index in job.current:
        for page in read_pages(job.job_dir(index)):
            if page.rank == SLOWED:
                return job.current[index].node_id, page.pid
    raise AssertionError("no such rank")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p1_a_node_that_is_slow_is_replaced_by_a_spare_and_the_losses_stay_equal_in_every_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job_of(tmp_path / "job", follow=True, nodes=4) as job:
        node, pid = with_spare(job)
        with slowed(pid, FACTOR):
            job.wait_until(
                lambda: any(n.process.poll() == 0 for n in job.current.values()), 400, "a node that leaves"
            )
        (left,) = (n for n in job.current.values() if n.process.poll() is not None)
        assert left.node_id == node
        at = last_step(job)
        job.wait_until(lambda: last_step(job) >= at + 10, 200, "further steps")
        others = [i for i, n in job.current.items() if n.node_id != node]
        rounds = [read_history(job.job_dir(i)) for i in others]
        told = max(rounds, key=len)[-1]
        assert told.left == [node]
        assert told.lost == []
        assert told.followed.startswith(f"replace {node}: ")
        assert len(told.joined) == 1
        capsys.readouterr()
        main(["status", "--memory-dir", *(str(job.current[i].memory_dir) for i in others[:1])])
        assert "advice followed" in capsys.readouterr().out
        job.finish()
        job.wait(120)
        found = losses(job)
        assert "advice is followed: replace" in "".join(p.read_text() for p in tmp_path.glob("job/**/*.log"))
    assert {len(each) for each in found.values()} == {1}
    assert {e["replicas"] for e in job.events("trained")} == {3}
    expected = undisturbed(tmp_path / "undisturbed", max(step for _, step in found))
    assert found.items() <= expected.items()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_without_the_wish_nothing_is_followed(tmp_path: Path) -> None:
    with job_of(tmp_path / "job", follow=False, nodes=4) as job:
        _, pid = with_spare(job)
        with slowed(pid, FACTOR):
            job.wait_until(lambda: bool(board(job).slow), 300, "somebody to be named")
            at = last_step(job)
            job.wait_until(lambda: last_step(job) >= at + 40, 300, "40 further steps")
            assert board(job).slow
        assert all(n.running for n in job.current.values())
        assert len(job.events("begins")) == 3
        job.finish()
        job.wait(120)


class Watched:
    """The launcher of the first of three nodes, which are advised to replace one."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.step, self.round = path, 0, 1
        self.state = _RendezvousState()
        self._board = SimpleNamespace(board=Board(job_id="job"), tolerance_left=lambda _: 1)
        self._follower = Follower(SimpleNamespace(state=self.state), path, self._board)  # type: ignore[arg-type]
        write_json(path / CONFIG_FILE, {"elastic": {"follow_advice": True}})
        monkeypatch.setattr(following, "LOOK_SECS", 0.0)
        monkeypatch.setattr(following, "situation", lambda *_: SimpleNamespace(spares=("d",)))
        monkeypatch.setattr(following, "advise", lambda _: (Advice(Action.REPLACE, ("b",), 3, "it is slow"),))

    def ordered(self, steps: int = SUSTAINED_STEPS) -> bool:
        """Whether it orders something, now and after so many steps."""
        before = read_order(self.path)
        for step in (self.step, self.step + steps):
            self.step = step
            rows = [Row(report=_report(node, self.round, self.step)) for node in "abc"]
            self._board.board = Board(job_id="job", rows=tuple(rows))
            nodes = ("a", "b", "c")
            agreement = Agreement(self.round, nodes, nodes, ((0,), (1,), (2,)), 0, known_step=1)
            config: Any = SimpleNamespace(min_nodes=2, max_nodes=4)
            self._follower.look(agreement, 0, config)
        return read_order(self.path) != before


def _report(node: str, number: int, step: int) -> NodeReport:
    return NodeReport(node=node, domain=node, number=1, round=number, step=step)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def millis(secs_ago: float) -> int:
    return int((time.time() - secs_ago) * 1000)


def test_advice_is_ordered_once(watched: Watched) -> None:
    assert watched.ordered()
    order = read_order(watched.path)
    assert order is not None
    assert (order.nodes, order.without) == (3, ("b",))
    assert not watched.ordered()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without the name that a process puts before its lines, which a test before this one may have set."""
    return [re.sub(r"^reft(:| \[.*?\]) ", "", record.getMessage()) for record in caplog.records]


def test_advice_that_is_refused_again_and_again_is_said_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Ordered, and refused, every ten minutes for as long as it stands."""
    caplog.set_level(logging.WARNING, "reft")
    for _ in range(3):
        assert watched.ordered()
        order = read_order(watched.path)
        assert order is not None
        write_json(watched.path / ORDER_FILE, asdict(order) | {"number": millis(COOL_DOWN_SECS + 60)})
    assert said(caplog) == ["advice is followed: replace b: it is slow"]
    watched.round = 2
    assert watched.ordered()
    assert len(caplog.records) == 2


def test_why_advice_is_not_followed_is_said_once_each(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "reft")
    monkeypatch.setattr(following, "situation", lambda *_: SimpleNamespace(spares=()))
    for _ in range(3):
        assert not watched.ordered()
        leaving_of(watched.state).add(_NodeDesc("c", 1, 0))
        assert not watched.ordered()
        leaving_of(watched.state).clear()
    assert [message.partition(";")[0] for message in said(caplog)] == [
        "advice is not followed: no spare waits",
        "advice is not followed: the job recovers, or changes its nodes",
    ]


def test_an_order_of_a_person_on_this_node_is_not_overtaken(watched: Watched) -> None:
    order = write_order(watched.path, 2, ())
    assert not watched.ordered()
    assert read_order(watched.path) == order


@pytest.mark.parametrize(("secs_ago", "again"), [(1.0, False), (COOL_DOWN_SECS + 60, True)])
def test_what_another_node_ordered_counts_too(watched: Watched, secs_ago: float, again: bool) -> None:
    """The first node may itself have been replaced: its order is not in the newcomer's history."""
    set_scaling(watched.state, Scaling(millis(secs_ago), 3, 3, ("a",), 1, replaces=True, why="replace a"))
    assert watched.ordered() is again


def test_nothing_is_ordered_while_nodes_are_told_to_leave(watched: Watched) -> None:
    leaving_of(watched.state).add(_NodeDesc("c", 1, 0))
    assert not watched.ordered()


def test_what_was_said_before_a_restart_does_not_count(watched: Watched) -> None:
    assert not watched.ordered(SUSTAINED_STEPS - 1)
    watched.round = 2
    assert not watched.ordered(SUSTAINED_STEPS - 1)
    assert watched.ordered(1)
