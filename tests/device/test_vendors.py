"""One contract for the devices of every vendor: what reft asks of one, its own and torch's."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from reft.device import Vendor, find_local_vendor, find_vendor
from reft.snapshot.device_engine import DeviceCopyEngine
from tests.device.conftest import hold
from tests.device.simulated import NAME


@pytest.fixture
def device(vendor: Vendor) -> torch.device:
    return torch.device(vendor.type, vendor.module.current_device())


def record(vendor: Vendor, **options: bool) -> Any:
    event = vendor.module.Event(**options)
    event.record(vendor.module.current_stream())
    return event


def registered(vendor: Vendor, device: torch.device, nbytes: int) -> torch.Tensor:
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    vendor.host_register(device, memory.data_ptr(), nbytes)
    return memory


def test_it_is_found_by_its_tensors(vendor: Vendor, device: torch.device) -> None:
    assert find_vendor(torch.zeros(1, device=device).device) is vendor
    assert find_vendor(torch.device("cpu")) is find_vendor(torch.device("meta")) is None
    assert find_local_vendor() is vendor
    assert vendor.module.is_initialized()
    assert vendor.module.device_count() >= 1
    assert isinstance(vendor.module.get_device_name(device), str)
    assert vendor.numa_node(device) >= -1


def test_its_own_stream_waits_for_events_alone_and_is_nobody_else_s(
    vendor: Vendor, device: torch.device
) -> None:
    stream = vendor.create_stream(device)
    state = torch.zeros(10_000, device=device)
    target = registered(vendor, device, 2**16)[:40_000].view(torch.float32)
    vendor.module.synchronize()
    go = hold(vendor)
    with vendor.module.stream(stream):
        assert vendor.module.current_stream(device) == stream
        target.copy_(state, non_blocking=True)
    stream.synchronize()  # it does not wait for the default stream
    state.fill_(1)
    written = record(vendor)
    with vendor.module.stream(stream):
        stream.wait_event(written)
        target.copy_(state, non_blocking=True)
    assert target.eq(0).all()
    go()
    stream.synchronize()
    assert target.eq(1).all()
    vendor.host_unregister(device, target.data_ptr())


def test_copies_into_registered_memory_do_not_hold_the_host_up(
    vendor: Vendor, device: torch.device
) -> None:
    state = torch.ones(2**16, dtype=torch.uint8, device=device)
    target = registered(vendor, device, 2**16)
    go = hold(vendor)
    target.copy_(state, non_blocking=True)
    done = record(vendor)
    assert not done.query()
    go()
    done.synchronize()
    assert target.eq(1).all()
    with pytest.raises(RuntimeError):
        vendor.host_register(device, target.data_ptr(), 2**16)
    vendor.host_unregister(device, target.data_ptr())
    with pytest.raises(RuntimeError):
        vendor.host_unregister(device, target.data_ptr())
    torch.ones(1, device=device).add_(
        1
    )  # no error of a driver's call is left behind for the next kernel
    vendor.module.synchronize()


def test_memory_and_random_state_are_told(vendor: Vendor, device: torch.device) -> None:
    free, total = vendor.module.mem_get_info(device)
    assert 0 < free <= total
    kept = torch.zeros(2**16, dtype=torch.uint8, device=device)
    stats = vendor.module.memory_stats_as_nested_dict(device)
    assert (
        stats["allocated_bytes"]["all"]["peak"]
        >= stats["allocated_bytes"]["all"]["current"]
        >= kept.nbytes
    )
    assert stats["reserved_bytes"]["all"]["current"] >= kept.nbytes
    state = vendor.module.get_rng_state()
    drawn = torch.rand(10, device=device).cpu()
    vendor.module.set_rng_state(state)
    assert torch.equal(torch.rand(10, device=device).cpu(), drawn)


@contextmanager
def captured(vendor: Vendor) -> Iterator[None]:
    """Training captures a graph meanwhile."""
    if vendor.type != NAME:
        with vendor.module.graph(vendor.module.CUDAGraph()):
            yield
        return
    with vendor.module.capture():
        yield
    assert vendor.module.settings.captures_ended == 0


def test_versions_are_copied_while_training_captures_a_graph(
    vendor: Vendor, device: torch.device
) -> None:
    engine = DeviceCopyEngine(torch.device(vendor.type), vendor)
    assert (engine.device, engine.name, engine.asynchronous) == (device, vendor.name, True)
    state, memory = torch.ones(2**20, dtype=torch.uint8, device=device), mmap.mmap(-1, 2**20)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    engine.begin()
    stamp = engine.stamp()

    def copy() -> None:
        """The worker's part, with memory for the arena and on the device that is new."""
        assert engine.register(memoryview(memory))
        engine.copy([(state, target)])
        engine.staging_buffer(2**26)
        engine.synchronize()
        engine.secs_of([stamp])

    with captured(vendor), ThreadPoolExecutor(1) as worker:
        worker.submit(copy).result()
    assert target.eq(1).all()
    engine.fence()
    engine.close()
