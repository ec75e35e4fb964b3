"""Finds checkpoints on storage, orders them and checks their integrity.

Rank 0 searches and sends the result to all ranks; if each node has a disk of its own, one rank of
each node does. Arenas on storage are recovered like those in
memory: blocks are verified while they are read. If the job already has state that a failed load
would destroy, all blocks are verified before the load as well. One rank compares each of
DeepSpeed's files with its checksum before any rank loads it (P5). If any rank finds a problem,
all ranks refuse the checkpoint (P6) and try the next older one.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reft.config import PersistConfig
from reft.control.control import ControlGroup
from reft.errors import PersistError, ReftError
from reft.grid import Coordinate, Degrees, VersionId, given_up
from reft.state.codec import decode, encode
from reft.storage.persisted import (
    FileRecord,
    PersistedInfo,
    check_arenas,
    check_files,
    find_markers,
    job_directory,
    latest_tag,
    read_marker,
)

logger = logging.getLogger(__name__)

_HOST_FILE = re.compile(r"reft_host-pp(\d+)\.dp(\d+)\.tp(\d+)\.msgpack")


def read_degrees(checkpoint: Path) -> Degrees | None:
    """Return the degrees of the job that wrote a checkpoint, derived from the names of reft's host
    files.

    Returns:
        The degrees; None unless every rank has a file.
    """
    found = {
        tuple(map(int, match.groups()))
        for path in checkpoint.glob("reft_host-*.msgpack")
        if (match := _HOST_FILE.fullmatch(path.name))
    }
    if not found:
        return None
    degrees = Degrees(*(1 + max(at[axis] for at in found) for axis in range(3)))
    every = set(product(range(degrees.pp), range(degrees.dp), range(degrees.tp)))
    return degrees if found == every else None


# Key, in the file with a rank's host state, under which the saving job, its incarnation and the
# step are recorded
SAVED_BY = "saved_by"
_TAG_STEP = re.compile(r"^\.?global_step(\d+)")


@dataclass(frozen=True)
class DiskCheckpoint:
    """A checkpoint that was found on storage."""

    directory: Path  # Directory to pass to ``load_checkpoint`` as ``load_dir``
    tag: str
    step: int  # Optimizer steps at which it was taken; -1 if unknown before it is loaded
    # Version id if this job wrote the checkpoint; None if another job or a job without reft did
    label: VersionId | None = None
    job_id: str | None = None  # Job that wrote the checkpoint; None if unknown
    # Lengths and checksums of the files, by name; None if none are recorded
    files: Mapping[str, FileRecord] | None = None
    # For a checkpoint that consists of arenas, the degrees of the job that wrote it; None if it
    # consists of DeepSpeed's files
    arenas: Degrees | None = None
    # Encoded fingerprint of the job that wrote the checkpoint; None if unknown
    fingerprint: str | None = None
    # Whether each node has only its own part, in its own directory; ``directory``, ``files`` are
    # those of one of the nodes
    local: bool = False

    @property
    def path(self) -> Path:
        return self.directory / self.tag

    def part_at(self, persist_dir: Path | None) -> Path | None:
        """Return the directory with this node's part of a local checkpoint.

        Args:
            persist_dir: this node's persist directory.

        Returns:
            The directory; None if this node's disk has no part of this version.
        """
        assert persist_dir is not None
        path = job_directory(persist_dir, str(self.job_id)) / self.tag
        info = read_marker(path)
        return path if info is not None and info.label == self.label else None

    def __str__(self) -> str:
        return str(self.path)

    def newer_than(self, label: VersionId) -> bool:
        """Return whether the checkpoint is newer than a version of this job.

        A checkpoint of an older incarnation is never newer, even if its step is higher: the job has
        gone back to an earlier step since. For a checkpoint that this job did not write, only the
        step decides.
        """
        return self.step > label.step if self.label is None else self.label > label


@dataclass(frozen=True)
class LoadedCheckpoint:
    checkpoints: tuple[DiskCheckpoint, ...] = ()  # Usable checkpoints, newest first
    problems: tuple[str, ...] = ()  # One text for each damaged or incomplete checkpoint

    def encode(self) -> bytes:
        return encode(_FOUND.dump_python(self, mode="json"))

    @classmethod
    def decode(cls, data: bytes) -> LoadedCheckpoint:
        return _FOUND.validate_python(decode(data))


_FOUND = TypeAdapter(LoadedCheckpoint)


# --- searching ------------------------------------------------------------------------------------


def find_on_disk(load_dir: Path | None, persist_dir: Path | None, job_id: str) -> LoadedCheckpoint:
    """Return the checkpoint that ``latest`` names in the user's directory, and those that reft
    wrote for this job.

    Never raises: the other ranks wait for the rank that searches.
    """
    persisted: list[DiskCheckpoint] = []
    problems: list[str] = []
    own: DiskCheckpoint | None = None
    try:
        if persist_dir is not None:
            infos, bad = find_markers(job_directory(persist_dir, job_id), job_id)
            persisted = [_read_marker(info, job_id) for info in infos]
            problems += bad
    except Exception as error:
        problems.append(_words(error))
    try:
        if load_dir is not None:
            own = _latest(load_dir, job_id, problems)
            if own is not None and own.files is not None and own.job_id is not None:
                # reft wrote this checkpoint: if it is damaged, the older ones next to it can be
                # used.
                infos, bad = find_markers(load_dir, own.job_id)
                known = {own.path.resolve(), *(c.path.resolve() for c in persisted)}
                persisted += [
                    _read_marker(i, job_id) for i in infos if i.path.resolve() not in known
                ]
                problems += bad
    except Exception as error:
        problems.append(_words(error))
    if own is not None and any(c.path.resolve() == own.path.resolve() for c in persisted):
        own = None
    checkpoints, left_out = in_order(persisted, own)
    return LoadedCheckpoint(tuple(checkpoints), (*problems, *left_out))


def merge_found(found: Sequence[LoadedCheckpoint]) -> LoadedCheckpoint:
    """Merge what the nodes have found on disks of their own: each version once."""
    checkpoints = {c.label or c.path: c for one in reversed(found) for c in one.checkpoints}
    ordered, left_out = in_order(checkpoints.values(), None)
    problems = [problem for one in found for problem in one.problems]
    return LoadedCheckpoint(tuple(ordered), tuple(dict.fromkeys([*problems, *left_out])))


def find_named(directory: Path, tag: Any, job_id: str) -> LoadedCheckpoint:
    """Return the checkpoint with the given tag; if ``tag`` is None, the one that ``latest`` names.

    The result is empty if there is no such checkpoint. Never raises.
    """
    try:
        tag = latest_tag(directory) if tag is None else str(tag)
        if tag is None or not (directory / tag).is_dir():
            return LoadedCheckpoint()
        return LoadedCheckpoint((_describe(directory, tag, job_id),))
    except Exception as error:
        return LoadedCheckpoint(problems=(_words(error),))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ReftError) else f"{type(error).__name__}: {error}"


def in_order(
    labelled: Iterable[DiskCheckpoint], own: DiskCheckpoint | None
) -> tuple[list[DiskCheckpoint], list[str]]:
    """Sort checkpoints, and drop those that the job abandoned when it went back.

    A version is abandoned if a later incarnation of the job continued from an earlier step.

    Returns:
        The checkpoints, newest first, and one line of text for each dropped one.
    """
    known = [*labelled, *([] if own is None else [own])]
    ours = [(c.label, not c.tag.startswith("."), c) for c in known if c.label is not None]
    ours.sort(key=lambda entry: entry[:2], reverse=True)
    passed = given_up(label for label, _, _ in ours)
    taken = [c for label, _, c in ours if label not in passed]
    left_out = [
        f"{c}: {label} was discarded when the job went back to an earlier step ({passed[label]})"
        for label, _, c in ours
        if label in passed
    ]
    for c in sorted((c for c in known if c.label is None), key=lambda c: c.step):
        at = next((i for i, t in enumerate(taken) if t.step <= c.step), len(taken))
        taken.insert(at, c)
    return taken, left_out


def _latest(directory: Path, job_id: str, problems: list[str]) -> DiskCheckpoint | None:
    if not (directory / "latest").is_file():
        return None
    tag = latest_tag(directory)
    if tag is None or not (directory / tag).is_dir():
        there = sorted(p.name for p in directory.iterdir() if p.is_dir())
        problems.append(
            f"{directory / 'latest'} is torn or names no checkpoint (found {tag!r}; there are "
            f"{', '.join(there[-3:]) or 'none'}); write the tag of a whole checkpoint into it"
        )
        return None
    return _describe(directory, tag, job_id)


def _describe(directory: Path, tag: str, job_id: str) -> DiskCheckpoint:
    info = read_marker(directory / tag)
    if info is not None:
        return _read_marker(info, job_id)
    match = _TAG_STEP.match(tag)
    saved, step = _saved_by(directory / tag)
    is_own = saved.get("job_id") == job_id
    return DiskCheckpoint(
        directory=directory,
        tag=tag,
        step=int(match.group(1)) if match else step,
        label=VersionId(int(saved["incarnation"]), int(saved["step"])) if is_own else None,
        job_id=saved.get("job_id"),
        fingerprint=saved.get("fingerprint"),
    )


def _read_marker(info: PersistedInfo, job_id: str) -> DiskCheckpoint:
    return DiskCheckpoint(
        directory=info.directory,
        tag=info.tag,
        step=info.label.step,
        label=info.label if info.job_id == job_id else None,
        job_id=info.job_id,
        files=info.files,
        arenas=info.degrees if info.arenas else None,
        fingerprint=info.fingerprint,
    )


def _saved_by(checkpoint: Path) -> tuple[Mapping[str, Any], int]:
    """Return the description of the job that saved a checkpoint, and the checkpoint's step, from
    the first readable host file."""
    from reft.storage.deepspeed_format import read_host_file

    for file in sorted(checkpoint.glob("reft_host-*.msgpack")):
        try:
            state = read_host_file(file)
        except (ReftError, OSError):
            continue
        if isinstance(state, dict):
            return state.get(SAVED_BY) or {}, int(state.get("engine", {}).get("global_steps", -1))
    return {}, -1


# --- integrity ------------------------------------------------------------------------------------


class DamagedError(PersistError):
    """A checkpoint differs from its checksums. Raised on all ranks."""


class DiskRestorer:
    """Finds and checks checkpoints on storage. All methods are collective over all ranks.

    Args:
        control: messages between the ranks.
        coordinate: this rank's place in the grid.
        job_id: the job.
        persist: where the job's versions are on storage.
        is_reader: whether this rank reads its node's own disk, if each node has one.
    """

    def __init__(
        self,
        control: ControlGroup,
        coordinate: Coordinate,
        job_id: str,
        persist: PersistConfig,
        *,
        is_reader: bool,
    ) -> None:
        self._control = control
        self._coordinate = coordinate
        self._job_id = job_id
        self._persist_dir, self._local = persist.dir, persist.local
        self._is_reader = is_reader
        self._refused: dict[Path, str] = {}

    def find(self, load_dir: Path | None) -> LoadedCheckpoint:
        """Return the checkpoints that were found, the same on all ranks, so that all choose the
        same one."""
        if not self._local:
            return self._from_rank_zero(
                lambda: find_on_disk(load_dir, self._persist_dir, self._job_id)
            )
        found = LoadedCheckpoint()
        if self._is_reader:
            directory = load_dir if self._control.rank == 0 else None
            found = self._mark_local(find_on_disk(directory, self._persist_dir, self._job_id))
        return merge_found(
            [LoadedCheckpoint.decode(m) for m in self._control.gather_bytes(found.encode())]
        )

    def _mark_local(self, found: LoadedCheckpoint) -> LoadedCheckpoint:
        """Mark the checkpoints in this node's persist directory as local."""
        if not self._local or self._persist_dir is None:
            return found
        own = job_directory(self._persist_dir, self._job_id).resolve()
        checkpoints = (
            replace(c, local=c.arenas is not None and c.directory.resolve() == own)
            for c in found.checkpoints
        )
        return replace(found, checkpoints=tuple(checkpoints))

    def find_named(self, directory: Path | None, tag: Any) -> DiskCheckpoint | None:
        """Return the checkpoint with the script's ``tag``; if ``tag`` is None, the one that
        ``latest`` names.

        Returns:
            The checkpoint; None if there is no such checkpoint.

        Raises:
            PersistError: the checkpoint is damaged.
        """
        if directory is None:
            return None
        found = self._from_rank_zero(
            lambda: self._mark_local(find_named(directory, tag, self._job_id))
        )
        if found.problems:
            raise damaged(directory / str(tag or ""), found.problems)
        return found.checkpoints[0] if found.checkpoints else None

    def refuse(self, checkpoint: DiskCheckpoint, error: DamagedError) -> None:
        """Log once that a checkpoint is not loaded."""
        if checkpoint.path not in self._refused:
            self._refused[checkpoint.path] = f"{checkpoint}: {error}"
            if self._control.rank == 0:
                logger.warning(
                    "%s is damaged and is not loaded: %s; an older one is tried", checkpoint, error
                )

    def refused(self, found: LoadedCheckpoint) -> tuple[str, ...]:
        """Return, for each checkpoint that was refused so far, the reason."""
        return (*found.problems, *self._refused.values())

    def check(self, checkpoint: DiskCheckpoint, *, whole: bool = True) -> dict[str, Any] | None:
        """Check the checkpoint's files; each file is read by one rank.

        Args:
            checkpoint: the checkpoint.
            whole: True to also read this rank's host state.

        Returns:
            The host state; None if not every rank saved one next to DeepSpeed's files.

        Raises:
            DamagedError: a file is damaged, on any rank; raised on all ranks.
        """
        found: list[str] = []
        state: dict[str, Any] | None = None
        try:  # The other ranks wait for this rank's message, so errors are sent to them as well
            share = find_share(checkpoint.files or {}, self._control.rank, self._control.world_size)
            if checkpoint.local:
                part = checkpoint.part_at(self._persist_dir) if self._is_reader else None
                info = None if part is None else read_marker(part)
                found += [] if info is None else check_arenas(info.path, info.files)
            elif checkpoint.arenas is not None:
                found += check_arenas(checkpoint.path, share)
            else:
                found += check_files(checkpoint.path, share)
                state = read_host_state(checkpoint.path, self._coordinate) if whole else None
        except Exception as error:
            found.append(_words(error))
        replies = [
            decode(data) for data in self._control.gather_bytes(encode([found, state is not None]))
        ]
        complete = all(present for _, present in replies)
        partly = not complete and any(present for _, present in replies)
        if partly and self._control.rank == 0 and read_degrees(checkpoint.path) is None:
            logger.warning(
                "%s: not every rank saved its host state there; random state and data position are "
                "not restored",
                checkpoint,
            )
        if problems := tuple(
            dict.fromkeys(problem for problems, _ in replies for problem in problems)
        ):
            raise DamagedError(_some(problems))
        return state if complete else None

    def _from_rank_zero(self, look: Callable[[], LoadedCheckpoint]) -> LoadedCheckpoint:
        message = look().encode() if self._control.rank == 0 else b""
        return LoadedCheckpoint.decode(self._control.gather_bytes(message)[0])


