"""What a node's files tell of it, and how every node of a job comes to know of it.

Nobody is asked, so that nobody can fail to answer: trainers, daemon and launcher write their pages,
the heads of the arenas and notes as they go.

Each launcher tells the others of its node: it writes a report into the rendezvous store and reads
the board, on which the first of those that are there, the keeper, puts all reports together. A node
whose report does not change is OFFLINE. A copy lies in the job's memory on every node, where ``reft
status`` and the daemon's metrics read it. It all happens in a thread of the launcher, over a
connection of its own: no trainer and no rendezvous waits for it, and nothing depends on it (P6).
Its traffic is bounded: a period is longer where there are more nodes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import ArenaError, ReftError
from reft.grid import Coordinate, Degrees, VersionId
from reft.memory.arena import ARENA_SUFFIX, Arena
from reft.memory.header import PREFIX_BYTES, ArenaHeader, ArenaState
from reft.memory.jobdir import DAEMON_FILE, STATUS_FILE, JobDir, is_running, read_json, write_json
from reft.node.client import ProtectionRecord, read_record
from reft.node.hangs import TrainerActivity
from reft.node.memory_watch import MemoryWatch
from reft.node.progress import Phase, TrainerView, read_pages, read_times
from reft.node.report import (
    BOARD_FILE,
    MOST_WARNINGS,
    GoodputTimes,
    HealthSignal,
    NodeReport,
    ReportBoard,
    RoundReport,
    Shard,
    cut,
    heard,
    note_keeper,
    place,
    read_board,
    read_history,
    read_scheme,
    restarts_among,
    tolerance_now,
)
from reft.node.stragglers import SpeedWatch, Straggler

logger = logging.getLogger(__name__)

_SPEED_STEPS = 64
_MOST_STEPS = 32  # of a rank, in a report
_MOST_MEMORIES, _MOST_RUNNING_OUT = 24, 3
_STALE_STEPS = 10
"""A busy machine skips a version now and then; a node that has taken none for so many steps is not
well."""
_PER_SEC = 10**9
_MOST_SECS = 60.0
"""Between two looks at the accounts: what is longer was spent asleep, and nobody knows on what."""


class _ArenaView(NamedTuple):
    """An arena at the last look: which file, what the two copies of its header began with, and
    it."""

    mark: tuple[object, ...]
    offsets: tuple[int, int]
    header: ArenaHeader | None


class CommitWatch:
    """Which versions are in a node's arenas, asked again after every commit; by several threads, if
    need be. An arena is read anew only if its header changed: block table and MAC may be hundreds
    of kilobytes. Nothing stays mapped between two looks, so that memory that is given up is free at
    once (P9)."""

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._seen: dict[Path, _ArenaView] = {}

    def newest(self) -> VersionId | None:
        """The newest version that is committed in any arena. Raises OSError."""
        committed = (h.label for h in self.headers() if h.state is ArenaState.COMMITTED)
        return max(committed, default=None)

    def headers(self) -> list[ArenaHeader]:
        """Of every arena, without its block table. Raises OSError."""
        paths = sorted(self._job_dir.path.glob(f"*{ARENA_SUFFIX}"))
        self._seen = {path: seen for path in paths if (seen := self._poll(path)) is not None}
        return [seen.header for seen in self._seen.values() if seen.header is not None]

    def _poll(self, path: Path) -> _ArenaView | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(ArenaError, OSError), open(os.open(path, flags), "rb", buffering=0) as file:
            known = self._seen.get(path)
            if known is not None and known.mark == _mark(file.fileno(), known.offsets):
                return known
            with Arena.open(path, self._job_dir.secret, job_id=self._job_dir.job_id) as arena:
                # The mark first: a header that changes meanwhile is read again next time.
                mark = _mark(file.fileno(), arena.header_offsets)
                return _ArenaView(mark, arena.header_offsets, arena.head())
        return None


def _mark(fd: int, offsets: tuple[int, int]) -> tuple[object, ...]:
    """The file, and what every record of a header begins with: sequence number, hash and MAC."""
    info = os.fstat(fd)
    return (
        info.st_dev,
        info.st_ino,
        info.st_size,
        *(os.pread(fd, PREFIX_BYTES, at) for at in offsets),
    )


class StepRate:
    """Steps per second over the last steps that were seen, whatever lies between them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_SPEED_STEPS)
        self._pid = 0

    def look(self, seen: TrainerView) -> float | None:
        """Take another look at a trainer's page; steps per second, or None before there are two."""
        if seen.pid != self._pid or (self._steps and seen.step < self._steps[-1][0]):
            self._pid = seen.pid
            self._steps.clear()
        if seen.phase not in (Phase.LOADING, Phase.FIRST_STEP) and (
            not self._steps or seen.step > self._steps[-1][0]
        ):
            self._steps.append((seen.step, seen.nanos))
        if len(self._steps) < 2:
            return None
        (first, began), (last, ended) = self._steps[0], self._steps[-1]
        return (last - first) * _PER_SEC / max(1, ended - began)


