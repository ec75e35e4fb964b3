"""benchmarks/frequency.py runs as anyone would run it; its simulation holds the choice against brute force."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmarks.test_benchmarks import ROOT, TIMEOUT_SECS

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def result() -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / "frequency.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_chosen_interval_is_within_two_percent_of_the_best_simulated(result: dict) -> None:
    points = result["points"]
    assert result["simulated"] is True
    mtbfs = sorted({p["mtbf_secs"] for p in points})
    rates = sorted({p["write_bytes_per_sec"] for p in points})
    assert (mtbfs[0], mtbfs[-1]) == (600.0, 864_000.0)
    assert rates[-1] / rates[0] == pytest.approx(1000.0)
    assert len(points) == len(mtbfs) * len(rates)
    for point in points:
        # Both were counted: the best is at least as good, and there is something to lose.
        assert 0 < point["effective"] <= point["best_effective"] < 1
        assert point["missed"] < 0.02
        assert point["allowed_missed"] < 0.02
        part = point["cost_secs"] / (point["allowed_steps"] * result["costs"]["step_secs"])
        assert part <= result["costs"]["max_overhead"] * (1 + 1e-9)
    # Far below that, in truth: an interval half as long again would still be within 2 %.
    assert max(p["missed"] for p in points) < 0.002
    assert result["worst"]["missed"] == max(p["missed"] for p in points)
    assert result["allowed_worst"]["allowed_missed"] == max(p["allowed_missed"] for p in points)


def test_how_often_memory_fails_is_what_single_losses_give_simulated(result: dict) -> None:
    assert {m["tolerance"] for m in result["memory_losses"]} == {0, 1, 2}
    for found in result["memory_losses"]:
        close = 0.05 if found["tolerance"] < 2 else 0.3  # few are drawn
        assert found["simulated_per_day"] == pytest.approx(found["formula_per_day"], rel=close)