def _some(problems: Sequence[str]) -> str:
    return "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if problems[3:] else "")


def damaged(what: object, problems: Sequence[str]) -> PersistError:
    return PersistError(
        f"{what} was asked for and is damaged: {_some(problems)}. Ask for another tag, or restore "
        "the directory from a copy"
    )


def nothing_sound(refused: Sequence[str]) -> str:
    lines = "".join(f"\n  {line}" for line in refused)
    return (
        f"no checkpoint on disk can be loaded:{lines}\nRestore one from a copy, or remove them to "
        "start without them"
    )


def find_share(files: Mapping[str, FileRecord], rank: int, ranks: int) -> dict[str, FileRecord]:
    """Return the files that ``rank`` reads to check them. Each file is read by one rank, and all
    ranks read about the same number of bytes.
    """
    loads = [(0, r) for r in range(ranks)]
    share = {}
    for name, record in sorted(files.items(), key=lambda item: (-item[1].nbytes, item[0])):
        nbytes, reader = heapq.heappop(loads)
        heapq.heappush(loads, (nbytes + record.nbytes, reader))
        if reader == rank:
            share[name] = record
    return share


def host_file(checkpoint: Path, coordinate: Coordinate) -> Path:
    """Return the path of the file with a rank's host state. It is next to DeepSpeed's own files;
    DeepSpeed ignores it."""
    from reft.storage.deepspeed_format import host_file_name

    return checkpoint / host_file_name(coordinate)


def read_host_state(checkpoint: Path, coordinate: Coordinate) -> dict[str, Any] | None:
    from reft.storage.deepspeed_format import read_host_file

    try:
        return read_host_file(host_file(checkpoint, coordinate))
    except FileNotFoundError:
        return None
