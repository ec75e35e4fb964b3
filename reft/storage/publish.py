"""Publishes a checkpoint: renames its working directory, makes ``latest`` name it, removes old
checkpoints.

All nodes share a checkpoint's working directory::

    <dir>/.global_step40.2.3-1f0c9ab3.tmp/   tag global_step40, a version of incarnation 2, written
                                             by incarnation 3 of the job 1f0c9ab3
        pp0.dp0.tp0.arena ...                the checkpoint's files, of each coordinate
        .staging/part-<coordinate>.json      complete files of a coordinate, with checksums
        .staging/failed-<node>.json          why a node gave up

Every file has one writer, so nothing depends on how a shared file system merges pages. The
records (the JSON files) carry a MAC with the job's secret as key, and appear under their names
only when complete. Blocks are compared with their checksums when they are written and again when
they are read (P5, P11).

The order of operations keeps a checkpoint loadable whichever process is killed at whichever
point. All files are on storage before the directory gets its final name. That name is on storage
before ``latest`` contains it. Older checkpoints are removed only after that. An incarnation of
the job that a newer one has replaced cannot publish any more, wherever it was interrupted
(:mod:`reft.storage.fence`). A version older than the one that ``latest`` names is refused as
well: a node that was cut off must not overwrite what later starts of the job wrote.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reft.authentication import is_same, mac
from reft.durable import sync_directory, write_durably
from reft.errors import AuthenticationError, PersistError
from reft.grid import Coordinate, VersionId, aligned, given_up
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
from reft.storage import fence
from reft.storage.epochs import find_epoch_ends
from reft.storage.fence import REMOVED_SUFFIX, short_name
from reft.storage.persisted import (
    LATEST_NAME,
    MARKER_NAME,
    STORAGE_KEY,
    FileRecord,
    PersistedInfo,
    check_files,
    format_tag,
    latest_tag,
    list_persisted,
    read_marker,
)

logger = logging.getLogger(__name__)

LEADER = Coordinate(0, 0, 0)  # The node of this coordinate publishes the checkpoint

_PERSON = b"reft-persist"


@dataclass(frozen=True)
class WorkDir:
    """The working directory in which a version's checkpoint is written."""

    root: Path
    job_id: str
    label: VersionId

    @classmethod
    def of(cls, directory: Path, job_id: str, label: VersionId, writer: int = 0) -> WorkDir:
        """Return the working directory of a version.

        Args:
            directory: the job's directory.
            job_id: the job.
            label: the version.
            writer: incarnation of the writing process, if later than the version's.
        """
        writer = max(writer, label.incarnation)
        name = f".{format_tag(label)}.{label.incarnation}.{writer}-{short_name(job_id)}.tmp"
        return cls(directory / name, job_id, label)

    @property
    def staging(self) -> Path:
        return self.root / ".staging"

    @property
    def scripts(self) -> Path:
        """Directory for the scripts that DeepSpeed puts next to the tag directories."""
        return self.staging / "scripts"

    @property
    def pointers(self) -> Path:
        """Directory for files that programs expect next to ``latest``, with the name of the
        newest checkpoint."""
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
                found.append(WorkDir(path, self.job_id, VersionId(int(incarnation), int(step))))
        return found


@dataclass(frozen=True)
class BlockInFile:
    """A block, and the memory that holds it."""

    # Position and checksum; the checksum was computed when the bytes were copied from training
    entry: Entry
    buffer: memoryview  # Data region that holds the block at ``entry.arena_offset``
    origin: str  # Description of the data region, for messages

    @property
    def data(self) -> memoryview:
        return self.buffer[self.entry.arena_offset : self.entry.arena_offset + self.entry.nbytes]

    def check(self, data: memoryview | bytes) -> None:
        """Compare the block's bytes with the checksum (P5).

        Raises:
            PersistError: the bytes do not match.
        """
        entry = self.entry
        if len(data) != entry.nbytes or checksum(data) != entry.checksum:
            raise PersistError(
                f"{entry.key.section} block {entry.key.index} of member {entry.key.member} in "
                f"{self.origin} does not match the checksum taken when it was copied; this version "
                "is not written"
            )


