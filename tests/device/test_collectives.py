"""Collectives of the simulated device are queued like kernels: the host runs ahead of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.device.accelerator import Queued
from tests.device.simulated import NAME, Simulated

TIMEOUT = timedelta(seconds=60)


def make_groups(size: int) -> list[Queued]:
    """The groups of all ranks, in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(lambda rank: Queued(store, rank, size, TIMEOUT), range(size)))


def test_the_host_is_ahead_of_a_receive_until_it_reads_the_value(sim: Simulated) -> None:
    sender, receiver = make_groups(2)
    sent, received = torch.arange(4.0, device=NAME), torch.zeros(4, device=NAME)
    sim.synchronize()
    sim.settings.host_waits = 0
    with sim.stream(sim.Stream()):
        receiver.recv([received], 0, 7).wait()
        doubled = received * 2  # Nothing has been sent yet.
        arrived = sim.current_stream().record_event()
    assert not arrived.query()
    assert sim.settings.host_waits == 0
    work = sender.send([sent], 1, 7)
    arrived.synchronize()
    sim.synchronize()
    assert doubled.cpu().tolist() == [0.0, 2.0, 4.0, 6.0]
    assert work.is_completed()


def test_a_collective_takes_what_the_caller_s_stream_has_written_before_it(sim: Simulated) -> None:
    groups = make_groups(2)
    tensors = [torch.zeros(1000, device=NAME) for _ in groups]
    sim.synchronize()
    for number, (group, tensor) in enumerate(zip(groups, tensors, strict=True), start=1):
        with sim.stream(sim.Stream()):
            go_on = sim.hold()
            tensor.fill_(number)
            work = group.allreduce([tensor])
            assert not work.is_completed()
            work.wait()
            tensor.add_(1)
            go_on()
    sim.synchronize()
    assert [set(tensor.tolist()) for tensor in tensors] == [{4.0}, {4.0}]


def test_a_collective_that_fails_is_an_error_of_the_device(sim: Simulated) -> None:
    (group,) = make_groups(1)
    options = dist.BroadcastOptions()
    options.rootRank = 3

    def fail() -> None:
        """The error may be there before the call returns."""
        group.broadcast([torch.zeros(4, device=NAME)], options)
        sim.synchronize()

    with pytest.raises(RuntimeError, match="the simulated device failed"):
        fail()
