"""Trains under `accelerate launch` from a loader that Accelerate has prepared; with "kill" rank 1 kills itself once
behind the fourth step.

ARGS: DeepSpeed's JSON; "dispatch": rank 0 reads for all ranks (dispatch_batches), or "resumable": each reads its
own part, from reft.resumable(loader); and "kill".
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, DummyOptim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import reft
from reft.engine.attach import find_session

EPOCHS, WIDTH, SAMPLES, BATCH = 2, 8, 56, 4


def say(text: str) -> None:
    """In one piece: two ranks write to one pipe."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    out, ways = Path(os.environ["TEST_OUT"]), sys.argv[2:]
    config = json.loads(Path(sys.argv[1]).read_text()) | {"zero_optimization": {"stage": 1}}
    # Where there is no device, Accelerate starts DeepSpeed but counts one process, unless it counted them before.
    PartialState(cpu=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(dispatch_batches="dispatch" in ways),
    )
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
    samples = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3)))
    made = DataLoader(samples, batch_size=BATCH, shuffle=True)
    engine, _, loader = accelerator.prepare(model, DummyOptim(model.parameters()), made)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    if "resumable" in ways:
        loader = reft.resumable(loader)
    path, _ = engine.load_checkpoint(str(out / "checkpoints"))
    say(f"rank {accelerator.process_index} loaded {path}")
    killed = out / "killed"
    for _ in range(loader.epoch if "resumable" in ways else 0, EPOCHS):
        for (batch,) in loader:
            loss = engine(batch).square().mean()
            accelerator.backward(loss)
            at = f"rank {accelerator.process_index} step {engine.global_steps}"
            say(f"{at} loss {loss.item().hex()}")
            if "kill" in ways and accelerator.process_index == 1 and engine.global_steps == 4:
                session = find_session(engine)
                while not killed.exists() and not session.stats.committed_step:
                    time.sleep(0.05)
                if not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    say(f"rank {accelerator.process_index} ended at step {engine.global_steps}")


main()
