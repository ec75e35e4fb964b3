"""``reft scale``: a running job goes to another number of nodes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from reft.cli.memory import EXIT_NOT_WELL, AsJson, Job, MemoryDirs, find_memory
from reft.errors import ReftError
from reft.memory.jobdir import JobDir, ScaleAnswer, live_processes, read_answer, write_order

_POLL_SECS = 0.1


def scale_command(
    nodes: Annotated[
        int, typer.Argument(min=1, help="nodes that the job should have, within its --nnodes MIN:MAX")
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

    Run it on any node that trains. The trainers commit their current step and start again under the same
    launchers. Fewer nodes: the last ones leave, as many at once as the job survives the loss of, skipping
    numbers that do not fit; their launchers end with exit code 0 once the others have a version without them.
    More nodes: waiting nodes (spares) join. The number holds until the next `reft scale`: further nodes wait.

    \b
    reft scale 2                     change to two nodes; the last ones leave
    reft scale 3 --without node17    change to three; node17 is among those that leave
    reft scale 4                     change back to four, two of which waited
    reft scale 4 --without node17    keep four: a waiting node replaces node17
    kill -USR1 LAUNCHER              the node of that `reft launch` leaves

    Refused, with the reason and the numbers that fit: below MIN, above MAX, no whole replicas, a batch that
    the replicas cannot share, fewer waiting nodes than needed, more nodes leaving at once than the job can
    survive. If a node leaves while the job survives no loss, or nothing is committed yet, the order first
    waits for up to a minute; `reft status` shows that. Exit code 0: done; 1: refused, or not done in time.
    """
    paths = [path for path in find_memory(memory_dir, job) if live_processes(JobDir.open(path).path)]
    if not paths:
        raise ReftError(
            "the job does not run here: run this on one of its nodes, or give --nnodes to its next `reft "
            "launch`"
        )
    path = paths[0]
    try:
        order = write_order(path, nodes, tuple(without or ()))
    except OSError as error:
        raise ReftError(f"the order cannot be written: {error}; make room there") from error
    if not wait:
        return
    answer = _await(path, order.number, wait)
    if answer is None:
        raise ReftError(
            f"no launcher has taken up the order in {path} within {wait:.0f} s: this node is a spare (run "
            "the command on a node that trains), or the job is still starting. The order stays until a "
            "launcher takes it up"
        )
    typer.echo(json.dumps(asdict(answer), indent=2) if as_json else _describe(answer))
    if not answer.done:
        raise typer.Exit(EXIT_NOT_WELL)


def _await(path: Path, number: int, timeout_secs: float) -> ScaleAnswer | None:
    """The answer to an order, done or refused; the newest one if that takes too long."""
    deadline = time.monotonic() + timeout_secs
    answer = None
    while time.monotonic() < deadline:
        found = read_answer(path)
        if found is not None and found.number == number:
            answer = found
        if answer is not None and (answer.done or answer.refused):
            break
        if answer is not None and not path.exists():
            # This node has left, and its memory went.
            return ScaleAnswer(answer.number, answer.nodes, answer.nodes, done=True)
        time.sleep(_POLL_SECS)
    return answer


def _describe(answer: ScaleAnswer) -> str:
    if answer.refused:
        return f"refused: {answer.refused}"
    if answer.done:
        return f"the job continues with {answer.nodes} nodes"
    if answer.waits:
        return answer.waits
    return f"the job is changing from {answer.running} to {answer.nodes} nodes; see `reft status`"
