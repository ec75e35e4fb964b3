"""Whether a job that goes on with fewer replicas trains at its share of the speed.

    .venv/bin/python benchmarks/smaller.py --json

A job of two nodes is started by ``reft launch``; one node is killed, the other goes on alone with
the same global batch; a new node comes, and both train. All in one run, so that what the machine
does besides falls on all three. Told are the samples per second of every phase (its first steps
left
out: they wait for memory and the first version), and what one replica trains beside half of what
two do. A node here is processes on this
machine: with fewer cores than nodes the share is no figure of the software.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from local_cluster import LocalCluster
from results import estimate, machine

JOB = Path(__file__).with_name("smaller_job.py")
BATCH, MICRO = 64, 8
GOAL = 0.95
"""Of its share; less is exit code 1."""
LEFT_OUT = 5
"""First steps of a phase."""
CONF = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"
CONFIG = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
    "reft": {"enabled": True, "tolerance": 0},
}


def phases(folder: Path) -> list[list[dict[str, Any]]]:
    """Steps of every start of the trainers, in their order."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        *lines, _torn = path.read_text().split("\n")
        if lines:
            found.append([json.loads(line) for line in lines])
    return sorted(found, key=lambda steps: steps[0]["time"])


def samples_per_sec(steps: list[dict[str, Any]]) -> list[float]:
    times = [step["time"] for step in steps[LEFT_OUT:]]
    return [BATCH / (after - before) for before, after in pairwise(times)]


def run(root: Path, steps: int, width: int) -> list[list[dict[str, Any]]]:
    """Two replicas, one, and two again, each for so many steps."""
    config, folder = root / "ds.json", root / "said"
    folder.mkdir()
    config.write_text(json.dumps(CONFIG))
    options = ("--nnodes", "1:2", "--max-restarts", "0", "--rdzv-conf", CONF)
    command = [str(JOB), str(config), str(folder), str(width)]

    def trained(replicas: int, starts: int) -> bool:
        found = [p for p in phases(folder) if p[0]["replicas"] == replicas]
        return len(found) >= starts and len(found[-1]) > steps + LEFT_OUT

    with LocalCluster(command, root, options=options, env={"OMP_NUM_THREADS": "1"}) as job:
        job.start()
        job.wait_until(lambda: trained(2, 1), 300, "steps of two replicas")
        job.kill_node(1)
        job.wait_until(lambda: trained(1, 1), 300, "steps of one replica")
        job.start_node(1)
        job.wait_until(lambda: trained(2, 2), 300, "steps of two replicas again")
        return phases(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--quick", action="store_true", help="few steps of a small model: whether it runs at all"
    )
    parser.add_argument("--steps", type=int, default=60, help="of every phase (default 60)")
    parser.add_argument(
        "--width", type=int, default=512, help="of the model's four layers (default 512)"
    )
    options = parser.parse_args()
    steps, width = (5, 32) if options.quick else (options.steps, options.width)
    with tempfile.TemporaryDirectory(prefix="reft-smaller-") as folder:
        found = [p for p in run(Path(folder), steps, width) if len(p) > LEFT_OUT + 2]
    told = [
        {"replicas": p[0]["replicas"], "samples_per_sec": estimate(samples_per_sec(p)).to_json()}
        for p in found
    ]
    large = [t["samples_per_sec"]["median"] for t in told if t["replicas"] == 2]
    small = [t["samples_per_sec"]["median"] for t in told if t["replicas"] == 1]
    share = small[-1] / (sum(large) / len(large) / 2)
    result = {
        "benchmark": "smaller",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/smaller.py", *sys.argv[1:]]),
        "machine": machine(),
        "load_average_at_end": os.getloadavg()[0],
        "steps": steps,
        "phases": told,
        "share": share,
        "goal_met": share >= GOAL,
    }
    if options.json:
        print(json.dumps(result))
        sys.exit(share < GOAL)
    for phase in told:
        print(f"{phase['replicas']} replicas: {phase['samples_per_sec']['median']:.1f} samples/s")
    print(f"one replica trains {100 * share:.1f} % of half of what two do")
    sys.exit(share < GOAL)


if __name__ == "__main__":
    main()
