"""``reft protect``, ``scale`` and ``advise``: change a running job, or get advice on it.

A request is a numbered file in the job's memory directory on this node. The job's trainers or its
launcher carry the request out, and write an answer next to it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from reft.cli.memory import EXIT_NOT_WELL, AsJson, Job, MemoryDirs, find_memory
from reft.config import AOR
from reft.errors import ReftError
from reft.memory import scale_request
from reft.memory.arena import headers
from reft.memory.files import bounds
from reft.memory.jobdir import JobDir, live_processes
from reft.memory.protection_record import (
    ProtectionRecord,
    parse_request,
    read_record,
    write_request,
)
from reft.memory.scale_request import ScaleAnswer, read_answer
from reft.node.advice import advise, applicable, scale_plan, situation
from reft.node.history import read_history
from reft.node.report import newest_board

_POLL_SECS = 0.1


def protect_command(
    scheme: Annotated[
        str | None,
        typer.Argument(
            help="none, arc, arc:K, aec, rs:K, arc+aec, arc:A+rs:K; without it: print the current "
            "protection"
        ),
    ] = None,
    memory_dir: MemoryDirs = None,
    job: Job = None,
    wait: Annotated[
        float,
        typer.Option(min=0, help="seconds to wait until the job has switched; 0: do not wait"),
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
    requested = parse_request(scheme)
    # The arenas show the data-parallel degree: refuse a scheme that needs more members than that.
    for path in paths:
        directory = JobDir.open(path)
        for _, header in headers(path, directory.secret, directory.job_id):
            requested.check_room(header.degrees.dp)
    running = [path for path in paths if live_processes(JobDir.open(path).path)]
    if not running:
        raise ReftError(
            f"job {JobDir.open(paths[0]).job_id!r} does not run in {', '.join(map(str, paths))}: "
            "nothing to "
            f'switch. Write "protection": "{scheme}" into the block for its next start'
        )
    try:
        request = write_request(running, scheme)
    except OSError as error:
        raise ReftError(f"the request cannot be written: {error}; make room there") from error
    if not wait:
        return
    answers: list[ProtectionRecord] = []
    for _ in _polls(wait):
        records = [read_record(path) for path in running]
        answers = [r for r in records if r is not None and r.number >= request.number]
        if len(answers) == len(running):
            break
    else:
        raise ReftError(
            f"the job has not switched to {scheme} within {wait:.0f} s: it is still starting, "
            'takes no versions ("variant": "none"), or its steps take longer than that. The '
            "request stays and is carried out at the next version; 'reft protect' shows the "
            "current protection"
        )
    _show(answers[0], as_json)
    if answers[0].refused is not None:
        raise typer.Exit(EXIT_NOT_WELL)


def _polls(secs: float) -> Iterator[None]:
    """Yield repeatedly, with pauses, until ``secs`` have passed; the caller polls each time."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_SECS)


def _show(record: ProtectionRecord, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record.to_json(), indent=2))
    else:
        typer.echo("\n".join(describe(record.to_json())))


def describe(record: dict[str, Any]) -> list[str]:
    """Return lines that describe a protection record, the active protection first.

    An empty record gives no lines.
    """
    if not record:
        return []
    degraded = record.get("degraded")
    since = f" since step {record['step']}" if record["step"] else ""
    scheme = degraded["scheme"] if degraded else record["scheme"]
    if record.get("aor") and scheme != "none":
        scheme += AOR
    lines = [
        f"{scheme}{since}, survives the loss of {record['tolerance']} node(s) per sharding group"
    ]
    if degraded:
        lines.append(
            f"MEMORY IS SHORT: {degraded['versions']} versions a rank under {scheme} instead of "
            f"{record['scheme']}: {degraded['cause']}"
        )
    if refused := record.get("refused"):
        lines.append(
            f"{refused['scheme']} was refused at step {refused['step']}: {refused['cause']}"
        )
    return lines


