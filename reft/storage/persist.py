"""Writes a version from the memory of its nodes to storage, without the trainers.

Every node runs :func:`persist_label` for the same version. The nodes meet in one working directory
on the shared file system (:mod:`reft.storage.publish`) and nowhere else:

1. Each node pins its arenas (locks them against overwriting) and copies its coordinates' *own*
   blocks into arena files in the working directory. Every block is compared with the checksum
   taken when it was copied from training. Then the arenas are released.
2. When the parts of all nodes are present, the node of coordinate (0, 0, 0), the *leader*,
   renames the directory to its final name and makes ``latest`` name it.

On disks that only their own node sees, each node does both for its own part, and the nodes meet in
the rendezvous store instead (:mod:`reft.storage.local_disks`).

``reft persist`` exports DeepSpeed's own files in the same way (:mod:`reft.storage.export`). An
error is raised to the caller, which counts it; training and existing checkpoints are not
affected (P6).
"""

from __future__ import annotations

import errno
import logging
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from reft.backoff import Backoff
from reft.config import FaultPoint, ReftConfig
from reft.errors import OvertakenError, PersistError, ReftError
from reft.faults import FaultPlan, kill_this_node
from reft.grid import Coordinate, Degrees, VersionId
from reft.memory.arena import ARENA_SUFFIX, Arena
from reft.memory.fingerprint_record import recorded_fingerprint
from reft.memory.header import ArenaHeader
from reft.memory.jobdir import JobDir
from reft.storage import fence
from reft.storage.local_disks import (
    GivenUpElsewhereError,
    NodeParts,
    OvertakenElsewhereError,
    StoreSilentError,
)
from reft.storage.persisted import (
    FileRecord,
    PersistedInfo,
    check_files,
    format_tag,
    job_directory,
    latest_tag,
    list_persisted,
    read_marker,
)
from reft.storage.publish import (
    LEADER,
    BlockInFile,
    WorkDir,
    publish,
    read_record,
    refuse_stale,
    remove_checkpoint,
    remove_debris,
    write_arena,
    write_record,
)

logger = logging.getLogger(__name__)

_POLL_SECS = (0.02, 0.5)
MAKE_WRITABLE = (
    "mount it or make it writable, or set persist.dir to another directory that every node sees"
)
_KEEP_LONGER = "write less often, or keep one more version in memory (reft.arenas)"


@dataclass(frozen=True)
class PersistProgress:
    """Progress of this node in writing a version."""

    phase: str  # Phase: "writing", "written", "renaming", "renamed" or "latest"
    nbytes: int = 0  # Bytes of the blocks written so far
    total_bytes: int = 0  # Bytes of all blocks that this node writes

    def __str__(self) -> str:
        if self.phase != "writing":
            return self.phase
        return f"writing: {self.nbytes / 2**20:.1f} of {self.total_bytes / 2**20:.1f} MiB"


Files = Mapping[str, FileRecord]


@dataclass(frozen=True)
class PersistOptions:
    """Where a version is written, and how."""

    directory: Path  # Directory of the job on storage
    keep: int = 2  # Number of newest checkpoints to keep
    keep_epochs: int = 0  # Number of newest epochs whose checkpoints are kept as well
    epochs: int | None = None  # Number of epochs that have ended at the version; None if unknown
    # Seconds without a new part from any node after which this node gives up
    timeout_secs: float = 600.0
    # Set by another thread to make the writer give up
    stop: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[PersistProgress], None] = lambda progress: None
    export: Export | None = None  # Function that writes DeepSpeed's files; None to write arenas
    # Record of the nodes' parts, if the directory is on this node's own disk; None if all nodes
    # share the directory
    parts: NodeParts | None = None


@dataclass(frozen=True)
class VersionSource:
    """The part of a version that one process writes."""

    job_id: str  # Id of the job whose state is written
    label: VersionId
    degrees: Degrees  # Parallel degrees of the job
    # Header of each coordinate's arena that this process writes
    headers: Mapping[Coordinate, ArenaHeader]
    # Each coordinate's own blocks: its shard of the replicated image, its owned image and its
    # host image; for a node's own disk, redundant blocks as well. For an export in DeepSpeed's
    # format, the complete replicated image instead of the shard.
    blocks: Mapping[Coordinate, Sequence[BlockInFile]]
    secret: bytes  # Key that authenticates the records which the nodes exchange through files
    node: str  # Id of this node, for messages
    fingerprint: str | None = None  # Encoded fingerprint of the job; None if unknown
    writer: int = 0  # Incarnation of the writing process, if later than the version's

    @property
    def leads(self) -> bool:
        return LEADER in self.blocks


