"""What a simulated step looked like: frozen, printable, and convertible to a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reft.pacing.schedule import InstructionRecord, StepTrace, Window
from reft.snapshot.gate import ChunkRecord

from .copying import Piece, Tier, bytes_by_tier
from .instructions import Compute, Instruction, MicroBatchInstruction


@dataclass(frozen=True, slots=True)
class Interval:
    """One executed instruction.

    Attributes:
        position: index in the stage's stream.
        instruction: what was executed.
        ready_secs: when the stage came to it.
        begin_secs: when it began to do something; until then it waited for another stage.
        end_secs: when the stage moved on.
    """

    position: int
    instruction: Instruction
    ready_secs: float
    begin_secs: float
    end_secs: float

    @property
    def waited_secs(self) -> float:
        return self.begin_secs - self.ready_secs

    @property
    def busy_secs(self) -> float:
        return self.end_secs - self.begin_secs


@dataclass(frozen=True)
class StageResult:
    """One stage's step.

    Attributes:
        stage_id: 0-based.
        intervals: every instruction, in order.
        windows: where it waited for other stages, in order.
        pieces: when its snapshot was copied, in order.
        fence_secs: how long all stages waited for its snapshot before the optimizer.
    """

    stage_id: int
    intervals: tuple[Interval, ...]
    windows: tuple[Window, ...]
    pieces: tuple[Piece, ...] = ()
    fence_secs: float = 0.0

    @cached_property
    def end_secs(self) -> float:
        return self.intervals[-1].end_secs if self.intervals else 0.0

    @cached_property
    def compute_secs(self) -> float:
        """Forward and backward."""
        return sum(i.busy_secs for i in self.intervals if isinstance(i.instruction, Compute))

    @cached_property
    def idle_secs(self) -> float:
        """Waiting for other stages."""
        return sum(w.length_secs for w in self.windows)

    @cached_property
    def other_secs(self) -> float:
        """Transfers, reductions, data loading and the optimizer."""
        return sum(i.busy_secs for i in self.intervals if not isinstance(i.instruction, Compute))


@dataclass(frozen=True)
class Simulation:
    """One simulated step of a pipeline.

    Attributes:
        schedule: its name.
        micro_batches: m.
        stages: by stage.
    """

    schedule: str
    micro_batches: int
    stages: tuple[StageResult, ...]

    @cached_property
    def makespan_secs(self) -> float:
        """From the first instruction of any stage to the last of all."""
        return max(stage.end_secs for stage in self.stages)

    @cached_property
    def bubble_fraction(self) -> float:
        """Share of all stages' time in which they wait for others."""
        idle_secs = sum(s.idle_secs + self.makespan_secs - s.end_secs for s in self.stages)
        return idle_secs / (len(self.stages) * self.makespan_secs)

    def to_traces(self, step: int = 1, start_secs: float = 0.0) -> tuple[StepTrace, ...]:
        """As the hook would have recorded it, one trace per stage; ranks are the stages.

        Where queued transfers waited is a matter of the ``CommitP2P`` that started them.
        """
        return tuple(_trace(stage, step, start_secs) for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain values, labelled as simulated."""
        return {
            "simulated": True,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "makespan_secs": self.makespan_secs,
            "bubble_fraction": self.bubble_fraction,
            "stages": [
                {
                    "stage_id": s.stage_id,
                    "compute_secs": s.compute_secs,
                    "idle_secs": s.idle_secs,
                    "other_secs": s.other_secs,
                    "copied_bytes": {t.name.lower(): n for t, n in bytes_by_tier(s.pieces).items()},
                    "fence_secs": s.fence_secs,
                    "windows": [w.to_json() for w in s.windows],
                }
                for s in self.stages
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.schedule} (simulated): {len(self.stages)} stages, {self.micro_batches} "
            f"micro-batches, {self.makespan_secs:.6g} s, bubble {self.bubble_fraction:.1%}"
        )
        for s in self.stages:
            windows = ", ".join(f"{w.kind} {w.length_secs:.4g}" for w in s.windows) or "none"
            yield (
                f"  stage {s.stage_id}: compute {s.compute_secs:.4g} s, other {s.other_secs:.4g} "
                f"s, idle {s.idle_secs:.4g} s ({windows})"
            )


def _trace(stage: StageResult, step: int, start_secs: float) -> StepTrace:
    records = tuple(
        InstructionRecord(
            i.position,
            i.instruction.name,
            i.instruction.micro_batch if isinstance(i.instruction, MicroBatchInstruction) else None,
            start_secs + i.ready_secs,
            start_secs + i.end_secs,
        )
        for i in stage.intervals
    )
    return StepTrace(
        step=step,
        rank=stage.stage_id,
        stage_id=stage.stage_id,
        begin_secs=start_secs,
        end_secs=start_secs + stage.end_secs,
        instructions=records,
        chunks=tuple(_chunk(piece, stage.windows, start_secs) for piece in stage.pieces),
        fence_secs=stage.fence_secs,
    )


def _chunk(piece: Piece, windows: tuple[Window, ...], start_secs: float) -> ChunkRecord:
    inside = (n for n, w in enumerate(windows) if w.start_secs <= piece.begin_secs < w.stop_secs)
    return ChunkRecord(
        tier=int(piece.tier),
        nbytes=round(piece.nbytes),
        begin_secs=start_secs + piece.begin_secs,
        end_secs=start_secs + piece.end_secs,
        window=next(inside, None) if piece.tier is Tier.WAITING else None,
        section="replicated",
    )
