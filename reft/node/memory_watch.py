"""Looks at the memory of a node's trainers: of the host, of control groups, in the file system of the job's
memory, and of devices, as far as trainers note it on their pages. Nobody is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from reft.memory.free_memory import Bound, bounds
from reft.memory.jobdir import DAEMON_FILE, read_json
from reft.node.progress import Phase, Seen
from reft.speed.memory import MemoryTrend, MemoryUse, Point, RunsOut

_LEAST_SECS = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_CHILDREN = 32

Limits = Callable[[Path, Path], list[Bound]]


class MemoryWatch:
    """One node's. Used by one thread.

    Args:
        path: the job's memory on this node.
        limits: what limits the memory of a process, as :func:`reft.memory.free_memory.bounds`.
    """

    def __init__(self, path: Path, limits: Limits = bounds) -> None:
        self._path = path
        self._limits = limits
        self._trends: dict[str, MemoryTrend] = {}
        self._last = float("-inf")
        self._pids: tuple[int, ...] = ()
        self.uses: tuple[MemoryUse, ...] = ()
        """What is in use, of every memory that limits the trainers."""
        self.runs_out: tuple[RunsOut, ...] = ()
        """What is running out, the soonest first."""

    def look(self, pages: list[Seen], steps_per_sec: float | None) -> None:
        """Take another look. ``pages``: of the trainers; ``steps_per_sec``: of the job, None: not known."""
        now = time.monotonic()
        if now - self._last < _LEAST_SECS:
            return
        self._last = now
        living = [p for p in pages if p.state not in ("", "Z") and p.phase is not Phase.ENDED]
        pids = tuple(p.pid for p in living)
        if pids != self._pids:
            # What others took before says nothing of these.
            self._pids, self.uses, self.runs_out = pids, (), ()
            self._trends.clear()
        if not living or any(p.phase in (Phase.LOADING, Phase.FIRST_STEP) for p in living):
            return
        step = max(p.step for p in living)
        parts = dict(self._parts(living))
        uses, running_out = [], []
        for use in (*self._host(living[0].pid), *_devices(living)):
            trend = self._trends.setdefault(use.name, MemoryTrend())
            # Tensors that are made and freed within a step are in the peak alone.
            used = use.peak_bytes if use.device else use.used_bytes
            trend.see(Point(now, step, used, {} if use.device else parts), use.limit_bytes)
            peak = max(use.peak_bytes, trend.peak_bytes)
            uses.append(use.model_copy(update={"peak_bytes": peak}))
            found = trend.runs_out(use.name, use.limit_bytes, steps_per_sec=steps_per_sec, now=time.time())
            if found is not None:
                running_out.append(found)
        self.uses = tuple(uses)
        self.runs_out = tuple(sorted(running_out, key=lambda r: r.in_secs))

    def _host(self, pid: int) -> Iterator[MemoryUse]:
        for bound in self._limits(self._path, Path("/proc") / str(pid)):
            used = bound.used_bytes
            yield MemoryUse(name=bound.name, used_bytes=used, peak_bytes=used, limit_bytes=bound.limit_bytes)

    def _parts(self, pages: Iterable[Seen]) -> Iterator[tuple[str, int]]:
        """Who takes memory of the host: bytes by name. Pages of tmpfs are counted with the job's memory, not
        with the processes that map them."""
        for page in pages:
            yield f"rank {page.rank} (pid {page.pid})", private_bytes(page.pid)
            for child in _children(page.pid):
                yield f"a child of rank {page.rank} (pid {child})", private_bytes(child)
        daemon = (read_json(self._path / DAEMON_FILE) or {}).get("pid")
        if isinstance(daemon, int):
            yield f"reft's daemon (pid {daemon})", private_bytes(daemon)
        yield f"reft's launcher (pid {os.getpid()})", private_bytes(os.getpid())
        yield f"the job's memory in {self._path.parent}", _file_bytes(self._path)


def _devices(pages: Iterable[Seen]) -> Iterator[MemoryUse]:
    for page in pages:
        if (use := page.device) is not None:
            yield MemoryUse(
                name=f"the device of rank {page.rank}",
                used_bytes=use.allocated,
                peak_bytes=use.peak_allocated,
                limit_bytes=use.total,
                device=True,
                gap_bytes=max(0, use.peak_reserved - use.peak_allocated),
                retries=use.retries,
            )


def private_bytes(pid: int) -> int:
    """Of a process: in memory, and not of a file; 0 where it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return max(0, int(fields[1]) - int(fields[2])) * _PAGE
    return 0


def _children(pid: int) -> list[int]:
    """Those of its main thread, such as a loader's workers."""
    with suppress(OSError, ValueError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()][:_MOST_CHILDREN]
    return []


def _file_bytes(directory: Path) -> int:
    total = 0
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def fullest(uses: Iterable[MemoryUse]) -> MemoryUse | None:
    """Of the host's: that of which the greatest part was in use; None where nothing is known."""
    found = [u for u in uses if not u.device and u.limit_bytes > 0]
    return max(found, key=lambda u: u.peak_bytes / u.limit_bytes, default=None)
