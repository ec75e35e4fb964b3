"""A small training script, as users write them: no job id anywhere, settings from the command line.

It says what it found in the directory TEST_OUT, one JSON object per rank. That is no argument: a name is made of
the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

import reft
from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start

parser = argparse.ArgumentParser()
parser.add_argument("--ckpt", type=Path, required=True)
parser.add_argument("--steps", type=int, default=3, help="train up to this step")
parser.add_argument("--lr", type=float, default=float(os.environ.get("TEST_LR", "0.01")))
parser.add_argument("--width", type=int, default=int(os.environ.get("TEST_WIDTH", "8")))
parser.add_argument("--accept", nargs="*", default=os.environ.get("TEST_ACCEPT", "").split())
parser.add_argument("--wait", action="store_true", help="stay after the last step until TEST_OUT/go is there")
args = parser.parse_args()
out = Path(os.environ["TEST_OUT"])


def tell(**facts: Any) -> None:
    path = out / f"rank{os.environ['RANK']}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), **facts}))
    draft.rename(path)


avoid_build_at_start()
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(int(os.environ.get("TEST_SEED", "7")))
model = torch.nn.Linear(args.width, 1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
    "steps_per_print": None,
    "reft": {"enabled": True, **({"accept_changes": args.accept} if args.accept else {})},
}
try:
    engine, *_ = reft.initialize(model=model, model_parameters=model.parameters(), config=config)
    path, _ = engine.load_checkpoint(str(args.ckpt))
except reft.ReftError as error:
    tell(refused=type(error).__name__, message=str(error))
    raise
session = session_of(engine)
assert session is not None
assert session.worker is not None
found = {"job": session.job_id, "from": path, "resumed": engine.global_steps, "tolerance": session.tolerance}
tell(**found)
while engine.global_steps < args.steps:
    engine.backward(engine(torch.ones(2, args.width)).sum())
    engine.step()
session.worker.drain(60)
tell(**found, trained=engine.global_steps, committed=session.stats.committed_step)
while args.wait and not (out / "go").exists():
    time.sleep(0.05)
session.close()
os._exit(0)  # without destroy_process_group: peers may be gone
