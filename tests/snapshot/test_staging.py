"""Staging: what is not in host memory by the fence is kept on the device, and drained later. Of devices only."""

from __future__ import annotations

from math import inf

import pytest
import torch

from reft.errors import CopyError, CopyOrderError, StagingMemoryError
from reft.grid import BlockKey, Section
from reft.pacing.staging import StagingArea
from reft.snapshot.copier import Chunk
from reft.snapshot.copy_engine import CheckedPieces, CopyEngine
from reft.snapshot.plan import Block, PlacedBlock
from reft.snapshot.stats import ByteKind
from tests.snapshot.conftest import Cuda, Simulated, host_memory, random_bytes


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Simulated:
    if request.param == "simulated":
        return Simulated(request.getfixturevalue("sim"))
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device; torch finds none")
    return Cuda(torch.cuda)


def test_p2_what_is_staged_is_the_state_between_begin_and_fence(
    device: Simulated, engine: CopyEngine
) -> None:
    live = device.put(torch.zeros(100_000, dtype=torch.uint8))
    memory = host_memory(engine, live.numel())
    buffer = engine.staging_buffer(60_000)
    release = device.hold()
    device.write(live, 1)  # the optimizer step, which the device has not begun yet
    engine.begin()
    engine.copy([(live[:40_000], memory[:40_000])])
    (staged,) = engine.stage([([(live[40_000:], memory[40_000:])], buffer, None)])
    engine.fence()
    device.write(live, 2)  # the next one
    release()
    engine.synchronize()
    assert torch.all(memory[:40_000] == 1)
    assert torch.all(memory[40_000:] == 0xEE), "what is staged is not in host memory yet"
    for at in range(len(staged)):
        engine.drain(staged[at : at + 1])
    engine.synchronize()
    assert torch.all(memory == 1)


def test_draining_goes_on_under_the_next_version_and_its_fence(
    device: Simulated, engine: CopyEngine
) -> None:
    live = device.put(random_bytes(3000))
    before = live.cpu().clone()
    first, second = host_memory(engine, 3000), host_memory(engine, 3000)
    buffer = engine.staging_buffer(3000)
    engine.begin()
    parts = [
        ([(live[cut], first[cut])], buffer[cut], None) for cut in (slice(1000), slice(1000, 3000))
    ]
    staged = [piece for pieces in engine.stage(parts) for piece in pieces]
    engine.fence()
    device.write(live, 9)
    idle = engine.stamp()  # no version is open
    one = engine.drain(staged[:1], after=idle)
    release = device.hold()
    held = engine.stamp()
    engine.begin()
    engine.copy([(live, second)])
    two = engine.drain(staged[1:], after=held)
    assert not two.done()
    release()
    engine.fence()
    device.write(live, 10)
    engine.synchronize()
    assert torch.equal(first, before)
    assert torch.all(second == 9)
    assert one.secs is not None
    assert two.secs is not None


def test_staging_out_of_order_or_place_is_refused(device: Simulated, engine: CopyEngine) -> None:
    live, memory = device.put(random_bytes(8)), host_memory(engine, 8)
    buffer = engine.staging_buffer(8)
    with pytest.raises(CopyOrderError, match="no version is open"):
        engine.stage([([(live, memory)], buffer, None)])
    engine.begin()
    with pytest.raises(CopyError, match="8 bytes are to be staged; the buffer has 7"):
        engine.stage([([(live, memory)], buffer[:7], None)])
    (staged,) = engine.stage([([(live, memory)], buffer, None)])
    engine.close()
    with pytest.raises(CopyOrderError, match="closed"):
        engine.drain(staged)
    assert torch.all(memory == 0xEE)


def test_a_margin_of_device_memory_is_left_to_training(
    device: Simulated, engine: CopyEngine
) -> None:
    if type(device) is not Simulated:
        pytest.skip("only the simulated device can be made full")
    settings = device.torch.settings
    settings.total_bytes, settings.others_bytes = 80 * 2**30, 78 * 2**30 - settings.reserved_bytes
    assert engine.free_bytes < 0  # 5 % of the device are more than that
    settings.total_bytes, settings.others_bytes = 4 * 2**30, 2 * 2**30 - settings.reserved_bytes
    assert engine.free_bytes == 2 * 2**30 - 512 * 2**20
    with pytest.raises(StagingMemoryError, match="1537 MiB are wanted"):
        engine.staging_buffer(1537 * 2**20)


