"""Versions committed, and what a step takes more, where nothing waits for them: simulated, in
proportion.

    python benchmarks/free_running.py [--hash-gb-per-sec 12] [--threads 4] [--steps 40] [--rounds 3]
    [--json]

A version of 24.1 GB takes 48 % of a step of a second over a link of 50 GB/s; both are scaled down.
Hashing sleeps as long as it would at the given rate of one thread. Steps with a version each and
steps without take turns. Of a real machine only the ratios of these times are right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import replay_worker
import torch
from common import scratch
from replay_savers import Version
from replay_stage import SimulatedDevice
from results import estimate, machine

from reft.config import Variant
from reft.snapshot import copier
from reft.snapshot.arenas import ArenaWriter
from reft.snapshot.device_engine import DeviceCopyEngine, copy_engine_for
from reft.snapshot.plan import PlacedBlock

VERSION_GB, LINK_GB_PER_SEC, STEP_SECS = 24.1, 50.0, 1.0  # what is scaled down
BYTES = 6 * 2**20
PARTS = 96  # blocks of a version; twice as many as batches


def hash_slowly(bytes_per_sec: float) -> None:
    """Have hashing take at least as long as it would."""
    hash_block = ArenaWriter.hash

    def act(self: ArenaWriter, placed: PlacedBlock) -> None:
        time.sleep(self.length(placed) / bytes_per_sec)
        hash_block(self, placed)

    ArenaWriter.hash = act  # type: ignore[method-assign]


def run(
    production: replay_worker.Production,
    device: SimulatedDevice,
    options: argparse.Namespace,
    saves: bool,
) -> Any:
    """Steps in a row. Returns seconds of a step, and what became of the versions."""
    kernel = torch.zeros(64, device=device.device)
    requests = []
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(options.steps):
        if saves:
            requests.append(production.submit(Variant.HAS))
        production.pacer.begin_step("step")
        device.wait(options.step_secs)
        production.pacer.begin_optimizer()
        production.worker.fence()
        kernel.add_(1)  # the optimizer's first kernel
        production.pacer.end_optimizer()
        production.pacer.end_step("step", ("ForwardPass", "OptimizerStep"))
    device.synchronize()
    secs = (time.perf_counter() - begin) / options.steps
    for request in requests:
        request.done.wait(replay_worker.WAIT_SECS)
    return secs, Counter(str(r.given_up.kind) if r.given_up else "committed" for r in requests)


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--hash-gb-per-sec", type=float, default=12.0, help="of a thread, at full size (default 12)"
    )
    made.add_argument("--threads", type=int, default=4, help="that hash (default 4)")
    made.add_argument("--steps", type=int, default=40, help="in a row (default 40)")
    made.add_argument("--step-secs", type=float, default=0.2, help="of a step here (default 0.2)")
    made.add_argument("--rounds", type=int, default=3, help="(default 3)")
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for the arena")
    made.add_argument("--disk", type=Path, default=Path("/tmp"), help=argparse.SUPPRESS)
    made.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = made.parse_args()
    device = SimulatedDevice()
    scale = BYTES / (VERSION_GB * 1e9) / (options.step_secs / STEP_SECS)
    device.module.settings.bytes_per_sec = LINK_GB_PER_SEC * 1e9 * scale
    hash_slowly(options.hash_gb_per_sec * 1e9 * scale)
    # Blocks and batches in proportion too.
    replay_worker._BLOCK_BYTES, copier._BATCH_BYTES = BYTES // PARTS, 2 * BYTES // PARTS
    copier.hashing_threads = lambda ranks_here=1: options.threads
    DeviceCopyEngine.least_chunk_bytes = 0
    state = torch.zeros(BYTES // 4, device=device.device)
    secs: dict[bool, list[float]] = {False: [], True: []}
    fates: Counter[str] = Counter()
    with scratch(options) as space:
        engine = copy_engine_for(device.device)
        version = Version([("state", state)], 1, 0)
        production = replay_worker.Production(version, engine, space.shm, BYTES // PARTS, (0, 1, 1))
        try:
            for saves in (False, True) * options.rounds:
                took, found = run(production, device, options, saves)
                secs[saves].append(took)
                fates += found
        finally:
            production.close()
    overhead = estimate([s / a - 1 for s, a in zip(secs[True], secs[False], strict=True)]).to_json()
    result = {
        "benchmark": "free_running",
        "simulated": True,
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/free_running.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": options.rounds * options.steps,
        "fates": fates,
        "step_secs": {"without": secs[False], "with": secs[True]},
        "overhead": overhead,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    low, high = overhead["ci95"]
    print(f"{fates['committed']} of {result['versions']} versions committed; {dict(fates)}")
    print(f"a step takes {overhead['median']:.2%} [{low:.2%}, {high:.2%}] more (simulated)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
