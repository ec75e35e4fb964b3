"""How fast a state comes back: from the nodes' memory by reft, and from page-cached files.

One DeepSpeed engine is built once, trains a few steps and saves its state in every way. Then, round
after round, its weights and optimizer are destroyed and restored by each way in turn; after every
restore the whole state is compared with what was saved, outside the time. reft restores through the
code behind ``engine.load_checkpoint``: inventory, plan, verification of every block, transfer, and,
where anything was lost, what it takes to protect the restored version again before the first step:

- reft_all_local: only the processes are gone, every node's memory is there;
- reft_node_lost: the memory of the last node is gone, its bytes come from the copies on its peers.

``deepspeed_slow_storage`` is DeepSpeed's load from a network file system. The published comparison
had nodes of four GPUs and 10 Gbps to the storage; every rank here is a node of its own and gets a
fourth of that. Reads are slowed within the process: each takes at least its bytes' time at that
rate, whatever the disk can do.

``plain_copy`` is the limit: every tensor is copied from one in this process's memory, and no more
is done. Files are read once before each restore, so that they come out of the page cache. reft
verifies every byte against its checksum and protects the result; the others do neither.

The ranks keep freed memory: no way pays for the first touch of pages because another one gave them
back. With ``--fresh-memory`` what is destroyed goes back to the system, and every way finds memory
as a new process does; how long the system takes to hand it out then decides more than the way.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
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
from memory_sampler import MemorySampler
from restore_ways import (
    DEEPSPEED,
    PLAIN_COPY,
    SLOW_STORAGE,
    DcpWay,
    DeepSpeedWay,
    PlainCopyWay,
    ReftNodeLostWay,
    ReftWay,
    SlowStorageWay,
    TorchWay,
    Way,
)
from results import estimate, facts, head_lines
from stopwatch import Stopwatch
from training import build_engine, device_name, inner_optimizer, synchronize
from units import KEEP_FREED_MEMORY

LOCAL_GOAL, LOST_GOAL, COPY_GOAL, STORAGE_GOAL = 1.5, 1.0, 1.3, 10.0
"""Times as fast as files with nothing lost, and with a node lost; seconds in those of a plain copy;
times as fast as a network file system."""


# --- a rank ---------------------------------------------------------------------------------------


class Rank:
    """What one rank does."""

    def __init__(self, options: argparse.Namespace, space: Scratch) -> None:
        import torch.distributed as dist

        import reft

        self.options = options
        self.space = space
        self.barrier = dist.barrier
        self.watch = Stopwatch()
        self.events = space.disk / "events"
        os.environ["REFT_EVENTS"] = str(self.events)
        self.engine, self.data = build_engine(options)
        self.session = reft.attach(self.engine, config={"enabled": True})
        self.is_first = os.environ["RANK"] == "0"
        self.is_last_node = (
            self.session.context.coordinate.dp == options.dp - 1
            and self.session.context.coordinate.pp == 0
        )
        for _ in range(2):
            self.engine.train_batch(self.data)
        self.session.flush(600.0)
        if self.session.stats.committed_step != self.engine.global_steps:
            raise RuntimeError(f"no snapshot was committed: {self.session.stats}")
        self.expected = self.digest()

    def digest(self) -> list[int]:
        """Checksums of every tensor of model and optimizer."""
        import torch

        from reft.memory.header import checksum

        optimizer = inner_optimizer(self.engine)
        tensors = [p for _, p in self.engine.module.named_parameters()]
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                tensors += [
                    param,
                    *(state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor)),
                ]
        return [
            checksum(t.detach().reshape(-1).view(torch.uint8).cpu().numpy().data) for t in tensors
        ]

    def destroy(self) -> None:
        """Lose the state, as a new process would have: no weights, no optimizer state."""
        import torch

        optimizer = inner_optimizer(self.engine)
        with torch.no_grad():
            for param in self.engine.module.parameters():
                param.fill_(0.5)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.fill_(0.5)
                    for value in optimizer.state.get(param, {}).values():
                        if isinstance(value, torch.Tensor):
                            value.fill_(0.5)
        if optimizer is self.engine.optimizer:
            optimizer.state.clear()
        gc.collect()
        if self.options.fresh_memory:
            ctypes.CDLL(None).malloc_trim(0)

    def last_restored(self) -> dict[str, Any]:
        """The newest ``restored`` event of this rank."""
        file = next(self.events.glob(f"reft-{os.environ['RANK']}-{os.getpid()}.jsonl"))
        events = [json.loads(line) for line in file.read_text().splitlines()]
        return [e for e in events if e["event"] == "restored"][-1]

    def trial(self, way: Way) -> dict[str, Any]:
        """Destroy, restore, compare."""
        way.before()
        self.destroy()
        synchronize()
        self.barrier()
        begin, cpu = time.monotonic(), time.process_time()
        found = way.restore()
        synchronize()
        cpu_secs = time.process_time() - cpu
        self.barrier()
        end = time.monotonic()
        if self.digest() != self.expected:
            raise RuntimeError(f"{way.name} did not restore the state that was saved")
        return {
            "way": way.name,
            "begin": begin,
            "end": end,
            "secs": end - begin,
            "cpu_secs": cpu_secs,
            **found,
        }


def run_rank(options: argparse.Namespace) -> None:
    space = enter_worker(options.worker)
    rank = Rank(options, space)
    kinds = [DeepSpeedWay, PlainCopyWay, ReftWay, TorchWay, ReftNodeLostWay, SlowStorageWay, DcpWay]
    ways = [kind(rank) for kind in kinds if options.dp > 1 or kind is not ReftNodeLostWay]
    for way in ways:
        way.save()
        rank.barrier()
    trials = []
    for round_ in range(options.trials + 1):
        for way in ways:
            trial = rank.trial(way)
            # The first round only warms up.
            trials += [trial] if round_ else []
            if rank.is_first:
                progress(f"{round_}/{options.trials} {way.name}: {trial['secs']:.3f} s")
    write_result(
        space,
        {
            "trials": trials,
            "bytes": {way.name: way.bytes() for way in ways},
            "optimizer": type(rank.engine.optimizer).__name__,
            "device": device_name(),
            "state_bytes": sum(image.nbytes for image in rank.session.state.adapter.images()),
        },
    )
    rank.barrier()
    if rank.is_first:
        shutil.rmtree(rank.events, ignore_errors=True)
    leave_worker()


# --- evaluation -----------------------------------------------------------------------------------


def merge(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trials of all ranks: the slowest rank counts, also for each part; bytes add up."""
    merged = []
    for trials in zip(*(r["trials"] for r in ranks), strict=True):
        one = {**trials[0], **{key: max(t[key] for t in trials) for key in ("secs", "cpu_secs")}}
        one["core_secs"] = sum(t["cpu_secs"] for t in trials)
        if "parts" in one:
            one["parts"] = {p: max(t["parts"].get(p, 0.0) for t in trials) for p in one["parts"]}
            known = sum(one["parts"].values())
            one["completing_core_secs"] = sum(t["completing_core_secs"] for t in trials)
            one["parts"]["transfer_and_verify"] = max(0.0, one["secs"] - known)
            one["bytes_from"] = {
                kind: sum(t["bytes_from"].get(kind, 0) for t in trials)
                for kind in one["bytes_from"]
            }
        merged.append(one)
    return merged


