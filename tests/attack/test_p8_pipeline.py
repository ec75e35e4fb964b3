"""A real pipeline job under ``reft launch`` whose trainer is killed: its ordinary loader goes on where it was."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader

from tests.attack.jobs import DEADLINE_SECS, launched
from tests.attack.test_p8_data import MICRO_BATCH, Life, Samples
from tests.engine.ranks import join_group

STEPS = 14


class Killed(Life):
    def _note(self, loss: torch.Tensor) -> None:
        step = int(self.engine.global_steps)
        with (out / f"losses-{rank}").open("a") as file:
            file.write(f"{step} {float(loss).hex()}\n")
        if [step, rank] == json.loads(os.environ.get("TEST_KILL", "[]")) and not (
            out / "killed"
        ).exists():
            (out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


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
    with launched(Path(__file__), cwd=out.parent, out=out, options=options, env=env) as started:
        assert started.processes[0].wait(DEADLINE_SECS) == 0, started.log.read_text(
            errors="replace"
        )[-3000:]
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


if __name__ == "__main__":
    out, rank = Path(os.environ["TEST_OUT"]), int(os.environ["RANK"])
    join_group()
    life = Killed(json.loads(os.environ.get("TEST_BLOCK", "null")), STEPS, out / "checkpoints")
    life.pipeline(stages=2)
    torch.manual_seed(rank)
    random.seed(rank)
    # Both ends of the pipeline read: the order must be one, so the loader has a generator of its own.
    order = torch.Generator().manual_seed(9)
    loader = DataLoader(
        Samples(noise=rank == 0), batch_size=MICRO_BATCH, shuffle=True, generator=order
    )
    data = iter(RepeatingLoader(loader))
    life.load()
    life.read(data)
