"""From a failure to the next step: reft beside torchrun with DeepSpeed's checkpoints.

    .venv/bin/python benchmarks/mttr.py --json

The same job, PP2 x DP2, every rank on a node of its own, runs in turns under ``reft launch`` and
under ``torchrun`` with a DeepSpeed checkpoint every 10 steps; with ``--peers DIR``, which ``make
peers`` fills, also under ``torchrun`` with a replicated local checkpoint of NVIDIA's every step
(DP2 alone: it keeps replicas by rank). In every turn it is killed so many times in each way:

- ``trainer``: SIGKILL of one trainer; its node lives;
- ``node_spare``: SIGKILL of every process of a node, its memory is gone, and a spare node waits;
- ``node_replaced``: the same without a spare; a new node is started at the moment of the kill.

The time runs from the kill to the end of the first step after it, on the last rank. Under torchrun
the steps since the checkpoint are lost as well (``lost_steps``), which is not in that time. A step
that is done again must have the same loss; ``differing_steps`` counts those that did not.

All nodes are on this one machine: what every node does by itself on a cluster, such as importing
torch, shares these cores here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import parser, progress, scratch
from local_cluster import KillKind
from mttr_jobs import Job, Recovered
from results import estimate, facts, run_lines

from examples.llama.model_config import load_model

KINDS = ("trainer", "node_spare", "node_replaced")
SYSTEMS = ("reft", "torchrun")
SPARE_GOAL_SECS, TORCHRUN_GOAL = 2.0, 3.0
"""Median with a spare at PP2 x DP2; and so many times faster than torchrun."""


def trainer_arguments(options: argparse.Namespace) -> list[str]:
    """Of ``examples.llama``: the tiny model, for as long as it is let."""
    return [
        *(
            "--model",
            "tiny",
            "--pp",
            str(options.pp),
            "--dp",
            str(options.dp),
            "--zero",
            str(options.zero),
        ),
        *(
            "--dtype",
            options.dtype,
            "--seq",
            str(options.seq),
            "--micro-batch",
            str(options.micro_batch),
        ),
        *(
            "--micro-batches",
            str(options.micro_batches),
            "--steps",
            "1000000",
            "--decay-steps",
            "1000",
        ),
        *("--dropout", "0.1"),
    ]


def job_facts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Head of a result, with the model that the job trains."""
    head = facts(name, options)
    model = load_model("tiny", {"seq_length": options.seq})
    head["model"] |= {
        "parameters": model.parameters,
        "layers": model.layers,
        "hidden": model.hidden_size,
        "vocabulary": model.vocab_size,
    }
    return head


def kill_once(job: Job, kind: str, number: int) -> Recovered:
    """Kill in the way that is asked for, wait for the next step, and complete the cluster again."""
    victim = number % job.nodes
    if kind == "trainer":
        now = time.time()
        job.kill(victim, KillKind.PROCESS)
        return job.wait_for_recovery(now)
    now = time.time()
    job.kill(victim, KillKind.NODE)
    if kind == "node_replaced":
        job.cluster.start_node(victim)
        return job.wait_for_recovery(now)
    recovered = job.wait_for_recovery(now)
    # The spare has taken the place; the node that comes back waits as the next one.
    job.cluster.current[victim] = job.cluster.current[job.nodes]
    job.cluster.start_node(job.nodes)
    return recovered


def take_turn(
    options: argparse.Namespace, system: str, kind: str, *, folder: Path, shm: Path, first: int
) -> Any:
    """One life of one job.

    Returns:
        Its recoveries, and the steps that had different losses.
    """
    job = Job(
        system=system,
        directory=folder,
        memory_root=shm,
        nodes=options.pp * options.dp // options.procs_per_node,
        procs_per_node=options.procs_per_node,
        spares=int(kind == "node_spare"),
        trainer=trainer_arguments(options),
        save_interval=options.save_interval,
        peers=options.peers,
    )
    found = []
    with ExitStack() as stack:
        stack.enter_context(job.cluster)
        job.start()
        for number in range(first, first + options.kills_per_turn):
            job.run_for(options.settle_secs)
            found.append(kill_once(job, kind, number))
            progress(
                f"[{kind}] {system}: {found[-1].secs:.2f} s, {found[-1].lost_steps} steps lost"
            )
        job.run_for(1.0)
    return found, job.differing_steps()


