"""A job that goes through several sizes is, from each resize on, the job of that size, to the bit; and reads every
sample once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reft.memory.jobdir import JobDir
from reft.storage.persister import committed_labels
from tests.engine.ranks import run_ranks
from tests.engine.test_resizing import to_universal

from .cluster import WatchedCluster, cluster
from .grid_job import BATCH, CONFIG, SAMPLES
from .test_resizing import last_step, trains

JOB = Path(__file__).with_name("grid_job.py")
CONF = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=240"


@dataclass
class Phase:
    """What one start of the trainers did.

    Attributes:
        replicas: how many there were.
        begins: newest step that was made before.
        ids: samples of every step, by rank and micro-batch.
        losses: likewise.
    """

    replicas: int
    begins: int
    ids: dict[int, dict[int, Any]] = field(default_factory=dict)
    losses: dict[int, dict[int, Any]] = field(default_factory=dict)


def phases(job: WatchedCluster) -> list[Phase]:
    """Those that made a step."""
    found: dict[int, Phase] = {}
    for event in job.events():
        phase = found.setdefault(event["start"], Phase(event["replicas"], event["step"]))
        if event["event"] == "trained":
            phase.ids.setdefault(event["step"], {})[event["rank"]] = event["ids"]
            phase.losses.setdefault(event["step"], {})[event["rank"]] = event["losses"]
    return [found[start] for start in sorted(found) if found[start].ids]


def is_of_its_layouts(found: list[Phase], root: Path, *layouts: tuple[int, int]) -> None:
    """``layouts``: stages and slices of every phase; one for all. Every phase's losses are those of a job of its layout, which DeepSpeed loaded from its own checkpoint of the
    version; every sample of the job was read once."""
    each = layouts * len(found) if len(layouts) == 1 else layouts
    counted: Counter[int] = Counter()
    tag, root = "", root / "reference" / "chain"
    root.mkdir(parents=True)
    for number, (phase, (pp, tp)) in enumerate(zip(found, each, strict=True)):
        until = found[number + 1].begins if number + 1 < len(found) else max(phase.ids) - 1
        made = {step: phase.ids[step] for step in range(phase.begins + 1, until + 1)}
        life = {
            "tag": tag,
            "until": until,
            "save": f"step{until}",
            "ids": {step: [ranks[r] for r in range(phase.replicas)] for step, ranks in made.items()},
            **{"pp": pp, "tp": tp},
        }
        (root / "life.json").write_text(json.dumps(life))
        told = run_ranks(JOB, root, world=phase.replicas * pp * tp)
        whole = {rank.get("dp", at): rank["losses"] for at, rank in enumerate(told) if rank.get("last", True)}
        for step in made:
            for rank in range(phase.replicas):
                assert phase.losses[step][rank] == whole[rank][str(step)], (number, step, rank)
        for ranks in made.values():
            read = [i for batches in ranks.values() for ids in batches for i in ids]
            assert len(read) == BATCH, "the global batch is kept"
            counted.update(read)
        to_universal(root.parent, life["save"])
        tag = f"{life['save']}-universal"
    steps = sum(counted.values()) // BATCH
    passes, rest = divmod(steps * BATCH, SAMPLES)
    assert set(counted.values()) <= {passes, passes + 1}
    assert sum(times == passes + 1 for times in counted.values()) == rest


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("pp", "tp", "sizes"), [(1, 1, [2, 1, 2]), (2, 1, [2, 1, 2]), (1, 2, [2, 1])])
def test_p1_from_each_resize_on_a_job_is_one_of_that_layout_and_reads_each_sample_once(
    tmp_path: Path, pp: int, tp: int, sizes: list[int]
) -> None:
    """A node holds a replica; one dies, and another takes its place."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**CONFIG, "reft": {"enabled": True, "tolerance": 0}}))
    options = ("--nnodes", "1:2", "--max-restarts", "0", "--rdzv-conf", CONF)
    arguments = ("../grid_job.py", str(config), str(pp), str(tp))
    with cluster(tmp_path, *arguments, nodes=2, procs_per_node=pp * tp, options=options) as job:
        trains(job, 2, 0, lives=1)
        job.kill_node(1)
        trains(job, 1, last_step(job, 2), lives=1)
        if len(sizes) > 2:
            job.start_node(1)
            trains(job, 2, last_step(job, 1), lives=2)
        found = phases(job)
        job.finish()
        job.wait_until(lambda: all(not n.running for n in job.current.values()), 240, "the end")
    assert [phase.replicas for phase in found] == sizes
    is_of_its_layouts(found, tmp_path, (pp, tp))


def committed(memory: Path) -> int:
    """Newest step that any node's arenas call committed."""
    jobs = [JobDir.open(path.parent) for path in memory.glob("*/*/secret")]
    return max((label.step for job in jobs for label in committed_labels(job)), default=0)


def phases_on(root: Path, memory: Path, layout: tuple[int, int, int]) -> list[Phase]:
    """A job of so many stages, slices and trainers of each of two nodes, which all die at once; the memory stays."""
    pp, tp, per_node = layout
    config = root / "ds.json"
    root.mkdir()
    config.write_text(json.dumps({**CONFIG, "reft": {"enabled": True, "tolerance": 0}}))
    options = ("--max-restarts", "0", "--rdzv-conf", CONF)
    arguments = ("../grid_job.py", str(config), str(pp), str(tp))
    with cluster(root, *arguments, nodes=2, procs_per_node=per_node, options=options, memory=memory) as job:
        began = job.wait_for("begins")[0]["step"]
        job.wait_until(lambda: committed(memory) >= began + 3, 240, "versions in memory")
        job.close()  # SIGKILL of every process
        return phases(job)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_p3_a_job_whose_trainers_all_die_goes_on_in_other_layouts_from_memory(tmp_path: Path) -> None:
    memory, found, newest = tmp_path / "memory", [], [0]
    layouts = [(2, 1, 2), (1, 1, 1), (1, 2, 2), (2, 1, 2)]
    for number, layout in enumerate(layouts):
        found += phases_on(tmp_path / f"life{number}", memory, layout)
        newest.append(committed(memory))
    assert [phase.replicas for phase in found] == [2, 2, 2, 2]
    # A version that all ranks have sealed is as good as a committed one.
    assert all(0 <= phase.begins - step <= 1 for phase, step in zip(found, newest, strict=False))
    is_of_its_layouts(found, tmp_path, *((pp, tp) for pp, tp, _ in layouts))
