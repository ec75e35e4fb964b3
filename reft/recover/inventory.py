"""What a node holds in memory after a restart, and how it tells the others.

An inventory carries headers and block tables, not data. It crosses hosts, so it is msgpack in a message under
a MAC keyed with the job's secret, and never pickle (P11). Tables are stored byte column by byte column, in
which offsets and lengths of neighbouring blocks hardly differ, and compressed: about ten bytes per
block, most of them checksum.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import numpy as np

from reft.errors import ArenaError, TransferError
from reft.memory.arena import Arena, scan
from reft.memory.header import (
    ArenaHeader,
    ArenaState,
    checksum,
    decode_header,
    encode_header,
    pack_entries,
    unpack_entries,
)
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.recover.plan import BlockSource, Fetch

logger = logging.getLogger(__name__)

_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class ArenaRecord:
    node: str  # node on which it was found (``header.node`` is where it was written)
    path: str  # file name within the node's job directory
    header: ArenaHeader  # whose version it holds, and its block table

    @property
    def usable(self) -> bool:
        return self.header.state.whole

    @property
    def committed(self) -> bool:
        return self.header.state is ArenaState.COMMITTED


@dataclass(frozen=True)
class Inventory:
    node: str
    arenas: tuple[ArenaRecord, ...]
    problems: tuple[str, ...] = ()

    def pack(self) -> bytes:
        arenas = [[record.path, *_pack_header(record.header)] for record in self.arenas]
        body: bytes = msgpack.packb([self.node, arenas, list(self.problems)])
        return body

    @classmethod
    def unpack(cls, body: bytes) -> Inventory:
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


def take_inventory(
    job_dir: Path, node: str, secret: bytes | None, is_wanted: Callable[[Path], bool] = lambda path: True
) -> Inventory:
    """List the arenas in a node's job directory. Unreadable ones become ``problems``, never errors.
    ``job_dir``: the node's directory of the job; a missing one is an empty inventory."""
    arenas: list[ArenaRecord] = []
    problems: list[str] = []
    for path, found in scan(job_dir, secret, is_wanted=is_wanted):
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


ArenaSet = Mapping[tuple[str, str], Arena]  # opened arenas by (node, file name)


@contextmanager
def opened_arenas(
    job_dir: Path, inventory: Inventory, secret: bytes | None, *, wait: bool = True
) -> Iterator[dict[tuple[str, str], Arena]]:
    """The usable arenas of one job directory, to be read.

    One that has vanished since the inventory is left out: its blocks then count as corrupt, and the plan
    falls down the ladder. In the end they are closed; views that are still alive keep their mapping."""
    arenas: dict[tuple[str, str], Arena] = {}
    try:
        for record in inventory.arenas:
            try:
                if record.usable:
                    arenas[record.node, record.path] = Arena.open(job_dir / record.path, secret)
            except (ArenaError, OSError) as error:
                logger.warning("node %s: arena %s cannot be opened: %s", record.node, record.path, error)
        yield arenas
    finally:
        if wait:
            _close(arenas)
        else:
            # To unmap what was read takes up to a fifth of the time that reading it took.
            threading.Thread(target=_close, args=(arenas,), name="reft-unmap", daemon=True).start()


def _close(arenas: ArenaSet) -> None:
    for arena in arenas.values():
        arena.close()


def open_job(job_dirs: Sequence[Path]) -> dict[str, JobDir]:
    """The directories of one job by node id; of equal ids, as of directories brought together from elsewhere,
    each is told by its path. Raises AuthenticationError: if a directory is somebody else's or its secret
    is missing."""
    jobs = [JobDir.open(path) for path in job_dirs]
    if len({(job.job_id, job.secret) for job in jobs}) != 1:
        found = ", ".join(f"{job.path} ({job.job_id})" for job in jobs) or "none"
        raise ArenaError(
            f"found the directories {found}; expected one job, and its secret in all of them: say --job"
        )
    names = [job.node for job in jobs]
    return {job.node if names.count(job.node) == 1 else f"{job.node}@{job.path}": job for job in jobs}


def find_corrupt(label: Label, fetches: Iterable[Fetch], arenas: ArenaSet) -> frozenset[BlockSource]:
    """Sources of ``fetches`` whose bytes do not match their checksum now, or that cannot be read (P5).
    ``fetches``: blocks to check; one that several coordinates need is read once."""
    current: dict[tuple[str, str], bool] = {}
    bad: set[BlockSource] = set()
    for source, fetch in {fetch.source: fetch for fetch in fetches}.items():
        place = fetch.node, fetch.arena
        if place not in current:
            header = arenas[place].header() if place in arenas else None
            current[place] = header is not None and header.label == label and header.state.whole
        if not current[place] or not matches(fetch, arenas):
            bad.add(source)
    for (node, arena), count in Counter((source.node, source.arena) for source in bad).items():
        logger.warning("node %s: %s: %d blocks of %s are corrupt or unreadable", node, arena, count, label)
    return frozenset(bad)


def stored_bytes(fetch: Fetch, arenas: ArenaSet) -> memoryview:
    """The source's bytes, unchecked: a view into the mapped arena, cut short by the arena's end."""
    return arenas[fetch.node, fetch.arena].data[fetch.arena_offset : fetch.arena_offset + fetch.nbytes]


def matches(fetch: Fetch, arenas: ArenaSet) -> bool:
    """Whether the source's bytes match the checksum taken when they were copied."""
    data = stored_bytes(fetch, arenas)
    # P5: a shorter read counts as damage too; a checksum of a prefix may be right.
    return len(data) == fetch.nbytes and checksum(data) == fetch.checksum
