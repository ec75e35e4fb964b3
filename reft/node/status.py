"""The whole job as one node sees it: what ``reft status --json`` prints and the daemon's web page shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from reft.memory.jobdir import DAEMON_FILE, JobDir, is_running, read_json
from reft.node.advice import advise, situation
from reft.node.history import read_history, restarts_among, why
from reft.node.observe import Doing, NodeObserver
from reft.node.progress import read_pages
from reft.node.protection import read_record
from reft.node.report import ENDED_WELL, Board, Row, is_well, newest_board, read_board, summary

ENDED_AS_WANTED = "it ended well"
_OLD_SECS = 10.0
_MOST_ROUNDS = 64


class StatusReader:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._observers = [
            NodeObserver(path, directory.node, directory.node, has_daemon=(path / DAEMON_FILE).exists())
            for path in paths
            for directory in [JobDir.open(path)]
        ]

    def read(self) -> dict[str, Any]:
        now = time.time()
        running = any(map(_runs, self.paths))
        board, said = self._board(now, running)
        told = summary(board, now)
        here = [_node(path) for path in self.paths]
        found = advise(situation(self.paths, board, None)) if running else ()
        return told | {
            "warnings": [*said, *told["warnings"]],
            "advice": [advice.to_json() for advice in found],
            "state": "runs" if running else "ended",
            "ended": None if running else _end(self.paths),
            "well": running and is_well(told) and all(map(_node_is_well, here)),
            "here": here,
        }

    def _board(self, now: float, running: bool) -> tuple[Board, list[str]]:
        """The newest board on any of the nodes; of a job without one what these nodes tell themselves."""
        if (board := newest_board(self.paths)) is not None:
            said = []
            if running and (old := now - board.written_unix_secs) > _OLD_SECS:
                said.append(f"the launcher of this node has reported nothing for {old:.0f} s: is it stopped?")
            if (lost := board.store_lost_unix_secs) is not None:
                said.append(
                    f"the launcher has not reached the rendezvous store since {clock(lost)}: the other "
                    f"nodes are shown as they were then"
                )
            return board, said
        rows = tuple(Row(report=observer.look(Doing())) for observer in self._observers)
        alone = "no reft launcher reports on other nodes: only nodes whose memory was read are shown"
        board = Board(job_id=JobDir.open(self.paths[0]).job_id, unix_secs=now, rows=rows)
        return board, [alone] if running else []


def _node(path: Path) -> dict[str, Any]:
    """What the node's own files tell, next to what the whole job knows: storage, traffic, protection."""
    directory = JobDir.open(path)
    rounds = read_history(path)
    restarts = restarts_among(rounds)
    record = read_record(path)
    return {
        "job_id": directory.job_id,
        "node": directory.node,
        "memory": str(path),
        "daemon_runs": _daemon_runs(path),
        "status": directory.read_status(),
        "restarts": f"{len(restarts)}; the last: {why(restarts[-1])}" if restarts else "none",
        "last_recovery": asdict(restarts[-1]) if restarts else None,
        "history": [{**asdict(row), "why": why(row)} for row in rounds[-_MOST_ROUNDS:]],
        "protection": None if record is None else asdict(record),
    }


def _node_is_well(node: dict[str, Any]) -> bool:
    status = node["status"] or {}
    persist = status.get("persist") or {}
    stale = status.get("stale_since_step") is not None or persist.get("stale_since_step") is not None
    return bool(node["daemon_runs"]) and status.get("last_committed") is not None and not stale


def _daemon_runs(path: Path) -> bool:
    daemon = read_json(path / DAEMON_FILE)
    return daemon is not None and is_running(daemon)


def _launcher_ended(path: Path) -> str:
    """Why the node's launcher has ended, by its own last word; "" while it runs, or where it was killed."""
    board = read_board(path)
    row = None if board is None else board.row(JobDir.open(path).node)
    return row.report.why if row is not None and row.report.left else ""


def _runs(path: Path) -> bool:
    """Whether any process of the job runs on the node, without touching a lock that it may want."""
    if _daemon_runs(path) or any(page.state not in ("", "Z") for page in read_pages(path)):
        return True
    board = read_board(path)
    told = board is not None and time.time() - board.written_unix_secs < _OLD_SECS
    return told and not _launcher_ended(path)


def _end(paths: Sequence[Path]) -> str:
    """Why the job does not run any more, as far as these nodes know."""
    for path in paths:
        rounds = read_history(path)
        if rounds and rounds[-1].ended is not None:
            return rounds[-1].ended
    said = list(map(_launcher_ended, paths))
    if ENDED_WELL in said:
        return ENDED_AS_WANTED
    return "its launcher was stopped" if any(said) else "its processes are gone"


def clock(unix_secs: float) -> str:
    return f"{datetime.fromtimestamp(unix_secs):%H:%M:%S}"
