"""P12: where DeepSpeed cannot load what it has saved, reft says so when a job starts, and only there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.machine import free_port
from tests.prefork import Popen

LIMIT_SECS = 300.0


@pytest.mark.integration
def test_what_reft_says_of_checkpoints_is_what_deepspeed_does(tmp_path: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    job = Popen(
        [sys.executable, str(Path(__file__).with_name("loadable_job.py")), str(tmp_path)],
        env={**os.environ, **place, "MASTER_PORT": str(free_port())},
    )
    assert job.wait(LIMIT_SECS) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: one["said"] is not None for name, one in found.items()} == {
        name: one["failed"] is not None for name, one in found.items()
    }, found
    assert found["pipeline bf16 0"]["failed"], "DeepSpeed loads it now: reft need not say anything of it"
