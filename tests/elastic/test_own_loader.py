"""DeepSpeed's own loader (``training_data=``), without a change of the script: trainers and nodes are killed, and every
step trains on the samples that it would have trained on; each sample once in an epoch (P8)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from .cluster import WatchedCluster, cluster

SAMPLES, BATCH, STEPS = 48, 8, 40
CONFIG = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 1000000,
    "reft": {"enabled": True},
}


def last_step(job: WatchedCluster) -> int:
    return int(max((e["step"] for e in job.events("trained")), default=0))


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