def write_arena(
    path: Path,
    header: ArenaHeader,
    blocks: Sequence[BlockInFile],
    on_block: Callable[[int], None] = lambda nbytes: None,
) -> FileRecord:
    """Write an arena file that contains the blocks one after another, and flush it to storage.

    The file is read like an arena in memory, with STORAGE_KEY in place of the job's secret.

    Args:
        path: file to write.
        header: header of the version; its entries are replaced by those of the blocks.
        blocks: blocks to write; each is compared with its checksum when it is read (P5).
        on_block: called with the number of bytes of each block that is written.
    """
    geometry = Geometry.of(sum(aligned(b.entry.nbytes) for b in blocks), len(blocks))
    entries: list[Entry] = []
    offset = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for block in blocks:
            block.check(block.data)
            _write_all(fd, block.data, geometry.data_offset + offset)
            entries.append(replace(block.entry, arena_offset=offset))
            offset += aligned(block.entry.nbytes)
            on_block(block.entry.nbytes)
        # Without redundant blocks there is no parity, and the header needs no code for decoding.
        coding = "" if all(block.entry.owner for block in blocks) else header.coding
        head = replace(header, state=ArenaState.COMMITTED, entries=(), coding=coding)
        body = encode_header(head, pack_entries(entries))
        record = encode_record(RecordKind.HEADER, 1, body, STORAGE_KEY)
        # One fsync flushes header and superblock. Their order does not matter here: the
        # checkpoint gets its name only after this returns, so no reader opens a partly written
        # file.
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


# --- records --------------------------------------------------------------------------------------


def write_record(path: Path, content: Mapping[str, Any], secret: bytes) -> None:
    """Write one authenticated JSON record. The file appears complete or not at all."""
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    write_durably(path, json.dumps({"mac": _mac(body, secret), "body": body}).encode())


