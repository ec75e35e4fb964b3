"""A two-stage pipeline with an ordinary loader, as users write it. One of its trainers kills itself once.

It writes every loss to the directory TEST_OUT; TEST_KILL names the step after which, and the rank that dies.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader

from tests.attack.data_job import CONFIG, MICRO_BATCH, WIDTH, Samples

STEPS = 14

if __name__ == "__main__":
    out, rank = Path(os.environ["TEST_OUT"]), int(os.environ["RANK"])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    layers = [
        LayerSpec(nn.Linear, WIDTH, 16),
        LayerSpec(nn.Dropout, 0.2),
        LayerSpec(nn.Linear, 16, WIDTH),
        LayerSpec(nn.Dropout, 0.2),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = (
        {**CONFIG, "reft": json.loads(os.environ["TEST_BLOCK"])} if "TEST_BLOCK" in os.environ else CONFIG
    )
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    torch.manual_seed(rank)
    random.seed(rank)
    # Both ends of the pipeline read: the order must be one, so the loader has a generator of its own.
    loader = DataLoader(
        Samples(noise=rank == 0),
        batch_size=MICRO_BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(9),
    )
    data = iter(RepeatingLoader(loader))
    engine.load_checkpoint(str(out / "checkpoints"))
    killed, (step, victim) = out / "killed", json.loads(os.environ.get("TEST_KILL", "[0, 0]"))
    while engine.global_steps < STEPS:
        loss = float(engine.train_batch(data))
        with (out / f"losses-{rank}").open("a") as file:
            file.write(f"{engine.global_steps} {loss.hex()}\n")
        if engine.global_steps == step and rank == victim and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
