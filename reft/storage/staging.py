"""The working directory of one checkpoint that is being written, shared by all nodes.

    <dir>/.global_step40.2.3-1f0c9ab3.tmp/   tag, incarnation, the start that writes it, job
        pp0.dp0.tp0.arena ...                the checkpoint's files, of each coordinate
        .staging/part-<coordinate>.json      which files, and their checksums: they are complete
        .staging/failed-<node>.json          this node gave up, and why

Every file has one writer, so that nothing depends on how a shared file system merges pages. The
records carry a MAC of the job's secret, and blocks are compared with their checksums when they are
written and again when they are read (P5, P11). Only whole records ever have their final name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reft.control.wire import is_same, mac
from reft.durable import write_durably
from reft.errors import AuthenticationError, PersistError
from reft.grid import Coordinate, aligned
from reft.memory.header import (
    ArenaHeader,
    ArenaState,
    Entry,
    Geometry,
    RecordKind,
    checksum,
    encode_geometry,
    encode_header,
    encode_record,
    pack_entries,
)
from reft.naming import Label
from reft.storage.fence import short_name
from reft.storage.persisted import STORAGE_KEY, FileRecord, tag_of

LEADER = Coordinate(0, 0, 0)  # the node of this coordinate names the checkpoint in the end

_PERSON = b"reft-persist"


@dataclass(frozen=True)
class WorkDir:
    root: Path
    job_id: str
    label: Label

    @classmethod
    def of(cls, directory: Path, job_id: str, label: Label, writer: int = 0) -> WorkDir:
        """Of a version that a start of the job writes: its own, or an earlier one's that memory holds."""
        writer = max(writer, label.incarnation)
        name = f".{tag_of(label)}.{label.incarnation}.{writer}-{short_name(job_id)}.tmp"
        return cls(directory / name, job_id, label)

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    @property
    def scripts(self) -> Path:
        """Scripts that DeepSpeed puts beside the tag directories."""
        return self.staging / "scripts"

    @property
    def pointers(self) -> Path:
        """Files that name the newest checkpoint, beside ``latest``, for the program that trains."""
        return self.staging / "pointers"

    def part(self, coordinate: Coordinate) -> Path:
        return self.staging / f"part-{coordinate}.json"

    def failed(self, node: str) -> Path:
        return self.staging / f"failed-{hashlib.sha256(node.encode()).hexdigest()[:16]}.json"

    def others(self) -> list[WorkDir]:
        suffix = self.root.name.rsplit("-", 1)[1]
        found = []
        for path in self.root.parent.glob(f".global_step*.*.*-{suffix}"):
            step, incarnation, _ = path.name.split("-")[0].removeprefix(".global_step").split(".")
            if path != self.root and step.isdecimal() and incarnation.isdecimal():
                found.append(WorkDir(path, self.job_id, Label(int(incarnation), int(step))))
        return found


@dataclass(frozen=True)
class SourceBlock:
    entry: Entry  # which block it is, and the checksum taken when its bytes were copied
    buffer: memoryview  # the data region that holds it at ``entry.arena_offset``, as it is now
    origin: str  # where that lies, for messages

    @property
    def data(self) -> memoryview:
        return self.buffer[self.entry.arena_offset : self.entry.arena_offset + self.entry.nbytes]

    def check(self, data: memoryview | bytes) -> None:
        """Compare bytes of it with the checksum (P5). Raises PersistError."""
        entry = self.entry
        if len(data) != entry.nbytes or checksum(data) != entry.checksum:
            raise PersistError(
                f"{entry.key.section} block {entry.key.index} of member {entry.key.member} in {self.origin} "
                f"does not match the checksum taken when it was copied; this version is not written"
            )


def write_arena(
    path: Path,
    header: ArenaHeader,
    blocks: Sequence[SourceBlock],
    on_block: Callable[[int], None] = lambda nbytes: None,
) -> FileRecord:
    """Write an arena of these blocks, one after the other, and flush it to storage. It is read as one in
    memory is, with :data:`STORAGE_KEY`. Each block is compared with its checksum as it is read (P5)."""
    geometry = Geometry.of(sum(aligned(b.entry.nbytes) for b in blocks), len(blocks))
    entries: list[Entry] = []
    offset = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for block in blocks:
            block.check(block.data)  # what changes on the way is found when it is read
            _write_all(fd, block.data, geometry.data_offset + offset)
            entries.append(replace(block.entry, arena_offset=offset))
            offset += aligned(block.entry.nbytes)
            on_block(block.entry.nbytes)
        # Nothing is decoded from what lies on storage: it has no parity.
        head = replace(header, state=ArenaState.COMMITTED, entries=(), coding="")
        body = encode_header(head, pack_entries(entries))
        record = encode_record(RecordKind.HEADER, 1, body, STORAGE_KEY)
        _write_all(fd, record, geometry.copy_offset(0))
        _write_all(fd, encode_geometry(geometry, STORAGE_KEY), 0)
        os.ftruncate(fd, geometry.file_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileRecord(geometry.file_bytes, checksum(record))


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


# --- records ---------------------------------------------------------------------------------------


def write_record(path: Path, content: Mapping[str, Any], secret: bytes) -> None:
    """Write one authenticated JSON record; it appears whole or not at all."""
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    write_durably(path, json.dumps({"mac": _mac(body, secret), "body": body}).encode())


def read_record(path: Path, secret: bytes) -> dict[str, Any] | None:
    """A record, None if it is not there (yet)."""
    try:
        envelope = json.loads(path.read_bytes())
        body, code = str(envelope["body"]), str(envelope["mac"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PersistError(f"{path}: is not a record of reft ({error!r})") from error
    if not is_same(code.encode(), _mac(body, secret).encode()):
        raise AuthenticationError(
            f"{path}: does not carry the job's secret; another job writes to the same directory under the "
            f"same name, or the file was forged. Give every job a persist.dir of its own"
        )
    content: dict[str, Any] = json.loads(body)
    return content


def _mac(body: str, secret: bytes) -> str:
    return mac(body.encode(), secret, _PERSON).hex()
