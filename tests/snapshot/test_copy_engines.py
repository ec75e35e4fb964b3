"""One contract for every copy engine: the bytes of one version arrive, in order, whatever happens."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.device import Cuda
from reft.errors import CopyError, CopyOrderError, UnsupportedStateError
from reft.snapshot import copy_engine as copy_engine_module
from reft.snapshot import device_engine as device_module
from reft.snapshot.copy_engine import CopyEngine, Piece, contiguous
from reft.snapshot.device_engine import PinnedRanges, copy_engine_for
from reft.state.catalogue import SectionImage
from tests.device.simulated import Simulated as Device
from tests.device.simulated import SimulatedVendor, missing
from tests.snapshot.conftest import WAIT_SECS, Cpu, Simulated, host_memory, random_bytes

CLOCK_ERROR_SECS = 0.001
"""Most by which a device's time, told by the host's clock, may be wrong on a busy machine."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def take(engine: CopyEngine, pieces: list[Piece]) -> None:
    engine.begin()
    engine.copy(pieces)
    engine.fence()
    engine.synchronize()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 64, 65, 999, 12289])),
        min_size=1,
        max_size=5,
    ),
    shift=st.integers(0, 5),
    cut=st.integers(50, 2**18),
)
def test_every_bit_arrives_whatever_the_dtypes_sizes_and_offsets(
    device: Cpu, engine: CopyEngine, parts: list[tuple[torch.dtype, int]], shift: int, cut: int
) -> None:
    tensors, raws = [], []
    for dtype, count in parts:
        raw = random_bytes(
            count * dtype.itemsize
        )  # among them NaNs of every payload, infinities, denormals
        raws.append(raw % 2 if dtype is torch.bool else raw)
        tensors.append((str(len(raws)), device.put(raws[-1].view(dtype))))
    image = SectionImage(tensors)
    expected = torch.zeros(image.nbytes, dtype=torch.uint8)
    for offset, raw in zip(image.offsets, raws, strict=True):
        expected[offset : offset + raw.numel()] = raw
    memory = host_memory(engine, image.nbytes + 11)
    target = memory[shift : shift + image.nbytes]
    target.zero_()
    engine.begin()
    for start in range(0, image.nbytes, cut):
        engine.copy(image.pieces_into(start, target[start : start + cut]))
    engine.fence()
    engine.synchronize()
    assert torch.equal(target, expected)
    assert torch.all(memory[:shift] == 0xEE)
    assert torch.all(memory[shift + image.nbytes :] == 0xEE)
    engine.unregister(memory)


def test_pieces_that_go_on_in_memory_are_one_unless_their_tensors_are_two(
    device: Cpu, engine: CopyEngine
) -> None:
    data = bytearray(random_bytes(200).numpy().tobytes())
    halves = [torch.frombuffer(data, dtype=torch.uint8, offset=at, count=100) for at in (0, 100)]
    memory = host_memory(engine, 200)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for sources, count in ((halves, 2), ((whole[:100], whole[100:]), 1)):
        pieces = [
            (source, memory[at : at + 100]) for source, at in zip(sources, (0, 100), strict=True)
        ]
        assert len(contiguous(pieces)) == count
        take(engine, pieces)
        assert bytes(memory.numpy()) == bytes(data)
        memory.zero_()


def test_a_version_is_the_state_between_begin_and_fence(device: Cpu, engine: CopyEngine) -> None:
    live = device.put(torch.zeros(100_000, dtype=torch.uint8))
    memory = host_memory(engine, live.numel())
    # Streams run in an order that the seed draws from those that the events allow.
    orders = (
        [device.torch.by_hand(seed) for seed in range(16)] if type(device) is Simulated else [None]
    )
    for number, order in enumerate(orders):
        with order or nullcontext():
            release = device.hold() if order is None else lambda: None
            device.write(
                live, 2 * number + 1
            )  # the optimizer step, which the device has not begun yet
            engine.begin()
            engine.copy([(live[:60_000], memory[:60_000])])
            engine.copy([(live[60_000:], memory[60_000:])])
            engine.fence()
            device.write(live, 2 * number + 2)  # the next one
            release()
            engine.synchronize()
        assert torch.all(memory == 2 * number + 1)


