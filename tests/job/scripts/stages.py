"""A two-stage pipeline as users write it: one rank says its losses, and it stands still behind step HOLD.

ARGS: DeepSpeed's JSON, and "topology" for `reft.topology` instead of DeepSpeed's own order.
"""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

HOLD, STEPS, WIDTH = 4, 8, 8


class Batches:
    """The batch of a micro step depends on its number and on the replica alone."""

    def __init__(self, replica: int) -> None:
        self.replica, self.taken = replica, 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.replica + self.taken)
        self.taken += 1
        x = torch.randn(4, WIDTH, generator=generator)
        return x, x.flip(0)


def main() -> None:
    out, rank = Path(os.environ["TEST_EVENTS"]), int(os.environ["RANK"])
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    how = {"num_stages": 2}
    if "topology" in sys.argv:
        import reft

        how = {"topology": reft.topology(pp=2, dp=2)}
    layers = [LayerSpec(nn.Linear, WIDTH, 16), LayerSpec(nn.Linear, 16, WIDTH)]
    model = PipelineModule(
        layers, loss_fn=nn.functional.mse_loss, partition_method="uniform", **how
    )
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(out / "checkpoints"))
    data = Batches(engine.grid.get_data_parallel_id())
    data.taken = engine.global_steps * engine.gradient_accumulation_steps()
    while engine.global_steps < STEPS:
        loss = float(engine.train_batch(data))
        with (out / f"losses-{rank}").open("a") as file:
            file.write(f"{engine.global_steps} {loss.hex()}\n")
        while engine.global_steps == HOLD and not (out / "go").exists():
            time.sleep(0.02)


main()
