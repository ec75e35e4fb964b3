"""benchmarks/has.py runs as anyone would run it and says consistent things. Never a time: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import ROOT, check_estimate, run


@pytest.mark.nightly
def test_has_compares_every_variant_within_one_run(tmp_path: Path) -> None:
    result = run("has.py", folder=tmp_path)
    assert result["benchmark"] == "has"
    (setting,) = result["settings"]
    assert setting["pp"] == 2
    assert set(setting["variants"]) == {"has", "host", "host_device", "blocking", "inter_node"}
    check_estimate(setting["step_secs"])
    for name, variant in setting["variants"].items():
        for key in ("overhead", "extra_secs", "extra_cpu_secs_per_rank", "stall_secs"):
            check_estimate(variant[key])
        # On a busy machine every version of so short steps may be given up before it has begun.
        assert abs(sum(variant["tiers"].values()) - 1) < 1e-9 or setting["skipped"], name
    assert setting["variants"]["blocking"]["tiers"]["0"] == 1 or setting["skipped"]
    assert setting["variants"]["host"]["tiers"]["1"] == 0
    # Every unit took a version at the end of each of its steps.
    versions = result["rounds"] * len(setting["variants"]) * (result["steps_per_unit"] + 1)
    assert setting["committed"] >= versions - sum(setting["skipped"].values())
    for plan in setting["plans"]:
        if plan is None:
            assert setting["skipped"], "every version was given up before one was copied"
            continue
        assert sum(plan["tier_bytes"].values()) > 0
        assert plan["fits_bubbles"] == (plan["tier_bytes"]["1"] == sum(plan["tier_bytes"].values()))
    if result["neighbour"] is not None:
        check_estimate(result["neighbour"]["slowdown"])
    assert set(result["goals"]) == {
        "has_at_most_2_percent_where_the_state_fits",
        "has_less_than_half_of_host_where_it_does_not",
    }


@pytest.mark.integration
@pytest.mark.parametrize(
    ("pairs", "samples"),
    [([], 0), ([(100.0, 90.0, 0.0)], 0), ([(100.0, 90.0, 0.0), (100.0, 80.0, 1e6), (90.0, 0.5, 2e6)], 2)],
)
def test_slices_in_which_the_neighbour_did_not_run_say_nothing(
    pairs: list[tuple[float, float, float]], samples: int
) -> None:
    """On a busy machine every one may be such a slice."""
    code = (
        "import json, sys; from neighbour import summary; print(json.dumps(summary(*json.load(sys.stdin))))"
    )
    command = [sys.executable, "-c", code]
    given = json.dumps([2**20, pairs])
    done = subprocess.run(
        command, input=given, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True, timeout=240
    )
    found = json.loads(done.stdout)
    assert (found is None) == (not samples)
    if found is not None:
        check_estimate(found["slowdown"])
        assert found["copy_bytes_per_sec"]["samples"] == samples
        assert 0 < found["extra_secs"] < found["copy_secs"]
