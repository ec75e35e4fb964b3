"""P2 and P5 where a checksum cannot help: bytes that another stream's memory spoilt before they were hashed.

On a device whose streams run in any order that the events allow and whose allocator hands blocks on
(:mod:`tests.device.simulated`, by hand), what arrives is the state of its step, parities included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from reft.protect.placement import place_group
from reft.snapshot.copier import ParityEncoder
from reft.snapshot.copy_engine import Part
from reft.snapshot.device_engine import copy_engine_for
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state.catalogue import SectionImage
from tests.device.simulated import NAME as DEVICE
from tests.device.simulated import Simulated
from tests.snapshot.conftest import host_memory, parity_of

SIZES = (1000, 64, 4096, 333, 2048)
"""Of the tensors that are the state: shards begin in the midst of one, so that parities gather."""
CHUNK_BYTES = 512
VERSIONS, OTHER = 3, 1000


class Training:
    """Kernels on the compute stream, with memory of its own that comes and goes."""

    def __init__(self, sim: Simulated, seed: int) -> None:
        self.sim, self.random = sim, random.Random(seed)
        self.state = [torch.empty(n, dtype=torch.uint8, device=DEVICE) for n in SIZES]
        self.states = {v: [t.to(DEVICE) for t in shadow(v)] for v in (*range(VERSIONS), OTHER)}
        self.kept: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def update(self, version: int) -> None:
        for number, tensor in enumerate(self.state):
            tensor.copy_(self.states[version][number])

    def compute(self) -> None:
        """Activations: written, read again later, given back before the device has come to them."""
        activation = torch.empty(
            self.random.choice((256, 512, 2048)), dtype=torch.uint8, device=DEVICE
        )
        value = self.random.randrange(256)
        activation.fill_(value)
        read = torch.zeros(len(activation), dtype=torch.uint8).pin_memory()
        read.copy_(activation, non_blocking=True)
        self.kept.append((read, value, activation))
        if self.random.random() < 0.6:
            read, value, _ = self.kept.pop(0)
            self.read = (*getattr(self, "read", ()), (read, value))
        self.sim.progress()

    def check(self) -> None:
        """P1: nothing that training computed was spoilt."""
        for read, value in (*getattr(self, "read", ()), *((r, v) for r, v, _ in self.kept)):
            assert torch.all(read == value)


def shadow(version: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in SIZES]


@pytest.fixture
def seed(request: pytest.FixtureRequest, sim: Simulated) -> Iterator[int]:
    with sim.by_hand(request.param):
        yield request.param


@pytest.mark.parametrize("seed", range(12), indirect=True)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("parities", [1, 2])
def test_p5_a_parity_is_that_of_its_step_whatever_memory_it_was_computed_in(
    sim: Simulated, seed: int, parities: int, staged: bool
) -> None:
    training = Training(sim, seed)
    image = SectionImage([(str(i), t) for i, t in enumerate(training.state)])
    placement = place_group([f"n{m}" for m in range(4)], 0, parities)
    plan = make_shard_plan(SectionSizes(image.nbytes, (0,) * 4, (64,) * 4), placement, 4096)
    member = plan.members[1]
    blocks = {b.key: b.block for m in plan.members for b in m.own}
    engine = copy_engine_for(DEVICE)
    for version in range(VERSIONS):
        training.compute()
        training.update(version)
        engine.begin()
        training.compute()
        # As when the layout was agreed anew: what encoded the version before is given up.
        encoder = ParityEncoder(image, blocks, CHUNK_BYTES)
        targets = {p.key: host_memory(engine, p.block.nbytes) for p in member.parity}
        buffer = engine.staging_buffer(sum(map(len, targets.values()))) if staged else None
        parts: list[Part] = []
        at = 0
        chunks = [
            chunk
            for placed in member.parity
            for chunk in encoder.cut(placed, member.terms[placed.key].terms, targets[placed.key])
        ]
        for start, stop, encoding in chunks:
            training.compute()
            if buffer is None:
                engine.copy((), engine.stamp(), encoding)
            else:
                parts.append(((), buffer[at : at + stop - start], encoding))
                at += stop - start
        staging = engine.stage(parts) if parts else []
        del encoder, encoding, chunks, parts
        training.compute()
        engine.fence()
        training.update(OTHER)
        if staged:
            engine.drain([piece for pieces in staging for piece in pieces])
        training.compute()
        engine.synchronize()
        shadowed = SectionImage([(str(i), t) for i, t in enumerate(shadow(version))])
        for key, expected in parity_of(plan, member, shadowed).items():
            np.testing.assert_array_equal(targets[key].numpy(), expected)
        staging, buffer = [], None
    engine.close()
    sim.synchronize()
    training.check()