def test_the_area_is_given_back_when_plans_have_long_not_asked_for_it(engine: CopyEngine) -> None:
    area = StagingArea(engine)
    free = area.room()
    assert area.reserve(10_000)
    held = area.capacity_bytes
    assert 10_000 <= held < 20_000
    assert area.reserve(5_000)
    assert area.capacity_bytes == held, "a smaller plan takes no new memory"
    for _ in range(15):
        assert area.reserve(0)
    assert area.capacity_bytes == held
    area.reserve(0)
    assert area.capacity_bytes == 0
    assert not area.reserve(2**50)
    # Refused: the next plans count on nothing, then the device is asked again.
    assert [area.room(), area.room()] == [0, 0]
    assert area.room() > free // 2


def test_a_copy_within_the_device_has_a_time_as_long_as_there_is_memory_for_it(
    device: Simulated, engine: CopyEngine
) -> None:
    if type(device) is not Simulated:
        pytest.skip("only the simulated device can be made full")
    settings = device.torch.settings
    area = StagingArea(engine)
    secs = area.copy_secs(2**24)
    assert 0 < secs < 1
    assert area.copy_secs(2**25) == pytest.approx(2 * secs), "measured once"
    assert area.copy_secs(engine.free_bytes + area.capacity_bytes) == inf
    # Training grows: its own area would not be missing, but the margin is.
    settings.others_bytes += engine.free_bytes + 1
    assert area.copy_secs(area.capacity_bytes) == inf
    area.reserve(0)
    assert area.capacity_bytes == 0, "given back at once"
    assert area.copy_secs(2**20) == pytest.approx(secs / 16)


def test_a_device_that_refuses_memory_has_no_copy_within_it(
    device: Simulated, engine: CopyEngine
) -> None:
    if type(device) is not Simulated:
        pytest.skip("only the simulated device refuses")
    area = StagingArea(engine)
    device.torch.settings.refuse_mallocs = 2
    assert [area.copy_secs(2**24), area.copy_secs(2**24)] == [inf, inf]


def test_an_outgrown_area_goes_back_to_the_device(device: Simulated, engine: CopyEngine) -> None:
    """Not to the cache of the side stream, on which training allocates nothing."""
    if type(device) is not Simulated:
        pytest.skip("only the simulated device tells what was reserved")
    settings = device.torch.settings
    before, area = settings.reserved_bytes, StagingArea(engine)
    for nbytes in (2**20, 2**22, 2**24):
        assert area.reserve(nbytes)
        assert settings.reserved_bytes - before < 1.2 * area.capacity_bytes
    for _ in range(16):
        area.reserve(0)
    assert settings.reserved_bytes == before


def test_a_plan_counts_on_no_memory_that_only_torch_knows_is_free(engine: CopyEngine) -> None:
    """What the area gives up stays in the caching allocator."""
    area = StagingArea(engine)
    assert area.reserve(10_000)
    room = area.room()
    assert room <= max(area.capacity_bytes, engine.free_bytes)


def test_what_fits_the_area_is_the_end_of_a_version_which_is_staged_with_one_event(
    device: Simulated, engine: CopyEngine
) -> None:
    live, memory = device.put(random_bytes(10_000)), host_memory(engine, 10_000)
    pieces = [
        CheckedPieces.of([piece])
        for piece in zip(live.split(1000), memory.split(1000), strict=True)
    ]
    placed = PlacedBlock(Block(BlockKey(Section.OWNED, 0, 0), 0, 1000), 0)
    chunks = [Chunk(placed, ByteKind.OWNED, piece, (0, 0, 1000), last=True) for piece in pieces]
    area = StagingArea(engine)
    assert area.first_fitting(chunks) == 10
    area.reserve(3 * 1024)  # three chunks, aligned, and the headroom not enough for one more
    assert area.first_fitting(chunks) == 7
    engine.begin()
    if type(device) is Simulated:
        device.torch.settings.recorded = 0
    staged = area.stage(chunks, 7)
    if type(device) is Simulated:
        assert device.torch.settings.recorded == 1
    engine.fence()
    for item in staged:
        engine.drain(item.pieces)
    engine.synchronize()
    assert [item.number for item in staged] == [7, 8, 9]
    assert torch.equal(memory[7000:], live[7000:].cpu())
    assert torch.all(memory[:7000] == 0xEE)
    area.reserve(11 * 1024)
    assert area.first_fitting(chunks) == 0
