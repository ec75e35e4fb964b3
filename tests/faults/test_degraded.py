"""What fails around the training costs snapshots or checkpoints, never the training (P6)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from reft.grid import Degrees
from reft.node.protection import read_record
from reft.recover.inspect import inspect_job
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import FaultJob, Scratch, wrong_losses
from tests.faults.memory import fill_up, make_read_only, make_writable, small_file_system
from tests.persist import latest_persisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

DP2 = Shape("PP1xDP2", Degrees(1, 2, 1), nodes=2, procs_per_node=1)
OPTIMIZER = OPTIMIZERS[2]
STEPS = 220


class Watched(FaultJob):
    """A job whose daemons' status is waited for."""

    def status(self, index: int = 0) -> dict[str, Any]:
        try:
            return self.cluster.status(index) or {}
        except (OSError, json.JSONDecodeError):
            return {}

    def persist_status(self, index: int = 0) -> dict[str, Any]:
        return dict(self.status(index).get("persist") or {})

    def trains_on(self, steps: int = 6) -> None:
        """So many more steps are done."""
        self.wait_for_step(self.history.current.last_step + steps)

    def end_well(self, scratch: Scratch) -> None:
        """One life, equal losses, and a last version when told to stop."""
        history = self.history
        assert list(history.incarnations) == [1]
        assert wrong_losses(history, scratch.reference(DP2, OPTIMIZER, STEPS)) == []
        for index in range(DP2.nodes):
            self.cluster.signal_node(index, signal.SIGTERM)
        assert set(self.cluster.wait(150.0).values()) == {143}
        life = self.history.current
        assert max(life.committed) >= life.last_step


def _block(persist_dir: Path | None = None) -> dict[str, Any]:
    block: dict[str, Any] = {
        "enabled": True,
        "block_bytes": 16384,
        "host_state_bytes": 2**17,
        "grace_secs": 100.0,
    }
    if persist_dir is not None:
        block["persist"] = {"dir": str(persist_dir), "interval_steps": 2}
    return block


def _job(scratch: Scratch, name: str, block: dict[str, Any], memory_root: Path | None = None) -> Watched:
    return Watched(scratch, name, DP2, OPTIMIZER, steps=10**6, block=block, memory_root=memory_root)


@pytest.mark.nightly
def test_memory_full(scratch: Scratch) -> None:
    memory_root = scratch.root / "small-memory"
    with small_file_system(memory_root, "48m") as reason:
        if reason is not None:
            pytest.skip(reason)
        # Enough for the daemons' own files, not for one arena.
        filler = fill_up(memory_root, leave_bytes=2**18)
        with _job(scratch, "memory-full", _block(), memory_root) as job:
            job.wait_for_step(10)
            assert job.history.current.committed == set()
            job.wait_for("the status", lambda: job.status().get("stale_since_step") == 1)
            assert "OutOfMemoryError" in job.status()["stale_cause"]
            assert job.logs.count("snapshots are stale since step 1") >= 1
            filler.unlink()
            job.wait_for("a commit", lambda: bool(job.history.current.committed))
            job.wait_for("the status", lambda: job.status().get("stale_since_step", 1) is None)
            assert job.status()["skipped"]["OutOfMemoryError"] >= 10
            job.end_well(scratch)


