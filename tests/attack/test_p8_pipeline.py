"""A real pipeline job under ``reft launch`` whose trainer is killed: its ordinary loader goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attack.jobs import DEADLINE_SECS, launched
from tests.attack.pipeline_job import STEPS

JOB = Path(__file__).with_name("pipeline_job.py")


def losses(out: Path) -> dict[int, set[str]]:
    """Every loss that was ever computed, by step; the same on both ranks."""
    found: dict[int, set[str]] = {}
    for path in out.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, loss = line.split()
            found.setdefault(int(step), set()).add(loss)
    return found


def run(out: Path, **env: str) -> dict[int, set[str]]:
    options = ("--nproc-per-node", "2", "--max-restarts", "2")
    with launched(JOB, cwd=out.parent, out=out, options=options, env=env) as started:
        assert started.processes[0].wait(DEADLINE_SECS) == 0, started.log.read_text(errors="replace")[-3000:]
    return losses(out)


@pytest.mark.nightly
def test_p8_a_killed_pipeline_reads_on_where_it_was(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    block = {"enabled": True, "memory_dir": str(tmp_path / "memory")}
    # The eighth step is within the second pass over the data.
    found = run(tmp_path / "killed", TEST_BLOCK=json.dumps(block), TEST_KILL=json.dumps([8, 1]))
    assert (tmp_path / "killed" / "killed").exists()
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == undisturbed
