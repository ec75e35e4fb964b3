"""The history of a job's starts, as seen by one node: JSON lines in its memory directory.

The launcher records when trainers start and why the previous ones ended. The first trainer of the
node records from what it resumed and when it completed its first step. The file outlives the
launcher and the trainers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.naming import safe_name

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"
_KEPT_PREFIX = "history-"
STARTED, RESUMED, STEPPED, ENDED = "started", "resumed", "stepped", "ended"  # Kinds of events


PARTS = {
    "ending": "from the failure until the launcher has ended the other trainers",
    "gathering": "until all nodes are present",
    "starting": "until the script begins: the trainer is forked, or started and imports reft",
    "script": "the script until it has an engine: imports, the model; without process groups",
    "groups": "init_distributed: the process groups",
    "engine": "deepspeed.initialize, without process groups",
    "joining": "until memory is read: reft's own start, and the script before it loads",
    "agreeing": "until all ranks agree on what is restored",
    "transfer": "until the state is restored and protected again",
    "first_step": "until the first step is completed",
}
"""Parts of an interruption of training, in order of time. Users see the names and descriptions."""


@dataclass
class RoundReport:
    """One start of the trainers on all nodes of the job."""

    round: int  # Number of the start; 1 for the first one under a launcher
    unix_secs: float  # Time at which all nodes were present
    nodes: list[str] = field(default_factory=list)
    # Reasons why trainers of the previous round ended: node, rank, and signal, exit code or error
    failures: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # Nodes that vanished since the previous round
    joined: list[str] = field(default_factory=list)  # Nodes that were not in the previous round
    left: list[str] = field(default_factory=list)  # Nodes that left on request
    newest_step: int = -1  # Newest committed step that any node knew at the start; -1: none
    # Source of the restored state, "memory, ..." or "disk, ..."; None: nothing was restored so far
    resumed_from: str | None = None
    resumed_step: int | None = None  # Step of the restored state
    # Seconds of each part of the interruption (see PARTS), by this node's wall clock. A part that
    # was not observed is missing.
    secs: dict[str, float] = field(default_factory=dict)
    # Time at which the launcher saw that a trainer of the previous round had failed; None if none
    # had failed
    failed_unix_secs: float | None = None
    ended: str | None = None  # Reason why the job ended in this round; None if it did not end


_ROUND = TypeAdapter(RoundReport)


def note(job_dir: Path, event: str, **facts: Any) -> None:
    """Append an event to a node's history. If that fails, only log a warning (P6).

    Args:
        job_dir: the job's memory directory on this node.
        event: kind of event: STARTED, RESUMED, STEPPED or ENDED.
        **facts: fields of the event.
    """
    line = json.dumps({"event": event, "unix_secs": time.time(), **facts})
    try:
        fd = os.open(job_dir / HISTORY_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # One write call per line: with O_APPEND, lines of several processes do not mix.
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("the restart history in %s cannot be written: %s", job_dir, error)


def read_history(job_dir: Path) -> list[RoundReport]:
    """Read every start of the trainers that this node saw; unknown lines are skipped."""
    try:
        lines = (job_dir / HISTORY_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    rounds: list[RoundReport] = []
    resumed_at = 0.0
    for line in lines:
        # Skip lines that another release wrote, or that a full file system cut off.
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            facts = json.loads(line)
            event, at = facts.pop("event"), _require_time(facts["unix_secs"])
            if event == STARTED:
                waits = {part: facts.get(f"{part}_secs") for part in ("ending", "gathering")}
                secs = {
                    part: _require_time(wait) for part, wait in waits.items() if wait is not None
                }
                rounds.append(_ROUND.validate_python({**facts, "secs": secs}))
                resumed_at = 0.0
            elif event == RESUMED and rounds:
                times = {name: _require_time(secs) for name, secs in facts.get("times", {}).items()}
                source, step = _require_text(facts["source"]), int(facts["step"])
                rounds[-1].resumed_from, rounds[-1].resumed_step = source, step
                rounds[-1].secs |= _split_start(rounds[-1].unix_secs, at, times)
                resumed_at = at
            elif event == STEPPED and rounds and resumed_at:
                rounds[-1].secs["first_step"] = at - resumed_at
            elif event == ENDED and rounds:
                rounds[-1].ended = _require_text(facts["reason"])
    return rounds


def _require_time(value: Any) -> float:
    """Return the value as seconds; raise ValueError or TypeError if it is no plausible time."""
    secs = float(value)
    if not 0 <= secs < 2**37:
        raise ValueError(f"{value!r} is not a time")
    return secs


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _split_start(formed: float, resumed: float, times: Mapping[str, float]) -> dict[str, float]:
    """Split the time from a start of the trainers until the state is restored into parts.

    Args:
        formed: time at which all nodes were present.
        resumed: time at which the state was restored.
        times: times at which the script passed certain points, by their names in
            :mod:`reft.engine.marks`.

    Returns:
        Seconds of each part, by the names of PARTS.
    """
    ends = {"starting": "began", "script": "engine", "engine": "built", "joining": "survey"}
    secs: dict[str, float] = {}
    since = formed
    for part, end in (*ends.items(), ("agreeing", "agreed")):
        if end in times:
            secs[part] = max(0.0, times[end] - since)
            since = max(since, times[end])
    secs["transfer"] = max(0.0, resumed - since)
    if {"groups", "grouped"} <= times.keys():
        groups = secs["groups"] = max(0.0, times["grouped"] - times["groups"])
        # Creating the process groups counts as a part of its own, but happens during one of these
        # parts: subtract its time there.
        for part in ("script", "engine", "joining"):
            if part in secs and times["groups"] < times[ends[part]]:
                secs[part] = max(0.0, secs[part] - groups)
                break
    return {part: secs[part] for part in PARTS if part in secs}


# -- descriptions ------------------------------------------------------------------------------


def restarts_among(rounds: Iterable[RoundReport]) -> list[RoundReport]:
    """Return the starts that followed a failure."""
    return [row for row in rounds if row.failures or row.lost]


def why(row: RoundReport) -> str:
    """Describe why the trainers were started in this round."""
    causes = [*row.failures, *(f"node {node} was lost" for node in row.lost)]
    if not causes:
        causes = [f"node {node} joined" for node in row.joined]
    return "; ".join(causes) if causes else "the job was started"


def describe_parts(secs: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in secs.items())


def after_failure(job_dir: Path) -> str:
    """Describe the failure that led to the newest start, as the end of a sentence.

    Returns:
        The description; empty if no failure preceded the start.
    """
    for row in restarts_among(read_history(job_dir)[-1:]):
        since = row.failed_unix_secs
        secs = "" if since is None else f"{max(0.0, time.time() - since):.1f} s "
        return f", {secs}after the failure ({why(row)})"
    return ""


# -- after the job has ended -------------------------------------------------------------------


def keep_history(job_dir: Path, job_id: str, node: str, directory: Path) -> None:
    """Append a node's history to a file that outlives the job's memory, one line per start.

    Args:
        job_dir: the job's memory directory on the node.
        job_id: name of the job's memory.
        node: id of the node.
        directory: directory of the file.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [{"job_id": job_id, "node": node, **asdict(row)} for row in read_history(job_dir)]
    with (directory / f"{_KEPT_PREFIX}{job_id}-{safe_name(node)}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_kept_histories(directory: Path) -> dict[tuple[str, str], list[RoundReport]]:
    """Read the starts that :func:`keep_history` wrote, by job and node; skip invalid lines."""
    histories: dict[tuple[str, str], list[RoundReport]] = {}
    for path in sorted(directory.glob(f"{_KEPT_PREFIX}*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                facts = json.loads(line)
                key = _require_text(facts.pop("job_id")), _require_text(facts.pop("node"))
                histories.setdefault(key, []).append(_ROUND.validate_python(facts))
    return histories
