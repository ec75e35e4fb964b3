"""Several nodes: any of them may die and be replaced, and what that costs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.local_cluster import KillKind
from reft.errors import AuthenticationError
from reft.job.node_memory import NodeMemory
from reft.job.script import EX_FENCED
from reft.memory.arena import Arena
from reft.memory.files import holder
from reft.memory.job_secret import SECRET_FILE
from reft.memory.jobdir import JobDir
from tests.job.conftest import SECRET

from .cluster import WatchedCluster, cluster

QUICK = ("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=120")


def members(job: WatchedCluster, attempt: int) -> set[str]:
    return {e["node"] for e in job.events("start", attempt=attempt)}


def node_of_rank(job: WatchedCluster, rank: int, attempt: int) -> int:
    name = job.events("start", rank=rank, attempt=attempt)[0]["node"]
    return next(n.index for n in job.history if n.node_id == name)


def trains(job: WatchedCluster, attempt: int, nodes: int) -> None:
    job.wait_until(
        lambda: (
            {e["rank"] for e in job.events("step", attempt=attempt, step=3)} == set(range(nodes))
        ),
        240,
        f"steps of round {attempt + 1}",
    )


@pytest.mark.integration
def test_any_node_may_die_be_replaced_or_hang_for_free(tmp_path: Path) -> None:
    """--max-restarts is 0 throughout: the node of rank 0 dies, then another hangs, is replaced, comes back and
    ends itself, a daemon is killed, and the job ends well."""
    with cluster(
        tmp_path, "allreduce.py", "100000", nodes=3, options=(*QUICK, "--max-restarts", "0")
    ) as job:
        trains(job, 0, 3)
        secret = (job.job_dir(1) / "secret").read_text()

        first = node_of_rank(job, 0, 0)
        job.kill_node(first)
        assert not job.current[first].memory_dir.exists()
        job.start_node(first)
        trains(job, 1, 3)
        assert members(job, 1) == {n.node_id for n in job.current.values()}
        survivors = {n.node_id for n in job.current.values()} - {job.current[first].node_id}
        assert {e["node"] for e in job.events("start", attempt=0)} & members(job, 1) == survivors
        assert {(job.job_dir(i) / "secret").read_text() for i in range(3)} == {secret}

        # Hanging: its peers' trainers hang with it, and restart when the replacement is there.
        hanging = node_of_rank(job, 2, 1)
        stopped = job.kill_node(hanging, KillKind.STOP)
        job.start_node(hanging)
        trains(job, 2, 3)
        assert stopped.node_id not in members(job, 2)
        job.resume_node(hanging)
        assert stopped.process.wait(240) == EX_FENCED

        # The daemon is the node's, not the job's: its death restarts nothing.
        other = next(i for i in range(3) if i != hanging)
        pid = job.status(other)["pid"]
        os.kill(pid, signal.SIGKILL)
        job.wait_until(
            lambda: (job.status(other) or {}).get("pid") not in (pid, None), 240, "a new daemon"
        )

        job.finish()
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
        assert {e["attempt"] for e in job.events("start")} == {0, 1, 2}
        assert len(job.events("end", attempt=2)) == 3
        assert not any(job.job_dir(i).exists() for i in range(3))
        # What it held stays: had its successor failed at once, it would have been needed.
        assert (stopped.memory_dir / job.job_id).exists()
        job.wait_until(job.none_left, 240, "the end of all processes")
        assert {e["restarts_used"] for e in job.launcher_events("round")} == {0}


@pytest.mark.integration
def test_only_own_failures_use_up_restarts(tmp_path: Path) -> None:
    """Rank 1 raises, then a trainer of rank 0 is killed: one restart is allowed, the second failure ends
    the job on both nodes."""
    options = (*QUICK, "--max-restarts", "1")
    with cluster(
        tmp_path, "allreduce.py", "100000", "raise@5:1:0", nodes=2, options=options
    ) as job:
        trains(job, 1, 2)
        assert [e["restarts_used"] for e in job.launcher_events("round")] == [0, 0, 1, 1]
        raised, killed = node_of_rank(job, 1, 0), node_of_rank(job, 0, 1)
        job.kill_node(killed, KillKind.PROCESS)
        codes = job.wait(240)
        assert codes[killed] == 137
        assert codes[1 - killed] == 1
        log = "".join(job.log(i) for i in range(2))
        assert "ValueError: bad sample at step 5; uses restart 1 of 1" in job.log(raised)
        assert "Connection closed by peer" in log or "Connection reset by peer" in log
        assert "uses no restart" in job.log(1 - raised)
        assert "killed by SIGKILL" in job.log(killed)
        assert f"node {job.current[killed].node_id} gave up" in job.log(1 - killed)
        assert not any(job.job_dir(i).exists() for i in range(2)), "no version was taken"
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.integration
def test_a_store_on_a_worker_node_dies_with_it_and_comes_back_with_it(tmp_path: Path) -> None:
    """torchrun's default: without `reft rendezvous` the job waits until the endpoint is served again."""
    with cluster(
        tmp_path, "allreduce.py", "100000", nodes=2, options=QUICK, external_rendezvous=False
    ) as job:
        trains(job, 0, 2)
        host = next(
            i
            for i in range(2)
            for c in psutil.Process(job.current[i].process.pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == int(job.endpoint.split(":")[1])
        )
        assert "dies with it" in job.log(host)
        job.kill_node(host)
        job.wait_until(
            lambda: "waiting up to 120 s" in job.log(1 - host), 240, "the survivor's warning"
        )
        job.start_node(host)
        trains(job, 1, 2)
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        assert members(job, 1) == {n.node_id for n in job.current.values()}
        assert "answers again" in job.log(1 - host)


@pytest.mark.process
def test_a_lost_rendezvous_does_not_disturb_healthy_trainers(tmp_path: Path) -> None:
    with cluster(tmp_path, "allreduce.py", "100000", nodes=2, options=QUICK) as job:
        trains(job, 0, 2)
        for index in range(2):
            (job.job_dir(index) / "rank0-slot0.arena").touch()
        assert job.rendezvous is not None
        job.rendezvous.kill()
        job.rendezvous.wait()
        job.wait_until(lambda: "Training continues" in job.log(0), 240, "the warning")
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        assert {e["attempt"] for e in job.events("start")} == {0}
        assert len(job.events("end")) == 2
        # Nobody could say that all nodes ended well, so nothing is removed.
        assert all(job.job_dir(i).is_dir() for i in range(2))


@pytest.mark.parametrize("end", [NodeMemory.remove, NodeMemory.discard_unused])
def test_p7_a_launcher_leaves_the_directory_that_another_made_and_holds(
    tmp_path: Path, end: object
) -> None:
    first = NodeMemory(tmp_path, "job", "node0")
    first.prepare(SECRET)
    shutil.rmtree(first.path)
    second = NodeMemory(tmp_path, "job", "node0")
    second.prepare(SECRET)
    end(first)  # type: ignore[operator]
    assert holder(second.path) is not None
    end(second)  # type: ignore[operator]
    assert not second.path.exists()


def test_p7_a_directory_made_again_is_held_again_and_goes_with_a_good_end(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    shutil.rmtree(memory.path)
    memory.remove()  # nothing is there
    memory.make_again(SECRET)
    assert holder(memory.path) is not None
    memory.remove()
    assert not memory.path.exists()


def test_what_trainers_made_again_goes_with_a_good_end(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    (memory.path / "job.lock").unlink()  # trainers do not hold it
    memory.remove()
    assert not memory.path.exists()


# -- what was there before ---------------------------------------------------------------------------


def left_by_an_earlier_run(memory_dir: Path) -> Path:
    job = JobDir.open_or_create(memory_dir, "job", "node0", secret=SECRET)
    Arena.create(job.path / "rank0-slot0.arena", 4096, 4, SECRET).close()
    return job.path


def test_p7_a_launch_that_meets_nobody_leaves_the_memory_of_an_earlier_run_and_nothing_of_its_own(
    tmp_path: Path,
) -> None:
    path = left_by_an_earlier_run(tmp_path)
    (path / "exits-3").mkdir()  # of a launcher that was killed
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    assert not (path / "exits-3").exists()
    memory.discard_unused()
    assert (path / "rank0-slot0.arena").exists()


@pytest.mark.parametrize("damage", ["readable by others", "short", "link"])
def test_p3_memory_whose_secret_cannot_be_read_stays(tmp_path: Path, damage: str) -> None:
    path = left_by_an_earlier_run(tmp_path)
    file = path / SECRET_FILE
    if damage == "readable by others":
        file.chmod(0o644)
    elif damage == "short":
        file.write_text(SECRET.hex()[:10])
    else:
        file.rename(path / "moved")
        file.symlink_to("moved")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(AuthenticationError, match=r"secret.*reft clean"):
        NodeMemory(tmp_path, "job", "node0").prepare(SECRET)
    after = {p.name: p.read_bytes() for p in path.iterdir()}
    assert {name: after.get(name) for name in before} == before


def test_p3_memory_under_another_secret_stays(tmp_path: Path) -> None:
    path = left_by_an_earlier_run(tmp_path)
    with pytest.raises(AuthenticationError, match=r"another secret.*is kept.*reft clean"):
        NodeMemory(tmp_path, "job", "node0").prepare(b"x" * 32)
    assert (path / "rank0-slot0.arena").exists()
    assert (path / SECRET_FILE).read_text().strip() == SECRET.hex()


def test_p3_memory_whose_secret_is_lost_is_opened_by_the_users(tmp_path: Path) -> None:
    path = left_by_an_earlier_run(tmp_path)
    other = path / "rank1-slot0.arena"
    Arena.create(other, 4096, 4, bytes(32)).close()
    (path / SECRET_FILE).unlink()
    NodeMemory(tmp_path, "job", "node0").prepare(SECRET)
    assert (path / "rank0-slot0.arena").exists()
    assert not other.exists()


def test_p11_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "job").mkdir(parents=True)
    (home / "job" / SECRET_FILE).write_text("precious")
    (tmp_path / "reft").symlink_to(home)
    with pytest.raises(AuthenticationError, match="symbolic link"):
        NodeMemory(tmp_path / "reft", "job", "node0").prepare(bytes(32))
    (tmp_path / "memory").mkdir(mode=0o700)
    (tmp_path / "memory" / "job").symlink_to(home / "job")
    with pytest.raises(AuthenticationError, match="expected a directory"):
        NodeMemory(tmp_path / "memory", "job", "node0").prepare(bytes(32))
    assert [path.name for path in (home / "job").iterdir()] == [SECRET_FILE]


@pytest.mark.integration
def test_a_node_of_which_the_same_trainer_always_fails_makes_room_for_a_spare(
    tmp_path: Path,
) -> None:
    """Two restarts are allowed: one is used, and the job does not end."""
    options = ("--nnodes", "2", *QUICK, "--max-restarts", "2")
    with cluster(
        tmp_path, "light.py", "broken", "node1", nodes=2, procs_per_node=2, options=options
    ) as job:
        job.wait_until(lambda: len(job.events("start")) == 4, 240, "four trainers")
        job.start_node(2)
        job.wait_until(lambda: is_spare(job, "node2"), 240, "a node that waits")
        job.finish()
        assert job.wait(240) == {0: 0, 1: EX_FENCED, 2: 0}
        said = job.log(1)
        assert "local rank 1" in said
        assert "a device of this node may be broken" in said
        assert [e["restarts_used"] for e in job.launcher_events("round")] == [0, 0, 1, 1, 1, 1]


def is_spare(job: WatchedCluster, node: str) -> bool:
    """Whether the node waits, by the reports that the first node has read."""
    path = job.job_dir(0) / "board.json"
    nodes: list[Any] = json.loads(path.read_text())["nodes"] if path.exists() else []
    return any(found["node"] == node and found["spare"] for found in nodes)
