"""What the storm strikes: layouts, number formats and protections, and what each is promised to survive."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.cases import OPTIMIZERS, Optimizer, Shape

FP32, _, BF16, BF16_BF16 = OPTIMIZERS
_KEPT = {"zero_optimization": {"reduce_scatter": False, "contiguous_gradients": False}}
"""What ZeRO-1 needs to keep the gradients of other ranks' partitions, for AOR."""
BF16_AOR = replace(
    BF16,
    name=f"{BF16.name}-gradients-kept",
    arguments=(*BF16.arguments, "--deepspeed-config", json.dumps(_KEPT)),
)


@dataclass(frozen=True)
class StormSetup:
    name: str  # for people and ``--setups``
    shape: Shape  # layout and nodes
    optimizer: Optimizer  # number format
    protection: str  # as in the block
    steps: int  # of a job: so many that several attacks find it alive, so few that it soon ends after them
    tolerance: int = 1  # lost nodes of a sharding group that it survives; so many are struck at once
    persist_steps: int = 0  # distance of its checkpoints on disk; 0: none
    memory_mib: int = 0  # size of a file system of its own for the memory of all nodes; 0: the machine's

    def block(self, persist_dir: Path) -> dict[str, Any]:
        """Its ``reft`` block. Short waits: what stands still has to be noticed while the storm waits."""
        block: dict[str, Any] = {
            "enabled": True,
            "block_bytes": 16384,
            "protection": self.protection,
            "tolerance": self.tolerance,
            "grace_secs": 60,
        }
        if self.persist_steps:
            block["persist"] = {"dir": str(persist_dir), "interval_steps": self.persist_steps, "keep": 3}
        return block


SETUPS = (
    StormSetup("dp2-arc-persist", Shape(1, 2, 1, 2), FP32, "arc", 1600, persist_steps=10),
    StormSetup("pp2dp2-arc", Shape(2, 2, 1, 4), BF16, "arc", 500),
    StormSetup("dp3-aec", Shape(1, 3, 1, 3), BF16, "aec", 900, memory_mib=256),
    StormSetup(
        "dp3-arc-aec-persist", Shape(1, 3, 1, 3), FP32, "arc+aec", 1200, tolerance=2, persist_steps=10
    ),
    StormSetup("dp4-rs2", Shape(1, 4, 1, 4), FP32, "rs:2", 700, tolerance=2),
    StormSetup("tp2dp2-arc", Shape(1, 2, 2, 2), BF16_BF16, "arc", 500, memory_mib=256),
    StormSetup("pp2dp2-arc-aor", Shape(2, 2, 1, 4), BF16_AOR, "arc+aor", 500),
    StormSetup("dp3-aec-aor", Shape(1, 3, 1, 3), BF16_AOR, "aec+aor", 900),
)
"""In an order in which the first few already differ in layout, format and protection."""
