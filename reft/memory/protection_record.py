"""Two files in a node's memory: the last request for another protection scheme, and the record of
the scheme in force.

A *request* is written by ``reft protect``, or by a trainer whose script calls ``Session.protect``.
The *record* holds the scheme on which the ranks agreed; the first trainer of each node writes it. A
request on any node reaches all ranks through their votes. Every node has the record, so a restart
finds the last change of scheme on any surviving node.
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
    """A request to switch to another scheme. Of several requests, the one with the highest number
    counts."""

    number: int  # Unix milliseconds, but higher than the number of any request handled before
    # Requested scheme in the form of the ``reft`` block's ``protection``, such as "arc:2+aec"
    scheme: str


@dataclass(frozen=True)
class Refusal:
    scheme: str
    cause: str
    step: int


@dataclass(frozen=True)
class Degradation:
    """The weaker protection in force while memory is too small for the requested one."""

    scheme: str
    versions: int  # Number of versions that each rank keeps
    cause: str  # Text that says which node has too little memory, and how much would be enough
    step: int  # Step of the first version with this weaker protection


@dataclass(frozen=True)
class ProtectionRecord:
    """The protection on which the ranks agreed, equal on every node."""

    scheme: str  # Requested scheme; also the one in force unless ``degraded`` is set
    # Text of the ``reft`` block's ``protection`` when this record was written. A block with a
    # different text has been edited since then, and counts as a newer request.
    configured: str
    number: int = 0  # Number of the newest request that was handled; 0 if none
    step: int = 0  # Step of the first version with this protection
    # Incarnation (number of the start) of the first version with this protection
    incarnation: int = 0
    tolerance: int = 0  # Node losses that every sharding group survives with the scheme in force
    refused: Refusal | None = None  # The newest request, if it was refused; otherwise None
    # The weaker scheme that is in force because memory is too small for the requested one; None if
    # the requested one fits
    degraded: Degradation | None = None
    # True if the scheme comes from a request, False if it comes from the ``reft`` block
    ordered: bool = False
    # True if the job was started with AOR (peers recompute a lost rank's optimizer partition);
    # no request can change this.
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
        """Decode the output of :meth:`to_json`.

        Raises:
            ValueError: the fields are not those of a record.
        """
        return TypeAdapter(cls).validate_python(fields)


def parse_request(text: str, *, aor: bool | None = None) -> Scheme:
    """Return the scheme that a request names.

    Args:
        text: the scheme in the form of the ``reft`` block's ``protection``; may include "+aor".
        aor: whether the job was started with AOR (recomputed optimizer partitions); None if
            unknown.

    Raises:
        ConfigError: there is no such scheme, the scheme is no better than one of its parts, or the
            request includes AOR in a job that was started without AOR.
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
    """Write a request to switch the scheme into each of the given job directories. A directory on
    one node is enough.

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
    """Return the newest request on this node; None if there is none or it is unreadable."""
    try:
        return TypeAdapter(ProtectionRequest).validate_python(read_json(job_dir / REQUEST_FILE))
    except ValueError:
        return None


def write_record(job_dir: Path, record: ProtectionRecord) -> None:
    write_json(job_dir / RECORD_FILE, record.to_json())


def read_record(job_dir: Path) -> ProtectionRecord | None:
    """Return the record on this node; None if there is none or it is unreadable."""
    try:
        return ProtectionRecord.from_json(read_json(job_dir / RECORD_FILE))
    except ValueError:
        return None


def resume_record(
    records: Iterable[ProtectionRecord], configured: str, scheme: str | None = None
) -> ProtectionRecord:
    """Return the record with which a start of the job begins.

    The scheme of the newest record stays in force, unless the ``reft`` block was edited after the
    record was written; then the block's scheme is used. In both cases, handled requests are not
    handled again, and the available memory is measured again.

    Args:
        records: records of all nodes.
        configured: text of the block's ``protection``.
        scheme: scheme for which the text ``configured`` stands; None if the text is the scheme
            itself.
    """
    newest = max(records, key=lambda r: (r.incarnation, r.number, r.step), default=None)
    if newest is not None and newest.ordered and newest.configured == configured:
        return replace(newest, degraded=None)
    return ProtectionRecord(scheme or configured, configured, number=newest.number if newest else 0)
