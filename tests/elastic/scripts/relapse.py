"""A trainer that kills itself in each of its first LIVES lives, as soon as the launcher can know of a new version.

ARGS: DeepSpeed's JSON and LIVES.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

STEPS_AT_THE_END = 3


def newest_step(status: Path) -> int:
    try:
        return int((json.loads(status.read_text())["last_committed"] or {"step": 0})["step"])
    except (OSError, ValueError, KeyError):
        return 0


def main() -> None:
    out, lives = Path(os.environ["TEST_EVENTS"]), int(sys.argv[2])
    status = Path(os.environ["REFT_MEMORY_DIR"], os.environ["REFT_JOB_ID"], "status.json")
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    began = engine.global_steps
    with (out / "lives").open("a") as file:
        file.write(f"{began}\n")
    last = (out / "lives").read_text().count("\n") > lives
    while not (last and engine.global_steps >= began + STEPS_AT_THE_END):
        engine.backward(engine(torch.ones(4, 8)).sum())
        engine.step()
        if not last and newest_step(status) > began:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)


main()
