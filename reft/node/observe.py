"""What a node's files tell of it: the trainers' pages, the heads of the arenas, notes of daemon and trainers.

Nobody is asked, so that nobody can fail to answer: trainers, daemon and launcher write them as they go.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from reft.errors import ArenaError, ReftError
from reft.memory.arena import ARENA_SUFFIX, Arena
from reft.memory.header import PREFIX_BYTES, ArenaHeader, ArenaState
from reft.memory.jobdir import DAEMON_FILE, STATUS_FILE, JobDir, is_running, read_json
from reft.naming import Label
from reft.node.history import Round, read_history, restarts_among
from reft.node.memory_watch import MemoryWatch
from reft.node.progress import Phase, Seen, read_pages, read_times
from reft.node.protection import ProtectionRecord, read_record
from reft.node.report import MOST_WARNINGS, Counts, NodeReport, Shard, Signal, cut
from reft.node.stragglers import Straggler

_SPEED_STEPS = 64
_MOST_STEPS = 32  # of a rank, in a report
_MOST_MEMORIES, _MOST_RUNNING_OUT = 24, 3
_STALE_STEPS = 10
"""A busy machine skips a version now and then; a node that has taken none for so many steps is not well."""
_PER_SEC = 10**9
_MOST_SECS = 60.0
"""Between two looks at the accounts: what is longer was spent asleep, and nobody knows on what."""


class _Seen(NamedTuple):
    """An arena at the last look: which file, what the two copies of its header began with, and it."""

    mark: tuple[object, ...]
    offsets: tuple[int, int]
    header: ArenaHeader | None


class CommitWatch:
    """Which versions are in a node's arenas, asked again after every commit; by several threads, if need be.
    An arena is read anew only if its header changed: block table and MAC may be hundreds of kilobytes.
    Nothing stays mapped between two looks, so that memory that is given up is free at once (P9)."""

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._seen: dict[Path, _Seen] = {}

    def newest(self) -> Label | None:
        """The newest version that is committed in any arena. Raises OSError."""
        committed = (h.label for h in self.headers() if h.state is ArenaState.COMMITTED)
        return max(committed, default=None)

    def headers(self) -> list[ArenaHeader]:
        """Of every arena, without its block table. Raises OSError."""
        paths = sorted(self._job_dir.path.glob(f"*{ARENA_SUFFIX}"))
        self._seen = {path: seen for path in paths if (seen := self._look(path)) is not None}
        return [seen.header for seen in self._seen.values() if seen.header is not None]

    def _look(self, path: Path) -> _Seen | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(ArenaError, OSError), open(os.open(path, flags), "rb", buffering=0) as file:
            known = self._seen.get(path)
            if known is not None and known.mark == _mark(file.fileno(), known.offsets):
                return known
            with Arena.open(path, self._job_dir.secret, job_id=self._job_dir.job_id) as arena:
                # The mark first: a header that changes meanwhile is read again next time.
                mark = _mark(file.fileno(), arena.header_offsets)
                return _Seen(mark, arena.header_offsets, arena.head())
        return None


def _mark(fd: int, offsets: tuple[int, int]) -> tuple[object, ...]:
    """The file, and what every record of a header begins with: sequence number, hash and MAC."""
    info = os.fstat(fd)
    return info.st_dev, info.st_ino, info.st_size, *(os.pread(fd, PREFIX_BYTES, at) for at in offsets)


@dataclass(frozen=True)
class Doing:
    """What the launcher says of itself: what it does, and of which round of trainers; ``failed``: why they
    ended by themselves, "" while they run and where a peer was lost."""

    words: str = ""
    round: int = 0
    spare: bool = False
    failed: str = ""
    since_unix_secs: float = 0.0
    warnings: tuple[str, ...] = ()


class Speed:
    """Steps per second over the last steps that were seen, whatever lies between them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_SPEED_STEPS)
        self._pid = 0

    def look(self, seen: Seen) -> float | None:
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


