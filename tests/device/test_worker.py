"""The whole worker with a device that runs behind the host: what is committed is the state of its step.

The device is simulated (:mod:`tests.device.simulated`), or a real one where a test is marked ``gpu``; all else is real.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from reft.config import HasConfig, Variant
from reft.device import Vendor
from reft.grid import VersionId
from reft.memory.arena import scan
from reft.pacing.gate import StreamGate
from reft.pacing.pacer import Pacer
from reft.pacing.schedule import Overflow
from reft.pacing.staging import StagingArea
from reft.policy.agreed import AgreedRates
from reft.policy.rate import CopyMode
from reft.snapshot import device_engine
from reft.snapshot import worker as worker_module
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CopyTicket, Piece
from reft.snapshot.device_engine import DeviceCopyEngine, copy_engine_for
from reft.snapshot.gate import UNLIMITED, Permit
from reft.snapshot.plan import LiveImages
from reft.snapshot.version import WRITTEN
from reft.snapshot.worker import SnapshotRequest
from reft.state.catalogue import SectionImage
from tests.device.simulated import NAME
from tests.snapshot.ranks import SECRET, WAIT_SECS, feature, group_of_one, make_worker

ELEMENTS = 300_000
NAMES = ["ForwardPass", "RecvGrad", "BackwardPass", "OptimizerStep"]
STEPS = 6
SLOW = 3e7  # bytes per second of a link that takes longer for the state than a step does


class ObservedGate(StreamGate):
    patience_secs = property(lambda self: self.patience, lambda self, secs: None)
    patience = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.handed_out: Counter[int] = Counter()

    @property
    def begun_beside(self) -> bool:
        return self._beside_left < max(1, self._beside_bytes)

    def admit(self) -> Permit:
        permit = super().admit()
        self.handed_out[permit.tier] += 1
        return permit


class Job:
    def __init__(self, folder: Path, vendor: Vendor, has: dict[str, Any]) -> None:
        self.vendor, self.sim = vendor, vendor.module
        engine = copy_engine_for(vendor.type)
        assert isinstance(engine, DeviceCopyEngine)
        self.engine = engine
        self.gate = ObservedGate()
        self.staging = StagingArea(self.engine)
        self.pacer = Pacer(
            HasConfig.model_validate({"overflow": "stall"} | has),
            self.engine,
            stage_id=0,
            stages=2,
            micro_batches=1,
            staging=self.staging,
            gate=self.gate,
        )
        self.content: dict[int, set[float]] = {}  # what each version held when it was committed
        self.state = torch.zeros(ELEMENTS, device=vendor.type)
        self.folder = folder
        copier = Copier(self.engine, 65536, self.staging)
        self.worker = make_worker(
            folder,
            copier,
            self.pacer,
            wanted_interval=lambda: self.pacer.advised_interval_steps,
            copies=self.pacer if self.pacer.chooses_mode else None,
            on_commit=self.note,
        )
        self.stats = self.worker.callbacks.stats
        self.images = LiveImages(SectionImage([("state", self.state)]), SectionImage([]), "layout")

    def note(self, label: VersionId) -> None:
        self.content[label.step] = self.committed()[label.step]

    def step(self, number: int, variant: Variant) -> SnapshotRequest:
        """Queue a step, as far ahead of the device as it may be, then hand its version over."""
        self.pacer.begin_step("step")
        forward = (self.pacer.stamp(), self.kernel(0.002), self.pacer.stamp())
        self.pacer.open(1, receives=True)
        self.kernel(0.01)
        self.pacer.close()
        backward = (self.pacer.stamp(), self.kernel(0.002), self.pacer.stamp())
        self.worker.fence()
        self.state.fill_(number)
        self.pacer.end_step("step", NAMES, [forward[::2]], [backward[::2]])
        return self.hand_over(number, variant)

    def hand_over(self, number: int, variant: Variant) -> SnapshotRequest:
        first = number == 1  # memory is reserved for it, whatever it takes
        request = SnapshotRequest(
            VersionId(1, number),
            self.images,
            f"host {number}".encode(),
            required=first,
            variant=variant,
        )
        self.worker.submit(request)
        if first:
            assert request.done.wait(WAIT_SECS)
        return request

    def await_turn(self, request: SnapshotRequest) -> None:
        """Host time that a step takes: enough for the worker to turn to its version, or to drain an older one."""
        while not (request.started or self.worker.votes.late or request.done.wait(0.001)):
            pass

    def end(self) -> None:
        self.worker.fence()
        self.state.fill_(-1.0)
        assert self.worker.drain(WAIT_SECS)

    def check(self) -> None:
        assert all(values == {float(step)} for step, values in self.content.items()), self.content

    def await_device(self) -> None:
        self.sim.current_stream().synchronize()

    def train(self, steps: Iterable[int]) -> None:
        """In step with the device, and with a worker that always gets its turn."""
        for number in steps:
            self.await_turn(self.step(number, Variant.HAS))
            self.await_device()

    def kernel(self, secs: float) -> None:
        if self.vendor.type == NAME:
            self.sim.sleep(secs)
        else:
            self.sim._sleep(int(secs * 2.5e9))  # cycles; no device has a faster clock

    def slow_down(self, bytes_per_sec: float) -> None:
        if self.vendor.type == NAME:
            self.sim.settings.bytes_per_sec = bytes_per_sec

    @property
    def recorded(self) -> int | None:
        """Events so far; a real device does not count them."""
        return int(self.sim.settings.recorded) if self.vendor.type == NAME else None

    def committed(self) -> dict[int, set[float]]:
        found = {}
        for _, arena in scan(self.folder, SECRET):
            header = arena.header()
            if header is None or not header.state.whole:
                continue
            values: set[float] = set()
            for entry in header.entries:
                assert arena.verify(entry)
                data = bytes(arena.read_block(entry))
                if entry.key.section.value in ("replicated", "owned"):
                    values |= set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist())
                elif entry.key.section.value == "host":
                    assert data == f"host {header.label.step}".encode()
            found[header.label.step] = values
            arena.close()
        return found


@pytest.fixture
def job(
    tmp_path: Path, at_hand: Vendor, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Job]:
    monkeypatch.setattr(DeviceCopyEngine, "least_chunk_bytes", 0)
    with group_of_one():
        made = Job(tmp_path, at_hand, getattr(request, "param", {"compute_share": 0.0}))
        yield made
        made.worker.close(WAIT_SECS)
    if at_hand.type == NAME:
        assert made.sim.registrations == 0, "memory stayed pinned"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [Variant.HAS, Variant.HOST_DEVICE, Variant.HOST])
def test_p2_a_committed_version_is_the_state_of_its_step(job: Job, variant: Variant) -> None:
    job.slow_down(SLOW)  # more for all chunks than a step takes
    for number in range(1, STEPS + 1):
        request = job.step(number, variant)
        if number % 3:  # else it is given up
            job.await_turn(request)
    job.end()
    committed = job.committed()
    assert len(committed) == 2
    for step, values in committed.items():
        assert values == {float(step)}, f"the version of step {step} holds other steps' numbers"
    assert job.stats.committed + sum(job.stats.skipped.values()) == STEPS


@pytest.mark.gpu
def test_p2_the_optimizer_on_the_host_waits_until_its_masters_are_copied(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offloaded optimizer writes masters in place, without a stream that could wait."""
    master = torch.zeros(ELEMENTS)
    job.images = LiveImages(job.images.replicated, SectionImage([("master", master)]), "offloaded")
    copy = device_engine.copy_on_host

    def copy_slowly(*args: Any) -> None:
        time.sleep(0.005)  # All chunks of the masters take longer than a step.
        copy(*args)

    monkeypatch.setattr(device_engine, "copy_on_host", copy_slowly)
    for number in range(1, STEPS + 1):
        job.worker.fence()
        master.fill_(number)
        job.await_turn(job.step(number, Variant.HOST_DEVICE))
    job.end()
    job.check()
    assert list(job.content) == list(range(1, STEPS + 1))


