"""Format of an arena file: superblock, two alternating header copies, data.

    0              superblock (written once): sizes of the regions
    4096           header copy A
    4096 + c       header copy B
    data offset    data, a multiple of 64 KiB from the start of the file

Every record carries magic, format version, a sequence number, its length, an unkeyed hash and a
keyed MAC. A change of state is written over the *older* copy, so that a write torn at any byte
leaves the newer one as it was; the reader takes the valid copy with the highest sequence number.
The hash tells a torn record from one that was written with another job's secret.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import xxhash

from reft.authentication import mac
from reft.errors import ArenaError
from reft.grid import BlockKey, Coordinate, Degrees, Section, VersionId, aligned

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"REFTARNA"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
DATA_ALIGNMENT_BYTES = 65536
"""The data region starts on a page boundary of every page size in use (arm64 has 64 KiB pages)."""

_CORE = struct.Struct("<IIQQ")  # format version, kind, sequence, payload bytes
_DIGESTS = struct.Struct("<Q16s")  # xxh3_64, MAC
PREFIX_BYTES = len(MAGIC) + _CORE.size + _DIGESTS.size
TABLE = np.dtype(
    [
        ("section", "<u1"),
        ("owner", "<u1"),
        ("unused", "<u2"),
        ("member", "<u4"),
        ("index", "<u4"),
        *(
            (name, "<u8")
            for name in ("start_bytes", "nbytes", "image_bytes", "arena_offset", "checksum")
        ),
    ]
)
"""The packed blocks of an arena. There are no gaps: NumPy would not copy what is in them."""
# Room for everything in a header but its block table: names are at most 255 characters
_HEAD_BYTES = 4096

_SECTIONS = tuple(Section)
_SECTION_CODES = {section: code for code, section in enumerate(_SECTIONS)}


class ArenaState(StrEnum):
    """Life of a version in an arena. Data may be read back from SEALED and COMMITTED ones only."""

    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"
    COMMITTED = "committed"

    @property
    def whole(self) -> bool:
        return self in (ArenaState.SEALED, ArenaState.COMMITTED)


@dataclass(frozen=True)
class Entry:
    key: BlockKey  # identity within sharding group and version
    start_bytes: int  # offset in the section's image
    nbytes: int  # true length
    image_bytes: int  # total bytes of that section image, for the exact-cover check at recovery
    arena_offset: int  # offset from the start of the arena's data region
    checksum: int  # xxh3_64 of the bytes
    owner: bool  # True for the member's own block, False for a redundant copy or a parity


@dataclass(frozen=True)
class ArenaHeader:
    """Whose version an arena holds, and which blocks (``entries`` only once it is sealed)."""

    job_id: str  # job that wrote it
    node: str  # node (failure domain) it was written on
    degrees: Degrees  # parallel degrees of the job
    coordinate: Coordinate  # (pp, dp, tp) of the rank that wrote it; never its rank number (P7)
    label: VersionId  # incarnation and step of the version
    state: ArenaState  # where the version stands
    entries: tuple[Entry, ...] = ()  # block table
    sealed_unix_secs: float = 0.0  # time of sealing; 0 before
    layout: str = ""  # hex hash of degrees and section sizes; versions of other layouts are refused
    # the erasure code of the replicated section, as `reft.protect.codes.BlockCode.describe` writes
    # it; empty without one
    coding: str = ""
    scheme: str = ""  # how the version is protected, ``arc:2+aec``; empty where nobody said


class RecordKind(IntEnum):
    SUPERBLOCK = 1
    HEADER = 2


@dataclass(frozen=True)
class Geometry:
    data_bytes: int
    max_entries: int
    copy_bytes: int

    @classmethod
    def of(cls, data_bytes: int, max_entries: int) -> Geometry:
        if data_bytes < 0 or max_entries < 0:
            raise ArenaError(
                f"an arena of {data_bytes} data bytes and {max_entries} blocks was asked for; "
                "expected two sizes that are not negative"
            )
        copy_bytes = PREFIX_BYTES + _HEAD_BYTES + max_entries * TABLE.itemsize
        return cls(data_bytes, max_entries, aligned(copy_bytes, PAGE_BYTES))

    def copy_offset(self, index: int) -> int:
        return PAGE_BYTES + index * self.copy_bytes

    @property
    def data_offset(self) -> int:
        return aligned(self.copy_offset(2), DATA_ALIGNMENT_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.data_bytes


@dataclass(frozen=True)
class Record:
    index: int  # which copy, 0 or 1
    sequence: int  # the record's number
    head: ArenaHeader | None  # the header without its entries; None for an EMPTY arena
    table: bytes  # the packed entries

    def header(self) -> ArenaHeader | None:
        """The header with its entries, which takes a while for thousands of them. Raises ArenaError
        if the table is none (its digests were right, so a program is wrong)."""
        if self.head is None:
            return None
        try:
            return replace(self.head, entries=unpack_entries(self.table))
        except (IndexError, ValueError) as error:
            raise ArenaError(f"a whole header copy holds no block table: {error!r}") from error


class TornRecordError(ArenaError):
    """A header copy is not whole: never written, wiped or torn."""


def checksum(data: Buffer) -> int:
    """xxh3_64 of ``data`` (any contiguous buffer); the GIL is released while it is computed."""
    return xxhash.xxh3_64_intdigest(data)


def encode_record(kind: RecordKind, sequence: int, payload: bytes, secret: bytes) -> bytes:
    body = _CORE.pack(FORMAT_VERSION, kind, sequence, len(payload)) + payload
    digests = _DIGESTS.pack(xxhash.xxh3_64_intdigest(body), _mac(body, secret))
    return b"".join((MAGIC, body[: _CORE.size], digests, payload))


def decode_record(raw: memoryview, kind: RecordKind, secret: bytes | None) -> tuple[int, bytes]:
    """Sequence number and payload of the record at the start of ``raw``, which has to be of this
    kind. Without the job's secret it is checked for tearing only, not for authenticity."""
    if len(raw) < PREFIX_BYTES or bytes(raw[: len(MAGIC)]) != MAGIC:
        raise TornRecordError("no record: the magic number is missing")
    version, found_kind, sequence, nbytes = _CORE.unpack_from(raw, len(MAGIC))
    if version > FORMAT_VERSION:
        raise ArenaError(
            f"written in format {version}; this reft reads format {FORMAT_VERSION}: use the reft "
            "that wrote it, or a later one"
        )
    digest, code = _DIGESTS.unpack_from(raw, len(MAGIC) + _CORE.size)
    if nbytes > len(raw) - PREFIX_BYTES:
        raise TornRecordError(f"torn: {nbytes} payload bytes do not fit the region of {len(raw)}")
    payload = bytes(raw[PREFIX_BYTES : PREFIX_BYTES + nbytes])
    body = bytes(raw[len(MAGIC) : len(MAGIC) + _CORE.size]) + payload
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise TornRecordError("torn: its bytes do not match their hash")
    if secret is not None and _mac(body, secret) != code:
        raise ArenaError(
            "whole, but its MAC does not match the job's secret: another job wrote it, or it was "
            "forged; remove it, or give the secret file of the job that wrote it"
        )
    if found_kind != kind:
        raise ArenaError(
            f"a record of kind {found_kind} stands where kind {int(kind)} was expected"
        )
    return sequence, payload


