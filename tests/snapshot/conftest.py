"""Every device with its engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from reft.snapshot.copying import cuda as copy_cuda
from reft.snapshot.copying.engine import CopyEngine
from tests.snapshot.devices import Cpu, Cuda, Simulated


@pytest.fixture(params=["cpu", "simulated", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cpu:
    if request.param == "cpu":
        return Cpu()
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA or ROCm device; torch finds none")
        return Cuda()
    simulated = Simulated()
    monkeypatch.setattr(copy_cuda, "cuda", simulated.cuda)
    return simulated


@pytest.fixture
def engine(device: Cpu) -> Iterator[CopyEngine]:
    made = device.engine()
    yield made
    made.close()
