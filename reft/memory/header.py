"""Format of an arena file: superblock, two alternating header copies, data.

    0              superblock (written once): sizes of the regions
    4096           header copy A
    4096 + c       header copy B
    data offset    data, a multiple of 64 KiB from the start of the file

Superblock and header copies are *records*. Every record carries a magic number, the format
version, a sequence number, its length, an unkeyed hash and a keyed MAC. A change of state is
written over the *older* copy, so a write that is torn at any byte leaves the newer one intact.
Readers take the valid copy with the highest sequence number. The hash distinguishes a torn
record from one that was written with another job's secret.
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
"""The data region starts at a multiple of this, which is a multiple of every page size in use
(arm64 has 64 KiB pages)."""

_CORE = struct.Struct("<IIQQ")  # Format version, kind, sequence number, payload size in bytes
_DIGESTS = struct.Struct("<Q16s")  # xxh3_64 hash, MAC
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
"""dtype of the packed block table. It has no padding, because NumPy does not copy padding bytes."""
# Bytes reserved in a header copy for all fields but the block table; names have at most 255
# characters
_HEAD_BYTES = 4096

_SECTIONS = tuple(Section)
_SECTION_CODES = {section: code for code, section in enumerate(_SECTIONS)}


class ArenaState(StrEnum):
    """State of a version in an arena. Only SEALED and COMMITTED data may be read."""

    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"
    COMMITTED = "committed"

    @property
    def whole(self) -> bool:
        return self in (ArenaState.SEALED, ArenaState.COMMITTED)


@dataclass(frozen=True)
class Entry:
    """A block in an arena: its identity, position and checksum."""

    key: BlockKey  # Identity of the block within its sharding group and version
    start_bytes: int  # Offset in bytes in the section's image
    nbytes: int  # Length in bytes without padding
    # Size in bytes of the section's image; recovery checks that the blocks cover all of it
    image_bytes: int
    arena_offset: int  # Offset from the start of the arena's data region
    checksum: int  # xxh3_64 of the bytes
    owner: bool  # True for the member's own block, False for a redundant copy or a parity block


@dataclass(frozen=True)
class ArenaHeader:
    """Identity, state and blocks of the version in an arena."""

    job_id: str  # Job that wrote the version
    node: str  # Node (failure domain) on which it was written
    degrees: Degrees  # Parallel degrees of the job
    coordinate: Coordinate  # (pp, dp, tp) of the rank that wrote it; never its rank number (P7)
    label: VersionId  # Incarnation and step of the version
    state: ArenaState  # State of the version
    entries: tuple[Entry, ...] = ()  # Block table; empty until the version is sealed
    sealed_unix_secs: float = 0.0  # Time at which the version was sealed; 0 before
    layout: str = ""  # Hex hash of degrees and section sizes; versions of other layouts are refused
    # Erasure code of the replicated section, in the form of
    # `reft.protect.codes.BlockCode.describe`; empty without one
    coding: str = ""
    scheme: str = ""  # Protection of the version, such as ``arc:2+aec``; empty if unknown


class RecordKind(IntEnum):
    SUPERBLOCK = 1
    HEADER = 2


@dataclass(frozen=True)
class Geometry:
    """Sizes of an arena's regions."""

    data_bytes: int  # Size of the data region in bytes
    max_entries: int  # Largest number of entries in the block table
    copy_bytes: int  # Size of one header copy in bytes

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
    """A valid header copy."""

    index: int  # Index of the copy, 0 or 1
    sequence: int  # Sequence number of the record; the higher one is newer
    head: ArenaHeader | None  # Header without its entries; None for an EMPTY arena
    table: bytes  # Packed block table

    def header(self) -> ArenaHeader | None:
        """Return the header with its entries; slow for thousands of them.

        Raises:
            ArenaError: the block table cannot be decoded. Its digests match, so the cause is a bug
                in the writer.
        """
        if self.head is None:
            return None
        try:
            return replace(self.head, entries=unpack_entries(self.table))
        except (IndexError, ValueError) as error:
            raise ArenaError(f"a whole header copy holds no block table: {error!r}") from error


class TornRecordError(ArenaError):
    """A header copy is incomplete: never written, wiped or torn."""


def checksum(data: Buffer) -> int:
    """Return xxh3_64 of ``data`` (any contiguous buffer); the GIL is released while it is
    computed."""
    return xxhash.xxh3_64_intdigest(data)


def encode_record(kind: RecordKind, sequence: int, payload: bytes, secret: bytes) -> bytes:
    body = _CORE.pack(FORMAT_VERSION, kind, sequence, len(payload)) + payload
    digests = _DIGESTS.pack(xxhash.xxh3_64_intdigest(body), _mac(body, secret))
    return b"".join((MAGIC, body[: _CORE.size], digests, payload))


def decode_record(raw: memoryview, kind: RecordKind, secret: bytes | None) -> tuple[int, bytes]:
    """Decode the record at the start of ``raw``.

    Args:
        raw: bytes that begin with the record.
        kind: expected kind.
        secret: the job's secret; None checks only the hash, not the MAC.

    Returns:
        Sequence number and payload.

    Raises:
        TornRecordError: the record is incomplete.
        ArenaError: the record has another kind, a later format or another job's MAC.
    """
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
    """Decode the superblock.

    Raises:
        ArenaError: the superblock is damaged or another job's, or its sizes are impossible.
    """
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
    """Decode the output of :func:`pack_entries`.

    Raises:
        IndexError: a section code is invalid.
        ValueError: the size is not a multiple of a row.
    """
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
    """Return the payload of a header copy.

    Args:
        header: None for an EMPTY arena; its ``entries`` are ignored.
        table: the packed entries.
    """
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
    """Decode a header copy's payload.

    Returns:
        The header without its entries (None for an EMPTY arena), and the packed block table.

    Raises:
        ArenaError: the payload cannot be decoded. Its digests match, so the cause is a bug in
            the writer.
    """
    try:
        head, table = msgpack.unpackb(payload)
        if head is None:
            return None, b""
        header = ArenaHeader(
            # Headers written by earlier releases lack the last two fields
            **{name: head[name] for name in _PLAIN if name in head},
            degrees=Degrees(*head["degrees"]),
            coordinate=Coordinate(*head["coordinate"]),
            label=VersionId(*head["label"]),
            state=ArenaState(head["state"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ArenaError(f"a whole header copy holds no header: {error!r}") from error
    return header, table


def newest_record(copies: Sequence[memoryview], secret: bytes | None) -> Record:
    """Return the valid header copy with the highest sequence number.

    Args:
        copies: bytes of both header copies.
        secret: the job's secret; None reads without authentication.

    Raises:
        TornRecordError: both copies are incomplete.
        ArenaError: no copy is valid, and one is of another job or a later format.
    """
    found: list[tuple[int, int, bytes]] = []
    # Keep only types and texts of errors. An error's traceback refers to this frame, and this
    # reference cycle would keep the views, and so the mapping, alive.
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
