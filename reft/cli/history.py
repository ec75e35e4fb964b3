"""``reft history``: what failed, what the job resumed from, and how long that took."""

from __future__ import annotations

import json
from datetime import datetime

import typer
from rich.console import Console
from rich.table import Table

from reft.cli.memory import AsJson, Job, MemoryDirs, find_memory_or_say
from reft.memory.jobdir import JobDir
from reft.node.history import Round, describe_parts, read_history, restarts_among, why


def history_command(memory_dir: MemoryDirs = None, job: Job = None, as_json: AsJson = False) -> None:
    """Every start of a job's trainers on a node: why the one before ended, and what it resumed from.

    With --json a list of nodes, empty where no memory is found; standard error says why.
    """
    paths = find_memory_or_say(memory_dir, job, as_json=as_json)
    nodes = [(JobDir.open(path), read_history(path)) for path in paths]
    if as_json:
        told = [
            {"job_id": directory.job_id, "node": directory.node, "rounds": [row.to_json() for row in rounds]}
            for directory, rounds in nodes
        ]
        typer.echo(json.dumps(told, indent=2))
        return
    for directory, rounds in nodes:
        title = f"job {directory.job_id}, as node {directory.node} saw it"
        table = Table("when", "why", "resumed from", "seconds", title=title, show_lines=True)
        for row in rounds:
            table.add_row(f"{datetime.fromtimestamp(row.unix_secs):%m-%d %H:%M:%S}", *_cells(row))
        Console().print(table, markup=False)


def summary(rounds: list[Round]) -> str:
    """One line for ``reft status``."""
    restarts = restarts_among(rounds)
    if not restarts:
        return "none"
    return f"{len(restarts)}; the last: {why(restarts[-1])}"


def _cells(row: Round) -> tuple[str, str, str]:
    resumed = "the beginning"
    if row.resumed_from is not None:
        resumed = f"step {row.resumed_step} ({row.resumed_from})"
        if (lost := row.newest_step - (row.resumed_step or 0)) > 0:
            resumed += f"; {lost} committed steps were lost"
    ended = "" if row.ended is None else f". Then the job ended: {row.ended}"
    return why(row) + ended, resumed, describe_parts(row.secs)
