"""A trainer whose weights go wrong behind step 4 of its first LIVES lives. ARGS: DeepSpeed's JSON, HOW and LIVES.

HOW is ``nan``, on every rank, or ``flip``: another value on rank 1. At the end rank 0 writes its weights.
"""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

STEPS, WRONG_BEHIND = 12, 4


def main() -> None:
    out, how, lives = Path(os.environ["TEST_EVENTS"]), sys.argv[2], int(sys.argv[3])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    began, rank = engine.global_steps, int(os.environ["RANK"])
    with (out / f"lives-{rank}").open("a") as file:
        file.write(f"{began}\n")
    life = (out / f"lives-{rank}").read_text().count("\n")
    while engine.global_steps < STEPS:
        engine.backward(engine(torch.ones(4, 8) * engine.global_steps).square().sum())
        engine.step()
        if engine.global_steps == WRONG_BEHIND and life <= lives:
            with torch.no_grad():
                if how == "nan":
                    model.weight[0, 0] = torch.nan
                elif rank == 1:
                    model.weight[0, 0] += 1.0
        time.sleep(0.2)
    if rank == 0:
        (out / "weights").write_text(str(model.weight.flatten().tolist()))


main()
