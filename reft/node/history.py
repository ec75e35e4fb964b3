"""The restarts of a job, as one node saw them: lines of JSON in the job's memory, which outlasts them.

The launcher notes when a round of trainers starts and why the one before ended, the first trainer of the node
what it resumed from and when it had made a step.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"
STARTED, RESUMED, STEPPED, ENDED = "started", "resumed", "stepped", "ended"


def note(job_dir: Path, event: str, **facts: Any) -> None:
    """Append a line. One that cannot be written is lost, and nothing else happens (P6)."""
    line = json.dumps({"event": event, "unix_secs": time.time(), **facts})
    try:
        fd = os.open(job_dir / HISTORY_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("the restart history in %s cannot be written: %s", job_dir, error)


PARTS = {
    "ending": "until the launcher, which had seen a trainer fail, had ended the others",
    "gathering": "until all nodes were there",
    "starting": "until the script began: the trainer is forked, or started and imports what reft needs",
    "script": "what the script does until it has an engine: imports, the model; without process groups",
    "groups": "init_distributed: the process groups",
    "engine": "deepspeed.initialize, without process groups",
    "joining": "until memory is looked at: reft's own start, and what the script does before it loads",
    "agreeing": "until all ranks agree on what is restored",
    "transfer": "until the state is restored, and protected again",
    "first_step": "until the first step was made",
}
"""Of an interruption, in their order."""


@dataclass
class Round:
    round: int  # 1 for the first start under a launcher
    unix_secs: float  # when all nodes were there
    nodes: list[str] = field(default_factory=list)
    # why trainers of the round before ended: node, rank, and signal, exit code or error
    failures: list[str] = field(default_factory=list)
    # lost, joined, left: nodes that vanished since the round before, are new, or have left as they were told
    lost: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    newest_step: int = -1  # newest committed step that a node knew of; -1: none
    resumed_from: str | None = None  # ``memory, ...`` or ``disk, ...``; None: from the beginning, or not yet
    resumed_step: int | None = None  # step that it went on from
    # parts of the interruption, one after the other, by the wall clock of this node; see `PARTS`. What nobody
    # has seen is missing.
    secs: dict[str, float] = field(default_factory=dict)
    # when the launcher saw that a trainer of the round before had failed; None: none had
    failed_unix_secs: float | None = None
    ended: str | None = None  # what the launcher said when the job ended in this round


_ROUND = TypeAdapter(Round)


def why(row: Round) -> str:
    said = [*row.failures, *(f"node {node} was lost" for node in row.lost)]
    if not said:
        said = [f"node {node} joined" for node in row.joined]
    return "; ".join(said) if said else "the job was started"


def restarts_among(rounds: Iterable[Round]) -> list[Round]:
    return [r for r in rounds if r.failures or r.lost]


def describe_parts(secs: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in secs.items())


def after_failure(job_dir: Path) -> str:
    """What the newest start followed, for the end of a sentence; "" where nothing had failed."""
    for row in restarts_among(read_history(job_dir)[-1:]):
        since = row.failed_unix_secs
        secs = "" if since is None else f"{max(0.0, time.time() - since):.1f} s "
        return f", {secs}after the failure ({why(row)})"
    return ""


def read_history(job_dir: Path) -> list[Round]:
    """Every start of the trainers that the node has seen; lines that are no events are left out."""
    try:
        lines = (job_dir / HISTORY_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    rounds: list[Round] = []
    resumed_at = 0.0
    for line in lines:
        # Another release, or a full disk, may have written what this one does not understand.
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            facts = json.loads(line)
            event, at = facts.pop("event"), _secs(facts["unix_secs"])
            if event == STARTED:
                told = {part: facts.get(f"{part}_secs") for part in ("ending", "gathering")}
                waits = {part: _secs(secs) for part, secs in told.items() if secs is not None}
                rounds.append(_ROUND.validate_python({**facts, "secs": waits}))
                resumed_at = 0.0
            elif event == RESUMED and rounds:
                times = {name: _secs(secs) for name, secs in facts.get("times", {}).items()}
                source, step = _text(facts["source"]), int(facts["step"])
                rounds[-1].resumed_from, rounds[-1].resumed_step = source, step
                rounds[-1].secs |= _parts(rounds[-1].unix_secs, at, times)
                resumed_at = at
            elif event == STEPPED and rounds and resumed_at:
                rounds[-1].secs["first_step"] = at - resumed_at
            elif event == ENDED and rounds:
                rounds[-1].ended = _text(facts["reason"])
    return rounds


def _secs(value: Any) -> float:
    """Raises ValueError, TypeError: it is none, or none since 1970 that a calendar has."""
    if not 0 <= (secs := float(value)) < 2**37:
        raise ValueError(f"{value!r} is no time")
    return secs


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _parts(formed: float, resumed: float, times: Mapping[str, float]) -> dict[str, float]:
    """What lies between the moment in which all nodes were there and that in which the state was restored."""
    ends = {"starting": "began", "script": "engine", "engine": "built", "joining": "survey"}
    secs, since = {}, formed
    for part, end in (*ends.items(), ("agreeing", "agreed")):
        if end in times:
            secs[part] = max(0.0, times[end] - since)
            since = max(since, times[end])
    secs["transfer"] = max(0.0, resumed - since)
    if {"groups", "grouped"} <= times.keys():
        groups = secs["groups"] = max(0.0, times["grouped"] - times["groups"])
        for part in ("script", "engine", "joining"):  # one of which they are made in
            if part in secs and times["groups"] < times[ends[part]]:
                secs[part] = max(0.0, secs[part] - groups)
                break
    return {part: secs[part] for part in PARTS if part in secs}
