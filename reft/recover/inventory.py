"""What a node holds in memory after a restart, and how it tells the others.

An inventory carries headers and block tables, not data. It crosses hosts, so it is msgpack in a message under
a MAC keyed with the job's secret, and never pickle (P11). Tables are stored byte column by byte column, in
which offsets and lengths of neighbouring blocks hardly differ, and compressed: about ten bytes per
block, most of them checksum.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import numpy as np

from reft.errors import ArenaError, TransferError
from reft.memory.arena_files import scan
from reft.memory.header import (
    ArenaHeader,
    ArenaState,
    decode_header,
    encode_header,
    pack_entries,
    unpack_entries,
)

logger = logging.getLogger(__name__)

_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class ArenaRecord:
    """One arena as found on a node.

    Attributes:
        node: node on which it was found (``header.node`` is where it was written).
        path: file name within the node's job directory.
        header: whose version it holds, and its block table.
    """

    node: str
    path: str
    header: ArenaHeader

    @property
    def usable(self) -> bool:
        """Whether its data may be read back."""
        return self.header.state.whole

    @property
    def committed(self) -> bool:
        return self.header.state is ArenaState.COMMITTED


@dataclass(frozen=True)
class Inventory:
    """All arenas of one node, and why others could not be read."""

    node: str
    arenas: tuple[ArenaRecord, ...]
    problems: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Bytes to send to other nodes, in an authenticated message."""
        arenas = [[record.path, *_pack_header(record.header)] for record in self.arenas]
        body: bytes = msgpack.packb([self.node, arenas, list(self.problems)])
        return body

    @classmethod
    def unpack(cls, body: bytes) -> Inventory:
        """Inverse of :meth:`pack`.

        Raises:
            TransferError: if it is not an inventory of this version of reft.
        """
        try:
            node, arenas, problems = msgpack.unpackb(body)
            records = tuple(
                ArenaRecord(node, path, _unpack_header(head, table)) for path, head, table in arenas
            )
            return cls(node, records, tuple(problems))
        except (ValueError, TypeError, ArenaError, zlib.error) as error:
            raise TransferError(
                f"an inventory of {len(body)} bytes carries the job's secret but cannot be read ({error!r}): "
                f"run the same version of reft on every node"
            ) from error

    def __str__(self) -> str:
        lines = [f"node {self.node}: {len(self.arenas)} arenas"]
        lines += [
            f"  {r.path}: {r.header.coordinate} {r.header.label} {r.header.state}, "
            f"{len(r.header.entries)} blocks"
            for r in self.arenas
        ]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def take_inventory(job_dir: Path, node: str, secret: bytes | None) -> Inventory:
    """List the arenas in a node's job directory. Unreadable ones become ``problems``, never errors.

    Args:
        job_dir: the node's directory of the job; a missing one is an empty inventory.
        node: id of the node as the running incarnation knows it.
        secret: the job's secret.
    """
    arenas: list[ArenaRecord] = []
    problems: list[str] = []
    for path, found in scan(job_dir, secret):
        if isinstance(found, str):
            problems.append(found)
            continue
        with found:
            header = found.header()
        if header is not None:
            arenas.append(ArenaRecord(node, path.name, header))
    logger.info("inventory of node %s: %d arenas, %d unreadable", node, len(arenas), len(problems))
    return Inventory(node, tuple(arenas), tuple(problems))


def _pack_header(header: ArenaHeader) -> tuple[bytes, bytes]:
    table = pack_entries(header.entries)
    rows = np.frombuffer(table, np.uint8).reshape(max(1, len(header.entries)), -1)
    columns = zlib.compress(rows.T.tobytes(), _COMPRESSION_LEVEL)
    return encode_header(header, b""), msgpack.packb([len(header.entries), columns])


def _unpack_header(head: bytes, packed: bytes) -> ArenaHeader:
    header, _ = decode_header(head)
    if header is None:
        raise ValueError("an arena without a header")
    count, compressed = msgpack.unpackb(packed)
    columns = np.frombuffer(zlib.decompress(compressed), np.uint8)
    rows = columns.reshape(-1, count).T if count else columns
    return replace(header, entries=unpack_entries(rows.tobytes()))
