"""Shares the state of every node of a job with all others.

Periodically each launcher writes the report of its node into the rendezvous store, and reads the
board, which holds the reports of all nodes. The launcher of the first node that is present is the
aggregator: it merges all reports into the board. A node whose report does not change for a while is
OFFLINE. Every launcher keeps a copy of the board in the job's memory directory, where
``reft status`` and the daemon's metrics read it.

All this runs in one thread of the launcher over a connection of its own. Neither trainers nor the
rendezvous wait for that thread, and nothing depends on it (P6). Its traffic is bounded, because the
period grows with the number of nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import write_json
from reft.node.goodput import GoodputCounters
from reft.node.hangs import TrainerActivity
from reft.node.observer import NodeObserver
from reft.node.report import (
    BOARD_FILE,
    HealthSignal,
    NodeReport,
    ReportBoard,
    mark_aggregator_silence,
    mark_silence,
    read_board,
)
from reft.node.stragglers import SpeedWatch
from reft.node.tolerance import find_holders, read_scheme, tolerance_now

logger = logging.getLogger(__name__)

_PERIOD_SECS = 1.0
# With more nodes than this, the time between two reports is longer in proportion
_NODES_PER_SEC = 64
_OFFLINE_PERIODS = 6  # Number of missed reports after which a node is OFFLINE
_SHOWN_SECS = 600.0  # Time for which a replaced node stays on the board
_MAX_REPLACED = 16  # Most replaced nodes on the board
_CLOSE_SECS = 3.0
_STORE_ERRORS = (StoreError, ReftError, OSError, RuntimeError, ValueError)


class JobStatus:
    """Reports a launcher's node, and merges all nodes' reports while its node is the aggregator.

    Args:
        connect: opens a connection to the rendezvous store for this object alone.
        own_report: the first report of this node.
        path: the job's memory directory on this node.
        job_id: name of the job's memory.
        has_daemon: whether the node has a daemon.

    Attributes:
        board: the board (the reports of all nodes) as this launcher last read it.
    """

    def __init__(
        self,
        connect: Callable[[], RendezvousStore],
        own_report: NodeReport,
        path: Path,
        *,
        job_id: str,
        has_daemon: bool,
    ) -> None:
        self.board = ReportBoard(job_id=job_id)
        self._connect = connect
        self._store: RendezvousStore | None = None
        self._store_lost_since: float | None = None
        self._observer = NodeObserver(path, has_daemon=has_daemon)
        self._is_spare: Callable[[], bool] = lambda: False
        self._nodes: Callable[[], Sequence[str]] = lambda: ()
        self._activities: Callable[[], Sequence[TrainerActivity]] = lambda: ()
        self._own_report, self._node = own_report, own_report.node
        self._path = path
        # Start above the report numbers of an earlier launcher of this node.
        self._number = time.time_ns()
        self._polled_at = time.monotonic()
        self._speeds: SpeedWatch | None = None  # Created once there are steps
        before = read_board(path)
        known = before.node(self._node) if before is not None else None
        self._goodput = GoodputCounters(path, known.counts if known is not None else None)
        self._warned_memories: set[str] = set()
        self._warned_round = 0
        self._reason = ""  # Reason why the launcher ends, for the last report
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="job-status", daemon=True)

    def start(
        self,
        is_spare: Callable[[], bool],
        nodes: Callable[[], Sequence[str]],
        activities: Callable[[], Sequence[TrainerActivity]],
    ) -> None:
        """Start the thread, without waiting for the store.

        Args:
            is_spare: returns whether this node is a spare.
            nodes: returns the ids of the present nodes, in the same order on every node; the first
                one is the aggregator.
            activities: returns what each trainer of this node is doing.
        """
        self._is_spare, self._nodes, self._activities = is_spare, nodes, activities
        self._thread.start()

    def report(self, doing: str, *, round: int | None = None, failed: str = "") -> None:
        """Report the launcher's new state.

        Args:
            doing: the state, as a text for users.
            round: number of the round whose trainers the launcher has just started; None if it has
                started none now.
            failed: why the node's trainers failed; empty if they did not.
        """
        update: dict[str, Any] = {"doing": doing, "why": failed}
        if doing != self._own_report.doing:
            update["doing_since_unix_secs"] = time.time()
        if round is not None:
            update |= {"round": round, "times": {HealthSignal.HEALTHY: time.time()}}
        self._own_report = self._own_report.model_copy(update=update)
        self._wake.set()

    def warn(self, *warnings: str) -> None:
        """Replace the launcher's own warnings in the report; no arguments: clear them."""
        if warnings != self._own_report.warnings:
            self._own_report = self._own_report.model_copy(update={"warnings": warnings})
            self._wake.set()

    @property
    def degrees(self) -> Degrees | None:
        return find_holders(self.board.nodes)[0]

    @property
    def holders(self) -> dict[Coordinate, tuple[str, str]]:
        """For each rank, the node that holds its newest version, with the node's failure domain."""
        _, holders = find_holders(self.board.nodes)
        return {at: (node.node, node.domain) for at, node in holders.items()}

    @property
    def scheme(self) -> str:
        """Protection scheme of the newest version; empty if unknown."""
        return read_scheme(self.board.nodes)

    def tolerance_left(self, incarnation: int) -> int | None:
        """Return how many further node losses the job survives, wherever they occur.

        Args:
            incarnation: number of this start of the job.

        Returns:
            The number; None until every rank has a version of this start.
        """
        nodes = self.board.nodes
        _, holders = find_holders(nodes)
        newest = [max(shard.label[0] for shard in node.shards) for node in holders.values()]
        return tolerance_now(nodes) if newest and min(newest) >= incarnation else None

    def close(self, why: str) -> None:
        """Send the last report and stop the thread; ``why`` says why the launcher ends."""
        self._reason = why or "ended"
        self._ending.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECS)
        self._closed = True
        if self._store is not None:
            self._store.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        logged = ""
        while True:
            ending = self._ending.is_set()
            try:
                self._run_once(ending)
            except Exception as error:
                # P6: a status that cannot be reported must not end the launcher.
                cause = f"{type(error).__name__}: {error}"
                if cause != logged:
                    logged = cause
                    logger.warning("the status of this node cannot be reported now: %s", cause)
            if ending:
                return
            self._wake.wait(self._period_secs())
            self._wake.clear()

    def _period_secs(self) -> float:
        return _PERIOD_SECS * max(1.0, len(self.board.nodes) / _NODES_PER_SEC)

    def _run_once(self, ending: bool) -> None:
        report = self._observe()
        if ending:
            report = report.model_copy(update={"left": True, "why": self._reason})
            # Write the copy of the board before the exchange, too, because the store may not
            # answer.
            self._write_copy(report)
        try:
            self._exchange(report)
            self._store_lost_since = None
        except _STORE_ERRORS as error:
            self._store_lost_since = self._store_lost_since or time.time()
            logger.debug("the rendezvous store cannot be reached: %s", error)
            if self._store is not None:
                self._store.close()
            self._store = None
        self._write_copy(report)

    def _observe(self) -> NodeReport:
        self._number += 1
        quiet = [activity for activity in self._activities() if activity.stalled]
        suspected = next((str(activity) for activity in quiet if activity.suspected), "")
        update: dict[str, Any] = {
            "number": self._number,
            "spare": self._is_spare(),
            "warnings": (*self._own_report.warnings, *map(str, quiet)),
            "why": self._own_report.why or suspected,
            "counts": self._goodput.poll(self.board.slow),
        }
        report = self._observer.poll(self._own_report.model_copy(update=update))
        if report.round != self._warned_round:
            self._warned_round = report.round
            self._warned_memories.clear()
        for forecast in report.runs_out:  # Log each memory once per round
            if forecast.name not in self._warned_memories:
                self._warned_memories.add(forecast.name)
                logger.warning("%s", forecast)
        return report

    def _exchange(self, report: NodeReport) -> None:
        if self._store is None:
            self._store = self._connect()
        store = self._store
        store.set(f"node/{self._node}", report.pack())
        packed, now = store.peek("board"), time.monotonic()
        board = ReportBoard(job_id=self.board.job_id)
        with suppress(ValueError):  # Ignore a board of another release; a new one replaces it
            board = board if packed is None else ReportBoard.unpack(packed)
        # Count two periods at most: after a longer gap this launcher was suspended, and the other
        # nodes were not silent.
        period = self._period_secs()
        elapsed, self._polled_at = min(now - self._polled_at, 2 * period), now
        self.board = mark_aggregator_silence(
            self.board, board, elapsed_secs=elapsed, offline_after_secs=_OFFLINE_PERIODS * period
        )
        names = self._nodes() or [self._node]
        if names[0] == self._node:
            self._aggregate(store, names, report, elapsed)

    def _aggregate(
        self,
        store: RendezvousStore,
        names: Sequence[str],
        own_report: NodeReport,
        elapsed_secs: float,
    ) -> None:
        """Merge the reports of all nodes into a new board."""
        now = time.time()
        before = {node.node: node for node in self.board.nodes}
        nodes, with_steps = [], []
        for name in sorted({*before, *names}):
            known = before.get(name)
            report = (own_report if name == self._node else _read_report(store, name)) or known
            if report is None:
                continue
            node = mark_silence(
                known,
                report,
                elapsed_secs=elapsed_secs,
                offline_after_secs=_OFFLINE_PERIODS * self._period_secs(),
                now=now,
            )
            if node.observed_signal is not HealthSignal.OFFLINE and node.ranks:
                with_steps.append(node)
            nodes.append(node.model_copy(update={"ranks": ()}))
        shown, forgotten = forget_replaced(nodes, now)
        if self._speeds is None and with_steps:
            self._speeds = SpeedWatch()
        if self._speeds is not None:
            newest = max((node.round for node in with_steps), default=0)
            self._speeds.poll(
                (node.node, rank)
                for node in with_steps
                if node.round == newest
                for rank in node.ranks
            )
        board = ReportBoard(
            job_id=self.board.job_id,
            aggregator=self._node,
            unix_secs=now,
            nodes=tuple(shown),
            slow=self._speeds.slow() if self._speeds else (),
            speeds=self._speeds.speeds() if self._speeds else (),
        )
        store.set("board", board.pack())
        were_slow = {straggler.name for straggler in self.board.slow}
        are_slow = {straggler.name: straggler for straggler in board.slow}
        for name in are_slow.keys() - were_slow:
            logger.warning("%s", are_slow[name])
        for name in were_slow - are_slow.keys():
            logger.info("%s is no longer slower than its peers", name)
        self.board = board
        for name in forgotten:
            store.delete(f"node/{name}")

    def _write_copy(self, report: NodeReport) -> None:
        """Write the board, with this node's newest report, into the job's memory directory."""
        if not self._path.is_dir() or self._closed:
            return
        own_report = report.model_copy(update={"ranks": ()})
        others = [node for node in self.board.nodes if node.node != self._node]
        board = self.board.model_copy(
            update={
                "nodes": (*others, own_report),
                "written_unix_secs": time.time(),
                "store_lost_unix_secs": self._store_lost_since,
            }
        )
        write_json(self._path / BOARD_FILE, board.model_dump(mode="json"))


def _read_report(store: RendezvousStore, node: str) -> NodeReport | None:
    packed = store.peek(f"node/{node}")
    with suppress(ValueError):
        return None if packed is None else NodeReport.unpack(packed)
    return None


def forget_replaced(nodes: Sequence[NodeReport], now: float) -> tuple[list[NodeReport], set[str]]:
    """Choose the nodes that stay on the board. Pure.

    A node that is OFFLINE counts as replaced if it holds no rank's newest version. Of these nodes,
    only the 16 that were lost last stay, for ten minutes at most (P9).

    Args:
        nodes: reports of all nodes.
        now: Unix seconds.

    Returns:
        The reports that stay, and the ids of the other nodes.
    """
    holders = {node.node for node in find_holders(nodes)[1].values()}
    replaced = [
        n for n in nodes if n.observed_signal is HealthSignal.OFFLINE and n.node not in holders
    ]
    newest = sorted(replaced, key=lambda n: n.offline_unix_secs or 0.0)[-_MAX_REPLACED:]
    shown = {n.node for n in newest if now - (n.offline_unix_secs or 0.0) < _SHOWN_SECS}
    forgotten = {n.node for n in replaced} - shown
    return [n for n in nodes if n.node not in forgotten], forgotten
