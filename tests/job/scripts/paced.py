"""Two pipeline stages with two replicas that compute for a while in every step, and tell of every step.

ARGS: DeepSpeed's JSON, and the last step; and a rank that keeps so many MiB of every step, where one is to leak.
"""

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import reft

WIDTH = 1024


class Batches:
    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(16, WIDTH)
        return x, x


def main() -> None:
    events, rank = Path(os.environ["TEST_EVENTS"]), int(os.environ["RANK"])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(8)]
    model = PipelineModule(
        layers,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        topology=reft.topology(pp=2, dp=2),
    )
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(events / "checkpoints"))
    data, last = Batches(), int(sys.argv[2])
    leaks = int(sys.argv[4]) if sys.argv[3:4] == [str(rank)] else 0
    kept = []
    with (events / f"worker-{rank}.jsonl").open("a") as file:
        while engine.global_steps < last and not (events / "finish").exists():
            engine.train_batch(data)
            kept.append(bytearray(b"x") * (leaks * 2**20))
            told = {"event": "step", "time": time.time(), "rank": rank, "pid": os.getpid()}
            file.write(json.dumps(told | {"step": engine.global_steps}) + "\n")
            file.flush()
    os._exit(0)


main()