@pytest.mark.gpu
def test_p2_what_is_written_after_copies_are_queued_and_before_they_are_made_costs_the_version(
    job: Job,
) -> None:
    """The host compares write counts between two passes, while the device has yet to copy."""
    job.train(range(1, 3))
    assert job.worker.drain(WAIT_SECS)
    job.kernel(0.3)  # what is handed over now is copied after that
    counts = job.images.write_counts()
    request = SnapshotRequest(
        VersionId(1, 3),
        job.images,
        b"host 3",
        written=lambda: job.images.written_since(counts),
        variant=Variant.HOST,
    )
    job.worker.submit(request)
    assert request.copied.wait(WAIT_SECS), "queued"
    job.worker.check_between_passes()
    job.state.fill_(-1.0)
    job.worker.fence()
    assert request.done.wait(WAIT_SECS)
    assert request.given_up is not None
    assert request.given_up.kind == WRITTEN


def test_with_has_chunks_begin_in_the_device_s_windows(job: Job) -> None:
    for number in range(1, 2 * STEPS):
        job.await_turn(job.step(number, Variant.HAS))
    job.worker.fence()
    assert job.worker.drain(WAIT_SECS)
    job.gate.enter()
    recorded = job.recorded
    job.pacer.open(1, receives=True)
    assert recorded is None or job.recorded == recorded + 1, (
        "training records an event where a window opens, and one at its end"
    )
    plan = job.pacer.plan
    (window,) = plan.windows
    assert window.position == 1
    assert window.length_secs >= 0.01
    in_windows = [record for record in job.worker.copier.records if record.tier == 1]
    assert in_windows
    assert {record.window for record in in_windows} == {0}


