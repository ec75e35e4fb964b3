"""A trainer that kills itself in each of its first LIVES lives, as soon as a new version is committed.

ARGS: DeepSpeed's JSON and LIVES.
"""

import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

import reft

STEPS_AT_THE_END = 3


def main() -> None:
    out, lives = Path(os.environ["TEST_EVENTS"]), int(sys.argv[2])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    began = engine.global_steps
    with (out / "lives").open("a") as file:
        file.write(f"{began}\n")
    last = (out / "lives").read_text().count("\n") > lives
    while not (last and engine.global_steps >= began + STEPS_AT_THE_END):
        engine.backward(engine(torch.ones(4, 8)).sum())
        engine.step()
        if not last and (reft.attach(engine).stats.committed_step or 0) > began:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)


main()
