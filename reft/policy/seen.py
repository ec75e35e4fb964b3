"""What is known of a job's nodes, for advice: from the board that its launchers keep, and its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from reft.memory.free_memory import bounds
from reft.memory.jobdir import JobDir
from reft.node.history import Round, read_history
from reft.node.memory_watch import fullest
from reft.node.signals import Board, NodeReport, Signal
from reft.policy.advice import Memory, Situation, Slow, Speed

_LEAST_STEPS = 50
"""Of a round, to tell a speed from it: DLRover's window."""
_UNTIL_TRAINING = ("starting", "script", "groups", "engine", "joining", "agreeing", "transfer")


def situation(paths: Sequence[Path], board: Board | None, most_nodes: int | None) -> Situation:
    """What the nodes of this host know of a job.

    Args:
        paths: its memory.
        board: of all its nodes, if there is one.
        most_nodes: that it may have.
    """
    rounds = max((read_history(path) for path in paths), key=len, default=[])
    rows = [row for row in (board.rows if board is not None else ()) if row.signal is not Signal.OFFLINE]
    training = tuple(row.report.node for row in rows if not row.report.spare)
    now = [r.report.steps_per_sec for r in rows if not r.report.spare and r.report.steps_per_sec]
    speeds = _speeds(rounds)
    if now and training:
        speeds = [*speeds, Speed(len(training), min(now))]
    return Situation(
        nodes=training or tuple(rounds[-1].nodes if rounds else ()),
        spares=tuple(row.report.node for row in rows if row.report.spare),
        slow=tuple(_slow({} if board is None else board.model_dump(mode="json"))),
        losses=Counter(node for r in rounds for node in r.lost),
        speeds=tuple(speeds),
        most_nodes=most_nodes,
        memory=tuple(_memory(paths[0], [row.report for row in rows])),
    )


def _memory(path: Path, reports: Sequence[NodeReport]) -> Iterable[Memory]:
    """Of every node that tells of its memory; of this one where none does."""
    told = [report for report in reports if report.memory]
    for report in told:
        if (use := fullest(report.memory)) is not None:
            said = str(report.runs_out[0]) if report.runs_out else ""
            yield Memory(report.node, use.peak_bytes, use.limit_bytes, use.name, said)
    if not told:
        found = max(bounds(path), key=lambda b: b.used_bytes / max(1, b.limit_bytes), default=None)
        if found is not None and found.limit_bytes > 0:
            yield Memory(JobDir.open(path).node, found.used_bytes, found.limit_bytes, found.name)


def _slow(board: dict[str, Any]) -> Iterable[Slow]:
    """Stragglers that the nodes have named, where they compare themselves."""
    for found in board.get("slow") or ():
        yield Slow(found["name"], tuple(found["nodes"]), float(found["factor"]), found["why"])


def _speeds(rounds: Sequence[Round]) -> list[Speed]:
    """Of the rounds before the present one: committed steps over the time from the first step on."""
    found = []
    for this, after in pairwise(rounds):
        began = this.unix_secs + sum(this.secs.get(part, 0.0) for part in _UNTIL_TRAINING)
        ended = min(after.failed_unix_secs or after.unix_secs, after.unix_secs)
        steps = after.newest_step - (this.resumed_step or 0)
        if steps >= _LEAST_STEPS and ended > began and this.nodes:
            found.append(Speed(len(this.nodes), steps / (ended - began)))
    return found
