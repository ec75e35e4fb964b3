"""A plain DeepSpeed job that writes down what it trains on before it does.

ARGS: DeepSpeed's JSON, worker processes, steps. Every rank writes, for each micro-batch, the step that trains on it,
the digests of its samples, and the digest of every random state; a version that holds the step holds them.
"""

import json
import os
import random
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import reft
from reft.engine.attach import find_session
from tests.job.test_ledger import BATCH, SEED, Samples, digest, seed_rank, state_digest

CONFIG, WORKERS, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    width = Samples.width
    model = nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[
        0
    ]
    loader = reft.data.loader(Samples(), BATCH, shuffle=True, seed=SEED, num_workers=WORKERS)
    engine.load_checkpoint(str(Path(os.environ["TEST_EVENTS"]) / "checkpoints"))
    if engine.global_steps == 0:
        seed_rank(RANK)
    # Of a launch that finds neither memory nor a new checkpoint, the incarnation is the last one's again.
    life = 1000 * int(os.environ.get("TEST_LAUNCH", "0")) + find_session(engine).memory.incarnation
    out = os.open(
        Path(os.environ["TEST_EVENTS"]) / f"worker-{life}-{RANK}.jsonl",
        os.O_CREAT | os.O_APPEND | os.O_WRONLY,
    )

    def write(**fields: object) -> None:
        os.write(
            out,
            (json.dumps({"life": life, "rank": RANK, "replicas": WORLD, **fields}) + "\n").encode(),
        )

    write(begins=engine.global_steps)
    for _ in range(loader.epoch, 10**6):
        for batch in loader:
            step = engine.global_steps + 1
            write(step=step, samples=[digest(x) for x in batch], rng=state_digest())
            # A step draws numbers of each kind; what became of them shows in the next one's states.
            noise = torch.rand(()) + random.random() + float(np.random.rand())
            engine.backward(nn.functional.mse_loss(engine(batch), batch.flip(1)) * (1 + 0 * noise))
            engine.step()
            if engine.global_steps >= STEPS:
                dist.barrier()
                return


main()
