"""DeepSpeed's pipeline engine with its bf16 optimizer, ZeRO-1, in two stages on the simulated device: a life of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import reft
from reft.device import VENDORS
from reft.engine.checks.device import device_paragraph
from reft.engine.deepspeed import session_of
from tests.device.accelerator import BACKEND, use_simulated
from tests.device.simulated import NAME, SimulatedVendor
from tests.engine.ranks import mse

WIDTH, STEPS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def batches(first: int) -> Any:
    number = first
    while True:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        number += 1
        yield x, x.roll(1, 0)


def train(block: dict[str, Any] | None, until: int, *, resumes: bool = False) -> tuple[Any, int, list[float]]:
    """The engine, the step at which it began, and the losses from there."""
    torch.manual_seed(1234)
    model = PipelineModule(
        [LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=mse, partition_method="uniform"
    )
    config: dict[str, Any] = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2**16, "allgather_bucket_size": 2**16},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if block is not None:
        config["reft"] = block
    engine, *_ = reft.initialize(model=model, config=config, model_parameters=model.parameters())
    if resumes:
        reft.resume(engine)
    begins = int(engine.global_steps)
    data = batches(4 * begins)
    losses = [engine.train_batch(data) for _ in range(begins, until)]
    return engine, begins, [float(loss) for loss in losses]


def live(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    sim = use_simulated()
    VENDORS[NAME] = SimulatedVendor(sim)
    sim.settings.bytes_per_sec, sim.settings.delay_secs = 1e8, 0.0005
    deepspeed.init_distributed(BACKEND, verbose=False)
    os.environ["REFT_NODE_ID"] = f"node{os.environ['RANK']}"
    out: dict[str, Any] = {} if life["resumes"] else {"reference": train(None, STEPS)[2]}
    block = {
        "enabled": True,
        "job_id": "sim",
        "memory_dir": str(root / os.environ["REFT_NODE_ID"]),
        "tolerance": 0,
    }
    engine, begins, losses = train(block, life["until"], resumes=life["resumes"])
    session = session_of(engine)
    session.close()  # the last version is committed
    return {
        **out,
        **{"begins": begins, "losses": losses, "synchronised": sim.settings.synchronised},
        "engine": session.copying.engine.name,
        "taken": session.stats.taken,
        "tried": device_paragraph(session.device_findings),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = live(folder)
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