def encode_geometry(geometry: Geometry, secret: bytes) -> bytes:
    payload: bytes = msgpack.packb([geometry.data_bytes, geometry.max_entries, geometry.copy_bytes])
    return encode_record(RecordKind.SUPERBLOCK, 0, payload, secret)


def decode_geometry(raw: memoryview, secret: bytes | None) -> Geometry:
    """Read the superblock. Raises ArenaError if it is foreign, damaged or impossible."""
    _, payload = decode_record(raw, RecordKind.SUPERBLOCK, secret)
    try:
        data_bytes, max_entries, copy_bytes = (int(v) for v in msgpack.unpackb(payload))
    except (ValueError, TypeError) as error:
        raise ArenaError(f"the superblock holds no sizes: {error}") from error
    geometry = Geometry.of(data_bytes, max_entries)
    if geometry.copy_bytes != copy_bytes:
        raise ArenaError(
            f"header copies of {copy_bytes} bytes for {max_entries} blocks were found, expected "
            f"{geometry.copy_bytes}: written by another build of reft"
        )
    return geometry


def pack_entries(entries: Sequence[Entry]) -> bytes:
    rows = [
        (
            *(_SECTION_CODES[e.key.section], e.owner, 0, e.key.member, e.key.index),
            *(e.start_bytes, e.nbytes, e.image_bytes, e.arena_offset, e.checksum),
        )
        for e in entries
    ]
    return np.array(rows, TABLE).tobytes()


