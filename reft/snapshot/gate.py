"""The gate that the copying thread passes before it copies a chunk. The gate in this module
admits everything."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission to copy a number of bytes."""

    # When the bytes are copied: 1 in a window (an idle interval of the pipeline), 2 during
    # computation, 3 during communication, 0 while training waits for them
    tier: int
    window: int | None = None  # Number of the window (tier 1); None outside of windows
    nbytes: int = 1  # Bytes that may be copied before the next permit; at least one chunk
    mark: Any = None  # Stamp of the device's clock at which the copy may start; None for at once
    # Stop flag shared with the C++ copier: training sets it to nonzero, and the copier reads it
    # between chunks without a lock. A late read costs at most one more chunk. None: no stop flag.
    until: ctypes.c_int | None = field(default=None, compare=False)


EXPEDITED = Permit(0, nbytes=UNLIMITED)


class Gate:
    """The gate between the training thread and the copying thread, which lets copies run. Each
    method says which thread calls it.

    This class admits every copy at once. It is used for versions that are not paced (restricted to
    windows), and for the baselines.

    Args:
        tier: tier in which chunks are counted; 0 if training waits for them.
        hurried: returns True once training waits at the fence; chunks then count as tier 0.
    """

    # If training has not called the gate for this number of seconds, copies continue without a
    # window
    patience_secs = 0.0
    # True while a version waits for this gate to admit its copy, or is being copied
    wanted = False

    def __init__(self, tier: int = 2, hurried: Callable[[], bool] = lambda: False) -> None:
        self._permit = Permit(tier, nbytes=UNLIMITED)
        self._hurried = hurried

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        """Open a window, since the device will be idle or communicate from now on. Called by the
        training thread.

        Args:
            window: number of the window; None for communication.
            nbytes: number of bytes planned for the window.
            mark: stamp of the device's clock at the beginning of the window.
        """

    def close(self) -> float:
        """Close the window, since the device computes again. Called by the training thread.
        Waits for the chunk in flight, up to a limit, so that no chunk overlaps the next training
        instruction.

        Returns:
            The seconds waited.
        """
        return 0.0

    def expedite(self) -> None:
        """Let all remaining chunks through until :meth:`reset`. Called by the training thread when
        it waits at the fence until they are copied, or soon will."""

    def reset(self) -> None:
        """Admit nothing until :meth:`enter`, because the version has ended. Called by the
        training thread."""

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        """Set how much may be copied outside of windows.

        Args:
            part: fraction of the time in which chunks may run there, 0 to 1; for synchronous
                engines.
            nbytes: bytes of each version to copy there; for asynchronous engines, if the plan
                has no window.
            bytes_per_sec: rate at which these bytes are admitted.
        """

    def enter(self, draining: bool = False) -> None:
        """Begin to admit chunks of a version that was handed to the worker. Called by the
        training thread.

        Args:
            draining: True if an older version is still being drained, which is copied first.
        """

    def begin(self) -> None:
        """The copy of the newest version begins: discard windows that opened before the copying
        thread received that version. Called by the copying thread."""

    def leave(self) -> None:
        """Stop admitting, since no version is left to copy. Called by the copying thread."""

    def admit(self) -> Permit:
        """Wait until a chunk may be copied, and return the permit. Called by the copying thread,
        which must give each permit back with :meth:`release`: :meth:`close` waits for chunks
        that hold one."""
        return EXPEDITED if self._hurried() else self._permit

    def release(self, permit: Permit, secs: float) -> None:
        """Give a permit back after the copy, which took ``secs`` seconds. Called by the copying
        thread."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Record of a chunk that was copied."""

    # When the chunk was copied: 1 in a window, 2 during computation, 3 during communication, 0
    # while training waited or without pacing
    tier: int
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None  # Number of the window in the plan; None outside of windows
    section: str  # Section of the stage image: "replicated", "owned" or "host"
