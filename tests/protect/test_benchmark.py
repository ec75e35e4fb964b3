"""The benchmark runs as anyone would run it and says consistent things. Never a rate: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reft.protect.backend import compiled_run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "protect.py"


@pytest.mark.integration
@pytest.mark.parametrize("members", [3, 8])
def test_every_backend_and_case_is_measured_against_the_bound(members: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--members", str(members)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["benchmark"] == "protect"
    assert f"--members {members}" in result["command"]
    rows = {(row["backend"], row["what"]): row for row in result["results"]}
    for backend in ("numpy", "torch cpu"):
        assert rows[backend, "copy (bound)"]["of_bound"]["median"] == 1
        assert rows[backend, "encode aec"]["of_xor_encode"]["median"] == 1
        # On the host, as recovery does; among three, two parities are copies and need no decoding.
        assert ((backend, "decode rs:2, 2 lost") in rows) == (backend == "numpy" and members > 3)
        assert ((backend, "decode aec, 1 lost") in rows) == (backend == "numpy")
        assert ((backend, "encode rs:3") in rows) == (members > 3)
    ways = (
        [rows["numpy", f"{what} rs:2, 2 lost"] for what in ("decode", "with NumPy", "add up")]
        if members > 3
        else []
    )
    assert len({way["bytes"] for way in ways}) <= 1
    assert result["compiled"] == (compiled_run() is not None)
    # One parity over everything: the image is read once, 1/(D-1) of it is written.
    encoded = rows["numpy", "encode aec"]["bytes"]
    assert encoded == pytest.approx(result["image_bytes"] * members / (members - 1), rel=1e-3)


@pytest.mark.process
def test_decoders_are_compared_with_the_libraries_that_are_installed(tmp_path: Path) -> None:
    options = ["--json", "--block-mib", "1", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT.with_name("decoders.py")), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)["ways"]
    assert {"copy", "reft, NumPy"} <= set(ways)
    assert ("reft, compiled" in ways) == (compiled_run() is not None)
