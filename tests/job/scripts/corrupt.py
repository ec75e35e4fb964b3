"""A trainer whose weights go wrong in step 4 of its first LIVES lives. ARGS: DeepSpeed's JSON, HOW, LIVES and STEPS.

HOW is ``nan``, a loss on every rank, or ``flip``: a reduced gradient on rank 1. At the end rank 0 writes its weights.
"""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn


def main() -> None:
    out, how, lives, steps = Path(os.environ["TEST_EVENTS"]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    began, rank = engine.global_steps, int(os.environ["RANK"])
    with (out / f"lives-{rank}").open("a") as file:
        file.write(f"{began}\n")

    def flip(*_: object) -> None:
        if engine.global_steps == 3 and life <= lives and how == "flip" and rank == 1:
            model.weight.grad[0, 0] -= 1e6

    engine.optimizer.register_step_pre_hook(flip)
    life = (out / f"lives-{rank}").read_text().count("\n")
    while engine.global_steps < steps:
        wrong = engine.global_steps == 3 and life <= lives
        loss = engine(torch.ones(4, 8) * engine.global_steps).square().sum()
        engine.backward(loss * torch.nan if wrong and how == "nan" else loss)
        engine.step()
        time.sleep(0.2)
    if rank == 0:
        (out / "weights").write_text(str(model.weight.flatten().tolist()))


main()