class Accounts:
    """Keeps the :class:`Counts`. Each launcher does, and has them in its node's report, whose copy in the
    memory of the job outlives it: ``known`` are those of a launcher before this one. Used by one thread."""

    def __init__(self, path: Path, known: Counts | None = None) -> None:
        self._path = path
        self._counts = known or Counts(began_unix_secs=time.time())
        self._looked = time.monotonic()
        self._pid = 0
        self._step_secs = 0.0
        self._stalls = 0

    def look(self, slow: Sequence[Straggler]) -> Counts:
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
            # Of each version that was taken since the last look the median that training waited for it.
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

    def __init__(self, path: Path, node: str, domain: str, *, has_daemon: bool) -> None:
        self._path = path
        self._node = node
        self._domain = domain
        self._has_daemon = has_daemon
        self._speed = Speed()
        self._memory = MemoryWatch(path)
        self._step: int | None = None
        self._arenas: CommitWatch | None = None
        self._times: dict[Signal, float] = {}
        self._signal: Signal | None = None
        self._snapped = self._completed = (0, 0)

    def look(self, doing: Doing) -> NodeReport:
        """What can be told of the node now. ``number`` is left to whoever sends it."""
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
        self._memory.look(pages, steps_per_sec)
        since, why = status.get("stale_since_step"), doing.failed
        if not why and since is not None and step is not None and step - since >= _STALE_STEPS:
            why = _stale(status)
        why = why or next(iter(status.get("suspected") or ()), "")
        self._times[Signal.HEALTHY] = doing.since_unix_secs or self._times.get(Signal.HEALTHY) or time.time()
        self._signal = self._signal_now(doing, bool(pages), why)
        return NodeReport(
            node=self._node,
            domain=self._domain,
            round=doing.round,
            spare=doing.spare,
            signal=self._signal or Signal.HEALTHY,
            times=dict(self._times),
            doing=doing.words,
            why=why,
            step=step,
            steps_per_sec=steps_per_sec,
            shards=_shards(heads),
            trainers=sum(p.state not in ("", "Z") for p in pages),
            tolerance=None if record is None else record.tolerance,
            restarts=len(restarts),
            recovery=_recovery(restarts[-1]) if restarts else None,
            warnings=tuple(self._warnings(doing, status, record)),
            memory=self._memory.uses[:_MOST_MEMORIES],
            runs_out=self._memory.runs_out[:_MOST_RUNNING_OUT],
            ranks=tuple(replace(t, steps=t.steps[-_MOST_STEPS:]) for t in read_times(self._path)),
        )

    def _note_versions(self, heads: list[ArenaHeader]) -> None:
        """When the newest version was begun, and when the newest one of all ranks here was whole."""
        began, whole = max(map(_key, heads), default=(0, 0)), _completed(heads)
        if began > self._snapped:
            if self._signal is not None:  # else it may have been begun, and torn, long ago
                self._times[Signal.SNAP] = time.time()
            self._snapped = began
        if whole > self._completed:
            self._completed = whole
            sealed = max(h.sealed_unix_secs for h in heads if _key(h) == whole)
            self._times[Signal.COMPLETED] = sealed
            if began == whole:  # begun and ended between two looks
                self._times[Signal.SNAP] = min(self._times.get(Signal.SNAP, sealed), sealed)

    def _signal_now(self, doing: Doing, has_trainers: bool, why: str) -> Signal:
        if why:
            if self._signal is not Signal.UNHEALTHY:
                self._times[Signal.UNHEALTHY] = time.time()
            return Signal.UNHEALTHY
        # What an earlier start of the trainers has left is no news of this one.
        newest = max(self._times.get(s, 0.0) for s in (Signal.SNAP, Signal.COMPLETED))
        if not has_trainers or newest <= doing.since_unix_secs:
            return Signal.HEALTHY
        return Signal.SNAP if self._snapped > self._completed else Signal.COMPLETED

    def _warnings(
        self, doing: Doing, status: dict[str, Any], record: ProtectionRecord | None
    ) -> Iterable[str]:
        yield from doing.warnings
        yield from status.get("quiet") or ()
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


def _worth(header: ArenaHeader) -> tuple[bool, Label]:
    return header.state is ArenaState.COMMITTED, header.label


def _recovery(row: Round) -> Round:
    """Not the names of all nodes, from each of them; and no text or list that has no bound (P9)."""
    failures, lost = ([cut(said) for said in texts[:MOST_WARNINGS]] for texts in (row.failures, row.lost))
    source = cut(row.resumed_from)
    return replace(row, nodes=[], joined=[], left=[], failures=failures, lost=lost, resumed_from=source)


def _stale(status: dict[str, Any]) -> str:
    return f"no version since step {status['stale_since_step']}: {status.get('stale_cause')}"