@pytest.mark.parametrize("ahead", [0, 1, 2, STEPS])
@pytest.mark.parametrize("variant", [Variant.HAS, Variant.HOST])
def test_a_version_may_begin_until_the_device_is_at_the_write_however_many_steps_ahead_the_host_is(
    job: Job, variant: Variant, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step the worker is busy until the host is at the fence, and free before the device is there."""
    monkeypatch.setattr(
        worker_module, "LATE_PART", 1e4
    )  # a step takes 14 ms here, a turn on a busy machine more
    at_fence, fence = threading.Event(), job.worker.fence

    def come_to_the_fence() -> float:
        at_fence.set()
        secs = fence()
        at_fence.clear()
        return secs

    def commit(label: VersionId) -> None:
        job.note(label)
        assert label.step == 1 or at_fence.wait(WAIT_SECS)

    monkeypatch.setattr(job.worker, "fence", come_to_the_fence)
    job.worker.callbacks.on_commit = commit
    ends = []
    for number in range(1, STEPS + 1):
        if number > ahead + 1:
            ends[-1 - ahead].synchronize()
        request = job.step(number, variant)
        ends.append(job.sim.current_stream().record_event())
        # A kernel of the next step: the device is in the middle of it until the worker has turned to the version.
        job.sim.launch(lambda version=request: job.await_turn(version))
    job.worker.fence()
    at_fence.set()
    assert job.worker.drain(WAIT_SECS)
    assert job.content == {step: {float(step)} for step in range(1, STEPS + 1)}, job.stats.skipped


def test_a_host_that_is_ahead_stays_so_where_the_worker_is_behind(job: Job) -> None:
    """It does not wait until the device is at the write for a version that comes too late in any case."""
    goes_on = threading.Event()
    job.worker.callbacks.on_commit = lambda label: label.step == 1 or goes_on.wait(WAIT_SECS)  # type: ignore[assignment, return-value]
    for number in range(1, 4):
        request = job.step(number, Variant.HOST)
        if number < 3:
            job.await_turn(request)
    job.kernel(1.0)
    at_write = job.pacer.stamp()
    job.worker.fence()
    ahead = not job.engine.reached(at_write)
    goes_on.set()
    assert job.worker.drain(WAIT_SECS)
    assert ahead
    assert not request.committed


@pytest.mark.parametrize("variant", [Variant.HAS, Variant.HOST])
def test_p6_a_device_that_fails_for_good_costs_no_committed_version_and_ends_every_wait(
    job: Job, variant: Variant
) -> None:
    job.train(range(1, 4))
    assert job.worker.drain(WAIT_SECS)
    before = job.committed()
    job.sim.hold()
    request = job.step(4, variant)
    job.sim.fail("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        job.state.add_(1)  # Training ends by its own error, whether or not it asks reft before.
    with suppress(RuntimeError):
        job.worker.fence()
    assert request.done.wait(WAIT_SECS)
    assert not request.committed
    job.worker.close(WAIT_SECS)
    assert not job.worker._thread.is_alive()
    assert max(before.items()) in job.committed().items()
    job.sim.reset()


STAGING = {"overflow": "staging", "compute_share": 0.0}


def train(job: Job, steps: int) -> None:
    job.train(range(1, steps + 1))
    job.end()


@pytest.mark.parametrize("job", [STAGING], indirect=True)
def test_p2_a_staged_version_is_committed_later_and_is_the_state_of_its_step(job: Job) -> None:
    job.sim.settings.bytes_per_sec = SLOW  # more for all chunks than a step takes
    train(job, 40)
    stats = job.stats
    assert job.pacer.plan.overflow is Overflow.STAGING
    assert stats.staged >= 3
    assert 0 < stats.staged_bytes < stats.staged * job.state.nbytes, (
        "windows before the fence were used too"
    )
    job.check()
    assert stats.committed == len(job.content)
    # A staged version keeps the one after it away; every one is accounted for.
    assert stats.skipped["not started before the next optimizer step"] > 0
    assert stats.committed + sum(stats.skipped.values()) == 40
    drained = [record for record in job.worker.copier.records if record.tier == 1]
    assert sum(record.nbytes for record in drained) > 0
    assert sum(stats.tier_bytes.values()) == stats.taken * job.state.nbytes


@pytest.mark.parametrize("job", [STAGING], indirect=True)
def test_the_fence_waits_for_the_staging_copy_only(job: Job) -> None:
    job.sim.settings.bytes_per_sec = SLOW
    train(job, 12)
    assert job.staging.capacity_bytes > 0
    release = job.sim.hold(job.engine.drain_stream)  # from here on nothing arrives on the host
    staged = job.stats.staged
    last = 12
    while job.stats.staged == staged:
        last += 1
        job.train([last])
    job.train(range(last + 1, last + 5))  # it is not held up
    last += 4
    assert job.worker.votes.late
    job.worker.votes.stop_proposal = last + 1  # somebody wants the job to stop
    release()
    assert job.worker.drain(WAIT_SECS)
    assert job.worker.votes.stop_step is not None
    assert job.worker.votes.stop_step > last + 1, (
        "ranks may have passed the step before they heard of it"
    )
    job.check()


@pytest.mark.parametrize("job", [STAGING], indirect=True)
def test_p6_without_device_memory_snapshots_are_taken_less_often_instead(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.sim.settings.bytes_per_sec = SLOW
    settings = job.sim.settings
    settings.others_bytes = settings.total_bytes - 2**28  # less than the margin is left
    train(job, 10)
    plan = job.pacer.plan
    assert plan.overflow is Overflow.INTERVAL
    assert plan.advised_interval_steps > 1
    assert job.stats.staged == 0
    assert "no device memory to stage snapshots: has.overflow is 'interval'" in caplog.text
    # It comes back with the memory.
    settings.others_bytes = 0
    job.train(range(11, 40))
    job.end()
    assert job.stats.staged > 0
    job.check()


@pytest.mark.parametrize("job", [STAGING], indirect=True)
def test_p5_a_drain_that_is_given_up_writes_into_no_newer_version(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of it is on its way arrives when the link lets it: not in an arena that holds another version by then."""
    job.sim.settings.bytes_per_sec = SLOW
    train(job, 12)
    job.content.clear()
    assert job.staging.capacity_bytes > 0
    release, given_up = (
        job.sim.hold(job.engine.drain_stream),
        threading.Event(),
    )  # the link is slow now
    drain = job.engine.drain

    def fail_in_the_middle(staged: Sequence[Piece], after: Any = None) -> CopyTicket:
        if given_up.is_set():
            return drain(staged, after)
        given_up.set()
        drain(staged[: len(staged) // 2], after)
        raise RuntimeError("the device refused")

    monkeypatch.setattr(job.engine, "drain", fail_in_the_middle)
    staged, number = job.stats.staged, 12
    while job.stats.staged == staged:
        number += 1
        job.train([number])
    release_at = None
    while release_at is None or number < release_at:
        number += 1
        job.await_turn(
            job.step(number, Variant.BLOCKING)
        )  # it leaves nothing to be drained behind that
        job.await_device()
        if release_at is None and given_up.is_set():
            release_at = number + 4
    release()
    job.worker.fence()
    assert job.worker.drain(WAIT_SECS)
    number += 1
    request = job.step(number, Variant.BLOCKING)
    assert request.done.wait(WAIT_SECS)
    assert request.committed
    job.check()
    assert all(values == {float(step)} for step, values in job.committed().items()), job.committed()


def train_without_windows(job: Job, steps: int, link_bytes_per_sec: float, first: int = 1) -> None:
    """Steps of an engine whose schedule is not known; the next one begins when its loss was read."""
    job.slow_down(link_bytes_per_sec)
    job.gate.patience = WAIT_SECS
    if first == 1:
        job.gate.share(1.0, UNLIMITED)  # as an engine of one stage begins
    for number in range(first, first + steps):
        job.kernel(0.01)
        job.pacer.begin_optimizer()
        job.worker.fence()
        job.state.fill_(number)
        job.pacer.end_optimizer()
        job.pacer.end_step("step", ())
        request = job.hand_over(number, Variant.HAS)
        # However late the worker comes, it does before the host gets to the next fence.
        job.await_turn(request)
        while request.started and not (job.gate.begun_beside or request.copied.wait(0.001)):
            pass
        job.await_device()
    job.end()
    job.check()


BESIDE = {"compute_share": 1.0, "overflow": "interval"}


@pytest.mark.gpu
@pytest.mark.parametrize("job", [BESIDE], indirect=True)
def test_without_windows_copies_begin_beside_computation(job: Job) -> None:
    train_without_windows(job, 8, 1e12)
    assert job.pacer.plan.windows == ()
    assert job.pacer.plan.fits
    assert job.gate.handed_out[2] >= 3, "copies waited for the fence"
    assert job.stats.committed >= 3


@pytest.mark.parametrize("job", [BESIDE], indirect=True)
def test_without_windows_what_takes_longer_than_a_step_does_not_fit_and_is_taken_less_often(
    job: Job,
) -> None:
    train_without_windows(job, 6, 3e6)
    plan = job.pacer.plan
    assert not plan.fits
    assert plan.advised_interval_steps > 1
    assert feature(job.worker, AgreedRates).interval_steps(100) > 1


@pytest.mark.parametrize("job", [BESIDE | {"overflow": "staging"}], indirect=True)
def test_without_windows_what_does_not_fit_is_staged(job: Job) -> None:
    train_without_windows(job, 16, 6e6)
    assert not job.pacer.plan.fits
    assert job.stats.staged > 0, "all was queued beside computation, and the fence waited for it"
    assert job.gate.handed_out[2] > 0


@pytest.mark.parametrize("job", [{"overflow": "auto", "compute_share": 1.0}], indirect=True)
def test_p2_copies_within_the_device_are_chosen_as_long_as_there_is_memory_with_equal_bits(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rates, last = feature(job.worker, AgreedRates), 0

    def train_until(reached: Callable[[], bool]) -> None:
        nonlocal last
        while last < 100 and not reached():
            train_without_windows(job, 4, 3e6, first=last + 1)
            last += 4

    train_until(lambda: job.stats.staged >= 2)
    assert rates.copy_mode is CopyMode.DEVICE
    settings = job.sim.settings
    settings.others_bytes = settings.total_bytes - 2**28  # training and others take the margin
    train_until(lambda: job.staging.capacity_bytes == 0)
    assert rates.copy_mode is CopyMode.HOST
    before = job.stats.staged, job.stats.committed
    train_without_windows(job, 4, 3e6, first=last + 1)
    assert job.stats.staged == before[0]
    assert job.stats.committed > before[1]
    changes = [m for r in caplog.records if "is copied" in (m := r.getMessage())][-2:]
    assert "copied through spare device memory" in changes[0]
    assert "copied directly to the host" in changes[1]
    assert "there is no memory" in changes[1]
