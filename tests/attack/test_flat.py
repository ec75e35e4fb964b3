"""Restarts leave nothing behind: descriptors, threads, memory and files of what outlives the trainers stay as they
were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.job.cluster import WatchedCluster, cluster, deepspeed_json

RESTARTS, WARM_UP = 50, 10
_MORE_BYTES = 8 * 2**20  # Allocators keep a little; a leak of 200 KB a restart is more


@dataclass(frozen=True)
class Held:
    descriptors: int
    threads: int
    rss_bytes: int


def lasting(job: WatchedCluster) -> Iterator[psutil.Process]:
    """Processes that outlive the trainers: the rendezvous, launchers, their daemons and servers of forks."""
    yield psutil.Process(job.rendezvous.pid)
    for index, node in job.current.items():
        launcher = psutil.Process(node.process.pid)
        trainers = {trainer.pid for trainer in job.trainers(index)}
        yield launcher
        yield from (child for child in launcher.children() if child.pid not in trainers)


def held(job: WatchedCluster) -> dict[int, Held]:
    return {p.pid: Held(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in lasting(job)}


def files(job: WatchedCluster) -> int:
    return sum(1 for index in job.current for _ in job.job_dir(index).rglob("*"))


def trainers(job: WatchedCluster) -> set[int]:
    return {trainer.pid for index in job.current for trainer in job.trainers(index)}


def all_run(job: WatchedCluster, told: str, ended: set[int]) -> bool:
    now = trainers(job)
    enough = len(now) == len(ended) if ended else len(now) >= len(job.current)
    return enough and not now & ended and now <= {event["pid"] for event in job.events(told)}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", [False, True], ids=["nothing", "a pipeline engine"])
def test_p9_what_outlives_fifty_restarts_holds_no_more_than_before(
    tmp_path: Path, engine: bool
) -> None:
    before: dict[int, Held] = {}
    ended: set[int] = set()
    options = ("--max-restarts", str(2 * RESTARTS))
    persist = {"dir": str(tmp_path / "persisted"), "interval_steps": 5, "keep": 2}
    sizes = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2}
    config = deepspeed_json(tmp_path, reft={"enabled": True, "persist": persist}, **sizes)
    script = ("paced.py", config, "1000000") if engine else ("light.py", "wait", "plain")
    told, procs = ("step", 2) if engine else ("ready", 1)
    with cluster(tmp_path, *script, nodes=2, procs_per_node=procs, options=options) as job:
        for number in range(RESTARTS + 1):
            job.wait_until(
                lambda ended=ended: all_run(job, told, ended), 300, f"start {number + 1}"
            )
            if number == WARM_UP:
                before, laid = held(job), files(job)
            ended = trainers(job)
            if number < RESTARTS:
                os.kill(job.trainers(number % 2)[0].pid, signal.SIGKILL)
        after = held(job)
        assert before.keys() == after.keys(), "the same processes"
        assert len(after) >= 5, "two launchers, two daemons, the rendezvous"
        for pid, now in after.items():
            was, name = before[pid], psutil.Process(pid).cmdline()
            print(name[-3:], was, now)
            assert now.descriptors <= was.descriptors + 2, (name, was, now)
            assert now.threads <= was.threads + 1, (name, was, now)
            assert now.rss_bytes <= was.rss_bytes + _MORE_BYTES, (name, was, now)
        assert files(job) <= laid + 2
