"""What a snapshot costs the training: reft against doing nothing and against the usual ways.

One DeepSpeed engine trains throughout. Units of a few steps alternate: plain steps, then the same
number of steps with a save started before the first of them (reft: before every one of them), plain
steps again, and so on. A unit ends when its save is complete, so that work which a save leaves to
the background is charged to it, whatever step it falls into. Each unit is compared with the plain
units on both sides of it. Two figures per save:

- stall: seconds the training thread spent in the saving call (reft: capture and fence);
- extra: seconds by which the unit took longer than its plain neighbours. It can be far larger than
  the stall: copying beside training takes cores and memory bandwidth from it. "Core s" are the
  seconds of a core that a save takes per rank, wherever it runs.

Both are taken in two situations: every core busy with training, and one core left to the helpers
(only the threads that savers start may use it).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common import (
    MIB,
    Scratch,
    enter_worker,
    launch,
    leave_worker,
    parser,
    progress,
    quicken,
    scratch,
    write_result,
)
from memory_sampler import MemorySampler
from placement import ThreadPlacement, situations
from results import estimate, facts, head_lines
from savers import (
    PLAIN,
    REFT,
    BlockingCopySaver,
    DcpSaver,
    DeepSpeedSaver,
    ReftSaver,
    Saver,
    TorchSaver,
)
from stopwatch import Stopwatch
from training import build_engine

DEFAULT_STEPS = 20
GOAL_FRACTION = 0.03
GOAL_FIXED_BYTES = 64 * MIB


# --- a rank ---------------------------------------------------------------------------------------


def plan_of(names: Sequence[str], rounds: int) -> list[str]:
    """Order of the units: plain ones between all others, and reft between every two of the rest."""
    order: list[str] = []
    for _ in range(rounds):
        for name in names:
            order += [PLAIN, REFT, PLAIN, name] if name != REFT else []
    return [*order, PLAIN]


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
        self.placement = ThreadPlacement()
        self.session = reft.attach(self.engine, config={"enabled": True, "interval_steps": 10**9})
        self.engine.train_batch(self.data)
        self.barrier = dist.barrier
        self.savers: dict[str, Saver] = {
            s.name: s
            for s in (
                Saver(),
                ReftSaver(self.session),
                BlockingCopySaver(self.session, space),
                *(
                    kind(self.engine, self.session, space)
                    for kind in (TorchSaver, DcpSaver, DeepSpeedSaver)
                ),
            )
        }
        self.watch = Stopwatch()
        self._watch_hot_path()

    def _watch_hot_path(self) -> None:
        from reft.engine import deepspeed
        from reft.snapshot import worker as worker_module
        from reft.snapshot.arenas import ArenaWriter

        session, worker, watch = self.session, self.session.worker, self.watch
        watch.watch(session, "submit", "training.submit")
        watch.watch(session.state, "_current_images", "training.submit.images")
        watch.watch(deepspeed, "capture_host_state", "training.submit.capture")
        watch.watch(worker, "fence", "training.fence")
        watch.watch(worker.copier, "copy", "worker.copy")
        watch.watch(worker_module, "_encode", "worker.copy.encode")
        watch.watch(worker.arenas, "begin", "worker.copy.begin")
        watch.watch(ArenaWriter, "hash", "worker.hash")
        watch.watch(worker.votes, "cast", "worker.votes")
        watch.watch(worker, "_exchange", "worker.exchange")
        watch.watch(ArenaWriter, "seal", "worker.seal")
        watch.watch(worker.arenas, "commit", "worker.commit")

    def unit(self, saver: Saver) -> dict[str, Any]:
        """A few steps, with or without saving."""
        self.barrier()
        self.watch.take()
        stalls = []
        begin, cpu = time.monotonic(), time.process_time()
        for step in range(self.options.span):
            saves = saver.name != PLAIN and (step == 0 or saver.every_step)
            called = time.perf_counter()
            if saves:
                saver.start()
                self.placement.place_new()
            call_secs = time.perf_counter() - called
            self.engine.train_batch(self.data)
            if saves:
                stalls.append(saver.stall_secs(call_secs))
        stepped = time.monotonic()
        saver.finish()
        end = time.monotonic()
        cpu = time.process_time() - cpu
        self.barrier()
        return {
            "saver": saver.name,
            "cpu_secs": cpu,
            "begin": begin,
            "end": end,
            "secs": end - begin,
            "drain_secs": end - stepped,
            "stalls": stalls,
            "parts": self.watch.take() if saver.name == REFT else {},
            "bytes": saver.clean(),
        }

    def situation(self, cores: Any) -> dict[str, Any]:
        """All units in one situation."""
        self.placement.apply(cores)
        for name in self.options.savers:
            self.unit(self.savers[name])
        before = self.session.stats.to_json()
        units = []
        order = plan_of(self.options.savers, self.options.rounds)
        for number, name in enumerate(order):
            units.append(self.unit(self.savers[name]))
            if self.is_first:
                secs = units[-1]["secs"] / self.options.span
                progress(f"[{cores.name}] {number + 1}/{len(order)} {name}: {secs:.3f} s per step")
        after = self.session.stats.to_json()
        return {
            "cores": cores.to_json(),
            "units": units,
            "snapshots": {
                "taken": after["taken"] - before["taken"],
                "committed": after["committed"] - before["committed"],
                "skipped": sum(after["skipped"].values()) - sum(before["skipped"].values()),
                "skipped_because": after["skipped"],
            },
        }


def run_rank(options: argparse.Namespace) -> None:
    space = enter_worker(options.worker)
    rank = Rank(options, space)
    wanted = situations(options.pp * options.dp)
    done = {c.name: rank.situation(c) for c in wanted if options.cores in ("both", c.name)}
    arenas = sum(f.stat().st_size for f in rank.session.memory.job_dir.path.glob("*.arena"))
    write_result(
        space,
        {
            "situations": done,
            "optimizer": type(rank.engine.optimizer).__name__,
            "bytes_per_snapshot": rank.session.stats.bytes_per_snapshot,
            "arena_bytes": arenas,
        },
    )
    rank.session.close()
    rank.barrier()
    leave_worker()


# --- evaluation -----------------------------------------------------------------------------------


def merge(ranks: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The units of all ranks: the slowest rank counts."""
    merged = []
    for units in zip(*(r["situations"][name]["units"] for r in ranks), strict=True):
        first = units[0]
        merged.append(
            {
                **first,
                "begin": min(u["begin"] for u in units),
                "end": max(u["end"] for u in units),
                "secs": max(u["secs"] for u in units),
                "cpu_secs": statistics.mean(u["cpu_secs"] for u in units),
                "drain_secs": max(u["drain_secs"] for u in units),
                "stalls": [max(s) for s in zip(*(u["stalls"] for u in units), strict=True)],
            }
        )
    return merged