class GoodputCounters:
    """Keeps the :class:`GoodputTimes`. Each launcher does, and has them in its node's report, whose
    copy in the memory of the job outlives it: ``known`` are those of a launcher before this one.
    Used by one thread."""

    def __init__(self, path: Path, known: GoodputTimes | None = None) -> None:
        self._path = path
        self._counts = known or GoodputTimes(began_unix_secs=time.time())
        self._looked = time.monotonic()
        self._pid = 0
        self._step_secs = 0.0
        self._stalls = 0

    def look(self, slow: Sequence[Straggler]) -> GoodputTimes:
        now = time.monotonic()
        elapsed, self._looked = min(_MOST_SECS, now - self._looked), now
        counts = self._counts
        pages = read_pages(self._path)
        page = pages[0] if pages else None
        idle = (Phase.LOADING, Phase.FIRST_STEP, Phase.ENDED)
        if page is not None and (page.phase in idle or page.state in ("", "Z")):
            page = None  # it makes no steps, nor what lies between them
        if page is not None and page.pid != self._pid:
            if self._pid or counts.newest_step is not None:
                rounds = read_history(self._path)
                counts.went_back((rounds[-1].resumed_step or 0) if rounds else 0, self._step_secs)
            self._pid, self._stalls = page.pid, 0
        if (timed := read_times(self._path)) and timed[0].steps:
            self._step_secs = median(s.whole for s in timed[0].steps)
        if page is None:
            counts.waited(elapsed)
        else:
            per_sample = max(max(0, p.flops_per_token) * p.tokens_per_sample for p in pages)
            # Of each version that was taken since the last look the median that training waited for
            # it.
            status = read_json(self._path / STATUS_FILE) or {}
            stats = ((status.get("trainers") or {}).get("0") or {}).get("stats") or {}
            before, self._stalls = self._stalls, int(stats.get("taken") or 0)
            stalled = max(0, self._stalls - before) * float(stats.get("stall_secs_median") or 0.0)
            counts.trained(
                elapsed,
                page.step,
                samples=page.samples_per_step,
                flops=float(page.samples_per_step * per_sample),
                stall_secs=stalled,
                straggler_secs=max((s.cost_secs for s in slow), default=0.0),
            )
        return replace(counts)


