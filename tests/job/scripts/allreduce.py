"""A tiny plain-torch trainer: an all_reduce per step, one JSON line per step. No deepspeed, no reft.

Ends after so many steps, or after the one in which rank 0 sees the file "finish".
ARGS: steps [fault], where fault is "raise@STEP:RANK:ROUND", "exit", "abort" or "kill" likewise.
"""

import json
import os
import signal
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
    at_step, rank, attempt = (int(x) for x in where.split(":"))
    here = (step, int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    if here != (at_step, rank, attempt) and not (attempt < 0 and here[:2] == (at_step, rank)):
        return
    if kind == "raise":
        raise ValueError(f"bad sample at step {step}")
    if kind == "exit":
        sys.exit(3)
    os.kill(os.getpid(), {"abort": signal.SIGABRT, "kill": signal.SIGKILL}[kind])


def main() -> None:
    steps = int(sys.argv[1])
    faults = sys.argv[2:]
    stop = []
    if os.environ.get("TEST_GRACEFUL"):
        signal.signal(signal.SIGTERM, lambda *_: stop.append(143))
        signal.signal(signal.SIGINT, lambda *_: stop.append(130))
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", "60"))))
    record(event="start", world=dist.get_world_size(), memory=os.environ.get("REFT_MEMORY_DIR"))
    for step in range(steps):
        for fault in faults:
            fail_if_due(fault, step)
        value = torch.tensor([1.0, float(os.path.exists(FINISH))])
        dist.all_reduce(value)
        assert value[0].item() == dist.get_world_size()
        record(event="step", step=step)
        if stop:
            record(event="flushed", step=step)
            sys.exit(stop[0])
        if value[1].item():
            break
        time.sleep(0.02)
    record(event="end")
    dist.destroy_process_group()


main()