def evaluate_way(
    trials: Sequence[Mapping[str, Any]], name: str, memory: MemorySampler
) -> dict[str, Any]:
    """One way to restore; ratios are taken within each round."""
    mine, disk, slow, copies = (
        [t for t in trials if t["way"] == way]
        for way in (name, DEEPSPEED, SLOW_STORAGE, PLAIN_COPY)
    )
    private = [
        p for p in (memory.peak_private(t["begin"], t["end"]) for t in mine) if p is not None
    ]
    found: dict[str, Any] = {
        "secs": estimate([t["secs"] for t in mine]).to_json(),
        "cpu_secs_median": statistics.median(t["cpu_secs"] for t in mine),
        "core_secs_of_all_ranks": estimate([t["core_secs"] for t in mine]).to_json(),
        "core_secs_of_deepspeed_over_these": estimate(
            [d["core_secs"] / t["core_secs"] for d, t in zip(disk, mine, strict=True)]
        ).to_json(),
        "core_secs_over_a_plain_copy": estimate(
            [t["core_secs"] / c["core_secs"] for c, t in zip(copies, mine, strict=True)]
        ).to_json(),
        "times_faster_than_deepspeed": estimate(
            [d["secs"] / t["secs"] for d, t in zip(disk, mine, strict=True)]
        ).to_json(),
        "times_faster_than_slow_storage": estimate(
            [s["secs"] / t["secs"] for s, t in zip(slow, mine, strict=True)]
        ).to_json(),
        "times_of_a_plain_copy": estimate(
            [t["secs"] / c["secs"] for c, t in zip(copies, mine, strict=True)]
        ).to_json(),
        "peak_private_bytes": max(private, default=None),
    }
    if "parts" in mine[0]:
        found["times_faster_without_protection"] = estimate(
            [
                d["secs"] / (t["secs"] - t["parts"].get("protect", 0.0))
                for d, t in zip(disk, mine, strict=True)
            ]
        ).to_json()
        found["core_secs_of_completing"] = estimate(
            [t["completing_core_secs"] for t in mine]
        ).to_json()
        found["core_secs_of_deepspeed_over_these_without_completing"] = estimate(
            [
                d["core_secs"] / (t["core_secs"] - t["completing_core_secs"])
                for d, t in zip(disk, mine, strict=True)
            ]
        ).to_json()
        found["parts_secs"] = {
            p: statistics.median(t["parts"][p] for t in mine) for p in mine[0]["parts"]
        }
        found["bytes_from"] = mine[0]["bytes_from"]
    return found


