"""What one rank did in one step, instruction by instruction and chunk by chunk: plain data.

Times are ``time.perf_counter()`` seconds of the process; device times are mapped onto that clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One instruction of the schedule that the engine executed."""

    # index in the stage's flattened instruction stream of one step, woven instructions not counted
    position: int
    name: str  # class name, for example ``"RecvActivation"``
    micro_batch: int | None  # the micro batch it works on; None where the schedule does not say
    begin_secs: float  # begin_secs, end_secs: when its call began and returned
    end_secs: float


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of state that was copied."""

    tier: int  # 1 in a bubble, 2 beside computation, 3 beside communication; 0 at the fence or forced
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None  # index into the windows of the plan; None outside of windows
    section: str  # section of the stage image ("replicated", "owned", "host")


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step of one rank."""

    step: int  # global step after it (``engine.global_steps``)
    rank: int
    stage_id: int
    # begin_secs, end_secs: when the engine began to execute the schedule, and when the step boundary had been
    # handled
    begin_secs: float
    end_secs: float
    instructions: tuple[InstructionRecord, ...]  # in order of execution
    # in order of copying; those of the version that was copied *during* this step
    chunks: tuple[ChunkRecord, ...]
    fence_secs: float  # seconds the training thread waited before the optimizer step

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepTrace:
        """The inverse of :meth:`to_json`."""
        fields = dict(data)
        fields["instructions"] = tuple(InstructionRecord(**i) for i in data["instructions"])
        fields["chunks"] = tuple(ChunkRecord(**c) for c in data["chunks"])
        return cls(**fields)