@pytest.mark.nightly
def test_memory_runs_short(scratch: Scratch) -> None:
    """Others fill the memory while the job trains: it keeps less, and more again when they are gone. What
    would not survive the loss of a node any more is written to disk at once (P3)."""
    memory_root = scratch.root / "shared-memory"
    with small_file_system(memory_root, "48m") as reason:
        if reason is not None:
            pytest.skip(reason)
        persist_dir = scratch.root / "short-persisted"
        # Nothing is due on disk: only what memory cannot keep.
        block = {
            **_block(),
            "memory_margin_bytes": 8 * 2**20,
            "arenas": 2,
            "persist": {"dir": str(persist_dir)},
        }
        with _job(scratch, "memory-short", block, memory_root) as job:
            job.wait_for_commit(5)
            filler = fill_up(memory_root, leave_bytes=6 * 2**20)
            job.wait_for("less to be kept", lambda: _protection(job).get("degraded") is not None)
            degraded = _protection(job)["degraded"]
            assert (degraded["scheme"], degraded["versions"]) == ("none", 2)
            assert "of memory left" in degraded["cause"]
            assert _protection(job)["scheme"] == "arc"
            job.trains_on()
            job.wait_for("a version", lambda: _newest_protection(job) == "none")
            assert job.logs.count("MEMORY IS SHORT") == 1
            at_once = f"is written to {persist_dir} at once"
            job.wait_for("it to be told", lambda: at_once in job.logs)
            written = persist_dir / job.cluster.job_id
            job.wait_for("a checkpoint on disk", lambda: latest_persisted(written) is not None)
            kept = latest_persisted(written)
            assert kept is not None
            assert kept.label.step >= degraded["step"]
            filler.unlink()
            job.wait_for("all to be kept again", lambda: _protection(job).get("degraded") is None)
            job.wait_for("a version", lambda: _newest_protection(job) == "arc")
            assert job.logs.count("there is enough memory for the wanted protection again") == 1
            job.end_well(scratch)


def _protection(job: Watched) -> dict[str, Any]:
    record = read_record(job.cluster.current[0].memory_dir / job.cluster.job_id)
    return {} if record is None else record.to_json()


def _newest_protection(job: Watched) -> str:
    nodes = job.cluster.current.values()
    report = inspect_job([node.memory_dir / job.cluster.job_id for node in nodes])
    return next((v.scheme for v in report.versions if v.committed), "")


@pytest.mark.nightly
def test_storage_and_daemon_fail(scratch: Scratch) -> None:
    """A persist directory that is missing, read-only, full; a daemon that is killed; and all well again."""
    store = scratch.root / "store"
    persist_dir = store / "mounted" / "checkpoints"
    with _job(scratch, "storage", _block(persist_dir)) as job:
        # The file system is not there: only one level is ever made.
        _goes_stale(job, "No such file")
        with small_file_system(persist_dir.parent, "8m") as reason:
            if reason is None:
                make_read_only(persist_dir.parent)
                _goes_stale(job, "Read-only")
                filler = fill_up_after_remount(persist_dir.parent)
                _goes_stale(job, "No space left")
                filler.unlink()
            first = _is_written(job, persist_dir)
            _kill_daemon(job)
            assert _is_written(job, persist_dir, after=first) > first
            job.end_well(scratch)
            persisted = latest_persisted(persist_dir / job.cluster.job_id)
            assert persisted is not None
            assert persisted.label.step == max(job.history.current.committed)
        if reason is not None:
            pytest.skip(
                f"a missing directory and a killed daemon were tested; read-only and full not: {reason}"
            )


def fill_up_after_remount(directory: Path) -> Path:
    make_writable(directory)
    return fill_up(directory)


def _goes_stale(job: Watched, because: str) -> None:
    job.wait_for(
        f"stale checkpoints: {because}",
        lambda: (
            because in str(job.persist_status().get("error"))
            and job.persist_status().get("stale_since_step") is not None
        ),
    )
    job.trains_on()
    # Snapshots in memory are none the worse for it.
    job.wait_for_commit(job.history.current.last_step)


def _is_written(job: Watched, persist_dir: Path, after: int = 0) -> int:
    def newest() -> int:
        persisted = latest_persisted(persist_dir / job.cluster.job_id)
        return persisted.label.step if persisted is not None else 0

    job.wait_for("a newer checkpoint on disk", lambda: newest() > after)
    job.wait_for(
        "the status to say so",
        lambda: (
            job.persist_status().get("last") is not None
            and job.persist_status().get("stale_since_step") is None
        ),
    )
    return newest()


def _kill_daemon(job: Watched) -> None:
    old = job.status()["pid"]
    trainers = [process.pid for process in job.cluster.trainers(0)]
    os.kill(old, signal.SIGKILL)
    job.wait_for("the next daemon", lambda: job.status().get("pid", old) != old)
    job.wait_for(
        "a commit that it was told of", lambda: (job.status().get("last_committed") or {}).get("step", 0) > 0
    )
    job.trains_on()
    assert [process.pid for process in job.cluster.trainers(0)] == trainers
    assert "training goes on, the next one starts" in job.logs
