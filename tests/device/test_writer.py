"""Restored blocks reach a device from registered memory, several at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from reft.device import Vendor
from reft.engine.device_writer import DeviceWriter
from reft.memory.arena import Arena
from reft.memory.header import checksum
from tests.device.conftest import hold
from tests.device.simulated import NAME, Simulated, SimulatedVendor

NBYTES = 100_000
SECRET = b"s" * 32


@pytest.fixture
def blocks(tmp_path: Path) -> list[torch.Tensor]:
    """Blocks of an arena that is mapped for reading, as a restore finds them."""
    path = tmp_path / "rank0-slot0.arena"
    data = torch.randint(0, 256, (8 * NBYTES,), dtype=torch.uint8)
    with Arena.create(path, data.numel(), 8, SECRET) as arena:
        arena.data[:] = data.numpy().data
    arena = Arena.open(path, SECRET)
    return list(torch.frombuffer(arena.data, dtype=torch.uint8).split(NBYTES))


def write_all(writer: DeviceWriter, blocks: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Write every block but 1,000 bytes in its middle, which belong to no tensor."""
    live = torch.zeros((len(blocks), NBYTES), dtype=torch.uint8, device=writer.device)
    writer.begin()

    def write(number: int) -> int:
        target, data, half = live[number], blocks[number], NBYTES // 2
        cuts = slice(0, half - 1000), slice(half, NBYTES)
        return writer.write([(target[cut], data[cut]) for cut in cuts], data)

    with ThreadPoolExecutor(4) as threads:
        return live, list(threads.map(write, range(len(blocks))))


def check(live: torch.Tensor, sums: list[int], blocks: list[torch.Tensor]) -> None:
    for found, total, block in zip(live.cpu(), sums, blocks, strict=True):
        expected = block.clone()
        expected[NBYTES // 2 - 1000 : NBYTES // 2] = 0
        assert torch.equal(found, expected)
        assert total == checksum(block.numpy().data)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_blocks_arrive_and_are_hashed(vendor: Vendor, blocks: list[torch.Tensor]) -> None:
    with closing(DeviceWriter(torch.device(vendor.type), vendor)) as writer:
        check(*write_all(writer, blocks), blocks)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_copies_take_registered_memory_and_streams_of_their_own(
    sim: Simulated, blocks: list[torch.Tensor]
) -> None:
    vendor = SimulatedVendor(sim)
    writer = DeviceWriter(torch.device(NAME), vendor)
    live = torch.zeros(NBYTES, dtype=torch.uint8, device=NAME)
    writer.begin()
    go_on: Callable[[], None] = hold(vendor)
    writer.write([(live, blocks[0])], blocks[0])  # It does not wait for the default stream.
    go_on()
    assert sim.settings.pageable == 0
    assert sim.registrations == 1
    check(*write_all(writer, blocks), blocks)
    assert 1 <= sim.registrations <= 4, "one buffer for each thread at most"
    writer.close()
    assert sim.registrations == 0


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_p6_where_memory_cannot_be_pinned_the_state_is_restored_all_the_same(
    sim: Simulated, blocks: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    sim.settings.refuse_registering = 1
    with closing(DeviceWriter(torch.device(NAME), SimulatedVendor(sim))) as writer:
        check(*write_all(writer, blocks), blocks)
    (said,) = caplog.messages
    assert "cannot be pinned" in said
