"""The working directory of one checkpoint that is being written, shared by all nodes.

    <dir>/.global_step40.2.3-1f0c9ab3.tmp/   tag, incarnation, the start that writes it, job
        .staging/image-<coordinate>          blocks of that coordinate, one after the other
        .staging/part-<coordinate>.json      which blocks, and their checksums: the image is complete
        .staging/done-<coordinate>.json      which checkpoint files were made of it: they are complete
        .staging/failed-<node>.json          this node gave up, and why
        mp_rank_00_model_states.pt ...       the checkpoint

Every file has one writer, so that nothing depends on how a shared file system merges pages. The
records carry a MAC of the job's secret, and image bytes are compared with their checksums when they are
written and again when they are read (P5, P11). Only whole records ever have their final name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.control.wire import is_same, mac
from reft.durable import write_durably
from reft.errors import AuthenticationError, PersistError
from reft.grid import Coordinate, Degrees
from reft.memory.header import checksum
from reft.naming import Label
from reft.protect.blocks import ALIGNMENT_BYTES, BlockKey, Section
from reft.storage.fence import short_name
from reft.storage.persisted import tag_of

logger = logging.getLogger(__name__)

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

    def image(self, coordinate: Coordinate) -> Path:
        return self.staging / f"image-{coordinate}"

    def part(self, coordinate: Coordinate) -> Path:
        return self.staging / f"part-{coordinate}.json"

    def done(self, coordinate: Coordinate) -> Path:
        return self.staging / f"done-{coordinate}.json"

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
    key: BlockKey  # identity within the sharding group
    start_bytes: int  # offset in the section's image
    image_bytes: int  # length of that image
    checksum: int  # xxh3_64, taken when the bytes were copied
    data: memoryview  # the bytes as they are now
    origin: str  # where they lie, for messages


@dataclass(frozen=True)
class StagedBlock:
    section: Section
    start_bytes: int
    nbytes: int
    checksum: int
    file_offset: int


@dataclass(frozen=True)
class Part:
    coordinate: Coordinate
    degrees: Degrees
    label: Label
    layout: str
    image_bytes: Mapping[Section, int]
    blocks: tuple[StagedBlock, ...]

    def to_json(self) -> Any:
        return _PART.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Part:
        return _PART.validate_python(content)


_PART = TypeAdapter(Part)


def stage_image(
    path: Path, blocks: Iterable[SourceBlock], on_block: Callable[[int], None] = lambda nbytes: None
) -> tuple[StagedBlock, ...]:
    """Write blocks one after the other and flush them to storage. ``blocks``: of one coordinate, each
    compared with its checksum as it is read (P5)."""
    staged: list[StagedBlock] = []
    offset = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for block in blocks:
            copy = bytes(block.data)  # what is compared is what is written
            if checksum(copy) != block.checksum:
                raise PersistError(
                    f"{block.key.section} block {block.key.index} of member {block.key.member} in "
                    f"{block.origin} does not match the checksum taken when it was copied; this version is "
                    f"not written"
                )
            _write_all(fd, copy, offset)
            staged.append(
                StagedBlock(block.key.section, block.start_bytes, len(copy), block.checksum, offset)
            )
            offset += -(-len(copy) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            on_block(len(copy))
        os.fsync(fd)
    finally:
        os.close(fd)
    return tuple(staged)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


class StagedImages:
    """The images of one coordinate, read from the image files of its sharding group. ``coordinate``: whose
    owned and host sections are read. ``parts``: records of every member of its sharding group, by dp."""

    def __init__(self, work: WorkDir, coordinate: Coordinate, parts: Sequence[Part]) -> None:
        self._maps = [_map(work.image(part.coordinate)) for part in parts]
        self._sound: set[tuple[int, int]] = set()
        self._blocks: dict[Section, list[tuple[int, StagedBlock]]] = {s: [] for s in Section}
        sizes: dict[Section, set[int]] = {s: set() for s in Section}
        for at, part in enumerate(parts):
            own = part.coordinate == coordinate
            for block in part.blocks:
                if block.section is Section.REPLICATED or own:
                    self._blocks[block.section].append((at, block))
            for section, nbytes in part.image_bytes.items():
                if section is Section.REPLICATED or own:
                    sizes[section].add(nbytes)
        for section, found in self._blocks.items():
            found.sort(key=lambda pair: pair[1].start_bytes)
            self._check_cover(section, [b for _, b in found], sizes[section], coordinate)
        self._starts = {s: [b.start_bytes for _, b in found] for s, found in self._blocks.items()}

    @staticmethod
    def _check_cover(
        section: Section, blocks: Sequence[StagedBlock], sizes: set[int], coordinate: Coordinate
    ) -> None:
        end = 0
        for block in blocks:
            if block.start_bytes != end:
                break
            end += block.nbytes
        if len(sizes) > 1 or sum(b.nbytes for b in blocks) != end or end != sum(sizes):
            raise PersistError(
                f"the {section} image of {coordinate} is not covered exactly: blocks reach byte {end}, "
                f"image sizes on record are {sorted(sizes)}"
            )

    def image_bytes(self, section: Section) -> int:
        blocks = self._blocks[section]
        return blocks[-1][1].start_bytes + blocks[-1][1].nbytes if blocks else 0

    def read(self, section: Section, start: int, nbytes: int) -> memoryview:
        """Bytes ``[start, start + nbytes)`` of an image, every block of them compared with its checksum.
        Returns a private, writable view: of the mapped file where the range lies in one, else of a copy."""
        if start < 0 or nbytes < 1 or start + nbytes > self.image_bytes(section):
            raise PersistError(
                f"bytes [{start}, {start + nbytes}) were asked of the {section} image of "
                f"{self.image_bytes(section)} bytes; the checkpoint template belongs to another layout"
            )
        first = bisect_right(self._starts[section], start) - 1
        pieces: list[tuple[int, int, int]] = []  # file, offset, length; neighbours merged
        position, stop = start, start + nbytes
        for at, block in self._blocks[section][first:]:
            if position >= stop:
                break
            self._verify(at, block)
            skip = position - block.start_bytes
            length = min(block.nbytes - skip, stop - position)
            offset = block.file_offset + skip
            if pieces and pieces[-1][0] == at and sum(pieces[-1][1:]) == offset:
                pieces[-1] = (at, pieces[-1][1], pieces[-1][2] + length)
            else:
                pieces.append((at, offset, length))
            position += length
        views = [memoryview(self._maps[at])[offset : offset + length] for at, offset, length in pieces]
        return views[0] if len(views) == 1 else memoryview(bytearray().join(views))

    def _verify(self, at: int, block: StagedBlock) -> None:
        if (at, block.file_offset) in self._sound:
            return
        data = memoryview(self._maps[at])[block.file_offset : block.file_offset + block.nbytes]
        if len(data) != block.nbytes or checksum(data) != block.checksum:
            raise PersistError(
                f"{block.section} bytes from {block.start_bytes} on are not in storage as they were written "
                f"({len(data)} of {block.nbytes} bytes readable); check the file system of persist.dir"
            )
        self._sound.add((at, block.file_offset))

    def close(self) -> None:
        """Unmap. Views that are still alive keep their mapping."""
        for mapping in self._maps:
            if isinstance(mapping, mmap.mmap):
                with suppress(BufferError):
                    mapping.close()


def _map(path: Path) -> mmap.mmap | bytearray:
    """The file, privately writable, so that tensors may be views of it."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return bytearray()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


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
