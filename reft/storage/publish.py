"""The last act of writing a checkpoint: give it its name, switch ``latest``, remove old ones.

The order is what keeps a checkpoint loadable whatever is killed: all files are on storage before the
directory gets its name, the name is on storage before ``latest`` says it, and nothing older is removed
before that. A start of the job that was replaced is refused, wherever it was stopped
(:mod:`reft.storage.fence`), and so is a version older than the one that ``latest`` names: a node that was cut
off must not overwrite what its successors wrote.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from reft.durable import sync_directory, write_durably
from reft.errors import PersistError
from reft.naming import Label
from reft.storage import fence
from reft.storage.fence import REMOVED_SUFFIX
from reft.storage.persisted import (
    LATEST_NAME,
    MARKER_NAME,
    PersistedInfo,
    check_files,
    given_up,
    latest_tag,
    list_persisted,
    read_marker,
)
from reft.storage.staging import WorkDir

logger = logging.getLogger(__name__)

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def publish(
    work: WorkDir,
    info: PersistedInfo,
    keep: int,
    reached: Callable[[str], None] = lambda phase: None,
    *,
    writer: int = 0,
) -> None:
    """Make a finished working directory the checkpoint to resume from. ``reached``: called with
    ``renaming``, ``renamed`` and ``latest`` as the steps are reached. ``writer``: the start of the job
    that writes, if it is a later one than the version's."""
    problems = check_files(work.root, info.files, read=False)
    if problems:
        raise PersistError(f"{work.root}: incomplete before it was published: {'; '.join(problems[:3])}")
    writer = max(writer, info.label.incarnation)
    pointers = {
        LATEST_NAME: info.tag.encode(),
        **{file.name: file.read_bytes() for file in _files(work.pointers)},
    }
    try:
        with fence.switched(info.directory, info.job_id, writer, info.label, pointers) as switch:
            # In this order: what is checked now holds for all that was made before, whenever it is renamed.
            fence.check(info.directory, info.job_id, writer)
            refuse_stale(info.directory, info.job_id, info.label)
            for script in _files(work.scripts):
                script.replace(info.directory / script.name)
            shutil.rmtree(work.staging)
            write_durably(work.root / MARKER_NAME, (json.dumps(info.to_json(), indent=1) + "\n").encode())
            reached("renaming")
            _rename(work.root, info)
            reached("renamed")
            switch()
    except FileNotFoundError:
        fence.check(info.directory, info.job_id, writer)
        raise
    reached("latest")
    prune(info, keep)


def refuse_stale(directory: Path, job_id: str, label: Label) -> None:
    """Refuse to write where a newer incarnation, or a newer version, of the job has already written."""
    tag = latest_tag(directory)
    named = read_marker(directory / tag) if tag else None
    if named is not None and named.job_id == job_id and label < named.label:
        raise PersistError(
            f"{directory}: latest is {named.tag}, {named.label}; writing {label} is refused, as this node "
            f"runs an older version of the job. If it was cut off, stop it"
        )


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _rename(source: Path, info: PersistedInfo) -> None:
    target = info.path
    if target.exists() or target.is_symlink():
        _check_replaceable(info)
        aside = info.directory / f".{info.tag}.{os.getpid()}.replaced"
        if not exchange(source, target):
            # Without an atomic exchange the old one stays loadable under its name aside.
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
            f"{info.path} exists and was not written by reft; remove it, or give persist.dir a directory "
            f"of its own"
        )
    if present.job_id != info.job_id:
        raise PersistError(
            f"{info.path} is a checkpoint of job {present.job_id}; job {info.job_id} does not replace "
            f"it. Give one of them another directory"
        )
    if info.label < present.label:
        raise PersistError(
            f"{info.path} holds {present.label}; writing {info.label} is refused, as it is older"
        )


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step; False where kernel or file system cannot, as with NFS."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE))
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a))


def prune(info: PersistedInfo, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints of the job.

    Those that the job went back behind are counted apart: they must not crowd out what it would fall back
    to. Only directories with reft's marker are touched, and never the one that ``latest`` names."""
    mine = list_persisted(info.directory, info.job_id)
    passed = given_up(i.label for i in mine)
    line = [i for i in mine if i.label not in passed]
    # What was set aside when another took its name is not what it would fall back to.
    behind = [i for i in mine if i.label in passed and not i.tag.startswith(".")]
    spared = {latest_tag(info.directory), *(i.tag for i in (*line[-keep:], *behind[-keep:]))}
    for old in mine:
        if old.tag not in spared:
            logger.info("removing %s", old.path)
            remove_checkpoint(old.path, old.label)


def remove_checkpoint(path: Path, label: Label) -> None:
    """Remove a checkpoint directory. It changes its name first, so that what is left of an interrupted
    removal is neither taken for a checkpoint nor left for good. ``label``: of the version to remove:
    another one, which has taken its name meanwhile, gets it back."""
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
    """Remove what interrupted attempts of this job left: older working directories and half-removed
    checkpoints. For the coordinating node only, before an attempt."""
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
