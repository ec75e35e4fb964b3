"""P12: where DeepSpeed cannot load what it has saved, reft says so when a job starts, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.engine.checks.releases import ZERO0_PIPELINE
from tests.engine.ranks import run_ranks


@pytest.mark.integration
def test_what_reft_says_of_checkpoints_is_what_deepspeed_does(tmp_path: Path) -> None:
    (found,) = run_ranks(Path(__file__).with_name("loadable_job.py"), tmp_path, world=1)
    for name, one in found.items():
        assert (one["said"] is None) == (one["failed"] is None), name
        if name.startswith("pipeline") or one["listed"] != ZERO0_PIPELINE:
            assert (one["listed"] is None) == (one["failed"] is None), name
