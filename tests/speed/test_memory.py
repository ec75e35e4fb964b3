"""Running out of memory: foreseen where it comes, and never where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, sin

import pytest

from reft.speed.memory import MemoryTrend, MemoryUse, Point, RunsOut

MIB, LIMIT = 2**20, 1000 * 2**20
Use = Callable[[int], float]
"""MiB in use at a second."""


def watched(use: Use, secs: int, *, noise: float = 0.0, seed: int = 0) -> list[RunsOut]:
    """What is said, one look a second at a job of two steps a second."""
    trend, found = MemoryTrend(), []
    draw = random.Random(seed)
    for now in range(secs):
        used = round((use(now) + draw.gauss(0.0, noise)) * MIB)
        parts = {"rank 0 (pid 1)": 100 * MIB, "rank 1 (pid 2)": used - 100 * MIB}
        trend.see(Point(now, 2 * now, used, parts), LIMIT)
        said = trend.runs_out("the host", LIMIT, steps_per_sec=2.0, now=1e9 + now)
        if said is not None:
            found.append(said)
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
    first = found[0]
    when = round(first.unix_secs - first.in_secs - 1e9)
    assert full - when > 0.1 * (full - (1800 if name == "after half an hour" else 0)), "said too late"
    assert first.who.startswith("rank 1 (pid 2) takes ")
    # It is said ever better: half way from there within a quarter.
    later = min(found, key=lambda f: abs(f.unix_secs - f.in_secs - 1e9 - (when + full) / 2))
    now = later.unix_secs - later.in_secs - 1e9
    assert later.in_secs == pytest.approx(full - now, rel=0.5 if name == "ever faster" else 0.25)
    assert later.step == pytest.approx(2 * (now + later.in_secs), abs=2)
    assert "near step" in str(later)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (1.0, 0), (10.0, 0), (10.0, 1)])
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
    assert found
    assert max(f.unix_secs - f.in_secs - 1e9 for f in found) < 101


def test_what_goes_up_and_down_is_said_in_its_first_turn_at_most() -> None:
    def saw(secs: int) -> float:
        return 300 + 3.0 * (secs % 100)

    found = watched(saw, 3600)
    assert max(f.unix_secs - f.in_secs - 1e9 for f in found) <= 100


def test_memory_that_nobody_of_the_job_takes_accuses_nobody() -> None:
    trend = MemoryTrend()
    for now in range(60):
        trend.see(Point(now, now, (500 + 5 * now) * MIB, {"rank 0 (pid 1)": 400 * MIB}), LIMIT)
    said = trend.runs_out("the host", LIMIT, steps_per_sec=None, now=1e9)
    assert said is not None
    assert (said.who, said.step) == ("", None)
    assert "No process of the job is known to grow" in str(said)


def test_a_device_in_pieces_is_told_from_one_that_is_full() -> None:
    facts = {"name": "the device of rank 1", "device": True, "limit_bytes": 100 * MIB}
    torn = MemoryUse(used_bytes=60 * MIB, peak_bytes=70 * MIB, gap_bytes=25 * MIB, retries=3, **facts)
    assert "expandable_segments" in torn.fragmented
    assert "PYTORCH_HIP_ALLOC_CONF" in torn.fragmented
    for changes in ({"retries": 0}, {"gap_bytes": 5 * MIB}, {"peak_bytes": 50 * MIB}, {"device": False}):
        assert torn.model_copy(update=changes).fragmented == ""
