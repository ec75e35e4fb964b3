"""An undisturbed run is waited for as long as it trains, however slow the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.tools.demo.cluster import LocalCluster, LocalClusterError
from tests.faults.job import wait_while_it_trains

STILL_SECS = 60.0
STEP = """
import sys, time
from pathlib import Path
events, steps, secs = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for step in range(steps):
    with (events / "reft-0-1.jsonl").open("a") as file:
        file.write(f"{step}\\n")
    time.sleep(secs)
"""


def start(cluster_dir: Path, steps: int, secs: float) -> LocalCluster:
    events = cluster_dir / "events"
    events.mkdir()
    script = cluster_dir / "steps.py"
    script.write_text(STEP)
    return LocalCluster(
        command=[str(script), str(events), str(steps), str(secs)],
        directory=cluster_dir,
        procs_per_node=1,
        nodes=1,
        options=("--no-daemon",),
        job_id="steps",
        external_rendezvous=False,
    )


@pytest.mark.nightly
def test_a_run_that_takes_longer_than_the_limit_of_standing_still_is_waited_for(tmp_path: Path) -> None:
    with start(tmp_path, steps=14, secs=5.0) as cluster:
        cluster.start()
        assert wait_while_it_trains(cluster, tmp_path / "events", STILL_SECS) == {0: 0}


@pytest.mark.integration
def test_a_run_that_stands_still_is_an_error(tmp_path: Path) -> None:
    with start(tmp_path, steps=1, secs=10_000.0) as cluster:
        cluster.start()
        with pytest.raises(LocalClusterError, match="no event for 5 s"):
            wait_while_it_trains(cluster, tmp_path / "events", 5.0)
