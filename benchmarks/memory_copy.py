"""What a version in memory costs beside a plain copy of the same bytes, in core seconds and in
time.

One DeepSpeed engine trains throughout; the ranks are as many as the machine has cores, so that
nothing is free. Units of a few steps alternate, each saver's between two units without saving::

    none · copy · none · reft · none · copy · ...

- copy: the training thread copies the bytes that reft keeps of this rank into touched shared
  memory, and nothing else: no checksum, no second version, no word to anybody;
- reft: a version every step, copied, hashed, sealed and committed, with a daemon beside every rank;
- with ``--peers DIR``, which ``make peers`` fills: DLRover's flash checkpoint into memory, NVIDIA's
  local checkpoint with a replica, and torch's ``async_save``, before every step
  (``peers/savers.py``).

A unit ends when its last version is complete, so that work in the background is charged to the unit
it belongs to. Per version and rank: *extra seconds* by which the steps took longer than the units
on both sides, and *core seconds* of all threads of the rank and of its daemon above those of the
neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    MIB,
    Scratch,
    add_device,
    enter_worker,
    launch,
    leave_worker,
    parser,
    progress,
    quicken,
    scratch,
    write_result,
)
from results import estimate, facts, head_lines
from savers import PLAIN, REFT, BlockingCopySaver, ReftSaver, Saver
from stopwatch import Stopwatch
from training import build_engine, device_name, synchronize

COPY = "copy"
GOAL_CORE_RATIO = 1.3
RATIOS = {
    "core_ratio_to_copy": "core seconds of reft to those of a copy",
}


# --- a rank ---------------------------------------------------------------------------------------


def _core_secs(pid: int) -> float:
    """CPU seconds of all threads of a process, also of those that have ended."""
    return time.clock_gettime((~pid << 3) | 2)


class Cores:
    """Core seconds of this process and of those beside it, by thread."""

    def __init__(self, daemons: Sequence[int]) -> None:
        self._daemons = daemons

    def now(self) -> dict[str, float]:
        """Core seconds so far; ``other`` are threads that Python did not start."""
        found = {"daemon": sum(map(_core_secs, self._daemons))}
        for thread in threading.enumerate():
            found[thread.name] = time.clock_gettime((~(thread.native_id or 0) << 3) | 6)
        found["other"] = _core_secs(os.getpid()) - sum(v for k, v in found.items() if k != "daemon")
        return found


class Rank:
    """What one rank does."""

    def __init__(self, options: argparse.Namespace, space: Scratch) -> None:
        import torch.distributed as dist

        import reft

        self.options = options
        self.is_first = os.environ["RANK"] == "0"
        self.engine, self.data = build_engine(options)
        for _ in range(2):
            self.engine.train_batch(self.data)
        config = {"enabled": True, "interval_steps": 10**9, "variant": options.variant}
        self.session = reft.attach(self.engine, config=config)
        self.engine.train_batch(self.data)
        self.barrier = dist.barrier
        self.daemon = subprocess.Popen(
            [
                *(sys.executable, "-m", "reft.node.daemon", str(self.session.memory.job_dir.path)),
                *("--launcher-pid", str(os.getpid())),  # it ends with this rank, however that ends
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.watch = Stopwatch()
        self.savers: dict[str, Saver] = {
            PLAIN: Saver(),
            COPY: BlockingCopySaver(self.session, space),
            REFT: ReftSaver(self.session),
        }
        daemons = [self.daemon.pid]
        if options.peers:
            sys.path.append(str(options.peers))
            from peers.savers import PEERS

            self.savers |= {peer.name: peer(self.engine, self.session, space) for peer in PEERS}
            daemons += self.savers["dlrover"].processes
        self.cores = Cores(daemons)
        if options.stages:
            self._watch_stages()

    def _watch_stages(self) -> None:
        """Where the seconds go, at a small cost of its own."""
        from reft.engine import deepspeed
        from reft.memory.arena import Arena
        from reft.snapshot import worker as worker_module
        from reft.snapshot.arenas import ArenaWriter

        watch, worker = self.watch, self.session.worker
        watch.watch(self.session, "submit", "training: submit")
        watch.watch(deepspeed, "capture_host_state", "training: capture")
        watch.watch(worker, "fence", "training: fence")
        watch.watch(worker_module, "_encode", "worker: encode host state")
        watch.watch(worker.copier, "copy", "worker: copy and hash")
        watch.watch(ArenaWriter, "hash_rest", "worker: hash rest")
        watch.watch(worker, "_exchange", "worker: exchange")
        watch.watch(worker.votes, "cast", "worker: votes")
        for name in ("begin", "seal", "lost", "commit"):
            watch.watch(Arena, name, f"worker: arena {name}")

    def unit(self, name: str) -> dict[str, Any]:
        """A few steps, with or without saving before each."""
        saver = self.savers[name]
        synchronize()
        self.barrier()
        self.watch.take()
        before, begin = self.cores.now(), time.monotonic()
        for _ in range(self.options.span):
            if name != PLAIN:
                saver.start()
            self.engine.train_batch(self.data)
        synchronize()
        stepped = time.monotonic()
        saver.finish()
        end, after = time.monotonic(), self.cores.now()
        self.barrier()
        return {
            "saver": name,
            "secs": end - begin,
            "steps_secs": stepped - begin,
            "cores": {name: value - before.get(name, 0.0) for name, value in after.items()},
            "stages": self.watch.take(),
            "bytes": saver.clean(),
        }

    def units(self) -> list[dict[str, Any]]:
        """All units, after one of each that is not counted."""
        order = [name for saver in self.options.savers for name in (saver, PLAIN)]
        made = []
        for number, name in enumerate([PLAIN, *order, *(order * self.options.rounds)]):
            made.append(self.unit(name))
            if self.is_first:
                secs = made[-1]["secs"] / self.options.span
                progress(
                    f"{number}: {name}: {secs:.3f} s, {sum(made[-1]['cores'].values()):.3f} core s"
                )
        return made[len(order) :]


def run_rank(options: argparse.Namespace) -> None:
    space = enter_worker(options.worker)
    rank = Rank(options, space)
    units = rank.units()
    stats = rank.session.stats.to_json()
    rank.daemon.kill()
    for saver in rank.savers.values():
        saver.close()
    write_result(
        space,
        {
            "units": units,
            "optimizer": type(rank.engine.optimizer).__name__,
            "device": device_name(),
            "snapshots": {
                key: stats[key] for key in ("taken", "committed", "skipped", "tier_bytes")
            },
        },
    )
    rank.session.close()
    rank.barrier()
    leave_worker()


# --- evaluation -----------------------------------------------------------------------------------


def evaluate_saver(ranks: Sequence[Mapping[str, Any]], name: str, span: int) -> dict[str, Any]:
    """One way to save against the plain units on both sides of each of its own."""
    extra, drained, cores, threads = [], [], [], []
    per_rank = [r["units"] for r in ranks]
    for at, unit in enumerate(per_rank[0]):
        if unit["saver"] != name:
            continue

        def above(rank: Sequence[Mapping[str, Any]], figure: Any, at: int = at) -> float:
            plain = (figure(rank[at - 1]) + figure(rank[at + 1])) / 2
            return (figure(rank[at]) - plain) / span

        extra.append(max(above(r, lambda u: u["steps_secs"]) for r in per_rank))
        drained.append(max(above(r, lambda u: u["secs"]) for r in per_rank))
        cores.append(
            statistics.mean(above(r, lambda u: sum(u["cores"].values())) for r in per_rank)
        )
        names = {thread for r in per_rank for thread in r[at]["cores"]}
        threads.append(
            {
                t: statistics.mean(
                    above(r, lambda u, t=t: u["cores"].get(t, 0.0)) for r in per_rank
                )
                for t in names
            }
        )
    mine = [u for u in per_rank[0] if u["saver"] == name]
    known = sorted({t for row in threads for t in row})
    stages = sorted({stage for u in mine for stage in u["stages"]})
    return {
        "bytes_per_rank": mine[0]["bytes"],
        "extra_secs_per_step": estimate(extra).to_json(),
        "extra_secs_per_step_with_drain": estimate(drained).to_json(),
        "extra_secs_of_rounds": [round(value, 4) for value in extra],
        "core_secs_per_version": estimate(cores).to_json(),
        "core_secs_of_rounds": [round(value, 4) for value in cores],
        "core_secs_by_thread": {
            t: statistics.median(row.get(t, 0.0) for row in threads) for t in known
        },
        "stages": {
            s: [
                statistics.median(u["stages"].get(s, (0.0, 0.0))[i] / span for u in mine)
                for i in (0, 1)
            ]
            for s in stages
        },
    }


def evaluate(options: argparse.Namespace, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole result."""
    result = facts("memory_copy", options)
    result |= {key: ranks[0][key] for key in ("optimizer", "device")}
    result["steps_per_unit"] = options.span
    plain = [u["secs"] / options.span for u in ranks[0]["units"] if u["saver"] == PLAIN]
    result["plain_step_secs"] = estimate(plain).to_json()
    result["snapshots"] = ranks[0]["snapshots"]
    savers = {name: evaluate_saver(ranks, name, options.span) for name in options.savers}
    result["savers"] = savers
    ratio = result["core_ratio_to_copy"] = _ratio(savers[REFT], savers[COPY], "core_secs_of_rounds")
    result["goals"] = {
        "core_seconds_at_most_1_3_of_a_copy": ratio is not None
        and ratio["median"] <= GOAL_CORE_RATIO
    }
    return result