def evaluate_saver(
    units: Sequence[Mapping[str, Any]], name: str, span: int, memory: MemorySampler
) -> dict[str, Any]:
    """One way to save against its plain neighbours."""
    extra, cpu, fraction = [], [], []
    for at, unit in enumerate(units):
        if unit["saver"] != name:
            continue
        plain, plain_cpu = (
            (units[at - 1][key] + units[at + 1][key]) / 2 for key in ("secs", "cpu_secs")
        )
        saves = len(unit["stalls"])
        cpu.append((unit["cpu_secs"] - plain_cpu) / saves)
        extra.append((unit["secs"] - plain) / saves)
        fraction.append((unit["secs"] - plain) / saves / (plain / span))
    mine = [u for u in units if u["saver"] == name]
    peaks = [memory.peak_private(u["begin"], u["end"]) for u in units]
    above = []
    for at, unit in enumerate(units):
        if unit["saver"] == name and None not in peaks[at - 1 : at + 2]:
            # What an earlier saver left behind lies in the neighbours too, and is not this one's.
            before, here, after = (p or 0 for p in peaks[at - 1 : at + 2])
            above.append(here - max(before, after))
    return {
        "stall_secs": estimate([s for u in mine for s in u["stalls"]]).to_json(),
        "extra_secs": estimate(extra).to_json(),
        "extra_cpu_secs_per_rank": estimate(cpu).to_json(),
        "fraction_of_a_step": estimate(fraction).to_json(),
        "saves_per_unit": len(mine[0]["stalls"]),
        "drain_secs_median": statistics.median(u["drain_secs"] for u in mine),
        "bytes": mine[0]["bytes"],
        "private_bytes_above_plain": max(0, *above) if above else None,
    }