class NodeObserver:
    """One node, looked at again and again by one thread."""

    def __init__(self, path: Path, *, has_daemon: bool) -> None:
        self._path = path
        self._has_daemon = has_daemon
        self._speed = StepRate()
        self._memory: MemoryWatch | None = None  # Once there are trainers
        self._step: int | None = None
        self._arenas: CommitWatch | None = None
        self._times: dict[HealthSignal, float] = {}
        self._signal: HealthSignal | None = None
        self._snapped = self._completed = (0, 0)

    def look(self, mine: NodeReport) -> NodeReport:
        """What can be told of the node now. ``mine``: what its launcher says of itself: what it
        does, the round of its trainers and since when they run, why they ended by themselves."""
        pages = read_pages(self._path)
        heads: list[ArenaHeader] = []
        with suppress(OSError, ReftError):
            self._arenas = self._arenas or CommitWatch(JobDir.open(self._path))
            heads = self._arenas.headers()
        status = read_json(self._path / STATUS_FILE) or {}
        record = read_record(self._path)
        restarts = restarts_among(read_history(self._path))
        # Trainers that have ended take their pages along: the last step that was seen stays.
        self._step = step = max((p.step for p in pages), default=self._step)
        self._note_versions(heads)
        steps_per_sec = self._speed.look(pages[0]) if pages else None
        memory = self._memory = self._memory or (MemoryWatch(self._path) if pages else None)
        if memory is not None:
            memory.look(pages, steps_per_sec)
        stale, why = status.get("stale_since_step"), mine.why
        if not why and stale is not None and step is not None and step - stale >= _STALE_STEPS:
            why = _stale(status)
        since = mine.times.get(HealthSignal.HEALTHY, 0.0)
        self._times[HealthSignal.HEALTHY] = (
            since or self._times.get(HealthSignal.HEALTHY) or time.time()
        )
        self._signal = self._signal_now(since, bool(pages), why)
        found: dict[str, Any] = {
            "signal": self._signal,
            "times": dict(self._times),
            "why": why,
            "step": step,
            "steps_per_sec": steps_per_sec,
            "shards": _shards(heads),
            "trainers": sum(p.state not in ("", "Z") for p in pages),
            "tolerance": None if record is None else record.tolerance,
            "restarts": len(restarts),
            "recovery": _recovery(restarts[-1]) if restarts else None,
            "warnings": tuple(self._warnings(mine, status, record)),
            "memory": memory.uses[:_MOST_MEMORIES] if memory else (),
            "runs_out": memory.runs_out[:_MOST_RUNNING_OUT] if memory else (),
            "ranks": tuple(
                replace(t, steps=t.steps[-_MOST_STEPS:]) for t in read_times(self._path)
            ),
        }
        return NodeReport(**{**dict(mine), **found})

    def _note_versions(self, heads: list[ArenaHeader]) -> None:
        """When the newest version was begun, and when the newest one of all ranks here was
        whole."""
        began, whole = max(map(_key, heads), default=(0, 0)), _completed(heads)
        if began > self._snapped:
            if self._signal is not None:  # else it may have been begun, and torn, long ago
                self._times[HealthSignal.SNAP] = time.time()
            self._snapped = began
        if whole > self._completed:
            self._completed = whole
            sealed = max(h.sealed_unix_secs for h in heads if _key(h) == whole)
            self._times[HealthSignal.COMPLETED] = sealed
            if began == whole:  # begun and ended between two looks
                self._times[HealthSignal.SNAP] = min(
                    self._times.get(HealthSignal.SNAP, sealed), sealed
                )

    def _signal_now(self, since: float, has_trainers: bool, why: str) -> HealthSignal:
        if why:
            if self._signal is not HealthSignal.UNHEALTHY:
                self._times[HealthSignal.UNHEALTHY] = time.time()
            return HealthSignal.UNHEALTHY
        # What an earlier start of the trainers has left is no news of this one.
        newest = max(self._times.get(s, 0.0) for s in (HealthSignal.SNAP, HealthSignal.COMPLETED))
        if not has_trainers or newest <= since:
            return HealthSignal.HEALTHY
        return HealthSignal.SNAP if self._snapped > self._completed else HealthSignal.COMPLETED

    def _warnings(
        self, mine: NodeReport, status: dict[str, Any], record: ProtectionRecord | None
    ) -> Iterable[str]:
        yield from mine.warnings
        if status.get("stale_since_step") is not None:
            yield _stale(status)
        persist = status.get("persist") or {}
        if (since := persist.get("stale_since_step")) is not None:
            yield f"no checkpoint on storage since step {since}: {persist.get('error')}"
        daemon = read_json(self._path / DAEMON_FILE)
        if self._has_daemon and daemon is not None and not is_running(daemon):
            yield "its daemon is not running: the launcher restarts it"
        if not self._has_daemon:
            yield "it has no daemon: no checkpoints on storage"
        if record is None:
            return
        if degraded := record.degraded:
            yield (
                f"memory is short: {degraded.scheme} with {degraded.versions} versions instead of "
                f"{record.scheme}: {degraded.cause}"
            )
        if refused := record.refused:
            yield f"{refused.scheme} was refused at step {refused.step}: {refused.cause}"


def _key(header: ArenaHeader) -> tuple[int, int]:
    return header.label.incarnation, header.label.step


def _completed(heads: Iterable[ArenaHeader]) -> tuple[int, int]:
    """The newest version of which all ranks with memory here have a whole shard."""
    newest: dict[Any, tuple[int, int]] = {}
    for head in heads:
        if head.state.whole:
            newest[head.coordinate] = max(newest.get(head.coordinate, (0, 0)), _key(head))
    return min(newest.values(), default=(0, 0))


def _shards(heads: Iterable[ArenaHeader]) -> tuple[Shard, ...]:
    """Of each rank with memory here the newest committed version, else the newest whole one."""
    newest: dict[Any, ArenaHeader] = {}
    for head in heads:
        known = newest.get(head.coordinate)
        if head.state.whole and (known is None or _worth(head) > _worth(known)):
            newest[head.coordinate] = head
    return tuple(
        Shard(
            at=(h.coordinate.pp, h.coordinate.dp, h.coordinate.tp),
            degrees=(h.degrees.pp, h.degrees.dp, h.degrees.tp),
            label=_key(h),
            scheme=h.scheme,
            sealed_unix_secs=h.sealed_unix_secs,
            committed=h.state is ArenaState.COMMITTED,
        )
        for _, h in sorted(newest.items())
    )


