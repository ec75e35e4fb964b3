"""Finds and reads the checkpoints that reft wrote into a persist directory.

A persist directory holds one directory for each job (P7), which ``load_checkpoint`` takes as
``load_dir``. It contains ``latest`` and a tag directory for each checkpoint, with the arenas of
all coordinates and a marker, ``reft.json``. Exports of ``reft persist``, and checkpoints of
format 1, have DeepSpeed's own files instead of arenas, and reft's host files next to them. A tag
directory gets its final name only when all its files are complete and on storage, so under a
final name a marker proves that all files are there.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from reft.errors import ArenaError, PersistError
from reft.grid import Degrees, VersionId
from reft.memory.arena import Arena
from reft.storage import fence

logger = logging.getLogger(__name__)

MARKER_NAME = "reft.json"
LATEST_NAME = "latest"
MARKER_FORMAT = 2
# Fixed, publicly known key of the MACs in arenas on storage. A job's secret may be lost with its
# memory, so these MACs detect damage, not forgery.
STORAGE_KEY = b"reft on storage"
_READ_BYTES = 4 * 2**20
_TAG = re.compile(r"^\.?global_step\d+")


@dataclass(frozen=True)
class FileRecord:
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class PersistedInfo:
    """A checkpoint's marker."""

    directory: Path  # The job's directory, which ``load_checkpoint`` takes as ``load_dir``
    tag: str  # Name of the checkpoint's directory within ``directory``
    job_id: str  # Job whose state the checkpoint holds
    label: VersionId  # Incarnation and step of the state
    degrees: Degrees  # Parallel degrees of the job
    created_unix_secs: float  # Time at which the checkpoint was completed
    # Hash of the arena layout, by coordinate
    layouts: Mapping[str, str] = field(default_factory=dict)
    # Length and checksum of each file except the marker, by name
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    fingerprint: str | None = None  # Encoded fingerprint of the job; None if unknown
    # Number of epochs (passes over the data) that have ended; None if unknown
    epochs: int | None = None
    # True if the checkpoint consists of arenas, False if of DeepSpeed's files
    arenas: bool = False

    @property
    def path(self) -> Path:
        return self.directory / self.tag

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files.values())

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.label} of job {self.job_id}, {self.degrees}, "
            f"{self.nbytes / 2**20:.1f} MiB"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": MARKER_FORMAT if self.arenas else 1,
            "job_id": self.job_id,
            "tag": self.tag,
            "incarnation": self.label.incarnation,
            "step": self.label.step,
            "degrees": [self.degrees.pp, self.degrees.dp, self.degrees.tp],
            "layouts": dict(self.layouts),
            "created_unix_secs": self.created_unix_secs,
            "files": {name: [f.nbytes, f.checksum] for name, f in sorted(self.files.items())},
            "fingerprint": self.fingerprint,
            "epochs": self.epochs,
        }


def job_directory(directory: Path, job_id: str) -> Path:
    """Return a job's own directory in a persist directory (P7).

    Raises:
        PersistError: the job id is not valid as the name of a directory.
    """
    if job_id in ("", ".", "..") or "/" in job_id or "\0" in job_id:
        raise PersistError(
            f"job id {job_id!r} cannot name a directory in {directory}; choose another one"
        )
    return directory / job_id


def format_tag(label: VersionId) -> str:
    """Return the tag of a version, which equals DeepSpeed's tag for the same step."""
    return f"global_step{label.step}"


