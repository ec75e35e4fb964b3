"""``reft advise``: what to change about a job's nodes, from what its nodes tell."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from reft.cli.memory import AsJson, Job, MemoryDirs, find_memory
from reft.memory.files import bounds
from reft.memory.jobdir import JobDir
from reft.node.advice import advise, scale_plan, situation
from reft.node.report import newest_board, read_history


def advise_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="most nodes that the job may have; without it, reft advises no additional nodes"
        ),
    ] = None,
    as_json: AsJson = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="only the ScalePlan for DLRover's operator (elastic.iml.github.io)")
    ] = False,
) -> None:
    """Advise what to change: nodes to replace or drop, the number of nodes, the memory of a node.

    The advice follows from stragglers, lost nodes, speeds at other numbers of nodes, and the nodes' memory.
    'reft scale' carries it out.
    """
    paths = find_memory(memory_dir, job)
    seen = situation(paths, newest_board(paths), max_nodes)
    found = advise(seen)
    name = JobDir.open(paths[0]).job_id
    if as_json or as_yaml:
        memory = min((b.limit_bytes for b in bounds(paths[0]) if b.limit_bytes > 0), default=0)
        # A plan of the same name is the same plan to the operator; every round has its own.
        number = max((r.round for p in paths for r in read_history(p)), default=0)
        cores = len(os.sched_getaffinity(0))
        workers, spares = len(seen.nodes), len(seen.spares)
        plan = scale_plan(name, number, found, workers=workers, spares=spares, cpu=cores, memory_bytes=memory)
        told = {"job_id": name, "advice": [a.to_json() for a in found], "scale_plan": plan}
        typer.echo(json.dumps(plan if as_yaml else told, indent=2))  # what is JSON is YAML too
        return
    for advice in found:
        typer.echo(str(advice))
    if not found:
        typer.echo(f"job {name}: nothing to change, as far as its nodes report")
