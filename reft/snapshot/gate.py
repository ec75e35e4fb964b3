"""The gate that the copying thread passes before every chunk. The one here admits everything."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission to copy."""

    tier: int  # 1, 2, 3, or 0 for bytes that the fence waits for
    window: int | None = None  # Number of the window (tier 1); None outside of windows
    nbytes: int = 1  # Bytes that may be copied before the next permit; at least one chunk
    mark: Any = None  # Stamp of the device; the copy starts no earlier
    # Stop flag shared with the C++ copier: training sets it to nonzero, and the copier reads it
    # between chunks without a lock. A late read costs at most one more chunk. None: no stop flag.
    until: ctypes.c_int | None = field(default=None, compare=False)


EXPEDITED = Permit(0, nbytes=UNLIMITED)


class Gate:
    """Shared by the training thread (T) and the copying thread (W).

    This class admits everything at once: for versions that are not paced, and for the baselines.

    Args:
        tier: tier that chunks are counted in; 0 if training waits for them.
        hurried: returns True once the fence waits; chunks then count as tier 0.
    """

    patience_secs = 0.0  # Silence of training after which copies continue without a window
    wanted = False  # A version is waiting to be copied, or is being copied, through this gate

    def __init__(self, tier: int = 2, hurried: Callable[[], bool] = lambda: False) -> None:
        self._permit = Permit(tier, nbytes=UNLIMITED)
        self._hurried = hurried

    def open(self, window: int | None, nbytes: int, mark: Any) -> None:
        """T: the device will be idle now, or communicate.

        Args:
            window: number of the window; None for communication.
            nbytes: bytes planned for this time.
            mark: stamp of the device at its beginning.
        """

    def close(self) -> float:
        """T: the device computes again. Waits for the chunk in flight, up to a limit, so that no
        chunk overlaps the next training instruction.

        Returns:
            Seconds waited.
        """
        return 0.0

    def expedite(self) -> None:
        """T: the fence waits: admit everything until :meth:`reset`."""

    def reset(self) -> None:
        """T: the version has ended: admit nothing until :meth:`enter`."""

    def share(self, part: float, nbytes: int = 0, bytes_per_sec: float = math.inf) -> None:
        """Set how much may be copied outside of windows.

        Args:
            part: fraction of the time in which chunks may run there, 0 to 1; for synchronous
                engines.
            nbytes: bytes of each version; for asynchronous engines, if the plan has no window.
            bytes_per_sec: rate at which these bytes are admitted.
        """

    def enter(self, draining: bool = False) -> None:
        """T: a version was handed over.

        Args:
            draining: an older version is still being drained, and is copied first.
        """

    def begin(self) -> None:
        """W: the newest version's copy begins. It must not use windows that opened before it was
        handed over."""

    def leave(self) -> None:
        """W: no version is left to copy."""

    def admit(self) -> Permit:
        """W: wait until a chunk may run. Each permit is returned through :meth:`release`, since
        :meth:`close` waits for chunks that hold one."""
        return EXPEDITED if self._hurried() else self._permit

    def release(self, permit: Permit, secs: float) -> None:
        """W: the chunk was copied and took ``secs``."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of state that was copied."""

    # 1 in a bubble, 2 during computation, 3 during communication; 0 at the fence or forced
    tier: int
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None  # Index of the plan's window; None outside of windows
    section: str  # Section of the stage image: "replicated", "owned" or "host"
