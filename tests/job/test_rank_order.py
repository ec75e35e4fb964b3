"""Two stages on two nodes with two trainers each: where DeepSpeed's order would lose a stage with a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reft
from reft.node.history import read_history

from .cluster import SCRIPTS, WatchedCluster, cluster

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": None,
}
HOLD, STEPS = 4, 8
RENDEZVOUS = ("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=240")


def start(directory: Path, *args: str, options: tuple[str, ...] = (), block: bool = True):
    directory.mkdir()
    path = directory / "ds_config.json"
    path.write_text(json.dumps(CONFIG | ({"reft": {"enabled": True}} if block else {})))
    script = str(SCRIPTS / "stages.py")
    return cluster(
        directory, script, str(path), *args, nodes=2, procs_per_node=2, options=(*RENDEZVOUS, *options)
    )


def losses(job: WatchedCluster) -> dict[int, set[str]]:
    """Every loss that a rank ever had, by step."""
    found: dict[int, set[str]] = {}
    for path in job.events_dir.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            found.setdefault(int(step), set()).add(loss)
    return found


def ranks_at(job: WatchedCluster, step: int) -> int:
    paths = job.events_dir.glob("losses-*")
    return sum(any(line.startswith(f"{step} ") for line in p.read_text().splitlines()) for p in paths)


def committed(job: WatchedCluster) -> bool:
    return all((job.status(i) or {}).get("last_committed") for i in range(2))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    with start(tmp_path_factory.mktemp("rank_order") / "plain", block=False) as job:
        (job.events_dir / "go").touch()
        assert job.wait(300) == {0: 0, 1: 0}
        found = losses(job)
    assert all(len(values) == 1 for values in found.values())
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("args", "options"),
    [((), ("--rank-order", "across-nodes")), (("topology",), ())],
    ids=["option", "topology"],
)
def test_p4_a_node_with_two_stages_may_die(
    tmp_path: Path, undisturbed: dict[int, set[str]], args: tuple[str, ...], options: tuple[str, ...]
) -> None:
    with start(tmp_path / "job", *args, options=(*options, "--keep-memory")) as job:
        job.wait_until(lambda: ranks_at(job, HOLD) == 4 and committed(job), 300, "a version")
        job.kill_node(1)
        job.start_node(1)
        (job.events_dir / "go").touch()
        assert job.wait(300) == {0: 0, 1: 0}
        found = losses(job)
        restart = read_history(job.job_dir(0))[-1]
        log = "".join(node.log_path.read_text(errors="replace") for node in job.history)
    assert "TOLERANCE IS 0" not in log
    assert (restart.lost, restart.joined) == (["node1"], ["node1.1"])
    assert (restart.resumed_step or 0) >= restart.newest_step > 0
    assert found == undisturbed
    assert sorted(found) == list(range(1, STEPS + 1))


def test_a_topology_takes_the_replicas_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    found = [reft.topology(pp=2).get_dim("data"), reft.topology(pp=2, tp=3).get_dim("data")]
    assert found == [6, 2]
    with pytest.raises(reft.ReftError, match=r"12 ranks, which make no whole replicas of 5 x 1 ranks"):
        reft.topology(pp=5)