Export = Callable[[VersionSource, WorkDir, Coordinate, Callable[[int], None]], Files]
"""Function that writes the files of a coordinate into a working directory, and calls back with
the number of bytes of each block that is written."""


def persist_label(
    job_dir: JobDir,
    label: VersionId,
    config: ReftConfig,
    *,
    epochs: int | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[PersistProgress], None] = lambda progress: None,
) -> Path:
    """Write this node's part of a committed version, and wait until the checkpoint is complete.

    Called on every node of the job for the same version. The arenas that hold the version are
    pinned only while they are read.

    Args:
        job_dir: the job's memory on this node.
        label: the version.
        config: the job's ``reft`` block.
        epochs: number of epochs that have ended at the version; None if unknown.
        stop: event that another thread sets to make this one give up.
        progress: called while blocks are written, and at each phase.

    Returns:
        The checkpoint's directory.

    Raises:
        OvertakenError: memory no longer holds the version, since newer versions replaced it.
        FencedError: a newer incarnation of the job writes there.
        PersistError: the version could not be written for another reason.
    """
    if config.persist.dir is None:
        raise PersistError(
            'there is no directory to persist to; write "persist": {"dir": ...} into "reft"'
        )
    with ExitStack() as pins, ExitStack() as opened:
        parts = None
        if config.persist.local:
            parts = opened.enter_context(closing(NodeParts.of_job(job_dir.job_id, job_dir.node)))
        options = PersistOptions(
            directory=job_directory(config.persist.dir, job_dir.job_id),
            keep=config.persist.keep,
            keep_epochs=config.persist.keep_epochs,
            epochs=epochs,
            timeout_secs=config.persist.timeout_secs,
            stop=stop or threading.Event(),
            progress=progress,
            parts=parts,
        )
        try:
            source = _pin(job_dir, label, pins, redundant=parts is not None)
        except OvertakenError as error:
            if isinstance(error, HeldError):
                raise
            if parts is not None:
                parts.fail(label, error)
            else:
                _notify_overtaken(job_dir, label, options.directory, error)
            raise
        return write_version(
            source, options, unpin=pins.close, reach=_fault_points(config, source)
        ).path


def _fault_points(config: ReftConfig, source: VersionSource) -> Callable[[Coordinate], None]:
    plans = {
        c: FaultPlan(
            config.faults,
            c,
            source.label.incarnation,
            lambda: kill_this_node(config.job_memory_dir),
        )
        for c in source.blocks
    }
    return lambda coordinate: plans[coordinate].reach(FaultPoint.DURING_PERSIST, source.label.step)


def reason_unwritable(directory: Path) -> str:
    """Return why this host cannot write to a persist directory; "" if it can. No file is left
    there.

    The directory may not exist yet, because the first write creates it. If its parent is
    missing, the file system is taken as not mounted.
    """
    try:
        with TemporaryFile(dir=directory if directory.exists() else directory.parent):
            return ""
    except OSError as error:
        return f"{error.strerror or error} (tried on host {socket.gethostname()})"


# --- the version's arenas on this node ------------------------------------------------------------


class HeldError(OvertakenError):
    """A trainer of this node has locked an arena that still holds the version, so a later
    attempt may succeed."""


def _notify_overtaken(
    job_dir: JobDir, label: VersionId, directory: Path, error: OvertakenError
) -> None:
    """Leave a record in the working directory which tells the other nodes not to wait for this
    node's part.

    The leader removes the record with the working directory when it writes a newer version.
    """
    writer = max(label.incarnation, job_dir.noted_incarnation())
    work = WorkDir.of(directory, job_dir.job_id, label, writer)
    try:
        if published(work) is not None:
            return
        fence.check(directory, job_dir.job_id, writer)
        _make_directory(work)
        _leave_reason(work, job_dir.node, error, job_dir.secret)
    except (ReftError, OSError) as cause:
        logger.info(
            "the other nodes could not be informed that memory moved past %s here: %s", label, cause
        )