def test_p2_a_version_of_which_a_part_is_in_host_memory_is_the_state_of_one_step(
    device: Cpu, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an offloaded optimizer. The optimizer step waits until the host's part is copied."""
    weights = device.put(torch.zeros(100_000, dtype=torch.uint8))
    master = torch.zeros(100_000, dtype=torch.uint8)
    memory = host_memory(engine, 200_000)
    began, stepped = threading.Event(), threading.Event()
    copy = copy_engine_module._copy_range

    def copy_slowly(target: int, source: int, nbytes: int, closed: Any) -> None:
        copy(target, source, nbytes // 2, closed)
        began.set()
        stepped.wait(0.3)  # The step can be made meanwhile, unless it waits for this copy.
        copy(target + nbytes // 2, source + nbytes // 2, nbytes - nbytes // 2, closed)

    monkeypatch.setattr(copy_engine_module, "_copy_range", copy_slowly)
    device.write(weights, 1)
    master.fill_(1)
    engine.begin()
    pieces = [(weights, memory[:100_000]), (master, memory[100_000:])]
    worker = threading.Thread(target=engine.copy, args=(pieces,))
    worker.start()
    assert began.wait(WAIT_SECS)
    engine.fence()
    device.write(weights, 2)
    master.fill_(2)
    stepped.set()
    worker.join()
    engine.synchronize()
    assert torch.all(memory == 1)


def test_the_host_is_not_held_up_by_the_device(device: Cpu, engine: CopyEngine) -> None:
    live = device.put(random_bytes(1000))
    memory = host_memory(engine, 1000)
    release = device.hold()
    engine.begin()
    ticket = engine.copy([(live, memory)])
    engine.fence()
    # All calls have returned, and the device has not yet come to the copy.
    assert ticket.done() is not device.asynchronous
    assert (ticket.secs is None) is device.asynchronous
    release()
    ticket.wait()
    engine.synchronize()
    assert torch.equal(memory, live.cpu())


def test_a_copy_after_a_mark_waits_until_the_device_is_there(
    device: Cpu, engine: CopyEngine
) -> None:
    live = device.put(random_bytes(2000))
    memory = host_memory(engine, 2000)
    engine.begin()
    early = engine.copy([(live[:1000], memory[:1000])])
    release = device.hold()
    mark = engine.stamp()
    late = engine.copy([(live[1000:], memory[1000:])], after=mark)
    early.wait()  # does not depend on the mark
    assert late.done() is not device.asynchronous
    release()
    engine.fence()
    engine.synchronize()
    assert torch.equal(memory, live.cpu())
    assert early.secs[0] <= early.secs[1] <= late.secs[0] <= late.secs[1]


def test_stamps_tell_when_the_device_was_there_and_hold_up_nobody(
    device: Cpu, engine: CopyEngine
) -> None:
    before = time.perf_counter()
    first = engine.stamp()
    release = device.hold()
    second = engine.stamp()
    handed_over = time.perf_counter()
    release()
    times = engine.secs_of([first, second])
    assert engine.secs_of([]) == []
    assert before - CLOCK_ERROR_SECS <= times[0] <= times[1]
    if device.asynchronous:
        assert times[1] >= handed_over - CLOCK_ERROR_SECS, (
            "the device was still held when the host went on"
        )
    else:
        assert times[1] <= handed_over


def test_the_fence_waits_for_a_copy_that_is_being_handed_over(
    device: Cpu, engine: CopyEngine
) -> None:
    inside, release = threading.Event(), threading.Event()
    ended: list[str] = []

    def encode() -> list[Piece]:
        inside.set()
        release.wait(WAIT_SECS)
        ended.append("copy")
        return []

    engine.begin()
    copier = threading.Thread(target=lambda: engine.copy([], encode=encode))
    copier.start()
    assert inside.wait(WAIT_SECS)
    trainer = threading.Thread(target=lambda: (engine.fence(), ended.append("fence")))
    trainer.start()
    with pytest.raises(CopyOrderError, match="no version is open"):
        # The trainer is in the fence as soon as it is refused.
        list(map(engine.copy, iter(list[Piece], None)))
    release.set()
    for thread in (copier, trainer):
        thread.join()
    assert ended == ["copy", "fence"]


def test_calls_out_of_order_are_refused(device: Cpu, engine: CopyEngine) -> None:
    live, memory = device.put(random_bytes(8)), host_memory(engine, 8)
    engine.fence()  # before every optimizer step, the first one too
    engine.synchronize()
    with pytest.raises(CopyOrderError, match="no version is open"):
        engine.copy([(live, memory)])
    engine.begin()
    with pytest.raises(CopyOrderError, match="was not fenced"):
        engine.begin()
    engine.fence()
    engine.fence()
    with pytest.raises(CopyOrderError, match="no version is open"):
        engine.copy([(live, memory)])
    engine.begin()
    assert torch.all(memory == 0xEE)
    engine.copy([(live, memory)])
    engine.synchronize()  # before the fence: all was copied early
    assert torch.equal(memory, live.cpu())


def test_after_close_nothing_works_and_nothing_breaks(device: Cpu) -> None:
    engine = device.engine()
    live, memory = device.put(random_bytes(8)), host_memory(engine, 8)
    engine.begin()
    engine.close()
    engine.close()
    engine.fence()
    engine.unregister(memory)
    for call in (engine.begin, engine.synchronize, lambda: engine.copy([(live, memory)])):
        with pytest.raises(CopyOrderError, match="closed"):
            call()


def test_close_waits_for_copies_in_flight(device: Cpu) -> None:
    engine = device.engine()
    live, memory = device.put(random_bytes(100_000)), host_memory(engine, 100_000)
    release = device.hold()
    engine.begin()
    engine.copy([(live, memory)])
    closing = threading.Thread(target=engine.close)
    closing.start()
    release()
    closing.join(WAIT_SECS)
    assert not closing.is_alive()
    assert torch.equal(memory, live.cpu())


def test_tensors_that_are_not_plain_bytes_are_refused(device: Cpu, engine: CopyEngine) -> None:
    memory = host_memory(engine, 64)
    good = device.put(torch.ones(4, 4))
    engine.begin()
    bad: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (good.t()[1:], memory[:48], "expected a contiguous one"),
        (good[:, 1], memory[:16], "expected a contiguous one"),
        (torch.ones(2, dtype=torch.complex64).conj(), memory[:16], "expected a contiguous one"),
        (torch.eye(2).to_sparse(), memory[:16], "expected a contiguous one"),
        (good, memory[:60], "expected a contiguous target of equal size"),
        (good[0], memory[:32:2], "expected a contiguous target of equal size"),
        (good, memory.view(torch.float32), "expected 1-D uint8"),
        (good, memory.view(8, 8), "expected 1-D uint8"),
    ]
    for source, target, message in bad:
        with pytest.raises(CopyError, match=message):
            engine.copy([(good, memory), (source, target)])
    assert torch.all(memory == 0xEE), "something was copied although the call was refused"
    with pytest.raises(CopyError):
        engine.copy([(torch.empty(4, device="meta"), memory[:16])])


def test_a_device_without_an_engine_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match="xpu"):
        copy_engine_for(torch.device("xpu", 0))


def test_memory_may_be_registered_again(device: Cpu, engine: CopyEngine) -> None:
    memory = memoryview(mmap.mmap(-1, 5 * mmap.PAGESIZE))
    engine.unregister(memory)
    live = device.put(random_bytes(len(memory)))
    for _ in range(3):
        assert engine.register(memory)
        assert engine.register(memory)
        target = torch.frombuffer(memory, dtype=torch.uint8).fill_(0)
        take(engine, [(live, target)])
        assert torch.equal(target, live.cpu())
        engine.unregister(memory)
    assert engine.register(memoryview(b""))


@pytest.mark.parametrize("early", ["unregistered", "freed"])
def test_sources_and_targets_stay_until_all_is_copied(
    device: Cpu, engine: CopyEngine, early: str
) -> None:
    live = device.put(random_bytes(100_000))
    expected, memory = live.cpu().clone(), host_memory(engine, 100_000)
    if type(device) is Simulated:
        device.torch.settings.delay_secs = 0.02
    engine.begin()
    engine.copy([(live, memory)])
    if early == "freed":
        del live
    else:
        engine.unregister(memory)
    engine.fence()
    engine.synchronize()
    assert torch.equal(memory, expected)


def test_memory_that_cannot_be_pinned_costs_speed_only(
    sim: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device = Simulated(sim)
    sim.settings.refuse_registering = 1
    engine = device.engine()
    memories = [memoryview(mmap.mmap(-1, 3500)) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        assert not any([engine.register(m) for m in memories])
        live = device.put(random_bytes(3500))
        for memory in memories:
            target = torch.frombuffer(memory, dtype=torch.uint8)
            engine.begin()
            engine.copy([(live, target)])
            assert torch.equal(target, live.cpu()), (
                "the copying thread waits where memory is not pinned"
            )
            engine.fence()
            engine.synchronize()
    (said,) = caplog.messages
    assert "cannot be pinned: simulated error 1" in said
    assert "ulimit -l" in said
    engine.close()


def test_memory_is_pinned_whole_or_not_at_all() -> None:
    chunks: dict[int, int] = {}

    def pin(address: int, nbytes: int) -> None:
        if len(chunks) == 2:
            raise RuntimeError("enough")
        chunks[address] = nbytes

    ranges = PinnedRanges(pin, chunks.__delitem__, mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    with pytest.raises(RuntimeError, match="enough"):
        ranges.add(memory)
    assert chunks == {}
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert ranges.split(address, len(memory)) == [(len(memory), False)]


EXIT_SCRIPT = """
import mmap, sys, torch
if sys.argv[1] == "sim":
    from reft.device import VENDORS
    from tests.device.simulated import SimulatedVendor, simulated
    VENDORS["sim"] = SimulatedVendor(simulated())
from reft.snapshot.device_engine import copy_engine_for
engine = copy_engine_for(sys.argv[1])
memory = memoryview(mmap.mmap(-1, 1 << 20))
engine.register(memory)
live = torch.ones(1 << 20, dtype=torch.uint8, device=sys.argv[1])
engine.begin()
engine.copy([(live, torch.frombuffer(memory, dtype=torch.uint8))])
"""


@pytest.mark.parametrize("refused", [False, True])
def test_p6_copies_share_no_stream_with_communicators_where_the_driver_gives_some_and_leave_none_behind(
    sim: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """torch hands its pool's streams out in turns: whoever took one shares it with a later communicator."""

    def refuse(*_: object) -> None:
        raise OSError("there is no driver")

    if refused:
        monkeypatch.setattr(SimulatedVendor, "create_stream", refuse)
    monkeypatch.setattr(device_module, "_left_streams", {})
    engine = Simulated(sim).engine()
    for _ in range(0 if refused else 32):
        sim.hold(sim.Stream())  # a transfer whose peer is not there yet
    target = host_memory(engine, 100)
    take(engine, [(torch.full((100,), 7, dtype=torch.uint8, device="sim"), target)])
    assert target.tolist() == [7] * 100
    assert sim.settings.own_streams == (0 if refused else 2), (
        "to copy, and to drain; the clock needs none"
    )
    engine.close()
    Simulated(sim).engine().close()
    assert sim.settings.own_streams == (0 if refused else 2), (
        "the next engine takes those of the closed one"
    )
    assert ["may wait for copies" in message for message in caplog.messages] == [True] * (
        2 * refused
    )


def test_memory_that_was_staged_in_is_given_back_after_its_engine_was_closed(sim: Device) -> None:
    """torch's allocator asks the stream on which a block was allocated, which may not be destroyed by then."""
    engine = Simulated(sim).engine()
    buffer = engine.staging_buffer(2**20)
    engine.close()
    del buffer
    sim.synchronize()
    sim.empty_cache()


@pytest.mark.parametrize("vendor", ["cu", "hip"])
def test_either_vendor_s_streams_do_not_wait_for_the_default_one_nor_its_threads_end_captures(
    vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    modes: list[int] = []

    def create(made: Any, flags: int, priority: int) -> int:
        calls.append((flags, priority))
        made._obj.value = 0xABC000
        return 0 if len(calls) == 1 else 2

    driver = SimpleNamespace(
        **{f"{vendor}StreamCreateWithPriority": create},
        **{f"{vendor}ThreadExchangeStreamCaptureMode": lambda mode: modes.append(mode._obj.value)},
    )
    monkeypatch.setattr(Cuda, "library", lambda self: driver)
    of_torch = SimpleNamespace(
        set_device=lambda device: None, ExternalStream=lambda address, device: (address, device)
    )
    monkeypatch.setattr(Cuda, "module", of_torch)
    assert Cuda().create_stream(torch.device("cpu")) == (0xABC000, torch.device("cpu"))
    assert calls == [(1, 0)]  # non-blocking, the priority of the default stream
    with pytest.raises(RuntimeError, match="error 2"):
        Cuda().create_stream(torch.device("cpu"))
    cuda = Cuda()
    for _ in range(2):
        cuda.enter(torch.device("cpu"))
    assert modes == [1], "once in a thread: others' captures of graphs are none of its business"


@pytest.mark.process
@pytest.mark.parametrize("name", ["cpu", "sim", "cuda"])
def test_a_process_that_ends_in_the_middle_ends_cleanly(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device; torch finds none")
    if name == "sim" and (why := missing()):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, name],
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