def _worth(header: ArenaHeader) -> tuple[bool, VersionId]:
    return header.state is ArenaState.COMMITTED, header.label


def _recovery(row: RoundReport) -> RoundReport:
    """Not the names of all nodes, from each of them; and no text or list that has no bound (P9)."""
    failures, lost = (
        [cut(said) for said in texts[:MOST_WARNINGS]] for texts in (row.failures, row.lost)
    )
    source = cut(row.resumed_from)
    return replace(
        row, nodes=[], joined=[], left=[], failures=failures, lost=lost, resumed_from=source
    )


def _stale(status: dict[str, Any]) -> str:
    return f"no version since step {status['stale_since_step']}: {status.get('stale_cause')}"


# -- every node of the job -------------------------------------------------------------------------

_PERIOD_SECS = 1.0
_NODES_PER_SEC = 64
_OFFLINE_PERIODS = 6
_SHOWN_SECS = 600.0
"""A node that is gone, and has been replaced, is shown for so long; and no more of them than so
many:"""
_MOST_GONE = 16
_END_SECS = 3.0
_CANNOT = (StoreError, ReftError, OSError, RuntimeError, ValueError)


class JobStatus:
    """One launcher's part; ``connect`` makes a connection to the job's store that nobody else
    uses."""

    def __init__(
        self,
        connect: Callable[[], RendezvousStore],
        mine: NodeReport,
        path: Path,
        *,
        job_id: str,
        has_daemon: bool,
    ) -> None:
        self._connect = connect
        self._observer = NodeObserver(path, has_daemon=has_daemon)
        self._is_spare: Callable[[], bool] = lambda: False
        self._nodes: Callable[[], Sequence[str]] = lambda: ()
        self._waiting: Callable[[], Sequence[TrainerActivity]] = lambda: ()
        self._mine, self._node = mine, mine.node
        self._path = path
        self._store: RendezvousStore | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._left = ""
        self._closed = False
        # more than that of a launcher before it that had the same node
        self._number = time.time_ns()
        self.board = ReportBoard(job_id=job_id)  # as this launcher last saw it
        self._looked_at = time.monotonic()
        self._lost_since: float | None = None
        self._watch: SpeedWatch | None = None  # Once there are steps
        before = read_board(path)
        known = before.node(self._node) if before is not None else None
        self._accounts = GoodputCounters(path, known.counts if known is not None else None)
        self._memory_told: set[str] = set()
        self._memory_round = 0
        self._thread = threading.Thread(target=self._run, name="status-board", daemon=True)

    def start(
        self,
        is_spare: Callable[[], bool],
        nodes: Callable[[], Sequence[str]],
        waiting: Callable[[], Sequence[TrainerActivity]],
    ) -> None:
        """Begin; does not wait for the store. ``nodes``: that are there, in the same order on all;
        the first keeps the board. ``waiting``: at what the trainers here are."""
        self._is_spare, self._nodes, self._waiting = is_spare, nodes, waiting
        self._thread.start()

    def tell(self, words: str, *, round: int | None = None, failed: str = "") -> None:
        """The launcher does something else now, in ``words``. ``round``: of the trainers that it
        has started, if it has; ``failed``: why its trainers have ended by themselves."""
        said: dict[str, Any] = {"doing": words, "why": failed}
        if words != self._mine.doing:
            said["doing_since_unix_secs"] = time.time()
        if round is not None:
            said |= {"round": round, "times": {HealthSignal.HEALTHY: time.time()}}
        self._mine = self._mine.model_copy(update=said)
        self._wake.set()

    def warn(self, *warnings: str) -> None:
        """What the status says of this node from now on, in place of what it said; none:
        nothing."""
        if warnings != self._mine.warnings:
            self._mine = self._mine.model_copy(update={"warnings": warnings})
            self._wake.set()

    @property
    def degrees(self) -> Degrees | None:
        return place(self.board.nodes)[0]

    @property
    def holders(self) -> dict[Coordinate, tuple[str, str]]:
        """Node and failure domain of whoever holds each rank's newest version."""
        return {at: (n.node, n.domain) for at, n in place(self.board.nodes)[1].items()}

    @property
    def scheme(self) -> str:
        """The protection of the newest version; "" where nobody said."""
        return read_scheme(self.board.nodes)

    def tolerance_left(self, incarnation: int) -> int | None:
        """As :func:`reft.node.report.tolerance_now`; None until every rank has a version of this
        start."""
        nodes = self.board.nodes
        _, holders = place(nodes)
        starts = [max(shard.label[0] for shard in node.shards) for node in holders.values()]
        return tolerance_now(nodes) if starts and min(starts) >= incarnation else None

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
        return _PERIOD_SECS * max(1.0, len(self.board.nodes) / _NODES_PER_SEC)

    def _turn(self, ending: bool) -> None:
        self._number += 1
        said: dict[str, Any] = {"number": self._number, "spare": self._is_spare()}
        quiet = [waiting for waiting in self._waiting() if waiting.quiet]
        said["warnings"] = (*self._mine.warnings, *map(str, quiet))
        said["why"] = self._mine.why or next((str(w) for w in quiet if w.suspected), "")
        said["counts"] = self._accounts.look(self.board.slow)
        report = self._observer.look(self._mine.model_copy(update=said))
        if report.round != self._memory_round:
            self._memory_round = report.round
            self._memory_told.clear()
        for found in report.runs_out:  # each memory is named once in a start of the trainers
            if found.name not in self._memory_told:
                self._memory_told.add(found.name)
                logger.warning("%s", found)
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

    def _exchange(self, report: NodeReport) -> None:
        if self._store is None:
            self._store = self._connect()
        store = self._store
        store.set(f"node/{self._node}", report.pack())
        held, now = store.peek("board"), time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        board = ReportBoard(job_id=self.board.job_id)
        with suppress(ValueError):  # another release's: it is put together anew
            board = board if held is None else ReportBoard.unpack(held)
        # This launcher may have stood still itself: that is nobody else's silence.
        period = self._period_secs()
        elapsed = min(elapsed, 2 * period)
        self.board = note_keeper(
            self.board, board, elapsed_secs=elapsed, offline_after_secs=_OFFLINE_PERIODS * period
        )
        names = self._nodes() or [self._node]
        if names[0] == self._node:
            self._keep(store, names, report, elapsed)

    def _keep(
        self, store: RendezvousStore, names: Sequence[str], mine: NodeReport, elapsed_secs: float
    ) -> None:
        period, now = self._period_secs(), time.time()
        before = {node.node: node for node in self.board.nodes}
        there, told = [], []
        for name in sorted({*before, *names}):
            report = mine if name == self._node else _report(store, name)
            known = before.get(name)
            if report is None and known is None:
                continue
            node = heard(
                known,
                report or known,  # type: ignore[arg-type]
                elapsed_secs=elapsed_secs,
                offline_after_secs=_OFFLINE_PERIODS * period,
                now=now,
            )
            if node.seen is not HealthSignal.OFFLINE and node.ranks:
                told.append(node)
            there.append(node.model_copy(update={"ranks": ()}))
        kept, forgotten = sort_out(there, now)
        newest = max((report.round for report in told), default=0)
        watch = self._watch = self._watch or (SpeedWatch() if told else None)
        if watch is not None:
            watch.look((r.node, steps) for r in told if r.round == newest for steps in r.ranks)
        board = ReportBoard(
            job_id=self.board.job_id,
            keeper=self._node,
            unix_secs=now,
            nodes=tuple(kept),
            slow=watch.slow() if watch else (),
            speeds=watch.speeds() if watch else (),
        )
        store.set("board", board.pack())
        was, now_slow = ({s.name: s for s in each.slow} for each in (self.board, board))
        for name in now_slow.keys() - was.keys():
            logger.warning("%s", now_slow[name])
        for name in was.keys() - now_slow.keys():
            logger.info("%s is no longer slower than its peers", name)
        self.board = board
        for name in forgotten:
            store.delete(f"node/{name}")

    def _write(self, report: NodeReport) -> None:
        """The copy on this node, with this node's own newest report."""
        mine = report.model_copy(update={"ranks": ()})
        others = [node for node in self.board.nodes if node.node != self._node]
        times = {"written_unix_secs": time.time(), "store_lost_unix_secs": self._lost_since}
        if self._path.is_dir() and not self._closed:
            board = self.board.model_copy(update={"nodes": (*others, mine), **times})
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


def sort_out(nodes: Sequence[NodeReport], now: float) -> tuple[list[NodeReport], set[str]]:
    """Those that are shown, and those that are forgotten: gone, and nobody needs what they held.
    Pure."""
    needed = {node.node for node in place(nodes)[1].values()}
    gone = [n for n in nodes if n.seen is HealthSignal.OFFLINE and n.node not in needed]
    newest = sorted(gone, key=lambda n: n.offline_unix_secs or 0.0)[-_MOST_GONE:]
    shown = {n.node for n in newest if now - (n.offline_unix_secs or 0.0) < _SHOWN_SECS}
    forgotten = {n.node for n in gone} - shown
    return [n for n in nodes if n.node not in forgotten], forgotten
