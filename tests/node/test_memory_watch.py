"""The memory of a node's trainers, looked at from outside: processes that really take it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reft.memory.free_memory import Bound, bounds
from reft.memory.jobdir import JobDir
from reft.node.memory_watch import MemoryWatch, fullest, private_bytes
from reft.node.observe import Doing, NodeObserver
from reft.node.progress import DeviceUse, ProgressPage, read_pages
from reft.speed.memory import MemoryUse

MIB = 2**20
TRAINER = """
import sys, time
from pathlib import Path
from reft.node.progress import ProgressPage
page = ProgressPage(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[2]), 10.0)
kept, leak = [], float(sys.argv[3])
for step in range(1, 100000):
    page.begin_step()
    kept.append(bytearray(b"x") * int(leak * 2**20))
    time.sleep(0.02)
    page.end_step(step)
    if step == 1:
        print("trains", flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path, "job", "node0", secret=b"s" * 32)


@contextmanager
def trainers(job: JobDir, *leaks_mib: float) -> Iterator[list[int]]:
    """Processes with the pages of trainers; each keeps so much of every step of 20 ms."""
    made = []
    try:
        for rank, leak in enumerate(leaks_mib):
            arguments = [sys.executable, "-c", TRAINER, str(job.path), str(rank), str(leak)]
            made.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
        yield [process.pid for process in made]
    finally:
        for process in made:
            process.kill()
            process.wait()


def grouped(watch_pids: list[int], limit_bytes: int) -> list[Bound]:
    """A control group of these processes alone, with what they really use."""
    return [Bound("control group /job", sum(map(private_bytes, watch_pids)), limit_bytes)]


@pytest.mark.nightly
def test_a_trainer_that_leaks_under_a_limit_is_named_before_it_is_reached(job: JobDir) -> None:
    limit = 1200 * MIB
    with trainers(job, 0.0, 0.3) as pids:
        watch = MemoryWatch(job.path, lambda directory, process: grouped(pids, limit))
        began = time.monotonic()
        while not watch.runs_out and sum(map(private_bytes, pids)) < limit:
            watch.look(read_pages(job.path), steps_per_sec=40.0)
            time.sleep(0.1)
        assert watch.runs_out, "the limit was reached"
        (found,) = watch.runs_out
        print(f"named after {time.monotonic() - began:.0f} s: {found}")
        assert found.name == "control group /job"
        assert found.who.startswith(f"rank 1 (pid {pids[1]})")
        assert found.used_bytes < limit
        assert found.step is not None
        assert found.step > max(p.step for p in read_pages(job.path))


@pytest.mark.nightly
def test_trainers_that_keep_nothing_are_not_named(job: JobDir) -> None:
    with trainers(job, 0.0, 0.0) as pids:
        used = sum(map(private_bytes, pids))
        watch = MemoryWatch(job.path, lambda directory, process: grouped(pids, used + 8 * MIB))
        for _ in range(120):
            watch.look(read_pages(job.path), steps_per_sec=40.0)
            assert watch.runs_out == ()
            time.sleep(0.2)
        assert [use.name for use in watch.uses] == ["control group /job"]
        assert watch.uses[0].peak_bytes >= watch.uses[0].used_bytes > 0


def test_what_really_limits_this_process_is_found(job: JobDir) -> None:
    found = {bound.name: bound for bound in bounds(job.path)}
    assert "the host" in found
    assert f"the file system of {job.path.parent}" in found
    assert all(b.used_bytes >= 0 and 0 < b.limit_bytes < 2**60 for b in found.values())


def test_every_node_tells_of_its_memory_and_of_its_devices(job: JobDir) -> None:
    page = ProgressPage(job.path, 0, 5, 10.0)
    page.begin_step()
    watch = NodeObserver(job.path, "node0", "node0", has_daemon=False)
    assert watch.look(Doing("running", round=1)).memory == ()
    page.end_step(1)
    page.set_device(DeviceUse(1000, 100, 700, 200, 950, 2))
    (seen,) = read_pages(job.path)
    assert seen.device == DeviceUse(1000, 100, 700, 200, 950, 2)
    time.sleep(0.6)  # it looks twice a second at most
    report = watch.look(Doing("running", round=1))
    device = next(use for use in report.memory if use.device)
    assert (device.name, device.peak_bytes, device.gap_bytes) == ("the device of rank 5", 700, 250)
    assert any("in gaps between tensors" in said for said in report.warnings)
    host = fullest(report.memory)
    assert host is not None
    assert not host.device
    page.close()


def test_of_several_memories_the_fullest_counts() -> None:
    facts = {"used_bytes": 1, "limit_bytes": 10}
    uses = [MemoryUse(name=str(peak), peak_bytes=peak, **facts) for peak in (3, 9, 5)]
    device = MemoryUse(name="device", peak_bytes=10, device=True, **facts)
    assert fullest([*uses, device]) == uses[1]
    assert fullest([device]) is None
