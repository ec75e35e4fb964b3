"""What runs out of memory is said before, with its culprit; a steady job hears nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, sin
from pathlib import Path

import pytest

from reft.memory.jobdir import JobDir
from reft.node.memory_watch import (
    MemoryForecast,
    MemorySample,
    MemoryTrend,
    fullest,
)
from reft.node.observer import NodeObserver
from reft.node.progress import DeviceUse, ProgressPage
from reft.node.report import (
    NodeReport,
)
from tests.machine import Clock

MIB, LIMIT = 2**20, 1000 * 2**20


Use = Callable[[int], float]  # MiB in use at a second


def watched(
    use: Use, secs: int, *, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, MemoryForecast]]:
    """When what is said, one look a second at a job of two steps a second."""
    trend, found = MemoryTrend(), []
    draw = random.Random(seed)
    for now in range(secs):
        used = round((use(now) + draw.gauss(0.0, noise)) * MIB)
        parts = {"rank 0 (pid 1)": 100 * MIB, "rank 1 (pid 2)": used - 100 * MIB}
        trend.add(MemorySample(now, 2 * now, used, parts), LIMIT)
        if (said := trend.forecast("the host", LIMIT, steps_per_sec=2.0)) is not None:
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
    assert full - when > 0.1 * (full - (1800 if name == "after half an hour" else 0)), (
        "said too late"
    )
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
        trend.add(
            MemorySample(now, now, (500 + 5 * now) * MIB, {"rank 0 (pid 1)": 400 * MIB}), LIMIT
        )
    said = trend.forecast("the host", LIMIT, steps_per_sec=None)
    assert said is not None
    assert (said.who, said.step) == ("", None)
    assert "No process of the job is known to grow" in str(said)


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path, "job", "node0", secret=b"s" * 32)


def test_every_node_tells_of_its_memory_and_of_its_devices(
    job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("reft.node.memory_watch.time", clock)
    page = ProgressPage(job_dir.path, 0, 5, 10.0, 600.0)
    page.begin_step()
    watch, mine = (
        NodeObserver(job_dir.path, has_daemon=False),
        NodeReport(node="node0", domain="node0"),
    )
    assert watch.poll(mine).memory == ()
    page.end_step(1)
    page.set_device(DeviceUse(1000, 100, 700))
    clock.sleep(0.6)  # it looks twice a second at most
    report = watch.poll(mine)
    device = next(use for use in report.memory if use.device)
    assert (device.name, device.peak_bytes, device.limit_bytes) == (
        "the device of rank 5",
        700,
        1000,
    )
    host = fullest(report.memory)
    assert host is not None
    assert not host.device
    page.close()
