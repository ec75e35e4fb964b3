"""A two-stage pipeline with an ordinary loader, as users write it. One of its trainers kills itself once.

It writes every loss to the directory TEST_OUT; TEST_KILL names the step after which, and the rank that dies.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader

from tests.attack.data_job import MICRO_BATCH, Life, Samples
from tests.engine.ranks import join_group

STEPS = 14


class Killed(Life):
    def _note(self, loss: torch.Tensor) -> None:
        step = int(self.engine.global_steps)
        with (out / f"losses-{rank}").open("a") as file:
            file.write(f"{step} {float(loss).hex()}\n")
        if [step, rank] == json.loads(os.environ.get("TEST_KILL", "[]")) and not (out / "killed").exists():
            (out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    out, rank = Path(os.environ["TEST_OUT"]), int(os.environ["RANK"])
    join_group()
    life = Killed(json.loads(os.environ.get("TEST_BLOCK", "null")), STEPS, out / "checkpoints")
    life.pipeline(stages=2)
    torch.manual_seed(rank)
    random.seed(rank)
    # Both ends of the pipeline read: the order must be one, so the loader has a generator of its own.
    order = torch.Generator().manual_seed(9)
    loader = DataLoader(Samples(noise=rank == 0), batch_size=MICRO_BATCH, shuffle=True, generator=order)
    data = iter(RepeatingLoader(loader))
    life.load()
    life.read(data)
