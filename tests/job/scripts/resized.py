"""A plain DeepSpeed job of as many replicas as there are nodes. Every rank says the steps that it makes, and their
losses.

ARGS: DeepSpeed's JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import reft

CONFIG = json.loads(Path(sys.argv[1]).read_text())
BATCH, MICRO = CONFIG["train_batch_size"], CONFIG["train_micro_batch_size_per_gpu"]
WIDTH, HIDDEN, PAUSE_SECS = 8, 33, 0.1
OUT, RANK, WORLD = (
    Path(os.environ["TEST_EVENTS"]),
    int(os.environ["RANK"]),
    int(os.environ["WORLD_SIZE"]),
)


def record(event: str, **fields: object) -> None:
    with (OUT / f"worker-{os.getpid()}.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": event, "time": time.time(), "replicas": WORLD, **fields}) + "\n"
        )


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    reft.attach(engine, on_resize=lambda was, now: record("resized", was=was.dp, now=now.dp))
    engine.load_checkpoint(str(OUT / "checkpoints"))
    record("begins", step=engine.global_steps)
    while True:
        finish = torch.tensor([float((OUT / "finish").exists())])
        dist.all_reduce(finish)  # all end behind the same step
        if finish:
            break
        step = engine.global_steps
        samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = []
        for first in range(MICRO * RANK, BATCH, MICRO * WORLD):
            x = samples[first : first + MICRO]
            loss = nn.functional.mse_loss(engine(x), x.flip(1))
            losses.append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        record("trained", step=engine.global_steps, rank=RANK, losses=losses)
        time.sleep(PAUSE_SECS)


main()
