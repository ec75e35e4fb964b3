"""P6: checkpoints get done beside busy trainers, as one process makes the files of many versions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reft.errors import PersistError
from reft.grid import Coordinate
from reft.naming import Label
from reft.storage.assemble import NICENESS, Assembler
from reft.storage.persist import persist_label
from reft.storage.staging import WorkDir
from tests.persist import verify_persisted
from tests.persist.job_memory import DEGREES, JOB, Memory, made_up_images


@pytest.fixture(scope="module")
def assembler() -> Iterator[Assembler]:
    with Assembler() as assembler:
        yield assembler


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """One node that holds all of a job."""
    return Memory(tmp_path / "memory", nodes=dict.fromkeys(DEGREES.coordinates(), "n0"))


def write(memory: Memory, step: int, directory: Path, assembler: Assembler) -> Path:
    label = Label(1, step)
    memory.write(label, made_up_images(DEGREES, step))
    return persist_label(memory.job_dir("n0"), label, memory.config(directory), assembler=assembler)


@pytest.mark.integration
def test_p6_many_versions_are_written_by_one_process(
    memory: Memory, tmp_path: Path, assembler: Assembler
) -> None:
    directory = tmp_path / "checkpoints"
    first = write(memory, 4, directory, assembler)
    pid = assembler.pid
    assert pid is not None
    assert psutil.Process(pid).nice() == min(
        psutil.Process().nice() + NICENESS, 19
    )  # the suite may be nice itself
    second = write(memory, 8, directory, assembler)
    assert (first.name, second.name) == ("global_step4", "global_step8")
    assert assembler.pid == pid
    # What cannot be done is an error, and no more than that.
    ask_for_nothing(assembler, tmp_path)
    assert assembler.pid == pid
    # Killed: the next version finds another one.
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert write(memory, 12, directory, assembler).name == "global_step12"
    assert assembler.pid not in (None, pid)
    assert verify_persisted(directory / JOB) == []


@pytest.mark.process
def test_p6_a_process_that_dies_or_does_nothing_is_an_error(tmp_path: Path, assembler: Assembler) -> None:
    ask_for_nothing(assembler, tmp_path)  # it is ready
    stopped = threading.Event()
    assert assembler.pid is not None
    os.kill(assembler.pid, signal.SIGSTOP)
    with pytest.raises(PersistError, match=r"no byte .* was written in 0\.3 s"):
        assembler.assemble(*request(tmp_path), idle_secs=0.3, stop=stopped)
    assert assembler.pid is None
    stopped.set()
    with pytest.raises(PersistError, match="was stopped"):
        assembler.assemble(*request(tmp_path), idle_secs=60.0, stop=stopped)
    assembler.start()
    assert assembler.pid is not None
    with pytest.raises(PersistError, match="ended with status -9: it said nothing"):
        assembler.assemble(*request(tmp_path), idle_secs=60.0, stop=Killer(assembler.pid))


class Killer(threading.Event):
    """Kills a process when it is waited for: before that, another one would take its place."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def is_set(self) -> bool:
        os.kill(self.pid, signal.SIGKILL)
        return False


def ask_for_nothing(assembler: Assembler, root: Path) -> None:
    with pytest.raises(PersistError, match="is gone"):
        assembler.assemble(*request(root / "nothing"), idle_secs=600.0, stop=threading.Event())


def request(root: Path) -> tuple[WorkDir, list[Coordinate], bytes]:
    return WorkDir(root, JOB, Label(1, 4)), [Coordinate(0, 0, 0)], bytes(32)
