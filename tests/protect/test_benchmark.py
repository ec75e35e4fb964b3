"""The benchmark runs as anyone would run it and says consistent things. Never a rate: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "protect.py"


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
    # The bound that counts the XORs in the cache too: there are some, and so it is nearer.
    decoded = rows["numpy", "decode aec, 1 lost"]
    assert decoded["xored_bytes"] == 0
    assert decoded["of_serial_bound"]["median"] == pytest.approx(decoded["of_bound"]["median"])
    if members > 3:
        decoded = rows["numpy", "decode rs:2, 2 lost"]
        assert decoded["xored_bytes"] > decoded["bytes"] / 2
        assert decoded["of_serial_bound"]["median"] > decoded["of_bound"]["median"]
        assert "of_serial_bound" not in rows["numpy", "add up rs:2, 2 lost"]
    # One parity over everything: the image is read once, 1/(D-1) of it is written.
    encoded = rows["numpy", "encode aec"]["bytes"]
    assert encoded == pytest.approx(result["image_bytes"] * members / (members - 1), rel=1e-3)


def test_the_table_is_for_people(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "of the bound" in done.stdout
    assert "decode rs:2, 2 lost" in done.stdout
