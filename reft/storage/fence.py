"""The fence of a job's checkpoints on shared storage: an older start of the job changes nothing
there (P3).

Every start of the job has a number, its incarnation, and claims the directory with it: the file
``.incarnation-<job>.<number>``. The highest number holds, so that writing an older one late does no
harm. A claim then takes away what older starts would put in place by renaming it: their working
directories, and the files that would become ``latest``. Whoever writes does it in this order:

1. make what is to be renamed; 2. look at the claims, and go no further if there is a newer one; 3.
  rename.

Against this a claim first marks and then takes away. So whoever was stopped between any two
operations, and goes on after a newer start has claimed the directory, finds at its next rename that
there is nothing to rename; or it had renamed before the claim, and the newer start puts its own
over it.
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
REMOVED_SUFFIX = ".removed.tmp"
"""Of the names of directories that are taken away; the next writer removes them."""


def short_name(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()[:8]


def claimed(directory: Path, job_id: str) -> int:
    """The newest start of the job that has claimed the directory; 0 if none has, or it does not
    exist."""
    return max(_claims(directory, job_id), default=0)


def check(directory: Path, job_id: str, incarnation: int) -> None:
    """Go no further where a newer start of the job has claimed the directory."""
    newest = claimed(directory, job_id)
    # P7: a node that was cut off goes on running; equal numbers are this start itself.
    if newest > incarnation:
        raise FencedError(
            f"{directory}: start {newest} of job {job_id} writes here; this is start "
            f"{incarnation}, which was replaced, and is refused. If a node that was cut off has "
            "come back, it ends by itself",
            newest,
        )


def claim(directory: Path, job_id: str, incarnation: int, *, alone: bool = False) -> None:
    """Keep older starts of the job out of the directory, from now on. ``alone``: nobody else may
    have claimed the directory with this number."""
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
    """Make small files ready, ``latest`` among them, to take the place of others. What is given
    puts them there, in their order: what was checked after they were made still holds. It raises
    FileNotFoundError where a newer start of the job has taken them away. In the end what is not in
    place is removed."""
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
    """What older starts have ready to be renamed, and their claims."""
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
