"""The bound on the steps that a failure rolls back is kept where the interval has just changed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import reft
from reft.config import ReftConfig
from reft.engine.attach import find_session
from reft.grid import Degrees, VersionId
from reft.policy.rates import newest_step
from reft.storage.persisted import MARKER_NAME, PersistedInfo, format_tag
from tests.engine.ranks import be_a_rank, block_of, run_life
from tests.engine.test_engine import make, train


def main(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    options = {"interval_steps": "auto", "max_lost_steps": 100, "faults": life["faults"]}
    engine = make(block_of(root, "due", **options), init=reft.initialize)
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = find_session(engine)
    assert session is not None
    assert session.worker is not None
    while engine.global_steps < life["until"]:
        wanted = max(int(step) for step in life["wants"] if int(step) <= engine.global_steps)
        session.rates.agreed._wanted_interval = lambda k=life["wants"][str(wanted)]: k
        train(engine, engine.global_steps + 1)
        assert session.worker.drain(60)  # every vote is known, whatever the machine does
    if life.get("killed"):
        (root / f"killed-{os.environ['RANK']}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"path": path}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("wants", "faults", "killed_at", "goes_on_at"),
    [
        # 104 is no multiple of 50, and 26 steps behind 78.
        pytest.param({0: 26, 100: 50}, [], 149, 104, id="longer"),
        # The version of step 104 is given up: another takes its place as soon as all know.
        pytest.param(
            {0: 26},
            [{"point": "before_copy", "step": 104, "action": "raise"}],
            129,
            106,
            id="given-up",
        ),
    ],
)
def test_a_kill_right_after_a_change_costs_no_more_steps_than_the_interval_was(
    tmp_path: Path, wants: dict[int, int], faults: list[Any], killed_at: int, goes_on_at: int
) -> None:
    with pytest.raises(AssertionError):  # a killed rank fails
        run_life(Path(__file__), tmp_path, wants=wants, faults=faults, until=killed_at, killed=True)
    assert list(tmp_path.glob("killed-*"))
    for rank in run_life(Path(__file__), tmp_path, wants={0: 1}, faults=[], until=goes_on_at):
        assert rank["path"] == f"memory:due/{goes_on_at}"


def store(persist_dir: Path, job: str, label: VersionId) -> None:
    """The marker of a checkpoint, which is all that is looked at."""
    info = PersistedInfo(persist_dir / job, format_tag(label), job, label, Degrees(1, 2, 1), 1.0)
    info.path.mkdir(parents=True)
    (info.path / MARKER_NAME).write_text(json.dumps(info.to_json()))


def test_storage_counts_from_the_newest_version_that_the_job_did_not_go_back_behind(
    tmp_path: Path,
) -> None:
    config = ReftConfig.model_validate(
        {"job_id": "mine", "persist": {"dir": str(tmp_path), "interval_steps": "auto"}}
    )
    assert newest_step(config, 300) == 0

    store(tmp_path, "mine", VersionId(1, 100))
    store(tmp_path, "mine", VersionId(1, 150))
    store(tmp_path, "another", VersionId(1, 250))
    assert newest_step(config, 300) == 150
    assert newest_step(config, 130) == 100
    store(tmp_path, "mine", VersionId(2, 120))  # the job went back to 100
    assert newest_step(config, 300) == 120
    (tmp_path / "mine" / "global_step120" / MARKER_NAME).write_text("{")
    assert newest_step(config, 110) == 100


if __name__ == "__main__":
    be_a_rank(main)
