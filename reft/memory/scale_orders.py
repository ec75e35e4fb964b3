"""``reft scale``: what was ordered on a node, what its launcher answers, and what it judges by: small files
in the job's memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from reft.memory.jobdir import read_json, write_json
from reft.state.fingerprint import Fingerprint

ORDER_FILE = "scale-request.json"
ANSWER_FILE = "scale.json"
SIZE_FILE = "size.json"


@dataclass(frozen=True)
class Size:
    """What decides whether a job can have another data-parallel degree."""

    why_not: str  # why it should not; "" where it can
    batch: int  # samples of a step; 0: so many as fit
    micro: int  # samples of a micro-batch
    # a start at another degree would be refused, and not only differ in what ``why_not`` says
    fixed: bool = False


def note_size(job_dir: Path, fingerprint: Fingerprint, why_not: str, *, fixed: bool, any_batch: bool) -> None:
    """By one trainer of the node. ``any_batch``: the global batch may be another one. Raises OSError."""
    facts = fingerprint.facts
    batch, micro = (
        facts.get(f"config.{n}", 1) for n in ("train_batch_size", "train_micro_batch_size_per_gpu")
    )
    size = Size(why_not, 0 if any_batch else int(batch), int(micro), fixed)  # type: ignore[arg-type]
    write_json(job_dir / SIZE_FILE, asdict(size))


def read_size(job_dir: Path) -> Size | None:
    try:
        return Size(**(read_json(job_dir / SIZE_FILE) or {}))
    except TypeError:
        return None


@dataclass(frozen=True)
class ScaleOrder:
    """A request for another number of nodes."""

    number: int  # milliseconds since the epoch
    nodes: int  # that the job is to have
    without: tuple[str, ...] = ()  # ids of nodes that leave before any other


@dataclass(frozen=True)
class ScaleAnswer:
    """What a launcher says of an order."""

    number: int  # of the order
    nodes: int  # that the job is to have
    running: int  # nodes that it has
    refused: str = ""  # why it is not followed; "" where it is
    done: bool = False  # the job runs on so many nodes, and has committed a version there
    waits: str = ""  # what the order waits for, before it is followed or refused; "" where it does not wait


def write_order(job_dir: Path, nodes: int, without: tuple[str, ...]) -> ScaleOrder:
    """Order it on this node. Raises OSError."""
    last = read_order(job_dir)
    number = max(time.time_ns() // 1_000_000, 0 if last is None else last.number + 1)
    order = ScaleOrder(number, nodes, without)
    write_json(job_dir / ORDER_FILE, asdict(order))
    return order


def read_order(job_dir: Path) -> ScaleOrder | None:
    """The newest order on this node, if one can be read."""
    found = read_json(job_dir / ORDER_FILE) or {}
    try:
        without = tuple(map(str, found["without"]))
        return ScaleOrder(int(found["number"]), int(found["nodes"]), without)
    except (KeyError, ValueError, TypeError):
        return None


def write_answer(job_dir: Path, answer: ScaleAnswer) -> None:
    """Raises OSError."""
    write_json(job_dir / ANSWER_FILE, asdict(answer))


def read_answer(job_dir: Path) -> ScaleAnswer | None:
    """The newest answer on this node, if one can be read."""
    try:
        return ScaleAnswer(**(read_json(job_dir / ANSWER_FILE) or {}))
    except TypeError:
        return None
