"""A whole job on the simulated device: DeepSpeed's pipeline, reft around it, in processes that end and come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.device.simulated import missing
from tests.engine.ranks import run_life

JOB, STEPS, DIES = Path(__file__).with_name("pipeline_job.py"), 16, 10


@pytest.mark.process
@pytest.mark.parametrize(
    ("stages", "world"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.integration)], ids=["DP2", "PP2xDP2"]
)
def test_p1_p3_p8_a_pipeline_on_a_device_goes_on_from_its_peers_memory_bit_for_bit(
    tmp_path: Path, stages: int, world: int
) -> None:
    """Parities and partitions recomputed, the rest staged; one trainer is killed, and its node is lost."""
    if why := missing():
        pytest.skip(why)
    lost = world - 1
    with pytest.raises(AssertionError):  # ranks that are killed, or lose a peer, fail
        run_life(JOB, tmp_path, world, stages=stages, until=DIES, killed=lost)
    shutil.rmtree(tmp_path / f"node{lost}")
    after = run_life(JOB, tmp_path, world, stages=stages, until=STEPS, killed=None)
    for rank, life in enumerate(after):
        reference, killed = (read(tmp_path, name, rank) for name in ("reference", "killed"))
        assert killed["losses"] == reference[:DIES]
        assert life["begins"] == after[0]["begins"] >= killed["committed"][-1] > 0
        assert life["losses"] == reference[life["begins"] :]
        assert min(life["staged"], life["recomputed"], len(life["committed"])) > 0
        assert (life["engine"], life["encodes"], life["synchronised"]) == ("sim", "torch", 0)
        assert life["own_streams"] == [2, 0], "copies take streams outside of torch's pool"


def read(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())
