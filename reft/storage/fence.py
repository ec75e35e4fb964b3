"""Protects a job's checkpoints on shared storage from older incarnations (starts) of the job
that may still be running on nodes that were cut off (P3).

Every start of the job has a number, the incarnation, and claims the directory by creating the
file ``.incarnation-<job>.<number>``. The highest number counts, so it does no harm if a lower
one is written late. The claiming process then removes everything that older incarnations could
still rename to a final name: their working directories, and their drafts of ``latest``. A writer
works in this order:

1. Create the files that will be renamed.
2. Check the claims, and stop if there is a newer one.
3. Rename.

The claim file is written before anything is removed. A writer may be suspended between any two
operations, and continue after a newer incarnation has claimed the directory. Then the writer's
next rename fails, because the source was removed. If the writer had renamed before the claim,
the newer incarnation replaces the result.
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
    the directory does not exist.
    """
    return max(_claims(directory, job_id), default=0)


def check(directory: Path, job_id: str, incarnation: int) -> None:
    """Stop if a newer incarnation of the job has claimed the directory.

    Raises:
        FencedError: a newer incarnation has claimed the directory.
    """
    newest = claimed(directory, job_id)
    # P7: a node that was cut off may still be running with an older number. An equal number is
    # this incarnation itself.
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
        incarnation: number of the claiming incarnation.
        alone: True to refuse if another process has claimed the directory with the same number.

    Raises:
        FencedError: a newer incarnation has claimed the directory; or, with ``alone``, another
            process with the same number.
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
    """Prepare drafts of small files such as ``latest``.

    Args:
        directory: the job's directory.
        job_id: the job.
        writer: incarnation that writes.
        label: version that the files name.
        contents: content by file name, in the order in which the drafts are renamed to these
            names.

    Yields:
        A function that renames the drafts to their final names. It raises FileNotFoundError if a
        newer incarnation has removed the drafts. So the caller checks only once, after making the
        drafts, that no newer incarnation has claimed the directory; it need not check again before
        renaming. Drafts that were not renamed are removed at the end.
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
    """Remove the claims of older incarnations, their draft files and their working directories, so
    that they can no longer rename a draft or a working directory to its final name."""
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