def read_marker(checkpoint: Path) -> PersistedInfo | None:
    """Return the marker in a checkpoint's directory; None if reft did not write the directory.

    Raises:
        PersistError: the marker cannot be read, or is of a later format.
    """
    try:
        text = (checkpoint / MARKER_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PersistError(
            f"{checkpoint / MARKER_NAME}: cannot be read: {error.strerror}"
        ) from error
    try:
        content = json.loads(text)
        if content["format"] > MARKER_FORMAT:
            raise PersistError(
                f"{checkpoint / MARKER_NAME}: written in format {content['format']}; this reft "
                f"reads format {MARKER_FORMAT}: use the reft that wrote it, or a later one"
            )
        return PersistedInfo(
            directory=checkpoint.parent,
            tag=checkpoint.name,
            job_id=content["job_id"],
            label=VersionId(int(content["incarnation"]), int(content["step"])),
            degrees=Degrees(*(int(n) for n in content["degrees"])),
            created_unix_secs=float(content["created_unix_secs"]),
            layouts=content["layouts"],
            files={
                _file(name): FileRecord(int(v[0]), int(v[1]))
                for name, v in content["files"].items()
            },
            fingerprint=content.get("fingerprint"),
            epochs=content.get("epochs"),
            arenas=content["format"] > 1,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise PersistError(
            f"{checkpoint / MARKER_NAME}: is not a marker of a persisted checkpoint ({error!r}); "
            "remove the directory if it is not needed"
        ) from error


def _file(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name


def find_markers(
    directory: Path, job_id: str | None = None
) -> tuple[list[PersistedInfo], list[str]]:
    """Find the checkpoints in a directory.

    A directory that was renamed to ``.global_step…`` because it is being replaced is included:
    until its replacement has the name, it may be the only checkpoint.

    Returns:
        The checkpoints that reft wrote, complete or not, the oldest first; and the reasons why
        other markers cannot be read.
    """
    found, problems = [], []
    for name in _subdirectories(directory):
        if not _TAG.match(name) or name.endswith(".tmp"):
            continue
        try:
            info = read_marker(directory / name)
        except PersistError as error:
            problems.append(str(error))
            continue
        if info is not None and job_id in (None, info.job_id):
            found.append(info)
    # If several directories hold the same version, the one with the final name comes last.
    return sorted(
        found, key=lambda i: (i.label, i.created_unix_secs, not i.tag.startswith("."))
    ), problems


def list_persisted(directory: Path, job_id: str | None = None) -> list[PersistedInfo]:
    """Return the complete checkpoints in ``directory``, the oldest first. Incomplete ones are
    logged and left out.
    """
    found, skipped = find_markers(directory, job_id)
    for problem in skipped:
        logger.warning("skipped: %s", problem)
    complete = []
    for info in found:
        problems = check_files(info.path, info.files, read=False)
        if problems:
            logger.warning(
                "%s is incomplete and is not used: %s", info.path, "; ".join(problems[:3])
            )
        else:
            complete.append(info)
    return complete


def newest_incarnation(directory: Path, job_id: str) -> int:
    """Return the newest incarnation of the job in any marker or claim of the directory; 0 if none.

    Damaged checkpoints are included, because the next incarnation must be newer than all others.

    Raises:
        PersistError: the directory cannot be read.
    """
    try:
        claimed = fence.claimed(directory, job_id)
    except OSError as error:
        raise PersistError(
            f"{directory}: cannot be listed: {error.strerror}; check persist.dir"
        ) from error
    return max(claimed, *(info.label.incarnation for info in find_markers(directory, job_id)[0]), 0)


def latest_tag(directory: Path) -> str | None:
    """Return the tag in the file ``latest``; None if there is no such file, or no valid tag in
    it."""
    try:
        tag = (directory / LATEST_NAME).read_text(errors="replace").strip()
        return _file(tag)
    except (OSError, ValueError):
        return None


def check_files(
    checkpoint: Path, files: Mapping[str, FileRecord], *, read: bool = True
) -> list[str]:
    """Compare files of a checkpoint with their records (P5).

    Args:
        checkpoint: directory of the checkpoint.
        files: recorded lengths and checksums, by file name.
        read: True to compare checksums, False to compare only lengths.

    Returns:
        One line of text for each file that differs.
    """
    problems = []
    for name, record in files.items():
        try:
            nbytes = (checkpoint / name).stat().st_size
            if nbytes != record.nbytes:
                problems.append(f"{name}: {nbytes} bytes, expected {record.nbytes}")
            elif read and (found := file_checksum(checkpoint / name)) != record.checksum:
                problems.append(f"{name}: checksum {found:016x}, expected {record.checksum:016x}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def check_arenas(checkpoint: Path, names: Iterable[str]) -> list[str]:
    """Compare all blocks of a checkpoint's arenas with their checksums (P5).

    Returns:
        One line of text for each block that differs.
    """
    problems = []
    for name in names:
        try:
            with Arena.open(checkpoint / name, STORAGE_KEY) as arena:
                header = arena.header()
                bad = [e.key for e in header.entries if not arena.verify(e)] if header else []
        except (ArenaError, OSError) as error:
            problems.append(str(error))
            continue
        problems += [
            f"{name}: {k.section} block {k.index} of member {k.member}: checksum" for k in bad
        ]
    return problems


def file_checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.intdigest()


def _subdirectories(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PersistError(
            f"{directory}: cannot be listed: {error.strerror}; check persist.dir"
        ) from error
