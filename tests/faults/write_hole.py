"""The write hole, with real kills: ``python -m tests.faults.write_hole``, part of ``make faults``.

A rank is killed at a point between the data and the parity of a version, and as many other nodes as the
protection tolerates are lost with it. What the dead rank has of that version, new data without parity or
parity without a seal, must not be mixed with anything: the version before comes back, and the losses that
follow are the undisturbed run's to the last bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from reft.config import FaultPoint
from reft.grid import Coordinate, Degrees
from reft.memory.arena import ArenaState
from reft.tools.demo.history import EventReader
from tests.faults.cases import OPTIMIZERS, Shape
from tests.faults.job import SECS_PER_LIFE, FaultJob, Scratch, broken_promises, wrong_losses
from tests.faults.memory import stored

POINTS = (
    FaultPoint.BEFORE_COPY,
    FaultPoint.DURING_COPY,
    FaultPoint.BEFORE_PARITY,
    FaultPoint.DURING_PARITY,
    FaultPoint.BEFORE_SEAL,
    FaultPoint.AFTER_SEAL,
    FaultPoint.BEFORE_COMMIT,
)
UNSEALED = (
    FaultPoint.DURING_COPY,
    FaultPoint.BEFORE_PARITY,
    FaultPoint.DURING_PARITY,
    FaultPoint.BEFORE_SEAL,
)
"""Points at which the rank has begun to write the version and has not sealed it."""
_FIRST_STEP, _RANGE_STEPS, _DISTANCE_STEPS, _TAIL_STEPS = 4, 10, 18, 6
"""A fault is armed for ten versions, since one may be skipped, and fires at the first."""


@dataclass(frozen=True)
class Hole:
    """A protection, and the group that it is tried on.

    Attributes:
        losses: nodes that it survives, all of which are lost beside the killed rank.
    """

    protection: str
    shape: Shape
    losses: int


HOLES = (
    Hole("aec", Shape("PP1xDP3", Degrees(1, 3, 1), nodes=3, procs_per_node=1), losses=1),
    Hole("rs:2", Shape("PP1xDP4", Degrees(1, 4, 1), nodes=4, procs_per_node=1), losses=2),
)
OPTIMIZER = OPTIMIZERS[0]


@dataclass(frozen=True)
class Struck:
    """What one kill has shown.

    Attributes:
        point: where the rank died.
        version: newest version in its memory, and
        state: the state in which that was left.
        whole: newest version that it had sealed.
        others: newest version that a surviving node had sealed; 0: no other node survived, or none had.
        restored: version that the next life began with.
        parity_bytes: of it, decoded from parity.
    """

    point: FaultPoint
    version: int
    state: ArenaState
    whole: int
    others: int
    restored: int
    parity_bytes: int

    @property
    def problems(self) -> list[str]:
        wrong = []
        if self.point in UNSEALED and (self.state is not ArenaState.WRITING or self.version <= self.whole):
            wrong.append(f"version {self.version} was {self.state}, so there was no hole to fall into")
        if self.restored > self.whole:
            wrong.append(f"restored {self.restored}, which more nodes had not than are tolerated")
        if not self.parity_bytes:
            wrong.append("nothing was decoded: parity was not put to the test")
        return [f"{self.point}: {text}" for text in wrong]

    def __str__(self) -> str:
        return (
            f"{self.point}: left version {self.version} {self.state}, other survivors had {self.others}; "
            f"restored {self.restored}, {self.parity_bytes} bytes of it decoded"
        )


def run_hole(scratch: Scratch, hole: Hole, points: Sequence[FaultPoint]) -> tuple[list[Struck], list[str]]:
    """One job that is struck once per point, each time in the life after the one before.

    Returns:
        What every kill has shown, and what was not as promised.
    """
    steps = _FIRST_STEP + _DISTANCE_STEPS * (len(points) - 1) + _RANGE_STEPS + _TAIL_STEPS
    reference = scratch.reference(hole.shape, OPTIMIZER, steps)
    coordinates = hole.shape.degrees.coordinates()
    victims = [coordinates[number % len(coordinates)] for number in range(len(points))]
    job = FaultJob(
        scratch,
        f"write-hole-{hole.protection.replace(':', '')}",
        hole.shape,
        OPTIMIZER,
        steps=steps,
        block={
            "enabled": True,
            "block_bytes": 16384,
            "protection": hole.protection,
            "has": {"chunk_bytes": 4096},  # several chunks of parity, small as the state is
            "faults": [
                entry
                for number, (point, at) in enumerate(zip(points, victims, strict=True))
                for entry in _armed(number, point, at)
            ],
        },
        max_restarts=len(points),
    )
    found = []
    with job:
        for number, (point, at) in enumerate(zip(points, victims, strict=True)):
            found.append(_strike(job, hole, number + 1, point, at))
        problem = job.run_to_end(SECS_PER_LIFE)
    history = job.history
    problems = [problem] if problem else []
    problems += [text for struck in found for text in struck.problems]
    problems += wrong_losses(history, reference, steps) + broken_promises(history)
    return found, problems


def _armed(number: int, point: FaultPoint, at: Coordinate) -> list[dict[str, Any]]:
    begin = _FIRST_STEP + _DISTANCE_STEPS * number
    common = {"point": str(point), "dp": at.dp, "incarnation": number + 1, "action": "kill"}
    return [{**common, "step": step} for step in range(begin, begin + _RANGE_STEPS)]


def _strike(job: FaultJob, hole: Hole, life: int, point: FaultPoint, at: Coordinate) -> Struck:
    """Wait for the rank to die, lose other nodes with it, and see what the next life begins with."""
    pid, node = _attached(job, life, at)
    job.wait_for(f"{at} to die {point} in life {life}", lambda: not _alive(pid))
    indices = [(node + i) % hole.shape.nodes for i in range(1, hole.shape.nodes)]
    lost, kept = indices[: hole.losses], indices[hole.losses :]
    for index in lost:
        job.cluster.kill_node(index)
    # Nothing is restored, and nothing written over, while nodes are missing.
    left = stored(job.cluster.job_dir(node), whole=False)
    newest = [s.label.step for index in kept for s in stored(job.cluster.job_dir(index))[:1]]
    for index in lost:
        job.cluster.start_node(index)
    job.wait_for(
        f"life {life + 1} to be restored",
        lambda: len(_restored(job, life + 1)) == hole.shape.degrees.world_size,
    )
    events = _restored(job, life + 1)
    return Struck(
        point=point,
        version=left[0].label.step,
        state=left[0].header.state,
        whole=next(s.label.step for s in left if s.header.state.whole),
        others=max(newest, default=0),
        restored=max(int(fields["version"]) for fields in events),
        parity_bytes=sum(int(fields["bytes_from"].get("parity", 0)) for fields in events),
    )


def _attached(job: FaultJob, life: int, at: Coordinate) -> tuple[int, int]:
    """Process and node index of a coordinate in a life; waits for it."""
    found: list[tuple[int, int]] = []

    def look() -> bool:
        for event in EventReader(job.events_dir).poll():
            fields = event.fields
            if event.kind == "attached" and (fields["incarnation"], fields["coordinate"]) == (life, str(at)):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Every protection at every point; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.write_hole", description=__doc__)
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep logs and events there")
    args = parser.parse_args(argv)
    root = args.keep_logs or Path(tempfile.mkdtemp(prefix="reft-write-hole-"))
    root.mkdir(parents=True, exist_ok=True)
    good, scratch = True, Scratch(root, root / "references")
    for hole in HOLES:
        print(f"{hole.protection}, {hole.shape.name}, {hole.losses} other node(s) lost each time", flush=True)
        found, problems = run_hole(scratch, hole, POINTS)
        for struck in found:
            print(f"  {struck}")
        for problem in problems:
            print(f"  NOT as promised: {problem}")
        good = good and not problems
    if good and args.keep_logs is None:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"logs: {root}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
