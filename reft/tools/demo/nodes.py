"""Nodes of this machine that can be lost: each is one ``reft launch`` with a memory directory of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from reft.env import ENV_CLUSTER, ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID
from reft.job.rendezvous.server import RendezvousServer

_POLL_SECS = 0.05
_KILL_SECS = 60.0
_NOT_INHERITED = (ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID)


@dataclass(frozen=True)
class Node:
    """A launcher and what it started; ``name``: ``node1``, and ``node1.2`` for its second replacement."""

    name: str
    memory_dir: Path
    log: Path
    process: subprocess.Popen[bytes]


class Nodes:
    """``count`` nodes and the store in which they meet, running ``command``. A context manager: nothing of
    them is left when it ends but their logs in ``directory``."""

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        count: int,
        *,
        directory: Path,
        memory: Path,
        env: Mapping[str, str],
    ) -> None:
        self.job_id, self.count = job_id, count
        self.started: list[Node] = []
        self.current: dict[int, Node] = {}
        self._command, self._directory, self._memory, self._env = command, directory, memory, env
        self._token = uuid.uuid4().hex

    def __enter__(self) -> Nodes:
        # In this process: a SIGKILL of it leaves no store behind.
        self._store = RendezvousServer("127.0.0.1", 0)
        for index in range(self.count):
            self.start(index)
        return self

    def start(self, index: int) -> Node:
        """Start the launcher of a node, or of its replacement if there was one before."""
        before = sum(node.name.partition(".")[0] == f"node{index}" for node in self.started)
        name = f"node{index}.{before}" if before else f"node{index}"
        memory_dir = self._memory / name
        arguments = [
            *("-m", "reft.job.launch", "--nnodes", str(self.count), "--nproc-per-node", "1"),
            *("--rdzv-endpoint", self._store.endpoint, "--rdzv-id", self.job_id, "--local-addr", "127.0.0.1"),
            *("--node-id", name, "--memory-dir", str(memory_dir), "--rank-order", "across-nodes"),
            *("--max-restarts", "0"),  # a lost node uses up none
            *self._command,
        ]
        node = Node(name, memory_dir, self._directory / f"{name}.log", self._start(name, arguments))
        self.started.append(node)
        self.current[index] = node
        return node

    def _start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Found also where reft is not installed but run from its sources.
        source = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join(p for p in (source, inherited.get("PYTHONPATH")) if p)
        own = {"PYTHONPATH": paths, ENV_CLUSTER: f"{self._token}:{name}"}
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1", **inherited, **self._env, **own},
                start_new_session=True,
            )

    def lose(self, index: int) -> Node:
        """A node dies as a host does: SIGKILL of every process of it, and its memory gone."""
        node = self.current[index]
        self._kill(f"{self._token}:{node.name}")
        shutil.rmtree(node.memory_dir, ignore_errors=True)
        return node

    def __exit__(self, *_: object) -> None:
        self._kill(f"{self._token}:")
        self._store.close()

    def _kill(self, mark: str) -> None:
        """SIGKILL until nothing is left: first all stand still, so that none starts another."""
        deadline, number = time.monotonic() + _KILL_SECS, signal.SIGSTOP
        while (found := [*self._processes(mark)]) and time.monotonic() < deadline:
            for process in found:
                with suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(0 if number is signal.SIGSTOP else _POLL_SECS)
            number = signal.SIGKILL

    def _processes(self, mark: str) -> Iterator[psutil.Process]:
        for node in self.started:
            node.process.poll()  # no zombie counts
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found = process.environ().get(ENV_CLUSTER, "")
                same = found == mark if not mark.endswith(":") else found.startswith(mark)
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
