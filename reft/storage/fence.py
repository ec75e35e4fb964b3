"""Fences a job's checkpoints on shared storage, so that a replaced incarnation cannot change them
(P3).

Every start of the job has a number, its incarnation, and claims the directory with a file,
``.incarnation-<job>.<number>``. The highest number counts, so a lower one that is written late does
no harm. The claiming process then removes everything that older incarnations could still rename
into place: their working directories, and their drafts of ``latest``. A writer works in this order:

1. It creates the files that it will rename.
2. It checks the claims, and stops if there is a newer one.
3. It renames.

The claim file is written before anything is removed. A writer may be suspended between any two
operations, and continue after a newer incarnation has claimed the directory. Its next rename then
fails, because the source was removed. If it had renamed before the claim, the newer incarnation
replaces the result.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from reft.durable import sync_directory, write_durably
from reft.errors import FencedError
from reft.grid import VersionId

_CLAIM = ".incarnation-"
_POINTER = ".pointer-"
_WORK = re.compile(r"^\.global_step\d+\.\d+\.(\d+)-([0-9a-f]{8})\.tmp$")
REMOVED_SUFFIX = ".removed.tmp"  # Suffix of directories that the next writer deletes


def short_name(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()[:8]


def claimed(directory: Path, job_id: str) -> int:
    """Return the newest incarnation of the job that has claimed the directory; 0 if none has, or
    there is no directory.
    """
    return max(_claims(directory, job_id), default=0)


def check(directory: Path, job_id: str, incarnation: int) -> None:
    """Stop if a newer incarnation of the job has claimed the directory.

    Raises:
        FencedError: one has.
    """
    newest = claimed(directory, job_id)
    # P7: a node that was cut off continues to run. An equal number is this incarnation itself.
    if newest > incarnation:
        raise FencedError(
            f"{directory}: start {newest} of job {job_id} writes here; this is start "
            f"{incarnation}, which was replaced, and is refused. If a node that was cut off has "
            "come back, it ends by itself",
            newest,
        )


def claim(directory: Path, job_id: str, incarnation: int, *, alone: bool = False) -> None:
    """Claim the directory, which locks out older incarnations of the job.

    Args:
        directory: the job's directory.
        job_id: the job.
        incarnation: the one that claims.
        alone: no other process may have claimed the directory with this number.

    Raises:
        FencedError: a newer incarnation has claimed it, or another process with ``alone``.
    """
    check(directory, job_id, incarnation)
    mine = directory / f"{_CLAIM}{short_name(job_id)}.{incarnation}"
    try:
        fd = os.open(
            mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
    except FileExistsError:
        if alone:
            raise FencedError(
                f"{mine}: another start of job {job_id} has number {incarnation}, too: two starts "
                "cannot see each other's rendezvous store. This one ends; start it where it "
                "reaches the other's store"
            ) from None
    else:
        with os.fdopen(fd, "wb") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())
        sync_directory(directory)
    _take_away(directory, job_id, incarnation)
    check(directory, job_id, incarnation)


@contextmanager
def switched(
    directory: Path, job_id: str, writer: int, label: VersionId, contents: Mapping[str, bytes]
) -> Iterator[Callable[[], None]]:
    """Prepare drafts of small files, ``latest`` among them.

    Args:
        directory: the job's directory.
        job_id: the job.
        writer: incarnation that writes.
        label: version that they name.
        contents: by name, in the order in which they are put in place.

    Yields:
        A function that puts the drafts in place. It raises FileNotFoundError if a newer incarnation
        has removed them, so a check of the claims that is made after the drafts still holds. Drafts
        that are not in place at the end are removed.
    """
    ready = {}
    for name, content in contents.items():
        draft = (
            directory
            / f"{_POINTER}{short_name(job_id)}.{writer}.{label.incarnation}.{label.step}.{name}"
        )
        write_durably(draft, content)
        ready[draft] = directory / name

    def switch() -> None:
        for draft, place in ready.items():
            draft.replace(place)
        sync_directory(directory)

    try:
        yield switch
    finally:
        for draft in ready:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def remove_drafts(directory: Path, job_id: str, doomed: Callable[[int, VersionId], bool]) -> None:
    prefix = f"{_POINTER}{short_name(job_id)}."
    for draft in directory.glob(f"{prefix}*"):
        numbers = draft.name.removeprefix(prefix).split(".")[:3]
        if len(numbers) == 3 and all(map(str.isdecimal, numbers)):
            writer, incarnation, step = map(int, numbers)
            if doomed(writer, VersionId(incarnation, step)):
                draft.unlink(missing_ok=True)


def _claims(directory: Path, job_id: str) -> list[int]:
    prefix = f"{_CLAIM}{short_name(job_id)}."
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return [int(number) for number in numbers if number.isdecimal()]


def _take_away(directory: Path, job_id: str, incarnation: int) -> None:
    """Remove older incarnations' claims, and the files that they could still rename into place."""
    job = short_name(job_id)
    for number in _claims(directory, job_id):
        if number < incarnation:
            (directory / f"{_CLAIM}{job}.{number}").unlink(missing_ok=True)
    remove_drafts(directory, job_id, lambda writer, _: writer < incarnation)
    for path in directory.iterdir():
        found = _WORK.match(path.name)
        if found is not None and found[2] == job and int(found[1]) < incarnation:
            with suppress(FileNotFoundError):
                path.rename(path.with_name(f"{path.name}.{os.getpid()}{REMOVED_SUFFIX}"))