def _ratio(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], figure: str
) -> dict[str, Any] | None:
    """Of a figure, in pairs of one round."""
    # A round that was disturbed may have cost nothing, or less: it says nothing about the ratio.
    ratios = [a / b for a, b in zip(mine[figure], theirs[figure], strict=True) if b > 0]
    return estimate(ratios).to_json() if ratios else None


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [*head_lines(result), f"plain step {result['plain_step_secs']['median']:.3f} s", ""]
    lines.append(
        f"{'per version and rank':22}{'MiB':>8}{'extra s':>10}"
        f"{'drained':>9}{'core s':>9}{'95 %':>20}"
    )
    for name, saver in result["savers"].items():
        core = saver["core_secs_per_version"]
        low, high = core["ci95"]
        lines.append(
            f"{name:22}{saver['bytes_per_rank'] / MIB:8.0f}"
            f"{saver['extra_secs_per_step']['median']:10.3f}"
            f"{saver['extra_secs_per_step_with_drain']['median']:9.3f}{core['median']:9.3f}"
            f"{f'[{low:.3f}, {high:.3f}]':>20}"
        )
    for name, saver in result["savers"].items():
        threads = saver["core_secs_by_thread"].items()
        lines.append(
            f"{name}, core s: " + ", ".join(f"{t} {v:.3f}" for t, v in threads if abs(v) >= 5e-4)
        )
    for stage, (wall, cpu) in result["savers"][REFT]["stages"].items():
        lines.append(f"  {stage:28}{wall:9.4f} s, {cpu:.4f} s of a core")
    for key, what in RATIOS.items():
        if ratio := result.get(key):
            low, high = ratio["ci95"]
            lines.append(f"{what}: {ratio['median']:.2f} [{low:.2f}, {high:.2f}]")
    return "\n".join([*lines, f"versions: {result['snapshots']}", f"goals: {result['goals']}"])


def main() -> int:
    made = parser(__doc__ or "")
    made.set_defaults(params=60e6)
    made.add_argument("--rounds", type=int, default=10, help="units of each saver (default 10)")
    made.add_argument("--span", type=int, default=2, help="steps of a unit (default 2)")
    made.add_argument("--variant", default="has", help="when reft copies (default has)")
    made.add_argument("--stages", action="store_true", help="time the stages of reft's versions")
    made.add_argument("--peers", type=Path, help="folder of their packages: they are measured too")
    add_device(made)
    options = made.parse_args()
    if options.quick:
        quicken(options)
        options.rounds = min(options.rounds, 2)
    options.savers = [COPY, REFT, *(("dlrover", "nvidia", "dcp") if options.peers else ())]
    if options.worker:
        run_rank(options)
    with scratch(options) as space:
        try:
            ranks, _ = launch(options, space)
        finally:
            if options.peers:
                from peers.savers import clean_up

                clean_up(space)
        result = evaluate(options, ranks)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
