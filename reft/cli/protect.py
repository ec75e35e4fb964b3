"""``reft protect``: which redundancy a running job keeps, and switching it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from reft.cli.memory import EXIT_NOT_WELL, AsJson, Job, MemoryDirs, find_memory
from reft.config import AOR
from reft.errors import ReftError
from reft.memory.arena import headers
from reft.memory.jobdir import JobDir, live_processes
from reft.node.protection import ProtectionRecord, parse_order, read_record, write_order

_POLL_SECS = 0.05


def protect_command(
    scheme: Annotated[
        str | None,
        typer.Argument(
            help="none, arc, arc:K, aec, rs:K, arc+aec, arc:A+rs:K; without it: print the current protection"
        ),
    ] = None,
    memory_dir: MemoryDirs = None,
    job: Job = None,
    wait: Annotated[
        float, typer.Option(min=0, help="seconds to wait until the job has switched; 0: do not wait")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Switch the redundancy of a running job, on all ranks at the same version.

    Run it on one node of the job: its trainers inform the others. The last committed version stays
    recoverable until a version is committed under the new scheme.
    """
    paths = find_memory(memory_dir, job)
    if scheme is None:
        record = read_record(paths[0])
        if record is None:
            raise ReftError(f"{paths[0]}: no trainer has reported its protection yet")
        _show(record, as_json)
        return
    wanted = parse_order(scheme)
    for path in paths:  # what the groups of this job have no room for, as far as its arenas tell
        directory = JobDir.open(path)
        for _, header in headers(path, directory.secret, directory.job_id):
            wanted.check_room(header.degrees.dp)
    running = [path for path in paths if live_processes(JobDir.open(path).path)]
    if not running:
        raise ReftError(
            f"job {JobDir.open(paths[0]).job_id!r} does not run in {', '.join(map(str, paths))}: nothing to "
            f'switch. Write "protection": "{scheme}" into the block for its next start'
        )
    try:
        order = write_order(running, scheme)
    except OSError as error:
        raise ReftError(f"the order cannot be written: {error}; make room there") from error
    if not wait:
        return
    record = _await(running, order.number, wait)
    if record is None:
        raise ReftError(
            f"the job has not switched to {scheme} within {wait:.0f} s: it is still starting, takes no "
            'versions ("variant": "none"), or its steps take longer than that. The order stays and is '
            "carried out at the next version; 'reft protect' shows the current protection"
        )
    _show(record, as_json)
    if record.refused is not None:
        raise typer.Exit(EXIT_NOT_WELL)


def _await(paths: Sequence[Path], number: int, timeout_secs: float) -> ProtectionRecord | None:
    """The record that answers an order, once it is on every node; None if it takes too long."""
    deadline = time.monotonic() + timeout_secs
    while time.monotonic() < deadline:
        records = [read_record(path) for path in paths]
        answers = [r for r in records if r is not None and r.number >= number]
        if len(answers) == len(paths):
            return answers[0]
        time.sleep(_POLL_SECS)
    return None


def _show(record: ProtectionRecord, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record.to_json(), indent=2))
    else:
        typer.echo("\n".join(describe(record.to_json())))


def describe(record: dict[str, Any]) -> list[str]:
    """A record in words; the first line says what is in force. Nothing where there is no record."""
    if not record:
        return []
    degraded = record.get("degraded")
    since = f" since step {record['step']}" if record["step"] else ""
    scheme = degraded["scheme"] if degraded else record["scheme"]
    if record.get("aor") and scheme != "none":
        scheme += AOR
    lines = [f"{scheme}{since}, survives the loss of {record['tolerance']} node(s) per sharding group"]
    if degraded:
        lines.append(
            f"MEMORY IS SHORT: {degraded['versions']} versions a rank under {scheme} instead of "
            f"{record['scheme']}: {degraded['cause']}"
        )
    if refused := record.get("refused"):
        lines.append(f"{refused['scheme']} was refused at step {refused['step']}: {refused['cause']}")
    return lines
