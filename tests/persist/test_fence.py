"""P3 on shared storage: whoever was stopped in the middle of writing a checkpoint, and goes on after a later start
of the job has written its own, changes nothing that is read afterwards."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reft.naming import Label
from reft.storage import fence
from reft.storage.persisted import latest_tag, list_persisted
from reft.storage.publish import publish, remove_debris
from reft.storage.staging import WorkDir
from tests.persist import verify_persisted

from .test_publish import JOB, prepare

EVENTS = ("open", "os.", "shutil.", "ctypes.call_function")
"""Beginnings of the audit events by which the interpreter tells of everything that touches a file system."""


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """In memory, where to flush costs nothing."""
    tmpfs = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="reft-fence-", dir=tmpfs) as made:
        yield Path(made)


def write(directory: Path, label: Label) -> None:
    """As the daemon of the leading node does: claim, stage, name."""
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
    """The newest version that is there, and which ``latest`` names."""
    return max(i.label for i in list_persisted(directory, JOB)), latest_tag(directory)


def is_whole(directory: Path) -> bool:
    """Whether every checkpoint, and what ``latest`` names, is as it was written."""
    found = list_persisted(directory, JOB)
    named = latest_tag(directory)
    return named in {i.tag for i in found} and not any(verify_persisted(directory, i.tag) for i in found)


@dataclass(frozen=True)
class Case:
    """Steps of the first and of the newest start; whether that one has written; how directories are replaced."""

    first: int
    newer: int
    publishes: bool
    exchange: bool

    def __str__(self) -> str:
        done = "has written" if self.publishes else "has begun"
        return f"{self.first}, {self.newer} {done}{'' if self.exchange else ', no exchange'}"


QUICK = {Case(4, 12, True, True), Case(4, 8, False, True), Case(8, 4, True, False), Case(8, 8, False, False)}
CASES = [
    pytest.param(case, id=str(case), marks=() if case in QUICK else (pytest.mark.nightly,))
    for case in (
        Case(first, newer, publishes, exchange)
        for first, newer in ((4, 12), (4, 8), (8, 4), (8, 8))
        for publishes in (True, False)
        for exchange in (True, False)
    )
]


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_stopped_at_any_operation_the_older_start_changes_nothing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Start 1 has written step ``first``, start 2 is stopped while it writes step 8; start 3 claims the
    directory, and may write step ``newer``. Start 2 goes on."""
    if not case.exchange:
        monkeypatch.setattr("reft.storage.publish.exchange", lambda a, b: False)
    wrong = []
    number = 0
    while True:
        number += 1
        directory = memory_path / str(number)
        directory.mkdir()
        write(directory, Label(1, case.first))
        pid = stopped_while(lambda at=directory: write(at, Label(2, 8)), number)
        if pid is None:
            break
        try:
            fence.claim(directory, JOB, 3, alone=True)
            if case.publishes:
                write(directory, Label(3, case.newer))
                assert latest_tag(directory) == f"global_step{case.newer}"
            before = state(directory)
        finally:
            go_on(pid)
        after = state(directory)
        if before != after or not is_whole(directory):
            wrong.append(f"stopped at {number}: {before} has become {after}, whole: {is_whole(directory)}")
    assert number > 30
    assert wrong == []
