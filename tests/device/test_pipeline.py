"""A whole job on the simulated device: DeepSpeed's pipeline, reft around it, in two processes that end and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.simulated import missing
from tests.engine.ranks import run_life

JOB, STEPS, ENDS = Path(__file__).with_name("pipeline_job.py"), 8, 5


@pytest.mark.integration
def test_p1_p8_a_pipeline_trains_and_resumes_on_a_device_bit_for_bit(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    first = run_life(JOB, tmp_path, resumes=False, until=ENDS)
    second = run_life(JOB, tmp_path, resumes=True, until=STEPS)
    for before, after in zip(first, second, strict=True):
        assert before["losses"] == before["reference"][:ENDS]
        assert (before["begins"], after["begins"]) == (0, ENDS)
        assert after["losses"] == before["reference"][ENDS:]
        assert before["engine"] == after["engine"] == "sim"
        assert before["taken"] > 0
        assert "tried on sim" in before["tried"]
        assert "could not be tried" not in before["tried"]
        assert before["synchronised"] == after["synchronised"] == 0
