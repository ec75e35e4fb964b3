"""What benchmarks/has.py says of its neighbour."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmarks.test_benchmarks import ROOT, check_estimates


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
        assert check_estimates(found["slowdown"])
        assert found["copy_bytes_per_sec"]["samples"] == samples
        assert 0 < found["extra_secs"] < found["copy_secs"]
