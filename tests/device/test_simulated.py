"""The simulated device is as strict as a real one: the tests that use it may believe it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import pytest
import torch

from tests.device.simulated import NAME, POISON, Simulated

WAIT_SECS = 60  # Longer than anything here takes; no test depends on it


def pages(sim: Simulated, nbytes: int) -> torch.Tensor:
    """Registered host memory."""
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    assert sim.host_register(memory.data_ptr(), nbytes) == 0
    return memory


def test_after_a_kernel_has_died_every_call_fails_as_long_as_the_process_lives(
    sim: Simulated,
) -> None:
    x = torch.zeros(3, device=NAME)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    event = sim.Event()
    event.record()
    sim.synchronize()
    x.index_fill_(0, torch.tensor([7]), 1.0)
    calls: list[Callable[[], object]] = [
        *(sim.synchronize, lambda: x.add_(1), x.cpu, event.record, sim.current_stream().query),
        *(lambda: sim.current_stream().wait_event(event), lambda: torch.empty(2**20, device=NAME)),
    ]
    for call in (*calls, *calls):
        with pytest.raises(RuntimeError, match="the simulated device failed"):
            call()
    assert sim.host_register(address, mmap.PAGESIZE) == 700
    sim.reset()
    assert torch.ones(3, device=NAME).add_(1).cpu().tolist() == [2, 2, 2]


def test_memory_that_is_refused_once_is_found_in_the_cache_of_every_stream(sim: Simulated) -> None:
    """As torch's allocator does it; training then allocates again what it had cached."""
    with sim.stream(sim.Stream()):
        cached = torch.zeros(2**20, dtype=torch.uint8, device=NAME)
    del cached
    before = sim.settings.reserved_bytes
    sim.settings.refuse_mallocs = 1
    x = torch.ones(2**21, dtype=torch.uint8, device=NAME)
    assert x.cpu().eq(1).all()
    assert sim.settings.malloc_retries == 1
    assert sim.settings.reserved_bytes < before + x.nbytes
    sim.settings.refuse_mallocs = 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(2**22, dtype=torch.uint8, device=NAME)
    assert x.add_(1).cpu().eq(2).all(), "The device is as good as before."


def test_what_changes_while_it_is_copied_arrives_torn(sim: Simulated) -> None:
    sim.settings.bytes_per_sec = 1e7
    x = torch.zeros(400_000, dtype=torch.uint8, device=NAME)
    target = pages(sim, 2**19)[:400_000].fill_(9)
    sim.synchronize()
    with sim.stream(sim.Stream()):
        target.copy_(x, non_blocking=True)
    deadline = time.monotonic() + WAIT_SECS
    while target[0] == 9:
        assert time.monotonic() < deadline
    x.fill_(1)
    sim.synchronize()
    assert (int(target[0]), int(target[-1])) == (0, 1)


def test_a_copy_from_pinned_memory_that_was_freed_brings_what_is_there_then(sim: Simulated) -> None:
    x = torch.zeros(1000, dtype=torch.uint8, device=NAME)
    source = pages(sim, mmap.PAGESIZE)[:1000].fill_(1)
    go = sim.hold()
    x.copy_(source, non_blocking=True)
    source.fill_(2)
    go()
    assert x.cpu().eq(2).all()
    temporary = torch.ones(1000, dtype=torch.uint8).pin_memory()
    assert temporary.is_pinned()
    assert not torch.ones(1).is_pinned()


def test_registering_is_as_strict_as_the_driver(sim: Simulated) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=torch.uint8)
    at, page = memory.data_ptr(), mmap.PAGESIZE
    assert sim.host_register(at, 0) == 1
    assert [sim.host_register(at, 2 * page), sim.host_register(at + page, page)] == [0, 712]
    assert sim.host_register(at + 2 * page, 2 * page) == 0
    x = torch.zeros(4 * page, dtype=torch.uint8, device=NAME)
    with pytest.raises(RuntimeError, match="invalid argument"):
        memory.copy_(x, non_blocking=True)
    assert [
        sim.host_unregister(at),
        sim.host_unregister(at),
        sim.host_unregister(at + 2 * page),
    ] == [
        0,
        713,
        0,
    ]
    assert sim.host_register(at, page) == 0
    go = sim.hold()
    memory[:page].copy_(x[:page], non_blocking=True)
    assert sim.host_unregister(at) == 0
    go()
    with pytest.raises(RuntimeError, match="unregistered under a copy"):
        sim.synchronize()
    sim.reset()
    sim.settings.refuse_registering = 1
    assert sim.host_register(at, page) == 1


