"""A pipeline of one stage, with as many replicas as there are ranks, that reads by DeepSpeed's own loader (`training_data=`), unchanged. Every
rank says which samples each step has trained on.

ARGS: DeepSpeed's JSON, and the last step.
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

SAMPLES, WIDTH = int(os.environ.get("TEST_SAMPLES", "48")), 8
OUT, RANK, WORLD = Path(os.environ["TEST_EVENTS"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
seen: list[int] = []


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), torch.tensor(
            [float(index)]
        )


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    seen.extend(int(index) for index in labels.flatten())
    return (outputs - labels / SAMPLES).square().mean()


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = PipelineModule([LayerSpec(nn.Linear, WIDTH, 1)], num_stages=1, loss_fn=loss)
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1], training_data=Samples()
    )[0]
    engine.load_checkpoint(str(OUT / "checkpoints"))
    with (OUT / f"worker-{os.getpid()}.jsonl").open("a") as file:
        while engine.global_steps < int(sys.argv[2]):
            seen.clear()
            result = engine.train_batch()
            told = {"event": "trained", "time": time.time(), "rank": RANK, "pid": os.getpid()}
            told |= {
                "step": engine.global_steps,
                "samples": list(seen),
                "replicas": WORLD,
                "loss": float(result).hex(),
            }
            file.write(json.dumps(told) + "\n")
            file.flush()
            time.sleep(0.1)


main()
