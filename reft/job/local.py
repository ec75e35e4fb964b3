"""Tries a job on this machine with several launchers, each for a node that can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from reft.env import ENV_CLUSTER, ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID
from reft.job.script import not_ignored

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOT_INHERITED = (ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID)
_KILL_SECS = 60.0
_POLL_SECS = 0.01


@dataclass(frozen=True)
class LocalNode:
    """One ``reft launch`` with its own memory directory, and the processes that it started."""

    name: str
    memory_dir: Path
    log: Path
    process: subprocess.Popen[bytes]


class LocalNodes:
    """Starts launchers, and finds all their descendants by a token in the environment.

    Args:
        environment: variables for all nodes, in addition to those of this process.
    """

    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    """Starts a launcher; tests replace it by a function that forks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.started: list[LocalNode] = []
        self._token = uuid.uuid4().hex
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # With the sources on the path, launchers can import reft even if it is not installed.
        sources = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (sources, inherited.get("PYTHONPATH")) if p)
        self._environment = {**inherited, "PYTHONPATH": path, **environment}

    def start(
        self,
        name: str,
        memory_dir: Path,
        log: Path,
        options: Sequence[str],
        program: Sequence[str],
    ) -> LocalNode:
        """Start ``reft launch OPTIONS PROGRAM`` as a node, in a session of its own.

        Args:
            name: name of the node.
            memory_dir: memory directory of the node.
            log: file to which the output is appended.
            options: options of the launcher.
            program: the training script and its arguments.
        """
        # -P keeps the working directory out of the module search path. --memory-dir comes after
        # the options, so that it overrides a value given there.
        words = [
            "-P",
            "-m",
            "reft.job.launch",
            *options,
            "--memory-dir",
            str(memory_dir),
            *program,
        ]
        with log.open("ab") as output:
            process = type(self).popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, ENV_CLUSTER: f"{self._token}:{name}"},
                start_new_session=True,
            )
        node = LocalNode(name, memory_dir, log, process)
        self.started.append(node)
        return node

    def lose(self, node: LocalNode) -> None:
        """Kill all processes of a node and remove its memory, as if its host had failed."""
        self.kill(node)
        shutil.rmtree(node.memory_dir, ignore_errors=True)

    def kill(self, *nodes: LocalNode) -> None:
        """Kill all processes of these nodes, and wait until none is left."""
        deadline = time.monotonic() + _KILL_SECS
        marks = {f"{self._token}:{node.name}" for node in nodes}
        # Stop (SIGSTOP) all processes first, so that none forks while others are being killed.
        number = signal.SIGSTOP
        while (processes := [*self._processes(marks)]) and time.monotonic() < deadline:
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(0 if number is signal.SIGSTOP else _POLL_SECS)
            number = signal.SIGKILL

    def _processes(self, marks: Collection[str]) -> Iterator[psutil.Process]:
        for node in self.started:
            node.process.poll()  # Reaps the launcher if it has ended
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_marked = process.environ().get(ENV_CLUSTER) in marks
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def handle_stop_signals() -> None:
    """Make the first stop signal raise KeyboardInterrupt, and ignore later ones during cleanup.

    A signal that was ignored when this process started stays ignored.
    """
    for number in not_ignored(_STOP_SIGNALS):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
