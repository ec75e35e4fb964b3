"""The write hole, with real kills: data and parity of different versions never mix.

A rank is killed at a point between the data and the parity of a version, and as many other nodes as the
protection tolerates are lost with it. What the dead rank has of that version, new data without parity or
parity without a seal, must not be mixed with anything: the version before comes back, and the losses that
follow are the undisturbed run's to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from benchmarks.job_events import EventReader
from tests.commands import inspected
from tests.faults.cases import DP3, DP4, OPTIMIZERS, Coordinate
from tests.faults.conftest import only_when_asked_for
from tests.faults.job import SECS_PER_LIFE, FaultJob, Scratch, broken_promises, wrong_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

UNSEALED = ("during_copy", "before_parity", "during_parity", "before_seal")
"""Points at which the rank has begun to write the version and has not sealed it."""
POINTS = ("before_copy", *UNSEALED, "after_seal", "before_commit")
_FIRST_STEP, _RANGE_STEPS, _DISTANCE_STEPS, _TAIL_STEPS = 4, 10, 18, 6
"""A fault is armed for ten versions, since one may be skipped, and fires at the first."""


LOSSES = {"aec": (DP3, 1), "rs:2": (DP4, 2)}
"""By protection: the group that it is tried on, and the nodes that it survives, all lost beside the killed rank."""
OPTIMIZER = OPTIMIZERS[0]


@pytest.mark.parametrize("protection", LOSSES)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("during_parity", "before_seal"), marks=pytest.mark.nightly, id="two"),
        pytest.param(POINTS, marks=only_when_asked_for, id="every"),
    ],
)
def test_p5_data_and_parity_of_different_versions_never_mix(
    scratch: Scratch, protection: str, points: Sequence[str]
) -> None:
    """One job that is struck once per point, each time in the life after the one before."""
    if protection != "aec" and points is not POINTS:
        pytest.skip("make faults runs it, at every point")
    shape, losses = LOSSES[protection]
    steps = _FIRST_STEP + _DISTANCE_STEPS * (len(points) - 1) + _RANGE_STEPS + _TAIL_STEPS
    reference = scratch.reference(shape, OPTIMIZER, steps)
    coordinates = shape.coordinates()
    strikes = [
        (life, point, coordinates[life % len(coordinates)]) for life, point in enumerate(points, 1)
    ]
    block = {
        "protection": protection,
        "has": {"chunk_bytes": 4096},  # several chunks of parity, small as the state is
        "faults": [entry for strike in strikes for entry in _armed(*strike)],
    }
    name = f"write-hole-{protection.replace(':', '')}"
    restarts = len(points)
    with FaultJob(
        scratch, name, shape, OPTIMIZER, steps=steps, block=block, max_restarts=restarts
    ) as job:
        for strike in strikes:
            _strike(job, losses, *strike)
        assert job.run_to_end(SECS_PER_LIFE) is None
    assert wrong_losses(job.history, reference, steps) + broken_promises(job.history) == []


def _armed(life: int, point: str, at: Coordinate) -> list[dict[str, Any]]:
    begin = _FIRST_STEP + _DISTANCE_STEPS * (life - 1)
    common = {"point": point, "dp": at.dp, "incarnation": life, "action": "kill"}
    return [{**common, "step": step} for step in range(begin, begin + _RANGE_STEPS)]


def _strike(job: FaultJob, losses: int, life: int, point: str, at: Coordinate) -> None:
    pid, node = _attached(job, life, at)
    job.wait_for(f"{at} to die {point} in life {life}", lambda: not _alive(pid))
    lost = [(node + i) % job.cluster.nodes for i in range(1, losses + 1)]
    for index in lost:
        job.cluster.kill_node(index)
    # Nothing is restored, and nothing written over, while nodes are missing.
    newest, *older = inspected(job.cluster.job_dir(node))["versions"]
    for index in lost:
        job.cluster.start_node(index)
    job.wait_for(
        f"life {life + 1} to be restored",
        lambda: len(_restored(job, life + 1)) == job.cluster.nodes,
    )
    events = _restored(job, life + 1)
    whole = next(version["step"] for version in (newest, *older) if version["whole_ranks"])
    if point in UNSEALED:
        states = [arena["state"] for arena in newest["arenas"]]
        assert (states, newest["step"] > whole) == (["writing"], True), (
            f"{point}: no hole to fall into"
        )
    assert max(int(fields["version"]) for fields in events) <= whole, f"{point}: of too few nodes"
    assert sum(int(fields["bytes_from"].get("parity", 0)) for fields in events), (
        f"{point}: nothing was decoded"
    )


def _attached(job: FaultJob, life: int, at: Coordinate) -> tuple[int, int]:
    found: list[tuple[int, int]] = []

    def look() -> bool:
        for event in EventReader(job.events_dir).poll():
            fields = event.fields
            if event.kind == "attached" and (fields["incarnation"], fields["coordinate"]) == (
                life,
                str(at),
            ):
                found.append((event.pid, int(fields["node"].removeprefix("node").split(".")[0])))
        return bool(found)

    job.wait_for(f"{at} in life {life}", look)
    return found[0]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _restored(job: FaultJob, life: int) -> list[Any]:
    known = job.history.incarnations
    return [event.fields for event in known[life].restored.values()] if life in known else []
