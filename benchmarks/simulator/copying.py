"""Snapshots in the simulator: a copy that runs beside a stage's step and slows it down.

The model is a fluid one. At any moment a stage waits, computes or communicates; in each of the
three the copy moves at some part of its bandwidth and the work moves at some part of its speed.
What is left when the stage comes to its optimizer step is copied there first (the fence).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from reft.errors import ConfigError

from .instructions import Compute, Instruction, OptimizerStep, Reduction, Transfer


class Tier(IntEnum):
    """Beside what a piece was copied, as :class:`reft.snapshot.gate.ChunkRecord` has it."""

    FENCE = 0
    WAITING = 1
    COMPUTING = 2
    COMMUNICATING = 3


@dataclass(frozen=True, slots=True)
class Beside:
    """Speeds while copy and work run at the same time.

    Attributes:
        copy: part of the copy's bandwidth, 0 to 1; 0 means the copy pauses.
        work: part of the work's speed, above 0.
    """

    copy: float = 0.0
    work: float = 1.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.copy <= 1.0 and 0.0 < self.work <= 1.0):
            raise ConfigError(f"speeds are parts of 1, that of the work above 0; got {self}")


PAUSED = Beside()


@dataclass(frozen=True, slots=True)
class Copying:
    """One stage's snapshot of one step. It begins with the step.

    Attributes:
        nbytes: what one rank copies.
        bytes_per_sec: when nothing else runs.
        at_once: the step begins when everything is copied (the blocking variant).
        waiting: part of the bandwidth while the stage waits for others.
        computing: beside forwards and backwards.
        communicating: beside transfers and reductions.
    """

    nbytes: float
    bytes_per_sec: float
    at_once: bool = False
    waiting: float = 1.0
    computing: Beside = PAUSED
    communicating: Beside = PAUSED

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.bytes_per_sec <= 0:
            raise ConfigError(
                f"bytes must not be negative and bandwidth must be positive; got {self}"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of time in which something was copied.

    Attributes:
        tier: beside what. nbytes: how much. begin_secs, end_secs: when, on the step's clock.
    """

    tier: Tier
    nbytes: float
    begin_secs: float
    end_secs: float


@dataclass
class CopyProgress:
    """How far the copy of one stage is."""

    copying: Copying
    left_secs: float = field(init=False)
    """Seconds that the rest would take alone."""
    pieces: list[Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left_secs = self.copying.nbytes / self.copying.bytes_per_sec

    def before_step(self) -> float:
        """Seconds by which the step begins later."""
        return self.finish(0.0, free_until_secs=0.0) if self.copying.at_once else 0.0

    def finish(self, now_secs: float, free_until_secs: float) -> float:
        """Copy the rest with nothing beside it; returns how long training has to wait for that.

        Until ``free_until_secs`` the stage would have waited for others anyway.
        """
        ends_secs = now_secs + self.left_secs
        free_secs = min(self.left_secs, max(0.0, free_until_secs - now_secs))
        self._move(Tier.WAITING, now_secs, free_secs, 1.0)
        self._move(Tier.FENCE, now_secs + free_secs, self.left_secs, 1.0)
        return max(0.0, ends_secs - max(now_secs, free_until_secs))

    def wait(self, begin_secs: float, end_secs: float) -> None:
        """The stage waits for others."""
        self._move(Tier.WAITING, begin_secs, end_secs - begin_secs, self.copying.waiting)

    def work(self, instruction: Instruction, begin_secs: float, work_secs: float) -> float:
        """The stage works on its own; how long that takes now."""
        tier, beside = self._beside(instruction)
        if beside is None or not self.left_secs or not beside.copy:
            return work_secs
        beside_secs = min(self.left_secs / beside.copy, work_secs / beside.work)
        self._move(tier, begin_secs, beside_secs, beside.copy)
        return beside_secs + max(0.0, work_secs - beside_secs * beside.work)

    def during(self, instruction: Instruction, begin_secs: float, end_secs: float) -> None:
        """The stage is busy for a time that another stage has set."""
        tier, beside = self._beside(instruction)
        if beside is not None:
            self._move(tier, begin_secs, end_secs - begin_secs, beside.copy)

    def transfer_slowdown(self) -> float:
        """How many times longer a transfer takes that this stage sends now."""
        busy = self.left_secs > 0 and self.copying.communicating.copy > 0
        return 1.0 / self.copying.communicating.work if busy else 1.0

    def _beside(self, instruction: Instruction) -> tuple[Tier, Beside | None]:
        if isinstance(instruction, Compute):
            return Tier.COMPUTING, self.copying.computing
        if isinstance(instruction, OptimizerStep):  # the copy has ended before it
            return Tier.FENCE, None
        if isinstance(instruction, (Transfer, Reduction)) or instruction.name == "CommitP2P":
            return Tier.COMMUNICATING, self.copying.communicating
        return Tier.FENCE, None

    def _move(self, tier: Tier, begin_secs: float, secs: float, rate: float) -> None:
        if rate <= 0 or secs <= 0 or self.left_secs <= 0:
            return
        used_secs = min(secs, self.left_secs / rate)
        nbytes = used_secs * rate * self.copying.bytes_per_sec
        self.left_secs = 0.0 if used_secs < secs else max(0.0, self.left_secs - used_secs * rate)
        if self.left_secs <= _ROUNDING * self.copying.nbytes / self.copying.bytes_per_sec:
            self.left_secs = 0.0
        self.pieces.append(Piece(tier, nbytes, begin_secs, begin_secs + used_secs))


_ROUNDING = 1e-12


def bytes_by_tier(pieces: Iterable[Piece]) -> dict[Tier, float]:
    """Bytes of each tier, all tiers named."""
    found = dict.fromkeys(Tier, 0.0)
    for piece in pieces:
        found[piece.tier] += piece.nbytes
    return found
