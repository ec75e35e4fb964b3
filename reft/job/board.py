"""The signals of a job's nodes, broadcast: each launcher tells of its node and knows of all others.

Every launcher writes a report of its node into the rendezvous store and reads the board, on which the first
of those that are there, the keeper, puts all reports together. A node whose report does not change is
OFFLINE. A copy lies in the job's memory on every node, where ``reft status`` and the daemon's metrics read
it.

It all happens in a thread of the launcher, over a connection of its own: no trainer and no rendezvous waits
for it, and nothing depends on it (P6). Its traffic is bounded: a period is longer where there are more nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import write_json
from reft.node.observe import Accounts, Doing, NodeObserver
from reft.node.report import (
    BOARD_FILE,
    Board,
    NodeReport,
    Row,
    Signal,
    newest_start,
    place,
    read_board,
    scheme_of,
    tolerance_now,
    updated_row,
)
from reft.node.stragglers import SpeedWatch, Straggler

logger = logging.getLogger(__name__)

_PERIOD_SECS = 1.0
_NODES_PER_SEC = 64
_OFFLINE_PERIODS = 6
_SHOWN_SECS = 600.0
"""A node that is gone, and has been replaced, is shown for so long; and no more of them than so many:"""
_MOST_GONE = 16
_END_SECS = 3.0
_CANNOT = (StoreError, ReftError, OSError, RuntimeError, ValueError)


class StatusBoard:
    """One launcher's part; ``connect`` makes a connection to the job's store that nobody else uses.
    ``nodes``: that are there, in the same order on all; the first keeps the board."""

    def __init__(
        self,
        connect: Callable[[], RendezvousStore],
        observer: NodeObserver,
        is_spare: Callable[[], bool],
        nodes: Callable[[], Sequence[str]],
        *,
        job_id: str,
        node: str,
        path: Path,
    ) -> None:
        self._connect = connect
        self._observer = observer
        self._is_spare = is_spare
        self._nodes = nodes
        self._job_id = job_id
        self._node = node
        self._path = path
        self._store: RendezvousStore | None = None
        self._doing = Doing()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._left = ""
        self._closed = False
        self._number = time.time_ns()  # more than that of a launcher before it that had the same node
        self.board = Board(job_id=job_id)  # as this launcher last saw it
        self._looked_at = time.monotonic()
        self._lost_since: float | None = None
        self._watch = SpeedWatch()
        before = read_board(path)
        row = before.row(node) if before is not None else None
        self._accounts = Accounts(path, row.report.counts if row is not None else None)
        self._memory_told: set[str] = set()
        self._memory_round = 0
        self._thread = threading.Thread(target=self._run, name="status-board", daemon=True)

    def start(self) -> None:
        """Begin; does not wait for the store."""
        self._thread.start()

    def tell(self, words: str, *, round: int | None = None, failed: str = "") -> None:
        """The launcher does something else now, in ``words``. ``round``: of the trainers that it has started,
        if it has; ``failed``: why its trainers have ended by themselves."""
        doing = replace(self._doing, words=words, failed=failed)
        if round is not None:
            doing = replace(doing, round=round, since_unix_secs=time.time())
        self._doing = doing
        self._wake.set()

    def warn(self, *warnings: str) -> None:
        """What the status says of this node from now on, in place of what it said; none: nothing."""
        if warnings != self._doing.warnings:
            self._doing = replace(self._doing, warnings=warnings)
            self._wake.set()

    @property
    def degrees(self) -> Degrees | None:
        return place(self.board.rows)[0]

    @property
    def holders(self) -> dict[Coordinate, tuple[str, str]]:
        """Node and failure domain of whoever holds each rank's newest version."""
        return {at: (row.report.node, row.report.domain) for at, row in place(self.board.rows)[1].items()}

    @property
    def scheme(self) -> str:
        """The protection of the newest version; "" where nobody said."""
        return scheme_of(self.board.rows)

    def tolerance_left(self, incarnation: int) -> int | None:
        """As :func:`reft.node.report.tolerance_now`; None until every rank has a version of this start."""
        rows = self.board.rows
        _, holders = place(rows)
        if not holders or any(newest_start(row) < incarnation for row in holders.values()):
            return None
        return tolerance_now(rows)

    def close(self, why: str) -> None:
        self._left = why or "ended"
        self._ending.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECS)
        self._closed = True
        if self._store is not None:
            self._store.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        told = ""
        while True:
            ending = self._ending.is_set()
            try:
                self._turn(ending)
            except Exception as error:  # a status that fails is a status that fails
                if (cause := f"{type(error).__name__}: {error}") != told:
                    told = cause
                    logger.warning("the status of this node cannot be reported now: %s", cause)
            if ending:
                return
            self._wake.wait(self._period_secs())
            self._wake.clear()

    def _period_secs(self) -> float:
        return _PERIOD_SECS * max(1.0, len(self.board.rows) / _NODES_PER_SEC)

    def _turn(self, ending: bool) -> None:
        self._number += 1
        doing = replace(self._doing, spare=self._is_spare())
        counts = self._accounts.look(self.board.slow)
        changes = {"number": self._number, "counts": counts}
        report = self._observer.look(doing).model_copy(update=changes)
        self._tell_memory(report)
        if ending:
            report = report.model_copy(update={"left": True, "why": self._left})
            self._write(report)  # whatever becomes of the store
        try:
            self._exchange(report)
            self._lost_since = None
        except _CANNOT as error:
            self._lost_since = self._lost_since or time.time()
            logger.debug("the status board cannot be reached: %s", error)
            self._drop()
        self._write(report)

    def _tell_memory(self, report: NodeReport) -> None:
        """Log what is running out on this node: each memory once in a start of the trainers."""
        if report.round != self._memory_round:
            self._memory_round = report.round
            self._memory_told.clear()
        for found in report.runs_out:
            if found.name not in self._memory_told:
                self._memory_told.add(found.name)
                logger.warning("%s", found)

    def _exchange(self, report: NodeReport) -> None:
        if self._store is None:
            self._store = self._connect()
        store = self._store
        store.set(f"node/{self._node}", report.pack())
        held, now = store.peek("board"), time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        board = Board(job_id=self._job_id)
        with suppress(ValueError):  # another release's: it is put together anew
            board = board if held is None else Board.unpack(held)
        self.board = board
        names = self._nodes() or [self._node]
        if names[0] == self._node:
            self._keep(store, names, report, elapsed)

    def _keep(
        self, store: RendezvousStore, names: Sequence[str], mine: NodeReport, elapsed_secs: float
    ) -> None:
        period, now = self._period_secs(), time.time()
        # The keeper may have stood still itself: that is nobody else's silence.
        elapsed = min(elapsed_secs, 2 * period)
        before = {row.report.node: row for row in self.board.rows}
        rows, told = [], []
        for name in sorted({*before, *names}):
            report = mine if name == self._node else _report(store, name)
            known = before.get(name)
            if report is None and known is None:
                continue
            row = updated_row(
                known,
                report or known.report,  # type: ignore[union-attr]
                elapsed_secs=elapsed,
                offline_after_secs=_OFFLINE_PERIODS * period,
                now=now,
            )
            if row.signal is not Signal.OFFLINE and row.report.ranks:
                told.append(row.report)
            rows.append(row.model_copy(update={"report": row.report.model_copy(update={"ranks": ()})}))
        kept, forgotten = sort_out(rows, now)
        newest = max((report.round for report in told), default=0)
        self._watch.look((r.node, steps) for r in told if r.round == newest for steps in r.ranks)
        board = Board(
            job_id=self._job_id,
            keeper=self._node,
            number=self.board.number + 1,
            unix_secs=now,
            rows=tuple(kept),
            slow=self._watch.slow(),
            speeds=self._watch.speeds(),
        )
        store.set("board", board.pack())
        tell_changes(self.board.slow, board.slow)
        self.board = board
        for name in forgotten:
            store.delete(f"node/{name}")

    def _write(self, report: NodeReport) -> None:
        """The copy on this node, with this node's own newest report."""
        row = Row(report=report.model_copy(update={"ranks": ()}))
        others = [r for r in self.board.rows if r.report.node != self._node]
        times = {"written_unix_secs": time.time(), "store_lost_unix_secs": self._lost_since}
        if self._path.is_dir() and not self._closed:
            board = self.board.model_copy(update={"rows": (*others, row), **times})
            write_json(self._path / BOARD_FILE, board.model_dump(mode="json"))

    def _drop(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


def _report(store: RendezvousStore, node: str) -> NodeReport | None:
    data = store.peek(f"node/{node}")
    with suppress(ValueError):
        return None if data is None else NodeReport.unpack(data)
    return None


def tell_changes(before: Sequence[Straggler], after: Sequence[Straggler]) -> None:
    """Log who has become slow, and who is no more: each once."""
    was, now = {s.name: s for s in before}, {s.name: s for s in after}
    for name, straggler in now.items():
        if name not in was:
            logger.warning("%s", straggler)
    for name in was.keys() - now.keys():
        logger.info("%s is no longer slower than its peers", name)


def sort_out(rows: list[Row], now: float) -> tuple[list[Row], set[str]]:
    """The rows that are shown, and the nodes that are forgotten: gone, and nobody needs what they held.
    Pure."""
    _, holders = place(rows)
    needed = {row.report.node for row in holders.values()}
    gone = [r for r in rows if r.signal is Signal.OFFLINE and r.report.node not in needed]
    newest = sorted(gone, key=lambda r: r.offline_unix_secs or 0.0)[-_MOST_GONE:]
    shown = {r.report.node for r in newest if now - (r.offline_unix_secs or 0.0) < _SHOWN_SECS}
    forgotten = {r.report.node for r in gone} - shown
    return [r for r in rows if r.report.node not in forgotten], forgotten