def _pin(
    job_dir: JobDir, label: VersionId, pins: ExitStack, *, redundant: bool = False
) -> VersionSource:
    """Find the arenas that hold the version ``label``, and lock them against writers until
    ``pins`` is closed.

    Args:
        job_dir: the job's memory on this node.
        label: the version.
        pins: releases the arenas when it is closed.
        redundant: whether redundant blocks are written as well as each coordinate's own.
    """
    held: dict[Coordinate, tuple[Arena, ArenaHeader]] = {}
    newer: set[Coordinate] = set()
    problems: list[str] = []
    for path, arena in job_dir.scan():
        if isinstance(arena, str):
            problems.append(arena)
            continue
        pins.callback(arena.close)
        header = arena.header()
        if header is None or header.coordinate in held:
            continue
        if header.label != label:
            if header.label.incarnation == label.incarnation and header.label > label:
                newer.add(header.coordinate)
            continue
        pinned = arena.lock_shared()
        # Read the header again: it may have changed before the lock was taken
        now = arena.header()
        there = now is not None and now.label == label and now.state.whole
        if now is None or not pinned or not there:
            kind = HeldError if there else OvertakenError
            raise kind(f"{path}: {label} is being overwritten; {_KEEP_LONGER}")
        held[now.coordinate] = (arena, now)
    if held and (missing := sorted(newer - held.keys())):
        of = ", ".join(map(str, missing))
        raise OvertakenError(
            f"{job_dir.path}: no arena of {of} holds {label} any more; {_KEEP_LONGER}"
        )
    if not held:
        found = f" ({'; '.join(problems)})" if problems else ""
        raise OvertakenError(
            f"{job_dir.path}: no arena holds {label} any more{found}; {_KEEP_LONGER}"
        )
    return VersionSource(
        job_id=job_dir.job_id,
        label=label,
        degrees=next(header.degrees for _, header in held.values()),
        headers={c: header for c, (_, header) in held.items()},
        blocks={c: _blocks(arena, header, redundant) for c, (arena, header) in held.items()},
        secret=job_dir.secret,
        node=job_dir.node,
        fingerprint=recorded_fingerprint(job_dir.path, label.incarnation),
        writer=max(label.incarnation, job_dir.noted_incarnation()),
    )


def _blocks(arena: Arena, header: ArenaHeader, redundant: bool) -> list[BlockInFile]:
    return [
        BlockInFile(entry, arena.data, str(arena.path))
        for entry in header.entries
        if entry.owner or redundant
    ]


# --- the protocol ---------------------------------------------------------------------------------


