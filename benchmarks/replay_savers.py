"""Ways to save the stage that :mod:`replay_stage` replays, and the bytes that they copy."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from reft.snapshot.copying import CopyEngine, CopyTicket, Mark
from reft.snapshot.has import Bandwidth, HasSchedule, Interval, plan_schedule
from reft.snapshot.plan import shard_cuts
from reft.snapshot.windows import Window
from reft.state.catalogue import SectionImage
from reft.store.arena import Arena

NONE = "none"

# --- what is copied ----------------------------------------------------------------------------------


class Version:
    """The bytes of one snapshot: ranges of the image, cut into chunks, and the arena they go to.

    Args:
        image: of the stage.
        parts: replicas; this one is the first.
        copies: neighbours whose shards are kept too.
        chunk_bytes: unit of copying.
        folder: tmpfs for the arena.
    """

    def __init__(self, image: SectionImage, parts: int, copies: int, chunk_bytes: int, folder: Path) -> None:
        cuts = shard_cuts(image.nbytes, parts)
        self.image = image
        self.nbytes = cuts[min(parts, 1 + copies)]
        self.arena = Arena.create(folder / "has_gpu.arena", self.nbytes, 1, b"benchmark".ljust(32, b"."))
        self.target = torch.frombuffer(self.arena.data, dtype=torch.uint8)
        self.chunks = [
            image.pieces_into(start, self.target[start : start + chunk_bytes])
            for start in range(0, self.nbytes, chunk_bytes)
        ]

    def close(self) -> None:
        """Remove the arena; the engine must have let go of it."""
        self.arena.close()
        self.arena.path.unlink(missing_ok=True)

    def expected(self) -> torch.Tensor:
        """What a snapshot of the state of now has to hold; the device must be idle."""
        found = torch.empty(self.nbytes, dtype=torch.uint8)
        self.image.read_into(0, found)
        return found


# --- ways to save ------------------------------------------------------------------------------------


class NoSaver:
    """Training alone; what a way to save does at the points of a step, on the training thread."""

    name = NONE

    def begin(self) -> None:
        pass

    def window(self, position: int) -> None:
        pass

    def gap(self, position: int) -> None:
        pass

    def fence(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def rate(self) -> float | None:
        """Bytes per second of the newest snapshot, over the time in which it was copied."""
        return None


class _EngineSaver(NoSaver):
    """Copies through reft's engine for the device."""

    def __init__(self, version: Version, engine: CopyEngine, thread: ThreadPoolExecutor) -> None:
        self.version, self.engine, self.thread = version, engine, thread
        self.tickets: list[CopyTicket] = []

    def begin(self) -> None:
        self.tickets = []
        self.engine.begin()

    def fence(self) -> None:
        self.engine.fence()

    def finish(self) -> None:
        self.engine.synchronize()

    def rate(self) -> float | None:
        times = [t.secs for t in self.tickets if t.secs is not None and t.nbytes]
        if not times:
            return None
        busy_secs = self._busy_secs(times)
        return self.version.nbytes / busy_secs if busy_secs > 0 else None

    def _busy_secs(self, times: list[tuple[float, float]]) -> float:
        """Seconds in which the link had something to do: all of it, but for a way that waits between."""
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def copy(self, first: int, stop: int, after: Mark | None = None) -> None:
        for chunk in self.version.chunks[first:stop]:
            self.tickets.append(self.engine.copy(chunk, after))


class BlockingSaver(_EngineSaver):
    name = "blocking"

    def begin(self) -> None:
        super().begin()
        self.copy(0, len(self.version.chunks))
        self.engine.synchronize()


class HostDeviceSaver(_EngineSaver):
    name = "host_device"

    def begin(self) -> None:
        super().begin()
        self._queued = self.thread.submit(self.copy, 0, len(self.version.chunks))

    def fence(self) -> None:
        self._queued.result()
        super().fence()


class HostSaver(NoSaver):
    """A thread with blocking copies into memory that no driver knows. They run on the stream that a
    new thread finds, which is the one that trains."""

    name = "host"

    def __init__(self, version: Version, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self.target = torch.zeros(version.nbytes, dtype=torch.uint8)
        self._pieces = version.image.pieces_into(0, self.target)

    def begin(self) -> None:
        self._done: Future[None] = self._thread.submit(self._copy)

    def _copy(self) -> None:
        for source, target in self._pieces:
            target.copy_(source)

    def fence(self) -> None:
        self._done.result()


class HasSaver(_EngineSaver):
    """Chunks in the bubbles of the plan, then beside computation, the rest before the fence."""

    name = "has"

    def __init__(
        self, version: Version, engine: CopyEngine, thread: ThreadPoolExecutor, plan: Plan, chunk_bytes: int
    ) -> None:
        super().__init__(version, engine, thread)
        self._plan = plan
        self._chunk_bytes = chunk_bytes

    def begin(self) -> None:
        super().begin()
        self._next, self._credit, self._queued = 0, 0.0, [self.thread.submit(lambda: None)]
        self.gap(_START)

    def window(self, position: int) -> None:
        self._release(self._plan.window_bytes.get(position, 0))

    def gap(self, position: int) -> None:
        self._release(self._plan.gap_bytes.get(position, 0))

    def _release(self, nbytes: int) -> None:
        """Queue what the plan has for here; parts of a chunk are saved up for the next time."""
        self._credit += nbytes / self._chunk_bytes
        stop = min(self._next + int(self._credit), len(self.version.chunks))
        if stop > self._next:
            self._queued.append(self.thread.submit(self.copy, self._next, stop, self.engine.mark()))
            self._credit -= stop - self._next
            self._next = stop

    def _busy_secs(self, times: list[tuple[float, float]]) -> float:
        return sum(end - begin for begin, end in times)

    def fence(self) -> None:
        self._queued.append(self.thread.submit(self.copy, self._next, len(self.version.chunks)))
        for queued in self._queued:
            queued.result()
        super().fence()


# --- the plan of has ---------------------------------------------------------------------------------

_START = -1
"""Stands for the begin of a step that begins with computing."""


@dataclass(frozen=True)
class Plan:
    """A schedule, by the positions of the instruction stream where it acts."""

    schedule: HasSchedule
    window_bytes: dict[int, int]
    gap_bytes: dict[int, int]


def make_plan(nbytes: int, windows: Sequence[Window], bytes_per_sec: float, step_secs: float) -> Plan:
    """Plan one version of ``nbytes`` for a stage that computes wherever it does not wait."""
    starts = {w.position: w.stop_secs for w in windows}
    if not windows or windows[0].start_secs > 0:
        starts[_START] = 0.0
    stops = sorted([*(w.start_secs for w in windows), step_secs])
    gaps = {
        position: Interval(start, next(s for s in stops if s > start))
        for position, start in starts.items()
        if start < step_secs
    }
    schedule = plan_schedule(
        {"replicated": nbytes},
        windows,
        Bandwidth(window=bytes_per_sec, compute=bytes_per_sec),
        step_secs=step_secs,
        computing=tuple(gaps.values()),
        estimator="analytic",
    )
    return Plan(
        schedule,
        schedule.budgets(),
        {position: p.nbytes for position, p in zip(gaps, schedule.computing, strict=True)},
    )
