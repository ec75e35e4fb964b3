"""The simulated device is as strict as a real one: the tests that use it may believe it."""

from __future__ import annotations

import mmap
import time

import pytest
import torch
from torch import nn

from tests.device.simulated import NAME, POISON, Simulated

WAIT_SECS = 60  # Longer than anything here takes; no test depends on it


def pages(sim: Simulated, nbytes: int) -> torch.Tensor:
    """Registered host memory."""
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    assert sim.host_register(memory.data_ptr(), nbytes) == 0
    return memory


# -- streams and events ------------------------------------------------------------------------------


def test_the_host_runs_ahead_and_a_stream_does_what_it_was_given_in_order(sim: Simulated) -> None:
    go = sim.hold()
    x = torch.zeros(1000, device=NAME)
    for number in range(5):
        x.mul_(10).add_(number)
    y = (x @ x).sqrt()
    event = sim.Event()
    event.record()
    assert not event.query(), "the device is held, and the host is here"
    go()
    event.synchronize()
    assert x.cpu().eq(1234).all()
    assert y.item() == pytest.approx(1234 * 1000**0.5)
    assert sim.settings.synchronised == 0


def test_events_tell_when_the_device_was_there(sim: Simulated) -> None:
    first, second, untimed = sim.Event(enable_timing=True), sim.Event(enable_timing=True), sim.Event()
    go = sim.hold()
    first.record()
    sim.sleep(0.02)
    second.record()
    untimed.record()
    with pytest.raises(RuntimeError):
        first.elapsed_time(second)  # not there yet
    go()
    second.synchronize()
    assert 20 <= first.elapsed_time(second) < 20_000
    with pytest.raises((RuntimeError, ValueError)):
        first.elapsed_time(untimed)


def test_torch_hands_its_pool_out_in_turns_and_the_driver_s_streams_are_nobody_else_s(sim: Simulated) -> None:
    sim.settings.pool = 3
    ids = [sim.Stream().stream_id for _ in range(7)]
    assert len(set(ids)) == 3
    own = sim.create_stream()
    assert own not in ids
    assert sim.settings.own_streams == 1
    sim.destroy_stream(own)
    assert sim.settings.own_streams == 0


def test_a_kernel_that_dies_is_heard_of_where_somebody_waits(sim: Simulated) -> None:
    x = torch.zeros(3, device=NAME)
    x.index_fill_(0, torch.tensor([7]), 1.0)
    with pytest.raises(RuntimeError, match="the simulated device failed"):
        sim.synchronize()
    assert x.cpu().tolist() == [0, 0, 0], "the next who waits is not told again"


# -- copies over the link -------------------------------------------------------------------------------


def test_copies_into_registered_memory_return_at_once_and_take_their_time(sim: Simulated) -> None:
    sim.settings.bytes_per_sec, sim.settings.delay_secs = 1e7, 0.001
    x = torch.full((400_000,), 7, dtype=torch.uint8, device=NAME)
    target = pages(sim, 2**19)[:400_000]
    sim.synchronize()
    began = sim.Event(enable_timing=True)
    ended = sim.Event(enable_timing=True)
    began.record()
    target.copy_(x, non_blocking=True)
    ended.record()
    assert not ended.query()
    sim.synchronize()
    assert target.eq(7).all()
    assert began.elapsed_time(ended) >= 40.0, "1e7 bytes a second, and the delay"
    ends = []
    for part in range(2):  # streams share the link
        with sim.stream(sim.Stream()):
            target[part * 200_000 :][:200_000].copy_(x[:200_000], non_blocking=True)
            ends.append(sim.Event(enable_timing=True))
            ends[-1].record()
    sim.synchronize()
    assert max(map(ended.elapsed_time, ends)) >= 40.0
    ordinary = torch.zeros(400_000, dtype=torch.uint8)
    ordinary.copy_(x, non_blocking=True)
    assert ordinary.eq(7).all(), "into memory that is not registered the host waits"


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
    assert [sim.host_unregister(at), sim.host_unregister(at), sim.host_unregister(at + 2 * page)] == [
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
    sim.settings.refuse_registering = 1
    assert sim.host_register(at, page) == 1


# -- memory ---------------------------------------------------------------------------------------------


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


def test_memory_comes_to_an_end(sim: Simulated) -> None:
    sim.settings.total_bytes = sim.settings.reserved_bytes + 2**20
    x = torch.empty(2**19, dtype=torch.uint8, device=NAME)
    assert sim.mem_get_info()[0] == 2**19
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**20, dtype=torch.uint8, device=NAME)
    del x
    torch.empty(2**20, dtype=torch.uint8, device=NAME)


# -- training -------------------------------------------------------------------------------------------


def train(sim: Simulated, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights. Nothing waits before the end."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(50, 32),
        nn.Linear(32, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.LayerNorm(64),
        nn.Linear(64, 50),
    ).to(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sim.manual_seed_all(7)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(step)).to(NAME)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [p.detach().cpu() for p in model.parameters()]


def test_models_train_on_it_the_same_in_every_run_and_nothing_waits(sim: Simulated) -> None:
    losses, weights = train(sim, 12)
    assert losses[-1] < losses[0] / 2
    assert sim.settings.synchronised == 0
    again, weights_again = train(sim, 12)
    assert again == losses
    assert all(map(torch.equal, weights, weights_again))


def test_what_has_no_shape_before_it_has_run_holds_the_host_up_and_is_counted(sim: Simulated) -> None:
    x = torch.tensor([0, 1, 0, 2], device=NAME)
    assert x.nonzero().cpu().tolist() == [[1], [3]]
    assert torch.equal(x, x.clone())
    assert sim.settings.synchronised >= 1


# -- by hand --------------------------------------------------------------------------------------------


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
