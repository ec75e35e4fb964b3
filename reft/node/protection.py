"""Which protection is wanted and which is in force: two small files beside a node's arenas.

``protect-request.json`` is the newest *order*, written by ``reft protect`` (or a trainer that was asked);
``protection.json`` is what the trainers made of it, written by the first trainer of the node. An order on
any node reaches all ranks in their votes; the record lies on every node, so that a restart finds the last
switch on whichever nodes are left. Both are private to the job's owner, like the arenas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.config import AOR
from reft.errors import ConfigError
from reft.memory.jobdir import read_json, write_json
from reft.protect.codes import Scheme

REQUEST_FILE = "protect-request.json"
RECORD_FILE = "protection.json"


@dataclass(frozen=True)
class Order:
    """A request to switch to a scheme as in the block, ``arc:2+aec``. Of several the one with the
    highest number counts: milliseconds since the epoch, and more than that of any order dealt with before."""

    number: int
    scheme: str


@dataclass(frozen=True)
class Refusal:
    scheme: str
    cause: str
    step: int


@dataclass(frozen=True)
class Degradation:
    """The redundancy and the versions per rank that are kept instead of what is wanted, while memory is
    short, since the version of ``step``; ``cause``: which node has too little, and what would be needed."""

    scheme: str
    versions: int
    cause: str
    step: int


@dataclass(frozen=True)
class ProtectionRecord:
    """What the ranks agreed on, the same on every node."""

    scheme: str  # wanted, and in force unless ``degraded``
    configured: str  # what the block said when that was decided. A block that says something else is newer.
    number: int = 0  # newest order that was dealt with; 0: none
    step: int = 0  # since which version
    incarnation: int = 0  # of that version
    tolerance: int = 0  # node losses that every sharding group survives under what is in force
    refused: Refusal | None = None  # the newest order, if it could not be carried out
    degraded: Degradation | None = None  # what is in force, if memory is too short for what is wanted
    ordered: bool = False  # the scheme came by order, not from the block
    # the job was started with partitions recomputed by their owners' peers; no order changes that
    aor: bool = False

    @property
    def parsed(self) -> Scheme:
        return Scheme.parse(self.scheme)

    @property
    def in_force(self) -> str:
        return self.degraded.scheme if self.degraded is not None else self.scheme

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> ProtectionRecord:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(fields)


def parse_order(text: str, *, aor: bool | None = None) -> Scheme:
    """The scheme that an order names as the block does, also with ``+aor``. ``aor``: whether the job
    recomputes partitions; None: not known. Raises ConfigError: there is no such scheme, it must not be used,
    or it asks for recomputing in a job that was started without."""
    plain = text.removesuffix(AOR)
    scheme = Scheme.parse(plain)
    if plain != text and not scheme.certain_losses:
        raise ConfigError(
            f"protection {text!r} keeps nothing of a peer that it could recompute; order {plain!r}"
        )
    if plain != text and aor is False:
        raise ConfigError(
            f"protection {text!r} cannot be ordered: recomputing is fixed at the start, and this job was "
            f"started without; order {plain!r}, or write {text!r} into the block for its next start"
        )
    if not scheme.designed:
        raise ConfigError(
            f"protection {text!r} survives no more than one of its parts; give "
            f"{text.removeprefix('naive:')!r}"
        )
    return scheme


def write_order(job_dirs: Sequence[Path], scheme: str) -> Order:
    """Order a switch, on every node given; one of them is enough. Raises ConfigError: there is no such
    scheme, or the job, as far as these nodes know, cannot follow; OSError."""
    records = [r for d in job_dirs if (r := read_record(d))]
    parse_order(scheme, aor=any(r.aor for r in records) if records else None)
    known = [o.number for d in job_dirs if (o := read_order(d))]
    known += [r.number for r in records]
    order = Order(max([time.time_ns() // 1_000_000, *(n + 1 for n in known)]), scheme)
    for directory in job_dirs:
        write_json(directory / REQUEST_FILE, asdict(order))
    return order


def read_order(job_dir: Path) -> Order | None:
    """The newest order on this node, or None where there is none that can be read."""
    try:
        return TypeAdapter(Order).validate_python(read_json(job_dir / REQUEST_FILE))
    except ValueError:
        return None


def write_record(job_dir: Path, record: ProtectionRecord) -> None:
    write_json(job_dir / RECORD_FILE, record.to_json())


def read_record(job_dir: Path) -> ProtectionRecord | None:
    """What is in force, by this node's file; None where there is none that can be read."""
    try:
        return ProtectionRecord.from_json(read_json(job_dir / RECORD_FILE))
    except ValueError:
        return None


def resume(
    records: Iterable[ProtectionRecord], configured: str, scheme: str | None = None
) -> ProtectionRecord:
    """What a start of the job begins with: the last switch that any node's record tells of, unless the block
    was edited since, which then is the newer request. Orders dealt with stay so in both cases; what memory
    there is, is found out anew. ``scheme``: what ``configured``, the block's words, mean."""
    newest = max(records, key=lambda r: (r.incarnation, r.number, r.step), default=None)
    if newest is not None and newest.ordered and newest.configured == configured:
        return replace(newest, degraded=None)
    return ProtectionRecord(scheme or configured, configured, number=newest.number if newest else 0)
