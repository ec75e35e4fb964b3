"""Ways to save the stage that :mod:`replay_stage` replays, and the bytes that they copy."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from reft.grid import ALIGNMENT_BYTES
from reft.pacing.schedule import Bandwidth, HasLimits, HasSchedule, Interval, Window, plan_schedule
from reft.snapshot.plan import shard_cuts
from reft.state.catalogue import SectionImage

NONE = "none"

# --- what is copied -------------------------------------------------------------------------------


class Version:
    """The bytes of one snapshot: the front of a stage's state, as much as one replica keeps.

    Args:
        named: tensors of the stage, by name.
        parts: replicas; this one is the first.
        copies: neighbours whose shards are kept too.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], parts: int, copies: int) -> None:
        whole = SectionImage(named)
        left = shard_cuts(whole.nbytes, parts)[min(parts, 1 + copies)]
        front = []
        for name, tensor in named:
            taken = tensor.detach().reshape(-1)[: max(0, left // tensor.element_size())]
            if taken.numel():
                front.append((name, taken))
            left -= -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.image = SectionImage(front)
        self.nbytes = self.image.nbytes

    def expected(self) -> torch.Tensor:
        """What a snapshot of the state of now has to hold; the device must be idle."""
        found = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.image.read_into(0, found)
        return found


# --- ways to save ---------------------------------------------------------------------------------


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

    def stepped(self, names: Sequence[str]) -> None:
        """The optimizer step was queued; ``names`` of the step's instructions."""

    def differing(self, expected: torch.Tensor) -> int | None:
        """Wrong bytes of the newest snapshot, behind :meth:`finish`; None where there is none."""
        return None

    def finish(self) -> None:
        pass

    def rate(self) -> float | None:
        """Bytes per second of the newest snapshot, over the time in which it was copied."""
        return None


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

    def differing(self, expected: torch.Tensor) -> int | None:
        return int((self.target != expected).sum())


# --- the plan of has ------------------------------------------------------------------------------

_START = -1
"""Stands for the begin of a step that begins with computing."""


def make_plan(
    nbytes: int, windows: Sequence[Window], bytes_per_sec: float, step_secs: float
) -> HasSchedule:
    """What would fit where at an assumed bandwidth, of a stage that computes wherever it does not
    wait."""
    starts = {w.position: w.stop_secs for w in windows}
    if not windows or windows[0].start_secs > 0:
        starts[_START] = 0.0
    stops = sorted([*(w.start_secs for w in windows), step_secs])
    gaps = {
        position: Interval(start, next(s for s in stops if s > start))
        for position, start in starts.items()
        if start < step_secs
    }
    return plan_schedule(
        {"replicated": nbytes},
        windows,
        Bandwidth(window=bytes_per_sec, compute=bytes_per_sec),
        step_secs=step_secs,
        computing=tuple(gaps.values()),
        limits=HasLimits(compute_share=1.0),
        estimator="analytic",
    )
