"""Every device with its engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from reft.snapshot.copying.engine import CopyEngine
from tests.device.conftest import at_hand, sim
from tests.snapshot.devices import Cpu, Cuda, Simulated

__all__ = ["at_hand", "sim"]


@pytest.fixture(params=["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Cpu:
    if request.param == "cpu":
        return Cpu()
    if request.param == "simulated":
        return Simulated(request.getfixturevalue("sim"))
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device; torch finds none")
    return Cuda(torch.cuda)


@pytest.fixture
def engine(device: Cpu) -> Iterator[CopyEngine]:
    made = device.engine()
    yield made
    made.close()
