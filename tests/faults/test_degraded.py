"""What fails around the training costs snapshots or checkpoints, never the training (P6)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Answer, command
from tests.faults.cases import DP2, DP3, OPTIMIZERS
from tests.faults.job import (
    FaultJob,
    Scratch,
    broken_promises,
    fill_up,
    remount,
    small_file_system,
    wrong_losses,
)
from tests.versions import step_on_storage

OPTIMIZER = OPTIMIZERS[2]
STEPS = 220


class Watched(FaultJob):
    def persist_status(self) -> dict[str, Any]:
        return dict(self.status().get("persist") or {})

    def trains_on(self, steps: int = 6) -> None:
        self.wait_for_step(self.history.current.last_step + steps)

    def end_well(self, scratch: Scratch) -> None:
        """One life, equal losses, and a last version when told to stop."""
        history = self.history
        assert list(history.incarnations) == [1]
        assert wrong_losses(history, scratch.reference(DP2, OPTIMIZER, STEPS)) == []
        self.stop()
        life = self.history.current
        assert max(life.committed) >= life.last_step


def _job(scratch: Scratch, name: str, memory_root: Path | None = None, **block: Any) -> Watched:
    block = {"host_state_bytes": 2**17, "grace_secs": 100.0, **block}
    return Watched(scratch, name, DP2, OPTIMIZER, steps=10**6, block=block, memory_root=memory_root)


@pytest.fixture
def memory_root(scratch: Scratch) -> Iterator[Path]:
    with small_file_system(scratch.root / "small-memory", "48m") as reason:
        if reason is not None:
            pytest.skip(reason)
        yield scratch.root / "small-memory"


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_memory_full(scratch: Scratch, memory_root: Path) -> None:
    # Enough for the daemons' own files, not for one arena.
    filler = fill_up(memory_root, leave_bytes=2**18)
    with _job(scratch, "memory-full", memory_root) as job:
        job.wait_for_step(10)
        assert job.history.current.committed == set()
        job.wait_for("the status", lambda: job.status().get("stale_since_step") == 1)
        assert "OutOfMemoryError" in job.status()["stale_cause"]
        assert job.logs.count("Snapshots are stale since step 1") >= 1
        filler.unlink()
        job.wait_for("a commit", lambda: bool(job.history.current.committed))
        job.wait_for("the status", lambda: job.status().get("stale_since_step", 1) is None)
        assert job.status()["skipped"]["OutOfMemoryError"] >= 10
        job.end_well(scratch)


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_memory_runs_short(scratch: Scratch, memory_root: Path) -> None:
    """Others fill the memory while the job trains: it keeps less, and more again when they are gone. What
    would not survive the loss of a node any more is written to disk at once (P3)."""
    persist_dir = scratch.root / "short-persisted"
    # Nothing is due on disk: only what memory cannot keep.
    block = {"memory_margin_bytes": 8 * 2**20, "arenas": 2, "persist": {"dir": str(persist_dir)}}
    with _job(scratch, "memory-short", memory_root, **block) as job:
        job.wait_for_commit(5)
        filler = fill_up(memory_root, leave_bytes=6 * 2**20)
        job.wait_for("less to be kept", lambda: _protection(job).get("degraded") is not None)
        degraded = _protection(job)["degraded"]
        assert (degraded["scheme"], degraded["versions"]) == ("none", 2)
        assert "of memory left" in degraded["cause"]
        assert _protection(job)["scheme"] == "arc"
        job.trains_on()
        job.wait_for("a version", lambda: job.newest_protection() == "none")
        assert job.logs.count("MEMORY IS SHORT") == 1
        at_once = f"is written to {persist_dir} at once"
        job.wait_for("it to be told", lambda: at_once in job.logs)
        written = persist_dir / job.cluster.job_id
        job.wait_for("a checkpoint on disk", lambda: step_on_storage(written) >= degraded["step"])
        filler.unlink()
        job.wait_for("all to be kept again", lambda: _protection(job).get("degraded") is None)
        job.wait_for("a version", lambda: job.newest_protection() == "arc")
        assert job.logs.count("there is enough memory for the wanted protection again") == 1
        job.end_well(scratch)


def _protection(job: Watched) -> dict[str, Any]:
    found: dict[str, Any] = command(
        "protect", "--memory-dir", job.cluster.job_dir(0), "--json"
    ).json
    return found


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_storage_and_daemon_fail(scratch: Scratch) -> None:
    store = scratch.root / "store"
    persist_dir = store / "mounted" / "checkpoints"
    with _job(scratch, "storage", persist={"dir": str(persist_dir), "interval_steps": 2}) as job:
        # The file system is not there: only one level is ever made.
        _goes_stale(job, "No such file")
        with small_file_system(persist_dir.parent, "8m") as reason:
            if reason is None:
                remount(persist_dir.parent, "ro")
                _goes_stale(job, "Read-only")
                remount(persist_dir.parent, "rw")
                filler = fill_up(persist_dir.parent)
                _goes_stale(job, "No space left")
                filler.unlink()
            first = _is_written(job, persist_dir)
            _kill_daemon(job)
            assert _is_written(job, persist_dir, after=first) > first
            job.end_well(scratch)
            assert step_on_storage(persist_dir / job.cluster.job_id) == max(
                job.history.current.committed
            )
        if reason is not None:
            pytest.skip(
                f"a missing directory and a killed daemon were tested; read-only and full not: {reason}"
            )


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
    written = persist_dir / job.cluster.job_id
    job.wait_for("a newer checkpoint on disk", lambda: step_on_storage(written) > after)
    job.wait_for(
        "the status to say so",
        lambda: (
            job.persist_status().get("last") is not None
            and job.persist_status().get("stale_since_step") is None
        ),
    )
    return step_on_storage(written)


def _kill_daemon(job: Watched) -> None:
    old = job.status()["pid"]
    trainers = [process.pid for process in job.cluster.trainers(0)]
    os.kill(old, signal.SIGKILL)
    job.wait_for("the next daemon", lambda: job.status().get("pid", old) != old)
    job.wait_for(
        "a commit that it was told of",
        lambda: (job.status().get("last_committed") or {}).get("step", 0) > 0,
    )
    job.trains_on()
    assert [process.pid for process in job.cluster.trainers(0)] == trainers
    assert "training continues, the next one starts" in job.logs


def started(scratch: Scratch, name: str, **block: Any) -> FaultJob:
    """Never reaches its last step: it is ended by what is tested."""
    return FaultJob(scratch, name, DP2, OPTIMIZERS[0], steps=10**6, block=block, job_id=name)


def measured(job: FaultJob, index: int, rate: str) -> dict[str, Any]:
    def told() -> dict[str, Any]:
        trainers = job.status(index).get("trainers") or {}
        return ((trainers.get("0") or {}).get("stats") or {}).get(rate) or {}

    job.wait_for("a measure", lambda: told().get("overhead") is not None)
    return told()


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_interval_is_measured_agreed_on_and_told(scratch: Scratch) -> None:
    persist_dir = scratch.root / "auto-persisted"
    persist = {"dir": str(persist_dir), "interval_steps": "auto", "max_lost_steps": 20}
    with started(scratch, "auto", persist=persist) as job:
        job.wait_for("the third version", lambda: step_on_storage(persist_dir / "auto") >= 30)
        for index in range(2):
            rate = measured(job, index, "persist_rate")
            # Two nodes survive the loss of one: failures ask for hardly any, the bound for one in ten steps.
            assert (rate["interval_steps"], rate["agreed_steps"], rate["most_lost_steps"]) == (
                10,
                10,
                20,
            )
            assert rate["max_overhead"] == 0.035
        assert step_on_storage(persist_dir / "auto") % 10 == 0


PLAIN = OPTIMIZERS[0]
BLOCK: dict[str, Any] = {
    "host_state_bytes": 2**17,
    "grace_secs": 100.0,
    # In the third life, after the new arenas were made and before the trainer has said so.
    "faults": [
        {"point": "during_switch", "step": step, "dp": 1, "incarnation": 3}
        for step in range(1, 2000)
    ],
}


class Switched(FaultJob):
    def ask(self, name: str, index: int, *arguments: str) -> Answer:
        return command(name, *arguments, "--memory-dir", self.cluster.job_dir(index))

    def wait_for_protection(self, scheme: str) -> None:
        self.wait_for(f"a version under {scheme}", lambda: self.newest_protection() == scheme)

    def lose_node(self, index: int) -> None:
        life = self.history.current.number
        self.cluster.kill_node(index)
        self.cluster.start_node(index)
        self.wait_for("steps of the next life", lambda: self.steps_in(life + 1) >= 5)

    def steps_in(self, life: int) -> int:
        current = self.history.current
        return len(current.steps) if current.number == life else 0


@pytest.mark.integration
def test_a_job_that_was_switched_to_parities_survives_a_node_by_them(scratch: Scratch) -> None:
    block = {"host_state_bytes": 2**17, "grace_secs": 100.0}
    with Switched(
        scratch, "to-parities", DP3, PLAIN, steps=10**6, block=block, max_restarts=1
    ) as job:
        job.wait_for_commit(3)
        assert job.newest_protection() == "arc"
        assert job.ask("protect", 0, "aec").code == 0
        job.wait_for_protection("aec")
        job.lose_node(1)
        restored = [e.fields for e in job.history.current.restored.values()]
        assert sum(int(f["bytes_from"]["parity"]) for f in restored) > 0
        assert job.newest_protection() == "aec"
        history = job.history
        assert broken_promises(history) == []
        assert wrong_losses(history, scratch.reference(DP3, PLAIN, history.current.last_step)) == []
        job.stop()


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_protection_is_switched_while_training(scratch: Scratch) -> None:
    with Switched(scratch, "switched", DP3, PLAIN, steps=10**6, block=BLOCK, max_restarts=1) as job:
        job.wait_for_commit(3)
        assert job.newest_protection() == "arc"
        answer = job.ask("protect", 0, "aec", "--json")
        told = answer.json
        assert answer.code == 0
        assert (told["scheme"], told["tolerance"], told["refused"]) == ("aec", 1, None)
        job.wait_for_protection("aec")
        job.lose_node(1)
        # The last switch holds for the next start too, on the new node as well.
        restored = [e.fields for e in job.history.current.restored.values()]
        assert sum(int(f["bytes_from"]["parity"]) for f in restored) > 0
        answer = job.ask("protect", 1)
        assert (answer.code, "aec since step" in answer.out) == (0, True)
        assert job.newest_protection() == "aec"

        for scheme, said in (
            ("raid5", "found protection 'raid5'; expected none, arc"),
            ("arc:3", "needs at least 4 data-parallel members, found 3"),
        ):
            answer = job.ask("protect", 2, scheme)
            # Lines are broken anywhere.
            assert (answer.code, said in " ".join(answer.err.split())) == (2, True), answer
        assert job.ask("protect", 2, "arc:2").code == 0
        job.wait_for_protection("arc:2")
        job.lose_node(2)
        assert job.newest_protection() == "arc:2"
        # On a busy machine a version may just have been skipped, which status calls stale.
        job.wait_for("a node that is well", lambda: job.ask("status", 2).code == 0)
        assert "survives the loss of 2 node(s)" in job.ask("protect", 2).out

        assert job.ask("protect", 0, "arc+aec", "--wait", "0").code == 0
        job.wait_for("steps of the next life", lambda: job.steps_in(4) >= 5)
        job.wait_for_protection("arc+aec")

        history = job.history
        assert list(history.incarnations) == [1, 2, 3, 4]
        assert broken_promises(history) == []
        steps = history.current.last_step
        assert wrong_losses(history, scratch.reference(DP3, PLAIN, steps)) == []
        job.stop()
        answer = job.ask("protect", 0, "arc")
        assert (answer.code, "does not run" in answer.err) == (1, True)
