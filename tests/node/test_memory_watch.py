"""Running out of memory: foreseen where it comes, and never where it does not; of processes that really take it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import exp, sin
from pathlib import Path

import pytest

from reft.memory.free_memory import Bound, bounds
from reft.memory.jobdir import JobDir
from reft.node.memory_watch import (
    MemoryTrend,
    MemoryUse,
    MemoryWatch,
    Point,
    RunsOut,
    fullest,
    private_bytes,
)
from reft.node.observe import Doing, NodeObserver
from reft.node.progress import DeviceUse, ProgressPage, read_pages

MIB, LIMIT = 2**20, 1000 * 2**20
Use = Callable[[int], float]
"""MiB in use at a second."""


def watched(use: Use, secs: int, *, noise: float = 0.0, seed: int = 0) -> list[tuple[int, RunsOut]]:
    """When what is said, one look a second at a job of two steps a second."""
    trend, found = MemoryTrend(), []
    draw = random.Random(seed)
    for now in range(secs):
        used = round((use(now) + draw.gauss(0.0, noise)) * MIB)
        parts = {"rank 0 (pid 1)": 100 * MIB, "rank 1 (pid 2)": used - 100 * MIB}
        trend.see(Point(now, 2 * now, used, parts), LIMIT)
        if (said := trend.runs_out("the host", LIMIT, steps_per_sec=2.0)) is not None:
            found.append((now, said))
    return found


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("from the start", lambda s: 400 + 2.0 * s),
        ("ever faster", lambda s: 300 + 0.01 * s * s),
        ("after half an hour", lambda s: 400 + max(0, s - 1800) * 2.0),
        ("in blocks", lambda s: 400 + 10 * (s // 5)),
        ("slowly", lambda s: 600 + 0.2 * s),
    ],
)
def test_what_runs_out_is_said_before_with_its_time_its_step_and_its_culprit(
    name: str, use: Use, noise: float
) -> None:
    full = next(s for s in range(100_000) if use(s) >= LIMIT / MIB)
    found = watched(use, full, noise=noise)
    assert found
    when, first = found[0]
    assert full - when > 0.1 * (full - (1800 if name == "after half an hour" else 0)), "said too late"
    assert first.who.startswith("rank 1 (pid 2) takes ")
    # It is said ever better: half way from there within a quarter.
    now, later = min(found, key=lambda f: abs(f[0] - (when + full) / 2))
    assert later.in_secs == pytest.approx(full - now, rel=0.5 if name == "ever faster" else 0.25)
    assert later.step == pytest.approx(2 * (now + later.in_secs), abs=2)
    assert "near step" in str(later)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (10.0, 1)])
@pytest.mark.parametrize(
    "use",
    [
        lambda s: 900.0,
        lambda s: 500 + 400 * (1 - exp(-s / 20)) * 0.9,  # levels off
        lambda s: 600 + 20 * sin(s / 40),
        lambda s: 400 + 400 * (s > 300),  # an evaluation's buffers, kept
        lambda s: 400 + 200 * (s > 100) + 200 * (s > 500) + 100 * (s > 900),
        lambda s: 500 + 100 * (s % 600 > 540),
        lambda s: 500 + 0.002 * s,  # full after three days: an hour says nothing of that
    ],
)
def test_nothing_is_said_of_a_steady_job(use: Use, noise: float, seed: int) -> None:
    assert watched(use, 3600, noise=noise, seed=seed) == []


def test_what_becomes_free_again_is_not_said_any_more() -> None:
    found = watched(lambda s: 400 + 3.0 * s if s < 100 else 400.0, 400)
    assert 0 < found[-1][0] < 101
    # What goes up and down is said in its first turn at most.
    assert watched(lambda s: 300 + 3.0 * (s % 100), 3600)[-1][0] <= 100


def test_memory_that_nobody_of_the_job_takes_accuses_nobody() -> None:
    trend = MemoryTrend()
    for now in range(60):
        trend.see(Point(now, now, (500 + 5 * now) * MIB, {"rank 0 (pid 1)": 400 * MIB}), LIMIT)
    said = trend.runs_out("the host", LIMIT, steps_per_sec=None)
    assert said is not None
    assert (said.who, said.step) == ("", None)
    assert "No process of the job is known to grow" in str(said)


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
    page.set_device(DeviceUse(1000, 100, 700))
    time.sleep(0.6)  # it looks twice a second at most
    report = watch.look(Doing("running", round=1))
    device = next(use for use in report.memory if use.device)
    assert (device.name, device.peak_bytes, device.limit_bytes) == ("the device of rank 5", 700, 1000)
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
