"""A DeepSpeed script under any launcher; with "kill" rank 1 kills itself once behind the fourth step.

ARGS: DeepSpeed's JSON, and "import" for `import reft`, and with it "kill".
"""

import os
import signal
import sys
import time
from pathlib import Path

if "import" in sys.argv:
    import reft
import deepspeed
import torch
from torch import nn

STEPS = 6


def main() -> None:
    out, rank = Path(os.environ["TEST_OUT"]), int(os.environ["RANK"])
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
    path, _ = engine.load_checkpoint(str(out / "checkpoints"))
    print(f"rank {rank} loaded {path}", flush=True)
    killed = out / "killed"
    while engine.global_steps < STEPS:
        loss = engine(torch.full((4, 8), 1.0 + rank)).sum()
        engine.backward(loss)
        engine.step()
        if "kill" in sys.argv and rank == 1 and engine.global_steps == 4 and not killed.exists():
            while not reft.attach(engine).stats.committed_step:
                time.sleep(0.05)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} ended at step {engine.global_steps}", flush=True)


main()
