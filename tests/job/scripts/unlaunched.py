"""A DeepSpeed script under any launcher; with "kill" rank 1 kills itself once behind the fourth step.

ARGS: DeepSpeed's JSON; "import" for `import reft`, or "attach" for `reft.attach(engine)` with the block in the
script, and with either "kill". DeepSpeed's launcher puts a --local_rank=N before them.
"""

import os
import signal
import sys
import time
from pathlib import Path

if {"import", "attach"} & set(sys.argv):
    import reft
import deepspeed
import torch
from torch import nn

ARGS = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
STEPS = 6


def committed(engine) -> int:
    from reft.engine.attach import find_session

    return find_session(engine).stats.committed_step or 0


def main() -> None:
    out, rank = Path(os.environ["TEST_OUT"]), int(os.environ["RANK"])
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ARGS[0])[
        0
    ]
    if "attach" in ARGS:
        reft.attach(engine, config={"enabled": True, "memory_dir": str(out / "memory")})
    path, _ = engine.load_checkpoint(str(out / "checkpoints"))
    print(f"rank {rank} loaded {path}", flush=True)
    killed = out / "killed"
    while engine.global_steps < STEPS:
        loss = engine(torch.full((4, 8), 1.0 + rank)).sum()
        engine.backward(loss)
        engine.step()
        if "kill" in ARGS and rank == 1 and engine.global_steps == 4 and not killed.exists():
            while not committed(engine):
                time.sleep(0.05)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} ended at step {engine.global_steps}", flush=True)


main()
