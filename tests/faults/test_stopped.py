"""One job that is stopped again and again, its memory damaged in between: after SIGTERM with flipped
bytes and strangers' files, after a total loss of all processes with torn headers, after Ctrl-C, with
another layout; and then to its end. All losses are the undisturbed run's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reft.grid import Degrees
from reft.protect.blocks import Section
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import SECS_PER_LIFE, FaultJob, Losses, Scratch, wrong_losses
from tests.faults.memory import memory_directory, newest_common, plant_strangers, stored
from tests.persist import latest_persisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

DP2 = Shape("PP1xDP2", Degrees(1, 2, 1), nodes=2, procs_per_node=1)
PP2 = Shape("PP2xDP1", Degrees(2, 1, 1), nodes=2, procs_per_node=1)
OPTIMIZER = OPTIMIZERS[2]
STEPS = 220
GRACE_SECS = 100.0
"""Long, for a busy machine: that a signal ends the job within it is what is tested."""


@dataclass
class StoppedJob:
    """The same job, started several times over the same memory."""

    scratch: Scratch
    memory_root: Path
    reference: Losses
    persist_dir: Path

    @contextmanager
    def started(self, name: str, *, shape: Shape = DP2, persist: bool = False) -> Iterator[FaultJob]:
        # Three, so that two whole versions are left whenever everything dies.
        block: dict[str, Any] = {"enabled": True, "block_bytes": 16384, "grace_secs": GRACE_SECS, "arenas": 3}
        block["allow_unprotected"] = shape is PP2
        if persist:
            block["persist"] = {"dir": str(self.persist_dir)}
        job = FaultJob(
            self.scratch,
            f"stopped-{name}",
            shape,
            OPTIMIZER,
            steps=STEPS,
            block=block,
            memory_root=self.memory_root,
            job_id="stopped",
        )
        with job:
            yield job
        assert job.cluster.survivors() == []

    @property
    def job_dirs(self) -> list[Path]:
        return [self.memory_root / f"node{index}" / "stopped" for index in range(DP2.nodes)]

    def stop(self, job: FaultJob, number: signal.Signals) -> int:
        """Send a signal to all launchers; everything has to end by itself. Returns the last version."""
        for index in range(DP2.nodes):
            job.cluster.signal_node(index, number)
        codes = job.cluster.wait(GRACE_SECS + 30.0)
        assert set(codes.values()) == {128 + number}
        assert job.left_over() == []
        assert job.memory_left() == self.job_dirs
        life = job.history.current
        # The training thread ends within the last step, before the script could tell of it.
        last = max(life.committed)
        assert life.last_step in (last - 1, last)
        newest = [stored(job_dir)[0].label for job_dir in self.job_dirs]
        assert [label.step for label in newest] == [last, last]
        return last

    def check(self, job: FaultJob, resumed_at: int) -> None:
        """It resumed from memory at this version and computed what it had to."""
        history = job.history
        assert wrong_losses(history, self.reference) == []
        [life] = history.incarnations.values()
        assert {event.fields["source"] for event in life.restored.values()} == {"memory"}
        assert {event.fields["version"] for event in life.restored.values()} == {resumed_at}
        assert min(life.steps) == resumed_at + 1


@pytest.mark.nightly
def test_stopped_and_damaged_and_started_again(scratch: Scratch) -> None:
    reference = scratch.reference(DP2, OPTIMIZER, STEPS)
    with memory_directory() as memory_root:
        whole = StoppedJob(scratch, memory_root, reference, scratch.root / "stopped-persisted")

        with whole.started("first", persist=True) as job:
            job.wait_for_step(8)
            preempted_at = whole.stop(job, signal.SIGTERM)
            assert wrong_losses(job.history, reference) == []
        persisted = latest_persisted(whole.persist_dir / job.cluster.job_id)
        assert persisted is not None
        assert persisted.label.step == preempted_at

        damaged = _flip_bytes(whole.job_dirs)
        plant_strangers(whole.job_dirs[0])
        with whole.started("repaired") as job:
            job.wait_for_commit(preempted_at + 8)
            whole.check(job, preempted_at)
            for life in job.history.incarnations.values():
                for event in life.restored.values():
                    assert len(event.fields["repaired"]) == damaged, event.fields["repaired"]
            assert "corrupt memory was repaired from another source" in job.logs
            # Everything dies at once, here, and the memory stays.

        expected = _tear_newest(whole.job_dirs)
        with whole.started("older") as job:
            job.wait_for_commit(expected + 8)
            whole.check(job, expected)
            interrupted_at = whole.stop(job, signal.SIGINT)

        before = newest_common(whole.job_dirs)
        with whole.started("other-layout", shape=PP2) as job:
            codes = job.cluster.wait(SECS_PER_LIFE)
            assert 0 not in codes.values()
            assert job.history.losses == {}
            # Another layout with another global batch is another job.
            assert "was written by a job that differs from this one" in job.logs
            assert "train_batch_size" in job.logs
        assert newest_common(whole.job_dirs) == before

        with whole.started("to-its-end") as job:
            assert job.run_to_end(SECS_PER_LIFE) is None
            assert job.memory_left() == []
            assert job.left_over() == []
            whole.check(job, interrupted_at)
            assert job.history.current.last_step == STEPS


def _flip_bytes(job_dirs: list[Path]) -> int:
    """One bit each in three blocks that the next start reads; returns how many."""
    first, second = (stored(job_dir)[0] for job_dir in job_dirs)
    first.flip(first.entry(Section.REPLICATED, owner=True))
    second.flip(second.entry(Section.OWNED, owner=True))
    # In a copy of another block: where a block and its only copy are damaged, nothing is left of it.
    copies = [e for e in second.header.entries if e.key.section is Section.REPLICATED and not e.owner]
    second.flip(copies[0])
    assert copies[0].key != first.entry(Section.REPLICATED, owner=True).key
    return 3


def _tear_newest(job_dirs: list[Path]) -> int:
    """Make the newest version that all nodes hold unreadable on every one; returns the one before."""
    newest, older, *_ = newest_common(job_dirs)
    for job_dir in job_dirs:
        for arena in stored(job_dir):
            if arena.label >= newest:
                arena.tear_header()
    assert newest_common(job_dirs)[0] == older
    return older.step
