"""The job of ``hangs.py``: steps of about 0.3 s; told to, a rank loops for ever or loses its links.

ARGS: DeepSpeed's JSON, and a directory. A file ``loop-RANK`` or ``link-RANK`` there is taken away
and carried out within the next forward pass; ``steps-RANK`` has a line for every step: Unix
seconds, step, loss.
"""

import os
import socket
import sys
import time
from pathlib import Path

import deepspeed
import psutil
import torch
from torch import nn

WIDTH, STEP_SECS = 64, 0.3
OUT, RANK = Path(sys.argv[2]), int(os.environ["RANK"])
LOST: list[object] = []


def cut_links() -> None:
    """Every connection to another process leads to nobody from now on; its other end stays open."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            ours, theirs = socket.socketpair()
            LOST.append((ours, theirs, os.dup(connection.fd)))
            os.dup2(ours.fileno(), connection.fd)


def carry_out() -> None:
    for kind in ("loop", "link"):
        told = OUT / f"{kind}-{RANK}"
        if told.exists():
            told.unlink()
            (OUT / "struck").write_text(str(time.time()))
            if kind == "link":
                cut_links()
            while kind == "loop":
                pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        carry_out()
        time.sleep(STEP_SECS)
        return nn.functional.mse_loss(self.inner(x), x.flip(0))


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Model()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=sys.argv[1]
    )[0]
    engine.load_checkpoint(str(OUT / "checkpoints"))
    while not (OUT / "finish").exists() or engine.global_steps % 10:
        step = engine.global_steps
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + RANK))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        with (OUT / f"steps-{RANK}").open("a") as file:
            file.write(f"{time.time()} {engine.global_steps} {float(loss).hex()}\n")


main()
