"""Every device with its engine."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from reft.device import find_vendor
from reft.grid import BlockKey
from reft.protect.backend import NumpyBackend, combine_ragged
from reft.snapshot.copy_engine import CopyEngine
from reft.snapshot.device_engine import DeviceCopyEngine, copy_engine_for
from reft.snapshot.plan import MemberPlan, ShardPlan
from reft.state.catalogue import SectionImage
from tests.device.conftest import at_hand, sim

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


WAIT_SECS = 60  # Longer than anything here takes; no test depends on it


class Cpu:
    """A device as the tests need it: here calls are done when they return."""

    asynchronous = False

    def engine(self) -> CopyEngine:
        return copy_engine_for("cpu")

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def write(self, live: torch.Tensor, value: int) -> None:
        live.fill_(value)

    def hold(self) -> Callable[[], None]:
        """A long kernel on the compute stream; what is returned lets it end."""
        return lambda: None


class Simulated(Cpu):
    asynchronous = True
    name = "sim"

    def __init__(self, of_torch: Any) -> None:
        self.torch = of_torch

    def engine(self) -> CopyEngine:
        device = torch.device(self.name)
        vendor = find_vendor(device)
        assert vendor is not None
        return DeviceCopyEngine(device, vendor, chunk_bytes=2 * mmap.PAGESIZE)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        live = value.to(self.name)
        self.torch.synchronize()
        return live

    def hold(self) -> Callable[[], None]:
        release: Callable[[], None] = self.torch.hold()
        return release


class Cuda(Simulated):
    name = "cuda"

    def engine(self) -> CopyEngine:
        return copy_engine_for("cuda")

    def hold(self) -> Callable[[], None]:
        torch.cuda._sleep(500_000_000)  # some tenths of a second
        return lambda: None


def host_memory(engine: CopyEngine, nbytes: int, fill: int = 0xEE) -> torch.Tensor:
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))
    assert engine.register(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].fill_(fill)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def parity_of(
    plan: ShardPlan, member: MemberPlan, image: SectionImage
) -> dict[BlockKey, np.ndarray]:
    whole = torch.zeros(image.nbytes, dtype=torch.uint8)
    image.read_into(0, whole)
    blocks = {b.key: b.block for m in plan.members for b in m.own}
    found = {}
    for placed in member.parity:
        terms = member.terms[placed.key].terms
        sources = [
            whole[b.start_bytes : b.start_bytes + b.nbytes].numpy()
            for b in (blocks[k] for k, _ in terms)
        ]
        target = found[placed.key] = np.zeros(placed.block.nbytes, np.uint8)
        combine_ragged(NumpyBackend(), (tuple(c for _, c in terms),), sources, (target,))
    return found