def hot_path(units: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median seconds per snapshot of reft's parts, on rank 0: wall and CPU."""
    mine = [u for u in units if u["saver"] == REFT]
    names = sorted({name for u in mine for name in u["parts"]})
    return {
        name: {
            kind: statistics.median(
                u["parts"].get(name, (0.0, 0.0))[at] / len(u["stalls"]) for u in mine
            )
            for at, kind in enumerate(("wall_secs", "cpu_secs"))
        }
        for name in names
    }


def evaluate(
    options: argparse.Namespace, ranks: Sequence[Mapping[str, Any]], memory: MemorySampler
) -> dict[str, Any]:
    """The whole result."""
    result = facts("save_stall", options)
    result["optimizer"] = ranks[0]["optimizer"]
    result["steps_per_unit"] = options.span
    result["situations"] = {}
    for name, first in ranks[0]["situations"].items():
        units = merge(ranks, name)
        plain = [u["secs"] / options.span for u in units if u["saver"] == PLAIN]
        result["situations"][name] = {
            "cores": first["cores"],
            "plain_step_secs": estimate(plain).to_json(),
            "savers": {s: evaluate_saver(units, s, options.span, memory) for s in options.savers},
            "snapshots": first["snapshots"],
            "hot_path": hot_path(units),
        }
    snapshot_bytes = sum(r["bytes_per_snapshot"] for r in ranks)
    private = max(
        s["savers"][REFT]["private_bytes_above_plain"] or 0 for s in result["situations"].values()
    )
    arenas = sum(r["arena_bytes"] for r in ranks)
    result["memory"] = {
        "own_and_redundant_bytes": snapshot_bytes,
        "arena_bytes": arenas,
        "reft_private_bytes": private,
        "allowed_bytes": 2 * snapshot_bytes + len(ranks) * GOAL_FIXED_BYTES,
        "blocking_copy_shared_bytes": memory.peak_files("copy"),
    }
    spare = result["situations"].get("spare_core")
    fraction = spare["savers"][REFT]["fraction_of_a_step"] if spare else None
    result["goals"] = {
        "spare_core_step_at_most_3_percent_longer": fraction["median"] <= GOAL_FRACTION
        if fraction
        else None,
        "host_memory_within_2x_plus_64_mib": arenas + private <= result["memory"]["allowed_bytes"],
    }
    return result


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = head_lines(result)
    for name, situation in result["situations"].items():
        step = situation["plain_step_secs"]["median"]
        lines += ["", f"{name}: plain step {step:.3f} s; snapshots {situation['snapshots']}"]
        lines.append(
            f"{'':28}{'stall':>10}{'extra':>10}{'of a step, 95 % interval':>32}{'core s':>10}"
            f"{'private MiB':>13}"
        )
        for saver, facts_ in situation["savers"].items():
            part = facts_["fraction_of_a_step"]
            low, high = part["ci95"]
            interval = f"{part['median']:8.1%}  [{low:.1%}, {high:.1%}]"
            private = facts_["private_bytes_above_plain"]
            lines.append(
                f"{saver:28}{facts_['stall_secs']['median']:10.4f}{facts_['extra_secs']['median']:10.3f}"
                f"{interval:>32}{facts_['extra_cpu_secs_per_rank']['median']:10.3f}"
                f"{'?' if private is None else round(private / MIB):>13}"
            )
        lines.append("reft, per snapshot:")
        for part, secs in situation["hot_path"].items():
            lines.append(
                f"  {part:26}{secs['wall_secs']:10.4f} s, {secs['cpu_secs']:.4f} s of a core"
            )
    lines += [
        "",
        *(f"{goal}: {met}" for goal, met in {**result["memory"], **result["goals"]}.items()),
    ]
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help=f"measured steps of each way (default {DEFAULT_STEPS})",
    )
    made.add_argument("--span", type=int, default=2, help="steps of a unit (default 2)")
    made.add_argument(
        "--cores",
        choices=("both", "no_spare_core", "spare_core"),
        default="both",
        help="(default both)",
    )
    made.add_argument(
        "--savers",
        nargs="+",
        choices=[s.name for s in (BlockingCopySaver, TorchSaver, DcpSaver, DeepSpeedSaver)],
        default=[s.name for s in (BlockingCopySaver, TorchSaver, DcpSaver, DeepSpeedSaver)],
        help="what to compare reft with (default all)",
    )
    options = made.parse_args()
    if options.quick:
        quicken(options)
        options.steps = 2 * options.span if options.steps == DEFAULT_STEPS else options.steps
    options.rounds = max(1, options.steps // options.span)
    options.savers = [REFT, *options.savers]
    if options.worker:
        run_rank(options)
    with scratch(options) as space:
        ranks, memory = launch(options, space)
        result = evaluate(options, ranks, memory)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
