"""Reads a job's status from its memory directories, for ``reft status`` and the status page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from reft.memory.jobdir import CONFIG_FILE, DAEMON_FILE, JobDir, is_running, read_json
from reft.memory.protection_record import read_record
from reft.node.advice import advise, situation
from reft.node.history import read_history, restarts_among, why
from reft.node.observer import NodeObserver
from reft.node.progress import Phase, read_pages
from reft.node.report import (
    ENDED_WELL,
    FAILED,
    WAITING,
    HealthSignal,
    NodeReport,
    ReportBoard,
    newest_board,
    read_board,
)
from reft.node.summary import is_well, summary

ENDED_AS_WANTED = "it ended well"
_OLD_SECS = 10.0  # Age of a board at which its launcher counts as silent
_GATHER_SECS = 2.0  # Time within which all present nodes join again after a failure
_MAX_ROUNDS = 64  # Most rounds of the history in the status


class JobState(StrEnum):
    RUNS = "runs"
    RECOVERING = "recovering"
    WAITING = "waiting for a node"
    ENDED = "ended"


class StatusReader:
    """Reads the status of a job repeatedly, from its memory directories on one or several nodes."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._observers = {
            JobDir.open(path).node: NodeObserver(path, has_daemon=(path / DAEMON_FILE).exists())
            for path in paths
        }

    def read(self) -> dict[str, Any]:
        now = time.time()
        running = any(map(_is_running, self.paths))
        board, warnings = self._read_board(now, running)
        job = summary(board, now)
        here = [_describe_node(path) for path in self.paths]
        advice = advise(situation(self.paths, board, None)) if running else ()
        state, waiting = _find_state(board, self.paths) if running else (JobState.ENDED, None)
        well = state is JobState.RUNS and is_well(job) and all(map(_is_node_well, here))
        return job | {
            "warnings": [*warnings, *job["warnings"]],
            "advice": [item.to_json() for item in advice],
            "state": str(state),
            "waiting": waiting,
            "ended": None if running else _find_end(self.paths),
            "well": well,
            "here": here,
        }

    def _read_board(self, now: float, running: bool) -> tuple[ReportBoard, list[str]]:
        """Return the newest board (reports of all nodes) and warnings about it.

        Without launchers there is no board; a board is then made from the files of the given nodes.
        """
        board = newest_board(self.paths)
        if board is None:
            nodes = tuple(
                observer.poll(NodeReport(node=node, domain=node))
                for node, observer in self._observers.items()
            )
            job_id = JobDir.open(self.paths[0]).job_id
            alone = (
                "no reft launcher reports on other nodes: only nodes whose memory was read are "
                "shown"
            )
            return ReportBoard(job_id=job_id, unix_secs=now, nodes=nodes), [alone] * running
        warnings = []
        age_secs = now - board.written_unix_secs
        if running and age_secs > _OLD_SECS:
            warnings.append(
                f"the launcher of this node has reported nothing for {age_secs:.0f} s: is it "
                "stopped?"
            )
        if (lost := board.store_lost_unix_secs) is not None:
            warnings.append(
                f"the launcher has not reached the rendezvous store since {clock(lost)}: the other "
                "nodes are shown as they were then"
            )
        return board, warnings


def _find_state(
    board: ReportBoard, paths: Sequence[Path]
) -> tuple[JobState, dict[str, Any] | None]:
    """Find the state of a running job.

    Returns:
        The state; and a description of the wait for nodes, or None if the job waits for no node:
        which nodes, since when, and until when (None if only the launchers' join timeout applies).
    """
    rounds = [row for path in paths for row in read_history(path)[-1:]]
    last = max(rounds, key=lambda row: row.unix_secs, default=None)
    present = [
        n
        for n in board.nodes
        if n.observed_signal is not HealthSignal.OFFLINE and not n.quiet and not n.spare
    ]
    waiting = [n for n in present if n.doing == WAITING]
    missing = [] if last is None else sorted(set(last.nodes) - {n.node for n in waiting})
    if waiting:
        since = min(
            (n.doing_since_unix_secs for n in waiting if n.doing_since_unix_secs), default=None
        )
        is_late = since is not None and time.time() - since > _GATHER_SECS
        is_gone = bool(set(missing) - {n.node for n in present})
        if last is None or is_gone or (missing and is_late):
            block = next(filter(None, (read_json(path / CONFIG_FILE) for path in paths)), {})
            wait_secs = (block.get("elastic") or {}).get("wait_secs")
            return JobState.WAITING, {
                "for": missing,
                "since_unix_secs": since,
                "until_unix_secs": since + wait_secs if since and wait_secs else None,
            }
    if waiting or any(n.doing == FAILED for n in present):
        return JobState.RECOVERING, None
    pages = [page for path in paths for page in read_pages(path) if page.state not in ("", "Z")]
    trains = any(page.phase not in (Phase.LOADING, Phase.FIRST_STEP) for page in pages)
    if last is not None and restarts_among([last]) and not trains:
        return JobState.RECOVERING, None
    return JobState.RUNS, None


def _describe_node(path: Path) -> dict[str, Any]:
    """Describe what a node's report does not contain: storage, traffic, protection, history."""
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
        "history": [{**asdict(row), "why": why(row)} for row in rounds[-_MAX_ROUNDS:]],
        "protection": None if record is None else asdict(record),
    }


def _is_node_well(node: Mapping[str, Any]) -> bool:
    status = node["status"] or {}
    persist = status.get("persist") or {}
    is_stale = (
        status.get("stale_since_step") is not None or persist.get("stale_since_step") is not None
    )
    return bool(node["daemon_runs"]) and status.get("last_committed") is not None and not is_stale


def _daemon_runs(path: Path) -> bool:
    daemon = read_json(path / DAEMON_FILE)
    return daemon is not None and is_running(daemon)


def _launcher_end(path: Path) -> str:
    """Return why the node's launcher ended, by its last report; empty if it runs or was killed."""
    board = read_board(path)
    node = None if board is None else board.node(JobDir.open(path).node)
    return node.why if node is not None and node.left else ""


def _is_running(path: Path) -> bool:
    """Whether any process of the job runs on the node.

    This function does not test the job's lock: trying to take it could make a process of the job
    fail.
    """
    if _daemon_runs(path) or any(page.state not in ("", "Z") for page in read_pages(path)):
        return True
    board = read_board(path)
    is_fresh = board is not None and time.time() - board.written_unix_secs < _OLD_SECS
    return is_fresh and not _launcher_end(path)


def _find_end(paths: Sequence[Path]) -> str:
    """Return why the job no longer runs, as far as the given nodes know."""
    for path in paths:
        rounds = read_history(path)
        if rounds and rounds[-1].ended is not None:
            return rounds[-1].ended
    ends = [_launcher_end(path) for path in paths]
    if ENDED_WELL in ends:
        return ENDED_AS_WANTED
    return "its launcher was stopped" if any(ends) else "its processes are gone"


def clock(unix_secs: float) -> str:
    return f"{datetime.fromtimestamp(unix_secs):%H:%M:%S}"
