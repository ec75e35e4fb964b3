"""A job of as many replicas as there are nodes, which reads by ``reft.data.loader``. Every rank says before each
step what it has read and its losses.

ARGS: DeepSpeed's JSON. Or, as a rank of :func:`tests.engine.ranks.run_ranks`: a directory whose ``life.json`` says
which steps to make again, without reft, from the samples that each rank had.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import reft
from reft.engine.install import avoid_build_at_start

avoid_build_at_start()

BATCH, MICRO, WIDTH, SAMPLES = 24, 2, 8, 480
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CONFIG: dict[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.5,
    "steps_per_print": None,
}


class Samples(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH))


def engine_of(config: dict[str, Any]) -> Any:
    made = model()
    return deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)[0]


def micro_batch(engine: Any, x: torch.Tensor) -> str:
    """The loss of one, exactly; its gradients are added up."""
    loss = nn.functional.mse_loss(engine(x), x.flip(1))
    engine.backward(loss)
    return loss.item().hex()


def again(root: Path) -> dict[str, Any]:
    """Make the steps of a phase again, as DeepSpeed alone makes them in this layout."""
    life = json.loads((root / "life.json").read_text())
    config = {**CONFIG, "checkpoint": {"load_universal": True}} if life["tag"] else CONFIG
    engine = engine_of(config)
    if life["tag"]:
        engine.load_checkpoint(str(root / "checkpoint"), tag=life["tag"])
    data, losses = Samples(), {}
    while engine.global_steps < life["until"]:
        step = engine.global_steps + 1
        losses[step] = []
        for ids in life["ids"][str(step)][RANK]:
            losses[step].append(micro_batch(engine, torch.stack([data[i][1] for i in ids])))
            engine.step()
    engine.save_checkpoint(str(root / "checkpoint"), tag=life["save"])
    return {"losses": losses}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    deepspeed.init_distributed("gloo", verbose=False)
    out = Path(os.environ["TEST_EVENTS"])
    path = out / f"worker-{os.getpid()}.jsonl"
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def record(event: str, **fields: object) -> None:
        told = {
            "event": event,
            "time": time.time(),
            "replicas": WORLD,
            "rank": RANK,
            "start": start,
            **fields,
        }
        with path.open("a") as file:
            file.write(json.dumps(told) + "\n")

    config = json.loads(Path(sys.argv[1]).read_text())
    engine = engine_of(config)
    loader = reft.data.loader(Samples(), batch_size=MICRO, shuffle=True, seed=3, drop_last=True)
    engine.load_checkpoint(str(out / "none"))
    record("begins", step=engine.global_steps)
    batches, losses = [], []
    for _ in range(loader.epoch, 10**6):
        for ids, x in loader:
            batches.append(ids.tolist())
            losses.append(micro_batch(engine, x))
            last = len(batches) == BATCH // MICRO // WORLD
            if last:
                record("trained", step=engine.global_steps + 1, ids=batches, losses=losses)
                batches, losses = [], []
            engine.step()
            if last:
                time.sleep(0.1)
                finish = torch.tensor([float((out / "finish").exists())])
                dist.all_reduce(finish)  # all end behind the same step
                if finish:
                    return


if __name__ == "__main__":
    if "TEST_EVENTS" in os.environ:
        main()
    else:
        from tests.engine.ranks import be_a_rank

        be_a_rank(again)
