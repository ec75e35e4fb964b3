"""DeepSpeed's own loader (``training_data=``), without a change of the script: trainers and nodes are killed, and every
step trains on the samples that it would have trained on; each sample once in an epoch (P8)."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from .cluster import WatchedCluster, cluster

SAMPLES, BATCH, STEPS = 48, 8, 40
CONFIG = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 1000000,
    "reft": {"enabled": True},
}


def last_step(job: WatchedCluster, **wanted: int) -> int:
    return int(max((e["step"] for e in job.events("trained", **wanted)), default=0))


@pytest.mark.nightly
def test_p8_deepspeeds_own_loader_trains_on_every_sample_once_over_kills(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    options = ("--max-restarts", "10")
    with cluster(tmp_path, "own_loader.py", str(config), str(STEPS), nodes=2, options=options) as job:
        for rank, at in ((1, 9), (0, 20)):  # in the second epoch, and in the fourth
            job.wait_until(lambda at=at: last_step(job) >= at, 240, f"step {at}")
            os.kill(job.events("trained", rank=rank)[-1]["pid"], signal.SIGKILL)
        job.wait(240)
        found: dict[tuple[int, int], set[str]] = {}
        for event in job.events("trained"):
            told = f"{event['samples']} {event['loss']}"
            found.setdefault((event["step"], event["rank"]), set()).add(told)
        pids = {event["pid"] for event in job.events("trained")}
    assert len(pids) == 6, "three lives of two trainers"
    assert {len(each) for each in found.values()} == {1}, "a step that was made again had other samples"
    per_epoch = SAMPLES // BATCH
    steps: list[int] = []
    for step in range(1, STEPS + 1):
        for rank in range(2):
            # What was made by a trainer that was killed before it could say so is not known.
            (told,) = found.get((step, rank), {"[]"})
            steps += json.loads(told[: told.index("]") + 1])
        if step % per_epoch == 0:
            assert len(steps) == len(set(steps)), f"in the epoch that ends with step {step}"
            assert len(steps) >= SAMPLES - 2 * BATCH // 2
            steps = []


RESIZED = 12
"""Samples of a step: of three replicas two micro-batches each, of two three."""
ELASTIC = (
    *("--nnodes", "2:3", "--max-restarts", "0"),
    *("--rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"),
)


def go_through_degrees(
    tmp_path: Path, samples: int, steps: int
) -> tuple[dict[tuple[int, int], list[int]], str]:
    """Three replicas, two behind the loss of a node, and three again. The samples of every step that all ranks have
    told, by step and replicas, and the log."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**CONFIG, "train_batch_size": RESIZED}))
    env = {"TEST_SAMPLES": str(samples)}
    with cluster(
        tmp_path, "own_loader.py", str(config), str(steps), nodes=3, options=ELASTIC, env=env
    ) as job:
        job.wait_until(lambda: last_step(job) >= 6, 240, "step 6")  # in the second pass
        job.kill_node(1)
        job.wait_until(lambda: last_step(job, replicas=2) >= 13, 240, "step 13 of two replicas")
        job.replace_node(1)
        job.wait(300)
        told: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        for event in job.events("trained"):
            told[event["step"], event["replicas"]][event["rank"]] = event["samples"]
        log = "".join(map(job.log, job.current))
    whole = {at: ranks for at, ranks in told.items() if len(ranks) == at[1]}
    return {at: [n for each in ranks.values() for n in each] for at, ranks in whole.items()}, log


@pytest.mark.nightly
def test_p12_a_loader_whose_position_does_not_go_to_another_degree_is_named(tmp_path: Path) -> None:
    """A pass ends within a step: at step 1 it is said that this may be, and at the resize that it is so."""
    _, log = go_through_degrees(tmp_path, 50, 40)
    assert "its 50 samples are no multiple of the 12 of a step" in log
    assert "was counted in batches of one replica and cannot be taken from DP3 to DP2" in log
    assert log.count("loader = reft.data.loader(dataset, batch_size)") >= 2
