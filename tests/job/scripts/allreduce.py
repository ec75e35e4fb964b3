"""A tiny plain-torch trainer: an all_reduce per step, one JSON line per step. No deepspeed, no reft.

Ends after so many steps, or after the one in which rank 0 sees the file "finish".
ARGS: steps [fault], where fault is "raise@STEP:RANK:ROUND", or "exit" likewise.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

FINISH = os.path.join(os.environ["TEST_EVENTS"], "finish")


def record(**fields: object) -> None:
    path = os.path.join(os.environ["TEST_EVENTS"], f"worker-{os.getpid()}.jsonl")
    fields |= {
        "node": os.environ.get("REFT_NODE_ID"),
        "rank": int(os.environ["RANK"]),
        "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "pid": os.getpid(),
        "time": time.time(),
    }
    with open(path, "a") as file:
        file.write(json.dumps(fields) + "\n")


def fail_if_due(fault: str, step: int) -> None:
    kind, _, where = fault.partition("@")
    if where == f"{step}:{os.environ['RANK']}:{os.environ['TORCHELASTIC_RESTART_COUNT']}":
        if kind == "raise":
            raise ValueError(f"bad sample at step {step}")
        sys.exit(3)


def main() -> None:
    steps = int(sys.argv[1])
    faults = sys.argv[2:]
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", "60")))
    )
    record(event="start", world=dist.get_world_size(), memory=os.environ.get("REFT_MEMORY_DIR"))
    for step in range(steps):
        for fault in faults:
            fail_if_due(fault, step)
        value = torch.tensor([1.0, float(os.path.exists(FINISH))])
        dist.all_reduce(value)
        assert value[0].item() == dist.get_world_size()
        record(event="step", step=step)
        if value[1].item():
            break
        time.sleep(0.02)
    record(event="end")
    dist.destroy_process_group()


main()
