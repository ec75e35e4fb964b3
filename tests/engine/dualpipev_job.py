"""DualPipeV under DeepSpeed's own engine: two ranks, each with two stages, traced."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import nn

import reft
from reft.engine.install import avoid_build_at_start
from tests.engine.ranks import be_a_rank

avoid_build_at_start()

WIDTH, MICRO_BATCHES, STEPS = 128, 4, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def make() -> Any:
    torch.manual_seed(7)
    model = DualPipeVModule(
        [LayerSpec(Block) for _ in range(8)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": None,
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        x = torch.randn(64, WIDTH, generator=generator)
        yield x, x.flip(0)


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        losses.append(float(engine.train_batch(batches(engine.global_steps))).hex())
        if engine.global_steps % 3 == 0:
            engine.eval_batch(batches(99))
    return losses


def main(root: Path) -> dict[str, Any]:
    reference = train(make(), STEPS + 3)
    block = {
        "enabled": True,
        "allow_unprotected": True,
        "job_id": "dualpipev",
        "memory_dir": str(root / f"memory{os.environ['RANK']}"),
        "has": {"chunk_bytes": 16 * 1024, "compute_share": 0.0},
    }
    engine = make()
    session = reft.attach(engine, config=block)
    session.tracer.traces = deque(maxlen=100)
    losses = train(engine, STEPS)
    session.worker.drain(60)
    plan = session.schedule
    result = {
        "reference": reference,
        "losses": losses,
        "committed": session.stats.committed_step,
        "traces": [t.to_json() for t in session.tracer.traces],
        "positions": [] if plan is None else [p.position for p in plan.windows],
    }
    session.close()
    resumed = make()
    session = reft.attach(resumed, config=block)
    result["path"], _ = resumed.load_checkpoint(str(root / "none"))
    result["resumed"] = train(resumed, STEPS + 3)
    session.close()
    return result


if __name__ == "__main__":
    be_a_rank(main)
