"""The gate that the copying thread passes before every chunk. The core's own admits everything."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to copy."""

    tier: int  # 1, 2, 3, or 0 for what the fence waits for
    window: int | None = None  # number of the window; None outside of windows (tier 1)
    nbytes: int = 1  # how much may be copied before asking again; at least one chunk
    mark: Any = None  # start no earlier than there
    # where a copy can be broken off between chunks, it goes on until training makes this anything
    # but 0
    until: ctypes.c_int | None = field(default=None, compare=False)


EXPEDITED = Permit(0, nbytes=UNLIMITED)


class Gate:
    """What the training thread (T) and the copying thread (W) share.

    This one lets everything through at once: for versions that are not paced, and for the
    baselines. ``tier``: what chunks count as; 0 where training waits for them. ``hurried``: whether
    the fence waits by now; then chunks count as tier 0 too."""

    patience_secs = 0.0  # how long training may be silent before copies go on without a window
    wanted = False  # whether a version is to be copied, or being copied, through this gate

    def __init__(self, tier: int = 2, hurried: Callable[[], bool] = lambda: False) -> None:
        self._permit = Permit(tier, nbytes=UNLIMITED)
        self._hurried = hurried

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        """T: the device will wait now, or, without a window, communicate; ``nbytes`` are planned
        for that."""

    def close(self) -> float:
        """T: the device goes on. Returns the seconds waited for the chunk in flight, which is not
        waited for any more once it has lasted too long."""
        return 0.0

    def expedite(self) -> None:
        """T: let everything through until :meth:`reset`; the fence waits."""

    def reset(self) -> None:
        """T: end of the version: nothing is to be copied until :meth:`enter`."""

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        """What may be copied outside of windows. ``part``: of the time in which chunks may run
        there, 0 to 1, for engines that are done when a call returns. ``nbytes``: of each version,
        for engines that queue, where the plan has no window to begin in. ``bytes_per_sec``: the
        pace of these."""

    def enter(self, draining: bool = False) -> None:
        """T: a version was handed over; ``draining``: another one is not out yet, and goes on
        first."""

    def begin(self) -> None:
        """W: the newest version's copy begins; windows from before it was handed over are not its
        own."""

    def leave(self) -> None:
        """W: nothing any more."""

    def admit(self) -> Permit:
        """W: wait until a chunk may run. Each permit is given back with :meth:`release`."""
        return EXPEDITED if self._hurried() else self._permit

    def release(self, permit: Permit, secs: float) -> None:
        """W: the chunk was copied and took ``secs``."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of state that was copied."""

    # 1 in a bubble, 2 beside computation, 3 beside communication; 0 at the fence or forced
    tier: int
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None  # index into the windows of the plan; None outside of windows
    section: str  # section of the stage image ("replicated", "owned", "host")
