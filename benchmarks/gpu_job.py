"""Two jobs of one rank on one device, over NCCL: one is left alone, one is killed after a commit.

    python benchmarks/gpu_job.py [--model 125m] [--steps 24] [--kill 12] [--small]

Prints one JSON object: whether every loss is equal to the bit, seconds from the kill to the next
step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ADAM = {
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "torch_adam": True}}
}  # nothing is compiled


def start(name: str, folder: Path, options: argparse.Namespace, faults: list) -> subprocess.Popen:
    memory = options.shm / f"reft-first-{os.getpid()}-{name}"
    (folder / name).mkdir()
    (folder / "adam.json").write_text(json.dumps(ADAM))
    block = {"enabled": True, "job_id": name, "memory_dir": str(memory), "faults": faults}
    shape = [
        "--model",
        options.model,
        "--seq",
        "1024",
        "--dtype",
        "bf16",
        "--zero",
        "1",
        "--micro-batch",
        "2",
        "--micro-batches",
        "4",
    ]
    if options.small:
        shape = [
            "--model",
            "tiny",
            "--seq",
            "16",
            "--layers",
            "2",
            "--micro-batch",
            "1",
            "--micro-batches",
            "1",
        ]
    command = [
        *(
            sys.executable,
            "-m",
            "reft.cli",
            "launch",
            "--nproc-per-node",
            "1",
            "--node-id",
            f"node-{name}",
        ),
        *("--memory-dir", str(memory), "--standalone"),
        *("examples/llama/pretrain.py", *shape, "--steps", str(options.steps)),
        *("--cache-dir", str(folder / "cache"), "--reft", json.dumps(block)),
        *(
            "--save-dir",
            str(folder / name / "none"),
            "--deepspeed-config",
            str(folder / "adam.json"),
            "--log-interval",
            "1",
        ),
    ]
    return subprocess.Popen(
        command,
        env={**os.environ, "REFT_EVENTS": str(folder / name), "OMP_NUM_THREADS": "2"},
        stdout=(folder / f"{name}.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def events(folder: Path) -> list[dict]:
    found = [
        json.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return sorted(found, key=lambda e: e.get("time", e.get("t", 0)))


def main() -> int:
    made = argparse.ArgumentParser()
    made.add_argument("--model", default="125m")
    made.add_argument("--steps", type=int, default=24)
    made.add_argument("--kill", type=int, default=12)
    made.add_argument("--secs", type=float, default=68)
    made.add_argument("--small", action="store_true")
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"))
    options = made.parse_args()
    options.shm.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, os.getcwd())
    folder = Path(tempfile.mkdtemp(prefix="reft-first-"))
    begin = time.monotonic()
    fault = {"point": "after_commit", "step": options.kill}
    jobs = {
        name: start(name, folder, options, faults)
        for name, faults in (("alone", []), ("killed", [fault]))
    }
    out: dict = {}
    for name, job in jobs.items():
        try:
            out[f"{name}_rc"] = job.wait(max(1, options.secs - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            out[f"{name}_rc"] = "too long"
            os.killpg(job.pid, 15)
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, 9)
    losses = {}
    for name in jobs:
        seen = events(folder / name)
        steps = [e for e in seen if e["event"] == "step" and "loss_hex" in e]
        losses[name] = {e["step"]: e["loss_hex"] for e in steps}
        times = [e["time"] for e in steps if "time" in e]
        out[f"{name}_commits"] = sum(e["event"] == "commit" for e in seen)
        out[f"{name}_skips"] = sorted({str(e.get("cause")) for e in seen if e["event"] == "skip"})
        if len(times) > 4:
            gaps = sorted(b - a for a, b in pairwise(times))
            out[f"{name}_step_secs"] = round(gaps[len(gaps) // 2], 3)
            out[f"{name}_longest_gap_secs"] = round(
                gaps[-1], 2
            )  # of the killed job: from the kill to the next step
        restored = [e for e in seen if e["event"] == "restored"]
        if restored:
            out[f"{name}_restored"] = {
                k: v for k, v in restored[-1].items() if not isinstance(v, (list, dict))
            }
        log = (folder / f"{name}.log").read_text()
        out[f"{name}_said"] = [
            x[-400:]
            for x in log.splitlines()
            if "tried on" in x or "never run" in x or "without preloaded" in x
        ][:4]
        if out[f"{name}_rc"] != 0:
            out[f"{name}_log"] = log[-2500:]
    both = sorted(set(losses["alone"]) & set(losses["killed"]))
    out["steps_compared"] = len(both)
    out["first_difference"] = next(
        (s for s in both if losses["alone"][s] != losses["killed"][s]), None
    )
    out["equal"] = len(both) == options.steps and out["first_difference"] is None
    out["secs"] = round(time.monotonic() - begin, 1)
    print(json.dumps(out, indent=1))
    for path in options.shm.glob(f"reft-first-{os.getpid()}-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    return int(not out["equal"])


if __name__ == "__main__":
    sys.exit(main())
