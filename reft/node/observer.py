"""Observes one node from its files, and makes the report that its launcher sends.

It sends no requests, so no process can fail to answer: trainers, daemon and launcher write progress
pages, arena headers and small files as they run, and the observer reads these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from reft.errors import ReftError
from reft.grid import Coordinate, VersionId
from reft.memory.header import ArenaHeader, ArenaState
from reft.memory.jobdir import DAEMON_FILE, STATUS_FILE, JobDir, is_running, read_json
from reft.memory.protection_record import ProtectionRecord, read_record
from reft.node.client import find_stale, read_trainer_reports
from reft.node.commit_watch import CommitWatch
from reft.node.history import RoundReport, read_history, restarts_among
from reft.node.memory_watch import MemoryWatch
from reft.node.progress import Phase, TrainerView, read_pages, read_times
from reft.node.report import MAX_WARNINGS, HealthSignal, NodeReport, Shard, shorten

_RATE_STEPS = 64  # Steps over which the speed is measured
_MAX_STEPS = 32  # Last steps of each rank in a report
_MAX_MEMORIES = 24
_MAX_RUNNING_OUT = 3
# Steps without a new version after which a node is unhealthy. Fewer are normal: a busy machine
# skips a version from time to time.
_STALE_STEPS = 10
_NANOS_PER_SEC = 10**9

_Label = tuple[int, int]  # Incarnation and step of a version


class StepRate:
    """Computes steps per second over the last 64 steps, including the time between steps."""

    def __init__(self) -> None:
        # (step number, time of that step in nanoseconds on the monotonic clock)
        self._steps: deque[tuple[int, int]] = deque(maxlen=_RATE_STEPS)
        self._pid = 0

    def poll(self, page: TrainerView) -> float | None:
        """Read the step number from a trainer's progress page.

        Returns:
            The steps per second; None until two different steps have been seen.
        """
        restarted = page.pid != self._pid or (self._steps and page.step < self._steps[-1][0])
        if restarted:
            self._pid = page.pid
            self._steps.clear()
        is_new = not self._steps or page.step > self._steps[-1][0]
        if page.phase not in (Phase.LOADING, Phase.FIRST_STEP) and is_new:
            self._steps.append((page.step, page.nanos))
        if len(self._steps) < 2:
            return None
        (first, began), (last, ended) = self._steps[0], self._steps[-1]
        return (last - first) * _NANOS_PER_SEC / max(1, ended - began)


class NodeObserver:
    """Observes one node from its files repeatedly. Used by one thread."""

    def __init__(self, path: Path, *, has_daemon: bool) -> None:
        self._path = path
        self._has_daemon = has_daemon
        self._rate = StepRate()
        self._memory: MemoryWatch | None = None  # Created once there are trainers
        self._step: int | None = None
        self._arenas: CommitWatch | None = None
        self._times: dict[HealthSignal, float] = {}
        self._signal: HealthSignal | None = None
        self._begun_label: _Label = (0, 0)
        self._complete_label: _Label = (0, 0)

    def poll(self, own_report: NodeReport) -> NodeReport:
        """Read the node's files, and return the node's whole report.

        Args:
            own_report: the launcher's part of the report: its state, the round of its trainers,
                the time at which they started, and why they failed.
        """
        pages = read_pages(self._path)
        headers: list[ArenaHeader] = []
        with suppress(OSError, ReftError):
            self._arenas = self._arenas or CommitWatch(JobDir.open(self._path))
            headers = self._arenas.headers()
        persist = (read_json(self._path / STATUS_FILE) or {}).get("persist") or {}
        stale = find_stale(read_trainer_reports(self._path).values())
        record = read_record(self._path)
        restarts = restarts_among(read_history(self._path))
        # Keep the last observed step: trainers remove their pages when they end.
        self._step = step = max((page.step for page in pages), default=self._step)
        self._note_versions(headers)
        steps_per_sec = self._rate.poll(pages[0]) if pages else None
        if self._memory is None and pages:
            self._memory = MemoryWatch(self._path)
        if self._memory is not None:
            self._memory.poll(pages, steps_per_sec)
        why = own_report.why
        if not why and stale and step is not None and step - stale[0] >= _STALE_STEPS:
            why = _describe_stale(*stale)
        started = own_report.times.get(HealthSignal.HEALTHY, 0.0)
        known = self._times.get(HealthSignal.HEALTHY)
        self._times[HealthSignal.HEALTHY] = started or known or time.time()
        self._signal = self._choose_signal(started, bool(pages), why)
        observed: dict[str, Any] = {
            "signal": self._signal,
            "times": dict(self._times),
            "why": why,
            "step": step,
            "steps_per_sec": steps_per_sec,
            "shards": _newest_shards(headers),
            "trainers": sum(page.state not in ("", "Z") for page in pages),
            "tolerance": None if record is None else record.tolerance,
            "restarts": len(restarts),
            "recovery": _bounded(restarts[-1]) if restarts else None,
            "warnings": tuple(self._warnings(own_report, stale, persist, record)),
            "memory": self._memory.uses[:_MAX_MEMORIES] if self._memory else (),
            "runs_out": self._memory.runs_out[:_MAX_RUNNING_OUT] if self._memory else (),
            "ranks": tuple(
                replace(rank, steps=rank.steps[-_MAX_STEPS:]) for rank in read_times(self._path)
            ),
        }
        return NodeReport(**{**dict(own_report), **observed})

    def _note_versions(self, headers: list[ArenaHeader]) -> None:
        """Record when the newest version was begun, and when a version was last completed.

        A version is complete once all ranks that keep an arena on this node have completed it.
        """
        begun = max(map(_label, headers), default=(0, 0))
        complete = _newest_complete(headers)
        if begun > self._begun_label:
            # Not at the first poll: an incomplete version may have been begun long ago.
            if self._signal is not None:
                self._times[HealthSignal.SNAP] = time.time()
            self._begun_label = begun
        if complete > self._complete_label:
            self._complete_label = complete
            sealed = max(h.sealed_unix_secs for h in headers if _label(h) == complete)
            self._times[HealthSignal.COMPLETED] = sealed
            if begun == complete:  # The version was begun and completed between two polls
                began = self._times.get(HealthSignal.SNAP, sealed)
                self._times[HealthSignal.SNAP] = min(began, sealed)

    def _choose_signal(self, started: float, has_trainers: bool, why: str) -> HealthSignal:
        if why:
            if self._signal is not HealthSignal.UNHEALTHY:
                self._times[HealthSignal.UNHEALTHY] = time.time()
            return HealthSignal.UNHEALTHY
        # Ignore versions from before this start of the trainers.
        version_times = [
            self._times.get(s, 0.0) for s in (HealthSignal.SNAP, HealthSignal.COMPLETED)
        ]
        if not has_trainers or max(version_times) <= started:
            return HealthSignal.HEALTHY
        if self._begun_label > self._complete_label:
            return HealthSignal.SNAP
        return HealthSignal.COMPLETED

    def _warnings(
        self,
        own_report: NodeReport,
        stale: tuple[int, str] | None,
        persist: Mapping[str, Any],
        record: ProtectionRecord | None,
    ) -> Iterator[str]:
        yield from own_report.warnings
        if stale is not None:
            yield _describe_stale(*stale)
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


def _label(header: ArenaHeader) -> _Label:
    return header.label.incarnation, header.label.step


def _newest_complete(headers: Iterable[ArenaHeader]) -> _Label:
    """Find the newest version for which all ranks that keep an arena on this node are complete."""
    newest: dict[Coordinate, _Label] = {}
    for header in headers:
        if header.state.whole:
            known = newest.get(header.coordinate, (0, 0))
            newest[header.coordinate] = max(known, _label(header))
    return min(newest.values(), default=(0, 0))


def _newest_shards(headers: Iterable[ArenaHeader]) -> tuple[Shard, ...]:
    """Choose a shard for each rank that keeps arenas on this node.

    The newest committed shard is chosen; if none is committed, the newest complete one.
    """

    def worth(header: ArenaHeader) -> tuple[bool, VersionId]:
        return header.state is ArenaState.COMMITTED, header.label

    newest: dict[Coordinate, ArenaHeader] = {}
    for header in headers:
        known = newest.get(header.coordinate)
        if header.state.whole and (known is None or worth(header) > worth(known)):
            newest[header.coordinate] = header
    return tuple(
        Shard(
            at=(h.coordinate.pp, h.coordinate.dp, h.coordinate.tp),
            degrees=(h.degrees.pp, h.degrees.dp, h.degrees.tp),
            label=_label(h),
            scheme=h.scheme,
            sealed_unix_secs=h.sealed_unix_secs,
            committed=h.state is ArenaState.COMMITTED,
        )
        for _, h in sorted(newest.items())
    )


def _bounded(row: RoundReport) -> RoundReport:
    """Shorten the texts and lists of a round, and leave out the names of its nodes (P9).

    All nodes send this round in their reports, and each would repeat the names of all nodes.
    """
    failures = [shorten(text) for text in row.failures[:MAX_WARNINGS]]
    lost = [shorten(text) for text in row.lost[:MAX_WARNINGS]]
    source = shorten(row.resumed_from)
    return replace(
        row, nodes=[], joined=[], left=[], failures=failures, lost=lost, resumed_from=source
    )


def _describe_stale(since_step: int, cause: str) -> str:
    return f"no version since step {since_step}: {cause}"