def read_record(path: Path, secret: bytes) -> dict[str, Any] | None:
    """Read a record; return None if there is none yet.

    Raises:
        AuthenticationError: the record's MAC was not made with the job's secret.
        PersistError: the file is not a record.
    """
    try:
        envelope = json.loads(path.read_bytes())
        body, code = str(envelope["body"]), str(envelope["mac"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PersistError(f"{path}: is not a record of reft ({error!r})") from error
    if not is_same(code.encode(), _mac(body, secret).encode()):
        raise AuthenticationError(
            f"{path}: does not carry the job's secret; another job writes to the same directory "
            "under the same name, or the file was forged. Give every job a persist.dir of its own"
        )
    content: dict[str, Any] = json.loads(body)
    return content


def _mac(body: str, secret: bytes) -> str:
    return mac(body.encode(), secret, _PERSON).hex()


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def publish(
    work: WorkDir,
    info: PersistedInfo,
    keep: int,
    reached: Callable[[str], None] = lambda phase: None,
    *,
    keep_epochs: int = 0,
    agree: Callable[[], None] = lambda: None,
    writer: int = 0,
) -> None:
    """Make a complete working directory the checkpoint that the job resumes from.

    Args:
        work: the working directory.
        info: marker of the checkpoint.
        keep: number of the newest checkpoints to keep.
        reached: called with "renaming", "renamed" and "latest" as these steps are reached.
        keep_epochs: number of the newest epochs whose first checkpoints are kept as well.
        agree: called when the checkpoint has its name, before ``latest`` names it and older ones
            are removed.
        writer: incarnation of the writing process, if later than the version's.

    Raises:
        FencedError: a newer incarnation of the job writes there.
        PersistError: files are missing, or storage has a newer version.
    """
    problems = check_files(work.root, info.files, read=False)
    if problems:
        raise PersistError(
            f"{work.root}: incomplete before it was published: {'; '.join(problems[:3])}"
        )
    writer = max(writer, info.label.incarnation)
    pointers = {
        LATEST_NAME: info.tag.encode(),
        **{file.name: file.read_bytes() for file in _files(work.pointers)},
    }
    try:
        with fence.switched(info.directory, info.job_id, writer, info.label, pointers) as switch:
            # Check for newer incarnations only after making the drafts. If one claims the directory
            # after this check, it deletes the drafts, and our rename fails.
            fence.check(info.directory, info.job_id, writer)
            refuse_stale(info.directory, info.job_id, info.label)
            for script in _files(work.scripts):
                script.replace(info.directory / script.name)
            # Remove the staging directory before writing the marker: a directory with a marker
            # must contain the complete checkpoint and nothing else. ``write_durably`` syncs the
            # directory, which covers this node's files; every other node has synced its own
            # files before it wrote its record.
            shutil.rmtree(work.staging)
            write_durably(
                work.root / MARKER_NAME, (json.dumps(info.to_json(), indent=1) + "\n").encode()
            )
            reached("renaming")
            _rename(work.root, info)
            reached("renamed")
            agree()
            switch()
    except FileNotFoundError:
        fence.check(info.directory, info.job_id, writer)
        raise
    reached("latest")
    prune(info, keep, keep_epochs)


def refuse_stale(directory: Path, job_id: str, label: VersionId) -> None:
    """Refuse to write a version older than the one that ``latest`` names.

    Raises:
        PersistError: ``label`` is older.
    """
    tag = latest_tag(directory)
    named = read_marker(directory / tag) if tag else None
    if named is not None and named.job_id == job_id and label < named.label:
        raise PersistError(
            f"{directory}: latest is {named.tag}, {named.label}; writing {label} is refused, as "
            "this node runs an older version of the job. If it was cut off, stop it"
        )


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _rename(source: Path, info: PersistedInfo) -> None:
    target = info.path
    if target.exists() or target.is_symlink():
        _check_replaceable(info)
        aside = info.directory / f".{info.tag}.{os.getpid()}.replaced"
        if not exchange(source, target):
            # Without an atomic exchange, the old checkpoint stays loadable under the name
            # ``aside`` meanwhile.
            target.rename(aside)
            try:
                source.rename(target)
            except OSError:
                aside.rename(target)
                raise
        else:
            source.rename(aside)
        sync_directory(info.directory)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        source.rename(target)
        sync_directory(info.directory)


def _check_replaceable(info: PersistedInfo) -> None:
    present = read_marker(info.path)
    if present is None:
        raise PersistError(
            f"{info.path} exists and was not written by reft; remove it, or give persist.dir a "
            "directory of its own"
        )
    if present.job_id != info.job_id:
        raise PersistError(
            f"{info.path} is a checkpoint of job {present.job_id}; job {info.job_id} does not "
            "replace it. Give one of them another directory"
        )
    if info.label < present.label:
        raise PersistError(
            f"{info.path} holds {present.label}; writing {info.label} is refused, as it is older"
        )


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step. Returns False if the kernel or the file system (such as
    NFS) cannot do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done = renameat2(
        _AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a))


def prune(info: PersistedInfo, keep: int, keep_epochs: int = 0) -> None:
    """Remove all but the ``keep`` newest checkpoints of the job, and those of the ``keep_epochs``
    newest epochs.

    Checkpoints of steps that the job abandoned when it went back are counted separately, so that
    they do not displace those that the job would fall back to. Only directories with reft's
    marker are removed, and never the one that ``latest`` names.
    """
    mine = list_persisted(info.directory, info.job_id)
    passed = given_up(i.label for i in mine)
    line = [i for i in mine if i.label not in passed]
    # Do not keep a directory that was renamed because it was being replaced.
    behind = [i for i in mine if i.label in passed and not i.tag.startswith(".")]
    spared = {latest_tag(info.directory), *(i.tag for i in (*line[-keep:], *behind[-keep:]))}
    spared |= {i.tag for i in find_epoch_ends(line, keep_epochs)}
    for old in mine:
        if old.tag not in spared:
            logger.info("removing %s", old.path)
            remove_checkpoint(old.path, old.label)


def remove_checkpoint(path: Path, label: VersionId) -> None:
    """Remove a checkpoint's directory.

    The directory is renamed first, so that what an interrupted removal leaves is not taken for a
    checkpoint; the next writer removes the rest.

    Args:
        path: the directory.
        label: the version to remove. The directory is kept if it has been replaced by another
            version in the meantime.
    """
    try:
        doomed = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}{REMOVED_SUFFIX}")
        path.rename(doomed)
        found = read_marker(doomed)
        if found is not None and found.label != label:
            doomed.rename(path)
            return
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
        return
    shutil.rmtree(doomed, ignore_errors=True)


def remove_debris(work: WorkDir) -> None:
    """Remove what interrupted attempts of this job have left: older working directories and
    partly removed checkpoints. Only the leader calls this, before an attempt."""
    for other in work.others():
        if other.label < work.label:
            shutil.rmtree(other.root, ignore_errors=True)
    for path in work.root.parent.glob(f".{LATEST_NAME}.*.new"):
        path.unlink(missing_ok=True)
    fence.remove_drafts(work.root.parent, work.job_id, lambda _, label: label < work.label)
    for path in work.root.parent.glob(f".*{REMOVED_SUFFIX}"):
        with suppress(PersistError):
            info = read_marker(path)
            if info is None or info.job_id == work.job_id:
                shutil.rmtree(path, ignore_errors=True)
