"""P6: checkpoints get done beside busy trainers, as one process makes the files of many versions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from reft.errors import PersistError
from reft.grid import Coordinate
from reft.naming import Label
from reft.storage.assemble import NICENESS, Assembler
from reft.storage.persist import persist_label
from reft.storage.staging import WorkDir
from tests.storage.job_memory import JOB, made_up_images, on_one_node, verify_persisted


@pytest.fixture(scope="module")
def assembler() -> Iterator[Assembler]:
    with closing(Assembler()) as assembler:
        yield assembler


@pytest.mark.integration
def test_p6_many_versions_are_written_by_one_process(tmp_path: Path, assembler: Assembler) -> None:
    memory, directory = on_one_node(tmp_path / "memory"), tmp_path / "checkpoints"

    def write(step: int) -> int | None:
        """The process that wrote it."""
        memory.write(Label(1, step), made_up_images(step))
        config = memory.config(directory)
        path = persist_label(memory.job_dir("n0"), Label(1, step), config, assembler=assembler)
        assert path.name == f"global_step{step}"
        return assembler.pid

    pid = write(4)
    assert pid is not None
    # The suite may be nice itself.
    assert psutil.Process(pid).nice() == min(psutil.Process().nice() + NICENESS, 19)
    assert write(8) == pid
    # What cannot be done is an error, and no more than that.
    ask_for_nothing(assembler, tmp_path)
    assert assembler.pid == pid
    # Killed: the next version finds another one.
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert write(12) not in (None, pid)
    assert verify_persisted(directory / JOB) == []


@pytest.mark.process
def test_p6_a_process_that_dies_or_does_nothing_is_an_error(tmp_path: Path, assembler: Assembler) -> None:
    ask_for_nothing(assembler, tmp_path)  # it is ready
    assert assembler.pid is not None
    os.kill(assembler.pid, signal.SIGSTOP)
    stopped = threading.Event()
    ask(assembler, tmp_path, r"no byte .* was written in 0\.3 s", stopped, idle_secs=0.3)
    assert assembler.pid is None
    stopped.set()
    ask(assembler, tmp_path, "was stopped", stopped)
    assembler.start()
    assert assembler.pid is not None
    ask(assembler, tmp_path, "ended with status -9: it said nothing", Killer(assembler.pid))


class Killer(threading.Event):
    """Kills a process when it is waited for: before that, another one would take its place."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def is_set(self) -> bool:
        os.kill(self.pid, signal.SIGKILL)
        return False


def ask(
    assembler: Assembler, root: Path, error: str, stop: threading.Event, idle_secs: float = 600.0
) -> None:
    """For the files of a rank of which nothing was staged."""
    work = WorkDir(root, JOB, Label(1, 4))
    with pytest.raises(PersistError, match=error):
        assembler.assemble(work, [Coordinate(0, 0, 0)], bytes(32), idle_secs=idle_secs, stop=stop)


def ask_for_nothing(assembler: Assembler, root: Path) -> None:
    ask(assembler, root / "nothing", "is gone", threading.Event())
