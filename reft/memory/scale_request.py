"""Files in a node's memory: requests of ``reft scale`` to change the number of nodes, and the
launcher's answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reft.memory.jobdir import read_json, write_json

REQUEST_FILE = "scale-request.json"
ANSWER_FILE = "scale.json"
SIZE_FILE = "size.json"


@dataclass(frozen=True)
class Size:
    """Facts that decide whether the job can continue at another data-parallel degree."""

    why_not: str  # Reason why the job should not change its degree; "" if it can
    batch: int  # Number of samples in a step; 0 if it may change with the degree
    micro: int  # Number of samples in a micro-batch
    # True if a start at another degree is refused; False if it is possible but gives other results,
    # for the reason ``why_not``.
    fixed: bool = False


def note_size(
    job_dir: Path, facts: Mapping[str, Any], why_not: str, *, fixed: bool, any_batch: bool
) -> None:
    """Record the job's :class:`Size`. Called by one trainer of each node.

    Args:
        job_dir: the job's memory on this node.
        facts: facts of the job's fingerprint.
        why_not: see :class:`Size`.
        fixed: see :class:`Size`.
        any_batch: True if the global batch may change.

    Raises:
        OSError: the file cannot be written.
    """
    batch = facts.get("config.train_batch_size", 1)
    micro = facts.get("config.train_micro_batch_size_per_gpu", 1)
    size = Size(why_not, 0 if any_batch else int(batch), int(micro), fixed)
    write_json(job_dir / SIZE_FILE, asdict(size))


def read_size(job_dir: Path) -> Size | None:
    try:
        return Size(**(read_json(job_dir / SIZE_FILE) or {}))
    except TypeError:
        return None


@dataclass(frozen=True)
class ScaleRequest:
    number: int  # Number of the request: Unix milliseconds
    nodes: int  # Requested number of nodes
    without: tuple[str, ...] = ()  # Ids of the nodes that leave first


@dataclass(frozen=True)
class ScaleAnswer:
    number: int  # Number of the request that is answered
    nodes: int  # Requested number of nodes
    running: int  # Number of nodes that the job has now
    refused: str = ""  # Reason why the request is refused; "" if it is carried out
    # True once the job runs on ``nodes`` nodes and has committed a version there
    done: bool = False
    waits: str = ""  # Condition for which the request waits; "" if it does not wait


def write_request(job_dir: Path, nodes: int, without: tuple[str, ...]) -> ScaleRequest:
    """Write a request on this node.

    Raises:
        OSError: the file cannot be written.
    """
    last = read_request(job_dir)
    number = max(time.time_ns() // 1_000_000, 0 if last is None else last.number + 1)
    request = ScaleRequest(number, nodes, without)
    write_json(job_dir / REQUEST_FILE, asdict(request))
    return request


def read_request(job_dir: Path) -> ScaleRequest | None:
    fields = read_json(job_dir / REQUEST_FILE) or {}
    try:
        without = tuple(map(str, fields["without"]))
        return ScaleRequest(int(fields["number"]), int(fields["nodes"]), without)
    except (KeyError, ValueError, TypeError):
        return None


def write_answer(job_dir: Path, answer: ScaleAnswer) -> None:
    write_json(job_dir / ANSWER_FILE, asdict(answer))


def read_answer(job_dir: Path) -> ScaleAnswer | None:
    try:
        return ScaleAnswer(**(read_json(job_dir / ANSWER_FILE) or {}))
    except TypeError:
        return None