@pytest.mark.parametrize("said", [False, True])
def test_a_freed_block_is_given_out_again_at_once_and_poisoned_unless_somebody_said_he_uses_it(
    sim: Simulated, said: bool
) -> None:
    side = sim.Stream()
    x = torch.ones(1000, dtype=torch.uint8, device=NAME)
    sim.synchronize()
    go = sim.hold(side)
    with sim.stream(side):
        late = x.clone()  # of memory that the default stream's allocator may give out again
    address = x.data_ptr()
    if said:
        x.record_stream(side)
    del x
    if not said:
        y = torch.empty(1000, dtype=torch.uint8, device=NAME)
        assert y.data_ptr() == address
        assert y.cpu().eq(POISON).all()
    go()
    sim.synchronize()
    assert late.cpu().eq(1 if said else POISON).all()


def test_what_has_no_shape_before_it_has_run_holds_the_host_up_and_is_counted(
    sim: Simulated,
) -> None:
    x = torch.tensor([0, 1, 0, 2], device=NAME)
    assert x.nonzero().cpu().tolist() == [[1], [3]]
    assert torch.equal(x, x.clone())
    assert sim.settings.synchronised >= 1


def orders(sim: Simulated, seed: int) -> list[int]:
    """In which order two streams did their kernels."""
    order: list[int] = []
    with sim.by_hand(seed):
        for _ in range(4):
            for number in (1, 2):
                with sim.stream(sim.ExternalStream(number)):
                    sim.launch(lambda number=number: order.append(number))
        assert order == []
        sim.progress(3)
        assert len(order) <= 3
        sim.synchronize()
    return order


def test_by_hand_a_seed_tells_the_whole_story(sim: Simulated) -> None:
    for seed in range(3):
        assert orders(sim, seed) == orders(sim, seed)
    assert len({tuple(orders(sim, seed)) for seed in range(20)}) > 5
    with sim.by_hand(0):
        sim.hold()
        with pytest.raises(RuntimeError, match="for ever"):
            sim.current_stream().synchronize()


def test_a_block_of_a_destroyed_stream_is_punished_when_it_is_given_back(sim: Simulated) -> None:
    address = sim.create_stream()
    with sim.stream(sim.ExternalStream(address)):
        block = torch.zeros(1000, device=NAME)
    sim.synchronize()
    sim.destroy_stream(address)
    del block
    with pytest.raises(RuntimeError, match="the stream was destroyed"):
        sim.synchronize()


def test_the_host_is_ahead_by_as_many_launches_as_a_stream_takes(sim: Simulated) -> None:
    sim.settings.launch_queue = 4
    begin = time.perf_counter()
    for _ in range(3):
        sim.sleep(0.05)
    assert time.perf_counter() - begin < 0.05
    for _ in range(6):
        sim.sleep(0.05)
    assert time.perf_counter() - begin > 0.15
    sim.synchronize()


def test_registering_takes_time_and_new_memory_may_wait(sim: Simulated) -> None:
    sim.settings.register_secs_per_gib = 10.0
    memory = mmap.mmap(-1, 2**24)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    begin = time.perf_counter()
    assert sim.host_register(address, 2**24) == 0
    assert time.perf_counter() - begin > 0.1
    sim.host_unregister(address)
    sim.settings.malloc_waits = 1
    sim.sleep(0.1)
    begin = time.perf_counter()
    torch.empty(2**22, dtype=torch.uint8, device=NAME)
    assert time.perf_counter() - begin > 0.05