def evaluate(
    options: argparse.Namespace, ranks: Sequence[Mapping[str, Any]], memory: MemorySampler
) -> dict[str, Any]:
    """The whole result."""
    result = facts("restore", options)
    trials = merge(ranks)
    names = list(dict.fromkeys(t["way"] for t in trials))
    result |= {key: ranks[0][key] for key in ("optimizer", "device")}
    result["state_bytes_per_rank"] = ranks[0]["state_bytes"]
    result["ways"] = {name: evaluate_way(trials, name, memory) for name in names}
    for name, found in result["ways"].items():
        found["stored_bytes"] = ranks[0]["bytes"][name]
    result["memory"] = {"arena_bytes": memory.peak_files("node")}
    local, lost = (result["ways"].get(name) for name in ("reft_all_local", "reft_node_lost"))
    result["goals"] = {
        f"nothing lost: at least {LOCAL_GOAL} times as fast as files in the page cache": (
            local["times_faster_than_deepspeed"]["median"] >= LOCAL_GOAL
        ),
        f"nothing lost: at most {COPY_GOAL} times a plain copy": (
            local["times_of_a_plain_copy"]["median"] <= COPY_GOAL
        ),
        f"nothing lost: at least {STORAGE_GOAL} times as fast as a network file system": (
            local["times_faster_than_slow_storage"]["median"] >= STORAGE_GOAL
        ),
    }
    if lost is not None:
        result["goals"]["one node lost: at least as fast as files in the page cache"] = (
            lost["times_faster_than_deepspeed"]["median"] >= LOST_GOAL
        )
        result["goals"][
            f"one node lost: at least {STORAGE_GOAL} times as fast as a network file system"
        ] = lost["times_faster_than_slow_storage"]["median"] >= STORAGE_GOAL
    return result


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        *head_lines(result),
        f"{result['state_bytes_per_rank'] / MIB:.0f} MiB of state per rank",
        "",
        f"{'':28}{'seconds, 95 % interval':>28}{'times faster than DeepSpeed':>32}{'core s':>9}"
        f"{'private MiB':>13}",
    ]
    for name, way in result["ways"].items():
        secs, ratio = way["secs"], way["times_faster_than_deepspeed"]
        shown = f"{secs['median']:8.3f}  [{secs['ci95'][0]:.3f}, {secs['ci95'][1]:.3f}]"
        times = f"{ratio['median']:8.2f}  [{ratio['ci95'][0]:.2f}, {ratio['ci95'][1]:.2f}]"
        private = way["peak_private_bytes"]
        lines.append(
            f"{name:28}{shown:>28}{times:>32}{way['cpu_secs_median']:9.3f}"
            f"{'?' if private is None else round(private / MIB):>13}"
        )
        lines.append(f"    of a plain copy:{way['times_of_a_plain_copy']['median']:44.2f}")
        shares = way["core_secs_of_all_ranks"], way["core_secs_of_deepspeed_over_these"]
        lines.append(
            "    core s of all ranks, and DeepSpeed's over these:"
            + "{:13.3f}{:8.2f}".format(*(s["median"] for s in shares))
        )
        lines.append(
            f"    faster than slow storage:{way['times_faster_than_slow_storage']['median']:35.2f}"
        )
        if (alike := way.get("times_faster_without_protection")) is not None:
            low, high = alike["ci95"]
            lines.append(
                f"    before it is protected again:{alike['median']:31.2f}  [{low:.2f}, {high:.2f}]"
            )
        for part, part_secs in way.get("parts_secs", {}).items():
            lines.append(f"    {part:24}{part_secs:10.4f}")
        if "bytes_from" in way:
            lines.append(
                "    MiB from "
                f"{ ({k: round(v / MIB, 1) for k, v in way['bytes_from'].items() if v}) }"
            )
    lines += [
        "",
        *(f"{goal}: {met}" for goal, met in {**result["memory"], **result["goals"]}.items()),
    ]
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument(
        "--trials", type=int, default=7, help="measured restores of each way (default 7)"
    )
    made.add_argument(
        "--storage-gbps",
        type=float,
        default=2.5,
        help="of a rank, from the slow storage (default 2.5: a node's 10 Gbps for four ranks)",
    )
    made.add_argument(
        "--fresh-memory",
        action="store_true",
        help="restore into pages that were never touched, as a new process does",
    )
    add_device(made)
    options = made.parse_args()
    if options.storage_gbps <= 0:
        made.error(f"--storage-gbps is {options.storage_gbps}; expected a bandwidth above 0")
    if options.quick:
        quicken(options)
        options.trials = min(options.trials, 2)
    if options.worker:
        run_rank(options)
    if not options.fresh_memory:
        os.environ.update(KEEP_FREED_MEMORY)
    with scratch(options) as space:
        ranks, memory = launch(options, space)
        result = evaluate(options, ranks, memory)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
