"""What one rank did in one step, instruction by instruction and chunk by chunk: plain data.

Times are ``time.perf_counter()`` seconds of the process; device times are mapped onto that clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One instruction of the schedule that the engine executed.

    Attributes:
        position: index in the stage's flattened instruction stream of one step, woven instructions not
            counted.
        name: class name, for example ``"RecvActivation"``.
        micro_batch: the micro batch it works on; None where the schedule does not say.
        begin_secs, end_secs: when its call began and returned.
    """

    position: int
    name: str
    micro_batch: int | None
    begin_secs: float
    end_secs: float


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of state that was copied.

    Attributes:
        tier: 1 in a bubble, 2 beside computation, 3 beside communication; 0 at the fence or forced.
        window: index into the windows of the plan; None outside of windows.
        section: section of the stage image ("replicated", "owned", "host").
    """

    tier: int
    nbytes: int
    begin_secs: float
    end_secs: float
    window: int | None
    section: str


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step of one rank.

    Attributes:
        step: global step after it (``engine.global_steps``).
        begin_secs, end_secs: when the engine began to execute the schedule, and when the step boundary had
            been handled.
        instructions: in order of execution.
        chunks: in order of copying; those of the version that was copied *during* this step.
        fence_secs: seconds the training thread waited before the optimizer step.
    """

    step: int
    rank: int
    stage_id: int
    begin_secs: float
    end_secs: float
    instructions: tuple[InstructionRecord, ...]
    chunks: tuple[ChunkRecord, ...]
    fence_secs: float

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
