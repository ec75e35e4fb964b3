"""A job that hangs as it is told: one rank stops, or loops for ever.

ARGS: DeepSpeed's JSON, and KIND@STEP:RANK: in the first life rank RANK hangs within the step after STEP.
"slow": nothing hangs, but much takes TEST_SLOW_SECS.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from torch import nn

import reft

STEPS, WIDTH = int(os.environ.get("TEST_STEPS", "40")), 8
OUT, RANK = Path(os.environ["TEST_EVENTS"]), int(os.environ["RANK"])
KIND, _, WHERE = sys.argv[2].partition("@")


def is_due(step: int) -> bool:
    if KIND == "none" or f"{step}:{RANK}" != WHERE or (OUT / "hung").exists():
        return False
    (OUT / "hung").write_text(f"{os.getpid()} {time.time()}")
    return True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH))
        self.due = False
        self.pause_secs = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.due and KIND == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.due and KIND == "loop":
            pass
        if self.pause_secs:
            with reft.pause_watch():  # within a step, whose limit is the shortest
                time.sleep(self.pause_secs)
            self.pause_secs = 0.0
        time.sleep(0.02)
        return nn.functional.mse_loss(self.inner(x), x.flip(0))


def pause_after(engine: object, model: Model, step: int) -> None:
    if KIND != "slow":
        return
    secs = float(os.environ["TEST_SLOW_SECS"])
    if step == 12:
        engine.eval()
        with torch.no_grad():
            handle = engine.module.register_forward_hook(lambda *_: time.sleep(secs))
            engine(torch.ones(4, WIDTH))
            handle.remove()
        engine.train()
    if step == 16 and RANK == 0:
        model.pause_secs = secs
    if step == 20 and RANK == 1:
        time.sleep(secs)  # the script's own, between two steps
    if step == 24:
        engine.save_checkpoint(str(OUT / "saved"), client_state={"slow": Slow(secs / 2)})


class Slow:
    def __init__(self, secs: float) -> None:
        self.secs = secs

    def __reduce__(self) -> tuple[type, tuple[float]]:
        time.sleep(self.secs)
        return Slow, (self.secs,)


def say(step: int, loss: float) -> None:
    with (OUT / f"losses-{RANK}").open("a") as file:
        file.write(f"{step} {loss.hex()}\n")


def main() -> None:
    timeout = timedelta(seconds=float(os.environ["TEST_TIMEOUT_SECS"]))
    deepspeed.init_distributed("gloo", timeout=timeout, verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Model()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(OUT / "checkpoints"))
    if KIND == "slow" and RANK == 0:
        time.sleep(float(os.environ["TEST_SLOW_SECS"]))
    while engine.global_steps < STEPS:
        step = engine.global_steps
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + RANK))
        model.due = is_due(step)
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        say(engine.global_steps, float(loss))
        pause_after(engine, model, engine.global_steps)


main()
