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

from tests.elastic.cluster import WatchedCluster, cluster

RESTARTS, WARM_UP = 50, 10
_MORE_BYTES = 8 * 2**20
"""Allocators keep a little; a leak of 200 KB a restart is more."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    rss_bytes: int


def lasting(job: WatchedCluster) -> Iterator[psutil.Process]:
    """Processes that outlive the trainers: the rendezvous, launchers, their daemons and servers of forks."""
    assert job.rendezvous is not None
    yield psutil.Process(job.rendezvous.pid)
    for index, node in job.current.items():
        launcher = psutil.Process(node.process.pid)
        trainers = {trainer.pid for trainer in job.trainers(index)}
        yield launcher
        yield from (child for child in launcher.children() if child.pid not in trainers)


def held(job: WatchedCluster) -> dict[int, Held]:
    return {p.pid: Held(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in lasting(job)}


def files(job: WatchedCluster) -> int:
    return sum(len(names) for index in job.current for _, _, names in os.walk(job.job_dir(index))) + sum(
        len(folders) for index in job.current for _, folders, _ in os.walk(job.job_dir(index))
    )


def all_run(job: WatchedCluster, start: int) -> bool:
    """The trainers of a start have begun on every node."""
    begun = [e for e in job.events("ready") if e["env"]["TORCHELASTIC_RESTART_COUNT"] == str(start)]
    return len(begun) == len(job.current)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_p9_what_outlives_fifty_restarts_holds_no_more_than_before(tmp_path: Path) -> None:
    before: dict[int, Held] = {}
    options = ("--max-restarts", str(2 * RESTARTS))
    with cluster(tmp_path, "light.py", "wait", "plain", nodes=2, options=options) as job:
        for number in range(RESTARTS + 1):
            job.wait_until(lambda n=number: all_run(job, n), 120, f"start {number + 1}")
            if number == WARM_UP:
                before, laid = held(job), files(job)
            if number < RESTARTS:
                os.kill(job.trainers(number % 2)[0].pid, signal.SIGKILL)
        after = held(job)
        assert before.keys() == after.keys(), "the same processes"
        assert len(after) >= 5, "two launchers, two daemons, the rendezvous"
        for pid, now in after.items():
            was, name = before[pid], psutil.Process(pid).cmdline()
            assert now.descriptors <= was.descriptors + 2, (name, was, now)
            assert now.threads <= was.threads + 1, (name, was, now)
            assert now.rss_bytes <= was.rss_bytes + _MORE_BYTES, (name, was, now)
        assert files(job) <= laid + 2
