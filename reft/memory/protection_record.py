"""The protection that is requested and the one that is in force: two files in a node's memory.

A *request* is written by ``reft protect``, or by a trainer that was asked to switch. The *record*
is what the ranks agreed on; the first trainer of each node writes it. A request on any node reaches
all ranks in their votes. The record lies on every node, so that a restart finds the last switch on
any node that is left.
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
class ProtectionRequest:
    """A request to switch to another scheme. Of several requests, the highest number counts."""

    number: int  # Unix milliseconds, and higher than that of any request that was handled before
    scheme: str  # as in the block, such as "arc:2+aec"


@dataclass(frozen=True)
class Refusal:
    scheme: str
    cause: str
    step: int


@dataclass(frozen=True)
class Degradation:
    """The protection that is kept while memory is too short for the requested one."""

    scheme: str
    versions: int  # Number of versions that each rank keeps
    cause: str  # Which node has too little memory, and how much would be enough
    step: int  # Step of the first such version


@dataclass(frozen=True)
class ProtectionRecord:
    """What the ranks agreed on, the same on every node."""

    scheme: str  # requested, and in force unless degraded
    # The block's words when this was decided. A block with other words is the newer request.
    configured: str
    number: int = 0  # newest request that was handled; 0 if none
    step: int = 0  # of the first version with this protection
    incarnation: int = 0  # of that version
    tolerance: int = 0  # node losses that every sharding group survives with what is in force
    refused: Refusal | None = None  # the newest request, if it could not be followed
    degraded: Degradation | None = None  # in force, if memory is too short for the scheme
    ordered: bool = False  # the scheme comes from a request, not from the block
    # The job was started with partitions recomputed by their owners' peers; no request changes it.
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
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the fields are something else.
        """
        return TypeAdapter(cls).validate_python(fields)


def parse_request(text: str, *, aor: bool | None = None) -> Scheme:
    """Return the scheme that a request names.

    Args:
        text: as in the block, also with "+aor".
        aor: whether the job recomputes partitions; None if unknown.

    Raises:
        ConfigError: there is no such scheme, it is not for use, or it asks for recomputing in a job
            that was started without.
    """
    plain = text.removesuffix(AOR)
    scheme = Scheme.parse(plain)
    if plain != text and not scheme.certain_losses:
        raise ConfigError(
            f"protection {text!r} keeps nothing of a peer that it could recompute; order {plain!r}"
        )
    if plain != text and aor is False:
        raise ConfigError(
            f"protection {text!r} cannot be ordered: recomputing is fixed at the start, and this "
            f"job was started without; order {plain!r}, or write {text!r} into the block for its "
            "next start"
        )
    if not scheme.designed:
        raise ConfigError(
            f"protection {text!r} survives no more than one of its parts; give "
            f"{text.removeprefix('naive:')!r}"
        )
    return scheme


def write_request(job_dirs: Sequence[Path], scheme: str) -> ProtectionRequest:
    """Request a switch on every node given; one of them is enough.

    Raises:
        ConfigError: see :func:`parse_request`.
        OSError: a file cannot be written.
    """
    records = [record for path in job_dirs if (record := read_record(path))]
    parse_request(scheme, aor=any(record.aor for record in records) if records else None)
    known = [request.number for path in job_dirs if (request := read_request(path))]
    known += [record.number for record in records]
    number = max([time.time_ns() // 1_000_000, *(n + 1 for n in known)])
    request = ProtectionRequest(number, scheme)
    for path in job_dirs:
        write_json(path / REQUEST_FILE, asdict(request))
    return request


def read_request(job_dir: Path) -> ProtectionRequest | None:
    """Return the newest request on this node; None if there is none that can be read."""
    try:
        return TypeAdapter(ProtectionRequest).validate_python(read_json(job_dir / REQUEST_FILE))
    except ValueError:
        return None


def write_record(job_dir: Path, record: ProtectionRecord) -> None:
    write_json(job_dir / RECORD_FILE, record.to_json())


def read_record(job_dir: Path) -> ProtectionRecord | None:
    """Return the record on this node; None if there is none that can be read."""
    try:
        return ProtectionRecord.from_json(read_json(job_dir / RECORD_FILE))
    except ValueError:
        return None


def resume_record(
    records: Iterable[ProtectionRecord], configured: str, scheme: str | None = None
) -> ProtectionRecord:
    """Return the record with which a start of the job begins.

    The last switch on any node is continued, unless the block was edited since: then the block is
    the newer request. In both cases, requests that were handled stay handled, and the available
    memory is measured again.

    Args:
        records: of all nodes.
        configured: the block's words.
        scheme: what these words mean, if not the scheme of the same name.
    """
    newest = max(records, key=lambda r: (r.incarnation, r.number, r.step), default=None)
    if newest is not None and newest.ordered and newest.configured == configured:
        return replace(newest, degraded=None)
    return ProtectionRecord(scheme or configured, configured, number=newest.number if newest else 0)