def scale_command(
    nodes: Annotated[
        int,
        typer.Argument(min=1, help="nodes that the job should have, within its --nnodes MIN:MAX"),
    ],
    *,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="id of a node that should leave first; may be repeated"),
    ] = None,
    memory_dir: MemoryDirs = None,
    job: Job = None,
    wait: Annotated[
        float, typer.Option(min=0, help="seconds to wait until the job has changed; 0: do not wait")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Change the number of nodes of a running job, at a step boundary and without losing a step.

    Run it on any node that trains. The trainers commit their current step and start again under the
    same launchers. Fewer nodes: the last ones leave, in batches no larger than the loss that the
    job survives; node counts that do not fit are skipped. A leaving node's launcher exits with code
    0 once the remaining nodes have a version without it. More nodes: waiting nodes (spares) join.
    The number holds until the next `reft scale`: further nodes wait.

    \b
    reft scale 2                     change to two nodes; the last ones leave
    reft scale 3 --without node17    change to three; node17 is among those that leave
    reft scale 4                     change back to four, two of which waited
    reft scale 4 --without node17    keep four: a waiting node replaces node17
    kill -USR1 LAUNCHER              the node of that `reft launch` leaves

    Refused, with the reason and the numbers that fit: below MIN, above MAX, no whole replicas, a
    batch that the replicas cannot share, fewer waiting nodes than needed, more nodes leaving at
    once than the job can survive. If a node leaves while the job survives no loss, or nothing is
    committed yet, the request first waits for up to a minute; `reft status` shows that. Exit code
    0: done; 1: refused, or not done in time.
    """
    paths = [
        path for path in find_memory(memory_dir, job) if live_processes(JobDir.open(path).path)
    ]
    if not paths:
        raise ReftError(
            "the job does not run here: run this on one of its nodes, or give --nnodes to its next "
            "`reft launch`"
        )
    path = paths[0]
    try:
        request = scale_request.write_request(path, nodes, tuple(without or ()))
    except OSError as error:
        raise ReftError(f"the request cannot be written: {error}; make room there") from error
    if not wait:
        return
    answer: ScaleAnswer | None = None
    for _ in _polls(wait):
        newest = read_answer(path)
        if newest is not None and newest.number == request.number:
            answer = newest
        # If this node has left the job, its memory was removed, with the final answer in it.
        if answer is not None and not path.exists():
            answer = ScaleAnswer(request.number, nodes, nodes, done=True)
        if answer is not None and (answer.done or answer.refused):
            break
    if answer is None:
        raise ReftError(
            f"no launcher has accepted the request in {path} within {wait:.0f} s: this node is a "
            "spare (run the command on a node that trains), or the job is still starting. The "
            "request stays until a launcher accepts it"
        )
    typer.echo(json.dumps(asdict(answer), indent=2) if as_json else _describe(answer))
    if not answer.done:
        raise typer.Exit(EXIT_NOT_WELL)


def _describe(answer: ScaleAnswer) -> str:
    if answer.refused:
        return f"refused: {answer.refused}"
    if answer.done:
        return f"the job continues with {answer.nodes} nodes"
    if answer.waits:
        return answer.waits
    return f"the job is changing from {answer.running} to {answer.nodes} nodes; see `reft status`"


def advise_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    *,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="most nodes that the job may have; without it, reft advises no additional nodes",
        ),
    ] = None,
    as_json: AsJson = False,
    as_yaml: Annotated[
        bool,
        typer.Option(
            "--yaml", help="only the ScalePlan for DLRover's operator (elastic.iml.github.io)"
        ),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="carry out the first advice for which no new node is needed (reft scale)",
        ),
    ] = False,
) -> None:
    """Advise what to change: nodes to replace or drop, the number of nodes, the memory of a node.

    The advice follows from stragglers, lost nodes, speeds at other numbers of nodes, and the nodes'
    memory. 'reft scale' or --apply carries it out, at a step boundary; a timer on one node may run
    'reft advise --apply'.
    """
    paths = find_memory(memory_dir, job)
    observed = situation(paths, newest_board(paths), max_nodes)
    advices = advise(observed)
    name = JobDir.open(paths[0]).job_id
    if as_json or as_yaml:
        memory = min((b.limit_bytes for b in bounds(paths[0]) if b.limit_bytes > 0), default=0)
        # The operator identifies a plan by its name, so use a new number in every round.
        number = max((r.round for p in paths for r in read_history(p)), default=0)
        cores = len(os.sched_getaffinity(0))
        plan = scale_plan(
            name,
            number,
            advices,
            workers=len(observed.nodes),
            spares=len(observed.spares),
            cpu=cores,
            memory_bytes=memory,
        )
        rows = [advice.to_json() for advice in advices]
        report = {"job_id": name, "advice": rows, "scale_plan": plan}
        typer.echo(json.dumps(plan if as_yaml else report, indent=2))  # JSON is valid YAML
        return
    for advice in advices:
        typer.echo(str(advice))
    if not advices:
        typer.echo(f"job {name}: nothing to change, as far as its nodes report")
    if apply and (chosen := applicable(observed, advices)) is not None:
        typer.echo(f"carrying out: {chosen.action} {', '.join(chosen.nodes)}".rstrip())
        scale_command(chosen.workers, without=[*chosen.nodes], memory_dir=memory_dir, job=job)
