"""A trainer whose weights go wrong in step 4 of its first LIVES lives. ARGS: DeepSpeed's JSON, HOW, LIVES and STEPS, and
the pipeline stages and tensor slices of another model than one layer.

HOW is ``nan``, a loss on every rank, or ``flip``: a reduced gradient on the last. At the end rank 0 writes its weights.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from reft.engine.attach import find_session
from tests.job.grid_job import WIDTH, engine_of


def main() -> None:
    out, how, lives, steps = (
        Path(os.environ["TEST_EVENTS"]),
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(5)
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if degrees := [int(n) for n in sys.argv[5:]]:
        engine, said = engine_of(sys.argv[1], *degrees, blocks=2)
        said.tell = lambda *_: None
    else:
        model = nn.Linear(8, 8)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=sys.argv[1]
        )[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    began = engine.global_steps
    with (out / f"lives-{rank}").open("a") as file:
        file.write(f"{began}\n")

    def flip(optimizer: Any, *_: object) -> None:
        if engine.global_steps == 3 and life <= lives and how == "flip" and rank == last:
            optimizer.param_groups[0]["params"][0].grad.view(-1)[0] -= 1e6

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)  # of ZeRO
    inner.register_step_pre_hook(flip)
    life = (out / f"lives-{rank}").read_text().count("\n")
    while engine.global_steps < steps:
        wrong = engine.global_steps == 3 and life <= lives
        x = torch.ones(4, 8) * engine.global_steps
        if degrees:
            engine.train_batch(iter([(x, torch.ones(4, WIDTH + 1))]))
        else:
            loss = engine(x).square().sum()
            engine.backward(loss * torch.nan if wrong and how == "nan" else loss)
            engine.step()
            time.sleep(0.2)
        # The version of the step before is there, on a busy machine too: it would be skipped for the next one.
        if (session := find_session(engine)) is not None and session.worker is not None:
            session.worker.drain(60)
    if rank == 0 and not degrees:
        (out / "weights").write_text(str(model.weight.flatten().tolist()))


main()
