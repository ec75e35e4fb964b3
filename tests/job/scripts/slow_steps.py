"""A job whose steps take TEST_SLOW_SECS, all in one call that writes nothing to the page of the trainer.

ARGS: DeepSpeed's JSON, and KIND: "plain", "pipe", or "accumulated", in which only the last micro-batch of a
step is slow, in the optimizer. A line of ``losses`` per step.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import reft

STEPS, WIDTH, MICRO_BATCHES = 4, 8, 4
SECS = float(os.environ["TEST_SLOW_SECS"])
OUT, RANK, KIND = Path(os.environ["TEST_EVENTS"]), int(os.environ["RANK"]), sys.argv[2]


class Slow(nn.Linear):
    """Takes its time once per step."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if KIND == "plain" or (KIND == "pipe" and self.calls % MICRO_BATCHES == 0):
            time.sleep(SECS)
        self.calls += 1
        return super().forward(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def main() -> None:
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=1800), verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH), Slow(WIDTH, WIDTH)]
    model: nn.Module = nn.Sequential(*layers)
    if KIND == "pipe":
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
    if KIND == "accumulated":
        engine.optimizer.register_step_pre_hook(lambda *_: time.sleep(SECS))
    reft.resume(engine)
    while engine.global_steps < STEPS:
        x = batch(engine.global_steps)
        if KIND == "pipe":
            loss = engine.train_batch(iter([(x, x.flip(0))] * MICRO_BATCHES))
        else:
            loss = nn.functional.mse_loss(engine(x), x.flip(0))
            engine.backward(loss)
            made = engine.global_steps
            engine.step()
            if engine.global_steps == made:
                continue
        with (OUT / f"losses-{RANK}").open("a") as file:
            file.write(f"{engine.global_steps} {float(loss).hex()}\n")


main()
