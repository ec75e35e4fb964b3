"""A loop over the epochs of a small data set, which waits until the end of each epoch is on storage."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import reft
from tests.contact.scripts.training import VERSIONS, make, note

BATCHES = 3  # of an epoch

engine = make(sys.argv[1])
samples = torch.randn(4 * BATCHES, 8, generator=torch.Generator().manual_seed(3))
loader = reft.resumable(DataLoader(TensorDataset(samples), batch_size=4, shuffle=True))
reft.resume(engine)
for _ in range(loader.epoch, 3):
    for (batch,) in loader:
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        note(engine, loss)
        ended = engine.global_steps - 1
        if ended and ended % BATCHES == 0:
            VERSIONS.wait(ended, Path(os.environ["TEST_EPOCHS"]))
