"""What training and peers are spared where one rank's worker is slow, has no slot, or breaks off (P6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from reft.aor.recompute import PeerOptimizers
from reft.config import Variant
from reft.errors import TransferError
from reft.grid import VersionId
from reft.memory.arena import Arena, scan
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CpuCopyEngine
from reft.snapshot.stats import PeerErrors, Samples
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotRequest
from tests.snapshot.ranks import (
    ALONE,
    SECRET,
    WAIT_SECS,
    HostPacing,
    Rank,
    group_of_one,
    make_worker,
)


class SlowToPin(CpuCopyEngine):
    def __init__(self) -> None:
        super().__init__()
        self.pinning, self.pinned = threading.Event(), threading.Event()
        self.pinned.set()

    def register(self, data: memoryview) -> None:
        self.pinning.set()
        assert self.pinned.wait(WAIT_SECS)
        super().register(data)


class Alone(Rank):
    def __init__(self, root: Path) -> None:
        self.engine, pacer = SlowToPin(), HostPacing()
        self.gate = pacer.gate
        self.gate.patience_secs = 10 * WAIT_SECS
        super().__init__(0, root, ALONE, Copier(self.engine, 65536), pacer)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    with group_of_one():
        job = Alone(tmp_path)
        yield job
        job.worker.close(10)


def test_p6_no_window_waits_while_an_arena_is_made(alone: Alone) -> None:
    """Training waits where a window closes for whoever has the permit. Somebody has removed the file that the
    next version goes to: it is made, touched and pinned anew, by nobody who has it."""
    assert alone.take(1)
    for path in alone.job_dir.glob("*.arena"):
        path.unlink()
    alone.engine.pinning.clear()
    alone.engine.pinned.clear()
    second = alone.begin(2, variant=Variant.HAS)
    alone.gate.open(0, 64, None)
    try:
        assert alone.engine.pinning.wait(WAIT_SECS), "no arena was made"
        closing = threading.Thread(target=alone.gate.close, daemon=True)
        closing.start()
        closing.join(3.0)  # less than the bound of a chunk
        assert not closing.is_alive(), "a window waits while an arena is made"
    finally:
        alone.engine.pinned.set()
    alone.worker.fence()
    assert alone.wait_for(second)


def test_p6_a_version_that_must_be_taken_waits_so_long_for_a_reader(alone: Alone) -> None:
    """As for one that a daemon writes to storage: it lets go at the end, or the version is given up."""
    assert alone.take(1)
    assert alone.take(2)
    readers = [arena for _, arena in scan(alone.job_dir, SECRET) if isinstance(arena, Arena)]
    assert all(reader.lock_shared() for reader in readers)
    alone.worker.arenas.pin_secs = 0.1
    refused = alone.begin(3, required=True)
    assert not alone.wait_for(refused)
    assert "all slots are in use" in str(refused.given_up)
    alone.worker.arenas.pin_secs = WAIT_SECS
    waiting = alone.begin(4, required=True)
    for reader in readers:
        reader.close()
    assert alone.wait_for(waiting)


def test_p6_the_worker_says_what_it_stopped_for_not_only_that_nobody_came(tmp_path: Path) -> None:
    control = mock.Mock(rank=0, world_size=1)
    control.vote.side_effect = TransferError("a peer votes on another step")
    control.rejoin.side_effect = TransferError("nobody came")
    skips: list[tuple[int, str]] = []
    worker = make_worker(
        tmp_path,
        Copier(CpuCopyEngine(), 65536),
        control=control,
        on_skip=lambda step, cause: skips.append((step, cause)),
    )
    requests = [
        SnapshotRequest(VersionId(1, n), None, cause=SkipCause("nothing to show")) for n in (1, 2)
    ]
    for request in requests:
        worker.submit(request)
        assert request.done.wait(WAIT_SECS)
    worker.close(10)
    assert worker.broken == "a peer votes on another step"
    assert requests[0].given_up == SkipCause("interrupted", "a peer votes on another step")
    assert skips[0] == (1, "interrupted")


def test_p6_a_mistake_while_partitions_are_compared_does_not_leave_this_rank() -> None:
    """Its peers wait for it in the exchange."""
    label = VersionId(1, 7)
    placement = mock.Mock(kept_by=mock.Mock(return_value=(0, 1)))
    layout = SimpleNamespace(member=0, plan=SimpleNamespace(placement=placement))
    writer = mock.Mock(layout=layout, label=label, wanted=mock.Mock(side_effect=KeyError("lost")))
    peers = PeerOptimizers(mock.Mock())
    peers.replicas[1] = mock.Mock(stale="", number=label.step)
    peers.count_equal(writer, mock.Mock(gradients={1: mock.Mock()}), mock.Mock())
    assert peers.stats.resynced == {"KeyError": 1}


def test_a_cause_is_said_once_whichever_step_it_names(caplog: pytest.LogCaptureFixture) -> None:
    peer_errors = PeerErrors()
    for step in range(5):
        peer_errors.record("a version broke off", TransferError(f"a peer is gone at step {step}"))
    peer_errors.record(
        "a version broke off", TransferError("ranks vote on different steps (3 and 4)")
    )
    assert len(caplog.records) == 2


def test_causes_are_not_kept_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    peer_errors = PeerErrors()
    for length in (*range(2000), 0):
        peer_errors.record("a version broke off", TransferError("x" * length))
    assert len(caplog.records) == 2001


def test_the_median_is_that_of_the_newest_samples_and_what_became_known_of_them_later() -> None:
    samples = Samples(3)
    samples.add_to_newest(5.0)
    assert (samples.median, samples.newest) == (None, None)
    for value in (9.0, 1.0, 4.0, 7.0):
        samples.append(value)
        samples.add_to_newest(0.5)
    assert (samples.median, samples.newest, list(samples)) == (4.5, 7.5, [1.5, 4.5, 7.5])
