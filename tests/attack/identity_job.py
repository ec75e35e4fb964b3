"""A small training script, as users write them: no job id anywhere, settings from the command line.

It says what it found in the directory TEST_OUT, one JSON object per rank. That is no argument: a name is made of
the arguments.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import reft

parser = argparse.ArgumentParser()
parser.add_argument("--ckpt", type=Path, required=True)
parser.add_argument("--steps", type=int, default=3, help="train up to this step")
parser.add_argument("--lr", type=float, default=float(os.environ.get("TEST_LR", "0.01")))
parser.add_argument("--width", type=int, default=int(os.environ.get("TEST_WIDTH", "8")))
parser.add_argument(
    "--wait", action="store_true", help="stay after the last step until TEST_OUT/go is there"
)
parser.add_argument(
    "--second", action="store_true", help="make a second engine beside the first, and after it"
)
args = parser.parse_args()
out = Path(os.environ["TEST_OUT"])


def tell(**facts: Any) -> None:
    path = out / f"rank{os.environ['RANK']}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), **facts}))
    draft.rename(path)


config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
    "steps_per_print": None,
    "reft": {"enabled": True, **json.loads(os.environ.get("TEST_BLOCK", "{}"))},
}


def start() -> tuple[Any, Any]:
    torch.manual_seed(int(os.environ.get("TEST_SEED", "7")))
    model = torch.nn.Linear(args.width, 1)
    engine, *_ = reft.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, engine.load_checkpoint(str(args.ckpt))[0]


def train(until: int) -> None:
    while engine.global_steps < until:
        engine.backward(engine(torch.ones(2, args.width)).sum())
        engine.step()


try:
    engine, path = start()
except reft.ReftError as error:
    tell(refused=type(error).__name__, message=str(error))
    raise
found = {"from": path, "resumed": engine.global_steps}
tell(**found)
train(args.steps)
if args.second:
    try:
        start()
    except reft.ConfigError as error:
        found |= {"refused": str(error)}
    train(args.steps + 2)
    reft.attach(engine).close()
    del engine
    gc.collect()
    engine, _ = start()
    tell(**found, again=engine.global_steps)
while args.wait and not (out / "go").exists():
    time.sleep(0.05)
reft.attach(engine).close()
os._exit(0)  # without destroy_process_group: peers may be gone
