"""Starts scripts as users do, with real processes, and waits for what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.job_events import History
from tests.machine import free_port
from tests.prefork import Popen

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECS = 300.0


def wait_for(condition: Callable[[], Any], what: str, log: Path | None = None) -> Any:
    deadline = time.monotonic() + DEADLINE_SECS
    while not (value := condition()):
        end = log.read_text(errors="replace")[-3000:] if log is not None and log.exists() else ""
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECS:.0f} s for {what}\n{end}"
        time.sleep(0.05)
    return value


def asked(command: str, memory_dirs: Iterable[Path], job_id: str, *more: str) -> dict[str, Any]:
    places = [word for place in memory_dirs for word in ("--memory-dir", str(place))]
    done = subprocess.run(
        [sys.executable, "-m", "reft.cli", command, "--json", "--job", job_id, *places, *more],
        env=clean_environment(**_of_the_suite()),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECS,
    )
    return dict(json.loads(done.stdout)) if done.stdout else {}


@dataclass
class Started:
    processes: list[subprocess.Popen[bytes]]  # one per rank, or the launcher alone
    out: Path  # directory where the script says what it found
    log: Path  # what all of them printed

    def said(self, rank: int, key: str) -> Any:
        return self.wait_for(
            lambda: [v for k, v in self.facts(rank).items() if k == key], f"{key!r} of rank {rank}"
        )[0]

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of ``condition``; an AssertionError where the job has ended without it."""

        def look() -> Any:
            ended = all(process.poll() is not None for process in self.processes)
            value = condition()
            assert value or not ended, (
                f"ended without {what}\n{self.log.read_text(errors='replace')[-3000:]}"
            )
            return value

        return wait_for(look, what, self.log)

    def facts(self, rank: int) -> dict[str, Any]:
        path = self.out / f"rank{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def history(self) -> History:
        return History.of(self.out / "events")

    def wait_for_commit(self, step: int) -> None:
        self.wait_for(lambda: step in self.history.current.committed, f"a commit of step {step}")

    def kill(self) -> None:
        """SIGKILL of everything, at once; nothing of it runs any more, nor holds anything, when this returns."""
        family: list[psutil.Process] = []
        for process in self.processes:
            if process.poll() is None:
                with suppress(psutil.Error):
                    parent = psutil.Process(process.pid)
                    family += [parent, *parent.children(recursive=True)]
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        for process in self.processes:
            process.wait(DEADLINE_SECS)
        wait_for(lambda: not any(runs(member) for member in family), "killed processes to end")

    def end(self) -> list[int]:
        (self.out / "go").touch()
        return [process.wait(DEADLINE_SECS) for process in self.processes]


def runs(process: psutil.Process) -> bool:
    """Whether it runs: one whose parent is gone may wait for ever to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _of_the_suite() -> dict[str, str]:
    """What the suite sets: there may be no home for a secret."""
    return {k: v for k, v in os.environ.items() if k in ("REFT_SECRET", "REFT_WARM")}


def clean_environment(**env: str) -> dict[str, str]:
    strange = ("REFT_", "TORCHELASTIC", "PET_", "TEST_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    path = os.pathsep.join(p for p in (str(ROOT), clean.get("PYTHONPATH")) if p)
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}


def ran(command: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A command at its end; its output is one text."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )


@contextmanager
def _started(
    command: Sequence[str], cwd: Path, out: Path, environs: Iterable[Mapping[str, str]]
) -> Iterator[Started]:
    out.mkdir(parents=True, exist_ok=True)
    started = Started([], out, out / "log")
    told = {"TEST_OUT": str(out), "REFT_EVENTS": str(out / "events")}
    try:
        with started.log.open("ab") as log:
            for env in environs:
                given = clean_environment(**{**told, **env})
                started.processes.append(
                    Popen(command, cwd=cwd, env=given, stdout=log, stderr=subprocess.STDOUT)
                )
        yield started
    finally:
        started.kill()


def ranks(
    script: Path,
    *args: str,
    cwd: Path,
    out: Path,
    memory: Sequence[Path],
    env: Mapping[str, str] | None = None,
) -> AbstractContextManager[Started]:
    """Start a script's ranks as plain ``torchrun`` does, rank r with the memory directory ``memory[r]``."""
    shared = {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(len(memory)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "REFT_MEMORY_DIR": str(directory)}
        for rank, directory in enumerate(memory)
    ]
    command = [sys.executable, str(script), *args]
    return _started(command, cwd, out, [{**shared, **each, **(env or {})} for each in own])


def launched(
    script: Path,
    *args: str,
    cwd: Path,
    out: Path,
    options: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> AbstractContextManager[Started]:
    command = [sys.executable, "-m", "reft.job.launch", *options, str(script), *args]
    return _started(command, cwd, out, [{**_of_the_suite(), **(env or {})}])