def measure(options: argparse.Namespace, space: Any) -> dict[str, Any]:
    found: dict[tuple[str, str], list[Recovered]] = defaultdict(list)
    systems = [*SYSTEMS, *(["nvidia"] if options.peers else [])]
    differing: dict[str, int] = dict.fromkeys(systems, 0)
    for kind in options.kinds:
        for turn in range(options.kills // options.kills_per_turn):
            for system in systems:
                folder = space.disk / f"{kind}-{turn}-{system}"
                (folder / "events").mkdir(parents=True)
                shm = space.shm / folder.name
                shm.mkdir()
                made, bad = take_turn(
                    options,
                    system,
                    kind,
                    folder=folder,
                    shm=shm,
                    first=turn * options.kills_per_turn,
                )
                found[kind, system] += made
                differing[system] += len(bad)
    ways = {
        kind: {system: describe(found[kind, system]) for system in systems} | compare(found, kind)
        for kind in options.kinds
    }
    return {"ways": ways, "differing_steps": differing, "goals": goals(ways, options)}


def describe(recoveries: list[Recovered]) -> dict[str, Any]:
    names = dict.fromkeys(name for recovery in recoveries for name in recovery.parts)
    parts = {name: [r.parts[name] for r in recoveries if name in r.parts] for name in names}
    return {
        "failure_to_step_secs": estimate([r.secs for r in recoveries]).to_json(),
        "most_secs": max(r.secs for r in recoveries),
        "parts_secs": {name: round(statistics.median(secs), 3) for name, secs in parts.items()},
        "lost_steps": statistics.median(r.lost_steps for r in recoveries),
        "all_secs": [round(r.secs, 2) for r in recoveries],
    }


def compare(found: Mapping[tuple[str, str], list[Recovered]], kind: str) -> dict[str, Any]:
    """How many times faster reft is, kill by kill."""
    pairs = zip(found[kind, "torchrun"], found[kind, "reft"], strict=True)
    return {"times_faster": estimate([slow.secs / fast.secs for slow, fast in pairs]).to_json()}


def goals(ways: Mapping[str, Any], options: argparse.Namespace) -> dict[str, bool]:
    met = {
        f"{kind}_at_most_a_third_of_torchrun": way["times_faster"]["median"] >= TORCHRUN_GOAL
        for kind, way in ways.items()
    }
    if "node_spare" in ways:
        median = ways["node_spare"]["reft"]["failure_to_step_secs"]["median"]
        met["spare_within_2_secs"] = median <= SPARE_GOAL_SECS
    return met


def table(result: Mapping[str, Any]) -> str:
    lines = run_lines(result)
    for kind, way in result["ways"].items():
        for system in result["differing_steps"]:
            secs = way[system]["failure_to_step_secs"]
            parts = ", ".join(
                f"{name} {value:.1f}" for name, value in way[system]["parts_secs"].items()
            )
            lines.append(
                f"{kind:14} {system:9} {secs['median']:6.1f} s ({secs['ci95'][0]:.1f} to "
                f"{secs['ci95'][1]:.1f}), {way[system]['lost_steps']:.0f} steps lost: {parts}"
            )
        lines.append(f"{kind:14} {way['times_faster']['median']:.1f} times faster")
    return "\n".join([*lines, *(f"{name}: {met}" for name, met in result["goals"].items())])


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="ways to fail")
    made.add_argument("--kills", type=int, default=10, help="of each kind and system (default 10)")
    made.add_argument(
        "--kills-per-turn", type=int, default=5, help="before the other's turn (default 5)"
    )
    made.add_argument(
        "--settle-secs", type=float, default=20.0, help="training between kills (default 20)"
    )
    made.add_argument(
        "--save-interval", type=int, default=10, help="steps, under torchrun (default 10)"
    )
    made.add_argument(
        "--procs-per-node", type=int, default=1, help="trainers of a node (default 1)"
    )
    made.add_argument("--peers", type=Path, help="folder of NVIDIA's packages: it is measured too")
    made.set_defaults(pp=2, seq=64, micro_batch=2, micro_batches=4)
    options = made.parse_args()
    if options.quick:
        options.kinds, options.kills, options.kills_per_turn, options.settle_secs = (
            ["trainer"],
            1,
            1,
            2.0,
        )
    if options.kills % options.kills_per_turn:
        made.error(
            f"--kills {options.kills} is no multiple of --kills-per-turn {options.kills_per_turn}"
        )
    with scratch(options) as space:
        result = {**job_facts("mttr", options), "spares": 1, **measure(options, space)}
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