def write_version(
    source: VersionSource,
    options: PersistOptions,
    *,
    unpin: Callable[[], None] = lambda: None,
    reach: Callable[[Coordinate], None] = lambda coordinate: None,
) -> PersistedInfo:
    """Write this process's part of a version, and wait until the checkpoint has its final name.

    If the leader fails, it removes the working directory; if another node fails, it leaves a
    record with the reason there.

    Args:
        source: the part of the version that this process writes.
        options: where the version is written, and how.
        unpin: function that releases the arenas; called when the blocks have been read.
        reach: called in the middle of writing the blocks of each coordinate, for fault injection.

    Raises:
        FencedError: a newer incarnation of the job writes there.
        PersistError: the version could not be written for another reason.
    """
    writing = _Writing(source, options)
    try:
        present = published(writing.work)
        if present is not None and (options.parts is None or writing.is_confirmed(present)):
            return present
        writing.is_repeated = present is not None
        fence.check(options.directory, source.job_id, writing.incarnation)
        refuse_stale(options.directory, source.job_id, source.label)
        return writing.write(unpin, reach)
    except OSError as error:
        if isinstance(error, ReftError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        change = f"make room in {options.directory}" if full else MAKE_WRITABLE
        raise PersistError(
            f"{error.filename or options.directory}: {error.strerror or error}; {change}"
        ) from error


def _make_directory(work: WorkDir) -> None:
    # Create the persist directory, as DeepSpeed does. If its parent is missing, the file system
    # is taken as not mounted, and nothing is created.
    for directory in (work.root.parent.parent, work.root.parent):
        with suppress(FileExistsError):
            directory.mkdir()
    work.staging.mkdir(parents=True, exist_ok=True)


class _Writing:
    """One process's part in writing one version."""

    def __init__(self, source: VersionSource, options: PersistOptions) -> None:
        self.source = source
        self.options = options
        self.work = WorkDir.of(options.directory, source.job_id, source.label, source.writer)
        # Incarnation of the writing process
        self.incarnation = max(source.writer, source.label.incarnation)
        # A node's own disk has its part only, which the node itself publishes
        self.leads = source.leads or options.parts is not None
        everyone = source.degrees.coordinates() if options.parts is None else source.blocks
        self.everyone: Sequence[Coordinate] = tuple(everyone)
        self.is_repeated = False  # Whether an earlier attempt has left this node's part

    def write(
        self, unpin: Callable[[], None], reach: Callable[[Coordinate], None]
    ) -> PersistedInfo:
        try:
            self._open()
            self._write_parts(reach)
            unpin()
            return self._finish() if self.leads else self._wait_for_name()
        except BaseException as error:
            self._give_up(error)
            raise

    def _open(self) -> None:
        if self.options.parts is not None:
            self._require_record(self.options.parts)
        _make_directory(self.work)
        if self.leads:
            fence.claim(self.work.root.parent, self.work.job_id, self.incarnation)
            remove_debris(self.work)
        self.work.failed(self.source.node).unlink(missing_ok=True)

    def _write_parts(self, reach: Callable[[Coordinate], None]) -> None:
        work, source, options = self.work, self.source, self.options
        total = sum(b.entry.nbytes for blocks in source.blocks.values() for b in blocks)
        export = options.export or _write_arena
        written = 0

        def on_block(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            if options.stop.is_set():
                raise PersistError(f"{work.label}: writing was stopped")
            options.progress(PersistProgress("writing", written, total))

        for coordinate, blocks in source.blocks.items():
            half = written + sum(b.entry.nbytes for b in blocks) // 2
            reached = False

            def tell(nbytes: int, coordinate: Coordinate = coordinate, half: int = half) -> None:
                nonlocal reached
                on_block(nbytes)
                if not reached and written >= half:
                    reached = True
                    reach(coordinate)

            files = export(source, work, coordinate, tell)
            part = {
                "label": [source.label.incarnation, source.label.step],
                "layout": source.headers[coordinate].layout,
                "files": {name: [record.nbytes, record.checksum] for name, record in files.items()},
            }
            write_record(work.part(coordinate), part, source.secret)
        options.progress(PersistProgress("written", written, total))

    def _finish(self) -> PersistedInfo:
        work, source = self.work, self.source
        self._wait_for_parts(self.everyone)
        parts = {c: self._read_part(c) for c in self.everyone}
        records = [(name, r) for part in parts.values() for name, r in part["files"].items()]
        twice = [name for name, count in Counter(name for name, _ in records).items() if count > 1]
        if twice:
            raise PersistError(
                f"{len(twice)} checkpoint files would be written by several ranks "
                f"({', '.join(twice[:3])}); "
                'remove "use_node_local_storage" from the "checkpoint" block of the DeepSpeed '
                "configuration"
            )
        info = PersistedInfo(
            directory=self.options.directory,
            tag=format_tag(source.label),
            job_id=source.job_id,
            label=source.label,
            degrees=source.degrees,
            created_unix_secs=time.time(),
            layouts={str(c): part["layout"] for c, part in parts.items()},
            files={name: FileRecord(*record) for name, record in records},
            fingerprint=source.fingerprint,
            epochs=self.options.epochs,
            arenas=self.options.export is None,
        )
        reached = lambda phase: self.options.progress(PersistProgress(phase))  # noqa: E731
        agree = lambda: self._agree(info)  # noqa: E731
        publish(
            *(work, info, self.options.keep, reached),
            keep_epochs=self.options.keep_epochs,
            agree=agree,
            writer=source.writer,
        )
        return info

    def _read_part(self, coordinate: Coordinate) -> dict[str, Any]:
        path, label = self.work.part(coordinate), self.source.label
        part = read_record(path, self.source.secret)
        if part is None:
            raise PersistError(f"{path}: is gone; the checkpoint was given up by another node")
        if part.get("label") != [label.incarnation, label.step]:
            raise PersistError(f"{path}: is of {part.get('label')}; expected {label}")
        return part

    def _give_up(self, error: BaseException) -> None:
        """Remove this process's files, and leave a record with the reason, so that other nodes
        do not wait."""
        work, source, parts = self.work, self.source, self.options.parts
        if parts is not None:
            parts.fail(source.label, error)
        if self.leads and (parts is not None or not isinstance(error, OvertakenError)):
            shutil.rmtree(work.root, ignore_errors=True)
            return
        # If memory no longer holds the version, the leader keeps the directory, because it records
        # why the write was abandoned and nodes that start writing later must read that.
        for coordinate in source.blocks:
            # Remove the record before the arena: as long as the record exists, the leader takes
            # the arena as complete.
            for path in (work.part(coordinate), work.root / arena_file(coordinate)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        if not isinstance(error, GivenUpElsewhereError):
            with suppress(OSError):
                _leave_reason(work, source.node, error, source.secret)

    # -- disks that only their own node sees -------------------------------------------------------

    def is_confirmed(self, info: PersistedInfo) -> bool:
        """Whether the version of this node's part is known to be complete on all nodes."""
        return latest_tag(info.directory) == info.tag

    def _require_record(self, parts: NodeParts) -> None:
        """Check that the version can still become complete before it is written."""
        directory = self.options.directory
        try:
            parts.require_open(self.source.label)
        except StoreSilentError:
            # This node may write one part that is not known to be complete, so that the last
            # version before a stop is on its disk, but must not fill the disk with such parts.
            stored = list_persisted(directory, self.source.job_id)
            if stored and not self.is_confirmed(stored[-1]):
                raise

    def _agree(self, info: PersistedInfo) -> None:
        """Wait until every node has its part of the version, which has its final name on this
        node's disk (P3).

        Raises:
            PersistError: the version is not complete, or that is not known.
        """
        parts, label = self.options.parts, self.source.label
        if parts is None:
            return
        try:
            parts.add(label, len(self.everyone), info.degrees.world_size)
            self._poll(lambda: [] if parts.is_complete(label) else ["the parts of the other nodes"])
        except PersistError as error:
            # An earlier attempt may have made the version complete without this node's knowledge
            if parts.fail(label, error) and not self.is_repeated:
                remove_checkpoint(info.path, label)
            raise

    # -- waiting for other nodes -------------------------------------------------------------------

    def _wait_for_name(self) -> PersistedInfo:
        found: list[PersistedInfo] = []

        def missing() -> list[str]:
            present = published(self.work)
            found.extend([present] if present is not None else [])
            late = [f"the part of {c}" for c in self.everyone if not self.work.part(c).exists()]
            return [] if found else [*late, f"the node of {LEADER} to name the checkpoint"]

        self._poll(missing, naming=True)
        return found[-1]

    def _wait_for_parts(self, coordinates: Sequence[Coordinate]) -> None:
        self._poll(
            lambda: [f"the part of {c}" for c in coordinates if not self.work.part(c).exists()]
        )

    def _poll(self, find_missing: Callable[[], list[str]], naming: bool = False) -> None:
        """Wait until nothing is missing. The timeout starts again with each part that appears."""
        poll = Backoff(*_POLL_SECS)
        seen = -1
        deadline = 0.0
        while missing := find_missing():
            if len(missing) != seen:
                seen, deadline = len(missing), time.monotonic() + self.options.timeout_secs
            self._check_others(naming)
            if time.monotonic() > deadline:
                raise PersistError(
                    f"{self.work.label}: waited {self.options.timeout_secs:g} s for "
                    f"{', '.join(missing[:4])}{' ...' if missing[4:] else ''}; check that the "
                    f"daemons of all nodes run and see {self.work.root.parent}, or raise "
                    "persist.timeout_secs"
                )
            if self.options.stop.wait(poll.failed()):
                raise PersistError(f"{self.work.label}: writing was stopped")

    def _check_others(self, naming: bool) -> None:
        work = self.work
        # While the leader renames the checkpoint, .staging disappears before the directory does.
        present = work.root if naming else work.staging
        if not present.is_dir() and published(work) is None:
            raise GivenUpElsewhereError(f"{work.label}: given up by the node of {LEADER}")
        for path in work.staging.glob("failed-*.json"):
            content = read_record(path, self.source.secret)
            if content is not None:
                kind = (
                    OvertakenElsewhereError if content.get("overtaken") else GivenUpElsewhereError
                )
                raise kind(f"{work.label}: node {content['node']} gave up: {content['error']}")
        for other in work.others():
            if other.label > work.label:
                raise OvertakenElsewhereError(
                    f"{work.label}: overtaken by {other.label}, which others write"
                )


def arena_file(coordinate: Coordinate) -> str:
    return f"{coordinate}{ARENA_SUFFIX}"


def _write_arena(
    source: VersionSource, work: WorkDir, coordinate: Coordinate, on_block: Callable[[int], None]
) -> Files:
    name = arena_file(coordinate)
    header, blocks = source.headers[coordinate], source.blocks[coordinate]
    return {name: write_arena(work.root / name, header, blocks, on_block)}


def _leave_reason(work: WorkDir, node: str, error: BaseException, secret: bytes) -> None:
    reason = {
        "node": node,
        "error": f"{type(error).__name__}: {error}",
        "overtaken": isinstance(error, OvertakenError),
    }
    write_record(work.failed(node), reason, secret)


def published(work: WorkDir) -> PersistedInfo | None:
    """Return the complete checkpoint of exactly this version; None if there is none."""
    info = read_marker(work.root.parent / format_tag(work.label))
    if info is None or (info.job_id, info.label) != (work.job_id, work.label):
        return None
    return None if check_files(info.path, info.files, read=False) else info