def unpack_entries(table: bytes) -> tuple[Entry, ...]:
    """Inverse of :func:`pack_entries`; raises ``IndexError`` or ``ValueError`` for nonsense."""
    return tuple(
        Entry(
            BlockKey(_SECTIONS[code], member, index),
            start,
            nbytes,
            image,
            offset,
            digest,
            bool(owner),
        )
        for code, owner, _, member, index, start, nbytes, image, offset, digest in np.frombuffer(
            table, TABLE
        ).tolist()
    )


def encode_header(header: ArenaHeader | None, table: bytes) -> bytes:
    """Payload of a header copy; None for an EMPTY arena. ``table`` stands for
    ``header.entries``."""
    payload: bytes = msgpack.packb([_head(header), table])
    return payload


_PLAIN = ("job_id", "node", "sealed_unix_secs", "layout", "coding", "scheme")


def _head(header: ArenaHeader | None) -> dict[str, Any] | None:
    if header is None:
        return None
    degrees, at = header.degrees, header.coordinate
    return {
        **{name: getattr(header, name) for name in _PLAIN},
        "degrees": [degrees.pp, degrees.dp, degrees.tp],
        "coordinate": [at.pp, at.dp, at.tp],
        "label": [header.label.incarnation, header.label.step],
        "state": str(header.state),
    }


def decode_header(payload: bytes) -> tuple[ArenaHeader | None, bytes]:
    """Header, without its entries, and packed block table of a header copy's payload. Raises
    ArenaError for anything else (its digests were right, so a program is wrong)."""
    try:
        head, table = msgpack.unpackb(payload)
        if head is None:
            return None, b""
        header = ArenaHeader(
            **{name: head[name] for name in _PLAIN if name in head},  # older ones lack the last two
            degrees=Degrees(*head["degrees"]),
            coordinate=Coordinate(*head["coordinate"]),
            label=VersionId(*head["label"]),
            state=ArenaState(head["state"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ArenaError(f"a whole header copy holds no header: {error!r}") from error
    return header, table


def newest_record(copies: Sequence[memoryview], secret: bytes | None) -> Record:
    """The valid header copy with the highest sequence number. Raises TornRecordError: if no copy is
    whole. Raises ArenaError: if a whole copy is foreign or of a later format, and no other one is
    valid."""
    found: list[tuple[int, int, bytes]] = []
    # Not the errors themselves: their tracebacks lead back here, and the cycle would keep the
    # views, and with them the mapping, alive.
    refusals: list[tuple[type[ArenaError], str]] = []
    for index, raw in enumerate(copies):
        try:
            sequence, payload = decode_record(raw, RecordKind.HEADER, secret)
            found.append((sequence, index, payload))
        except ArenaError as error:
            refusals.append((type(error), str(error)))
    if not found:
        kind, reason = min(refusals, key=lambda refusal: refusal[0] is TornRecordError)
        raise kind(reason)
    sequence, index, payload = max(found)
    head, table = decode_header(payload)
    return Record(index, sequence, head, table)


def _mac(body: bytes, secret: bytes) -> bytes:
    return mac(body, secret, b"reft-arena")
