"""P3 on shared storage: at every instant of writing a checkpoint ``latest`` names one that is whole, and whoever was
stopped in the middle, and goes on after a later start of the job has written its own, changes nothing that is read
afterwards."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from reft.naming import Label
from reft.storage import fence
from reft.storage.persisted import check_files, latest_tag, list_persisted
from reft.storage.publish import WorkDir, publish, remove_debris

from .test_publish import JOB, names, prepare

EVENTS = ("open", "os.", "shutil.", "ctypes.call_function")
"""Beginnings of the audit events by which the interpreter tells of everything that touches a file system."""


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """In memory, where to flush costs nothing."""
    tmpfs = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="reft-fence-", dir=tmpfs) as made:
        yield Path(made)


def write(directory: Path, label: Label) -> None:
    fence.claim(directory, JOB, label.incarnation)
    remove_debris(WorkDir.of(directory, JOB, label))
    publish(*prepare(directory, label), keep=1)


def stop_at(number: int) -> None:
    """Stop this process before its operation ``number`` on the file system."""
    seen = 0

    def count(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(EVENTS):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(count)


def stopped_while(work: Callable[[], None], number: int) -> int | None:
    """A process that does ``work`` and stands still before its operation ``number``; None if it has fewer."""
    pid = os.fork()
    if pid == 0:
        try:
            stop_at(number)
            work()
        except Exception:
            os._exit(1)
        finally:
            os._exit(0)
    if os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
        return pid
    return None


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)


def state(directory: Path) -> tuple[Label, str | None]:
    return max(i.label for i in list_persisted(directory, JOB)), latest_tag(directory)


def whole(directory: Path) -> set[str]:
    """The checkpoints, if all are as they were written."""
    found = list_persisted(directory, JOB)
    return set() if any(check_files(i.path, i.files) for i in found) else {i.tag for i in found}


QUICK = {(4, 12, True, True), (4, 8, False, True), (8, 4, True, False), (8, 8, False, False)}
CASES = [
    pytest.param(case, id=str(case), marks=() if case in QUICK else (pytest.mark.nightly,))
    for case in product((4, 8), (4, 8, 12), (True, False), (True, False))
    if case[:2] not in ((4, 4), (8, 12))
]


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_stopped_at_any_operation_the_older_start_changes_nothing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[int, int, bool, bool]
) -> None:
    """Start 1 has written step ``first``, start 2 is stopped while it writes step 8; start 3 claims the
    directory, and may write step ``newer``. Start 2 goes on. ``exchange``: how directories are replaced."""
    first, newer, publishes, exchange = case
    if not exchange:
        monkeypatch.setattr("reft.storage.publish.exchange", lambda a, b: False)
    wrong = []
    number = 0
    while True:
        number += 1
        directory = memory_path / str(number)
        directory.mkdir()
        write(directory, Label(1, first))
        pid = stopped_while(lambda at=directory: write(at, Label(2, 8)), number)
        if pid is None:
            break
        try:
            # As SIGKILL there would leave it. Without an exchange what is replaced has a name aside for an instant.
            there = whole(directory)
            assert latest_tag(directory) in there or (there and not exchange), f"stopped at {number}"
            fence.claim(directory, JOB, 3, alone=True)
            if publishes:
                write(directory, Label(3, newer))
                assert latest_tag(directory) == f"global_step{newer}"
            before = state(directory)
        finally:
            go_on(pid)
        after = state(directory)
        if before != after or latest_tag(directory) not in whole(directory):
            wrong.append(f"stopped at {number}: {before} has become {after}, whole: {whole(directory)}")
        # The next one cleans up.
        write(directory, Label(4, 16))
        debris = [name for name in names(directory) if name.startswith(".")]
        assert (latest_tag(directory), debris) == ("global_step16", []), f"stopped at {number}"
    assert number > 30
    assert wrong == []
