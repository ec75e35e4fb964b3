"""Nodes on one machine, to be killed: what tests and benchmarks stand on.

A node is one ``reft launch`` with a memory directory of its own. It dies as a host does: SIGKILL of
every process of it, and its memory gone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import psutil

from reft.engine.build_locks import abandoned_locks
from reft.env import ENV_CLUSTER, ENV_EXTENSIONS, ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID
from reft.errors import ReftError
from reft.memory.jobdir import STATUS_FILE, read_json

_POLL_SECS = 0.05
_KILL_SECS = 60.0
_NOT_INHERITED = (ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID)


EXTENSIONS = Path(__file__).resolve().parents[1] / "build" / "torch_extensions"


def use_own_extensions() -> None:
    """Have torch compile operators into a folder of this checkout, unless the user has named one.

    Jobs that are killed leave a lock on what they were building. Under plain torchrun every later
    job waits for it without end: here it is removed, since only tests and benchmarks build
    there."""
    if os.environ.setdefault(ENV_EXTENSIONS, str(EXTENSIONS)) != str(EXTENSIONS):
        return
    for lock, _ in abandoned_locks():
        lock.unlink(missing_ok=True)


class LocalClusterError(ReftError, RuntimeError):
    """A process of the cluster did not do what was waited for."""


class KillKind(StrEnum):
    NODE = "node"  # All its processes are killed and its memory is gone: a lost host
    PROCESS = "process"  # One trainer is killed; launcher, daemon and memory stay
    STOP = "stop"  # All its processes stand still: a host that hangs, or is cut off


@dataclass
class LocalNode:
    """One node: a launcher and what it started. A replacement has the same index and one more
    generation."""

    index: int
    generation: int
    memory_dir: Path
    log_path: Path
    process: subprocess.Popen[bytes]
    killed: bool = False

    @property
    def node_id(self) -> str:
        return node_id(self.index, self.generation)

    @property
    def running(self) -> bool:
        return self.process.poll() is None


def node_id(index: int, generation: int) -> str:
    """``node1``, and ``node1.2`` for its second replacement."""
    return f"node{index}" if generation == 0 else f"node{index}.{generation}"


@dataclass
class LocalCluster:
    """Several nodes and a rendezvous on this machine. Use it as a context manager: nothing of it is
    left when it ends."""

    # what to train: ``["script.py", ARGS...]`` or ``["-m", "module", ARGS...]``
    command: Sequence[str]
    directory: Path  # for logs
    nodes: int = 2  # number of nodes
    procs_per_node: int = 1  # trainers per node
    options: Sequence[str] = ()  # further options of ``reft launch``
    env: Mapping[str, str] = field(default_factory=dict)  # set for all processes
    job_id: str = "local"  # of the memory
    # where the nodes' memory directories are made; None: in tmpfs if there is one
    memory_root: Path | None = None
    # serve the store as a process of its own; otherwise node 0's launcher does
    external_rendezvous: bool = True
    rendezvous_options: Sequence[str] = ()  # further options of ``reft rendezvous``
    etcd: str | None = None  # ``host:port,...`` of an etcd cluster in which the nodes meet instead
    popen: ClassVar[type[subprocess.Popen[Any]]] = subprocess.Popen  # Starts its processes

    def __post_init__(self) -> None:
        self.token = uuid.uuid4().hex
        self.history: list[LocalNode] = []
        self.current: dict[int, LocalNode] = {}
        self.rendezvous: subprocess.Popen[str] | None = None
        self.endpoint = ""
        self._own_memory_root = self.memory_root is None
        self.directory.mkdir(parents=True, exist_ok=True)
        use_own_extensions()

    def __enter__(self) -> LocalCluster:
        if self.memory_root is None:
            tmpfs = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self.memory_root = Path(tempfile.mkdtemp(prefix="reft-local-", dir=tmpfs))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- start -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.start_rendezvous()
        for index in range(self.nodes):
            self.start_node(index)

    def start_rendezvous(self, port: int = 0) -> None:
        """Serve the store; without ``external_rendezvous`` only choose its address."""
        if self.etcd is not None:
            self.endpoint = self.etcd
            return
        if not self.external_rendezvous:
            self.endpoint = f"127.0.0.1:{port or free_port()}"
            return
        with (self.directory / "rendezvous.log").open("ab") as log:
            self.rendezvous = self.popen(
                [sys.executable, *self._rendezvous_arguments(port or free_port())],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment("rendezvous"),
                start_new_session=True,
            )
        assert self.rendezvous.stdout is not None
        line = self.rendezvous.stdout.readline()
        if not line:
            raise LocalClusterError(
                f"reft rendezvous did not start: {self.directory / 'rendezvous.log'}"
            )
        self.endpoint = json.loads(line)["endpoint"]

    def start_node(self, index: int) -> LocalNode:
        """Start the launcher of node ``index``, or of its replacement if there was one before."""
        generation = sum(n.index == index for n in self.history)
        name = node_id(index, generation)
        assert self.memory_root is not None
        memory_dir = self.memory_root / name
        log_path = self.directory / f"{name}.log"
        with log_path.open("ab") as log:
            process = self.popen(
                [sys.executable, *self._arguments(name, memory_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(name),
                start_new_session=True,
            )
        node = LocalNode(index, generation, memory_dir, log_path, process)
        self.history.append(node)
        self.current[index] = node
        return node

    def _rendezvous_arguments(self, port: int) -> list[str]:
        """Of the interpreter: it prints one line of JSON with the ``endpoint``."""
        server = ("-m", "reft.job.rendezvous.server", "--host", "127.0.0.1")
        return [*server, "--port", str(port), "--json", *self.rendezvous_options]

    def _arguments(self, name: str, memory_dir: Path) -> list[str]:
        """Of the interpreter: a node's launcher."""
        return [
            *("-m", "reft.job.launch"),
            *("--nnodes", str(self.nodes), "--nproc-per-node", str(self.procs_per_node)),
            *(
                "--rdzv-backend",
                "etcd-v3" if self.etcd else "c10d",
                "--rdzv-endpoint",
                self.endpoint,
            ),
            *("--rdzv-id", self.job_id),
            *("--local-addr", "127.0.0.1", "--node-id", name, "--memory-dir", str(memory_dir)),
            *self.options,
            *self.command,
        ]

    def _environment(self, name: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Found also where reft is not installed but run from its sources.
        source = str(Path(__file__).resolve().parents[1])
        python_path = os.pathsep.join(p for p in (source, inherited.get("PYTHONPATH")) if p)
        own = {"PYTHONPATH": python_path, ENV_CLUSTER: f"{self.token}:{name}"}
        return {"OMP_NUM_THREADS": "1", **inherited, **self.env, **own}

    # -- failures ----------------------------------------------------------------------------------

    def kill_node(self, index: int, kind: KillKind | str = KillKind.NODE) -> LocalNode:
        node = self.current[index]
        kind = KillKind(kind)
        if kind is KillKind.PROCESS:
            trainers = self.trainers(index)
            if not trainers:
                raise LocalClusterError(f"{node.node_id} has no trainer to kill")
            trainers[0].kill()
            return node
        node.killed = True
        if kind is KillKind.STOP:
            self.signal_all(node.node_id, signal.SIGSTOP)
            return node
        self.kill_all(node.node_id)
        shutil.rmtree(node.memory_dir, ignore_errors=True)
        return node

    def resume_node(self, index: int) -> None:
        """Let a stopped node, replaced or not, run on: the newest one that was stopped."""
        for node in reversed(self.history):
            if node.index == index and node.killed:
                self.signal_all(node.node_id, signal.SIGCONT)
                return

    def signal_node(self, index: int, number: signal.Signals) -> None:
        """Send a signal to the launcher alone, as a batch system or a keyboard does."""
        self.current[index].process.send_signal(number)

    def trainers(self, index: int) -> list[psutil.Process]:
        """Trainer processes of a node, by local rank; those that are starting may be missing."""
        found = {}
        for process in self._processes(self.current[index].node_id):
            with suppress(psutil.Error):
                environ = process.environ()
                if process.ppid() == self.current[index].process.pid and "LOCAL_RANK" in environ:
                    found[int(environ["LOCAL_RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    # -- looking -----------------------------------------------------------------------------------

    def wait(self, timeout_secs: float) -> dict[int, int]:
        """Wait for the launchers of all current nodes. Returns exit code by node index."""
        deadline = time.monotonic() + timeout_secs
        codes = {}
        for index, node in sorted(self.current.items()):
            try:
                codes[index] = node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise LocalClusterError(
                    f"{node.node_id} still runs after {timeout_secs:.0f} "
                    f"s:\n{self.log(index)[-3000:]}"
                ) from error
        return codes

    def wait_until(self, condition: Callable[[], bool], timeout_secs: float, what: str) -> None:
        """Wait for ``condition``; raises LocalClusterError with all logs if it does not come."""
        deadline = time.monotonic() + timeout_secs
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {n.node_id}\n{n.log_path.read_text(errors='replace')[-2000:]}"
                    for n in self.history
                )
                raise LocalClusterError(f"waited {timeout_secs:.0f} s for {what}\n{logs}")
            time.sleep(_POLL_SECS)

    def log(self, index: int, generation: int | None = None) -> str:
        wanted = self.current[index].generation if generation is None else generation
        return (self.directory / f"{node_id(index, wanted)}.log").read_text(errors="replace")

    def job_dir(self, index: int) -> Path:
        return self.current[index].memory_dir / self.job_id

    def status(self, index: int) -> dict[str, Any] | None:
        return read_json(self.job_dir(index) / STATUS_FILE)

    def survivors(self) -> list[psutil.Process]:
        """Every process of this cluster that still runs, the rendezvous included."""
        return list(self._processes(None))

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill everything and remove the memory; logs stay."""
        self.kill_all(None)
        if self.rendezvous is not None and self.rendezvous.stdout is not None:
            self.rendezvous.stdout.close()
        if self._own_memory_root and self.memory_root is not None:
            shutil.rmtree(self.memory_root, ignore_errors=True)

    def _processes(self, name: str | None) -> Iterator[psutil.Process]:
        wanted = self.token if name is None else f"{self.token}:{name}"
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mark = process.environ().get(ENV_CLUSTER, "")
                same = mark == wanted if name is not None else mark.split(":")[0] == wanted
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def signal_all(self, name: str | None, number: signal.Signals) -> int:
        count = 0
        for process in list(self._processes(name)):
            with suppress(psutil.Error):
                process.send_signal(number)
                count += 1
        return count

    def kill_all(self, name: str | None) -> None:
        """SIGKILL until nothing is left: first all stand still, so that none starts another."""
        deadline = time.monotonic() + _KILL_SECS
        self.signal_all(name, signal.SIGSTOP)
        while self.signal_all(name, signal.SIGKILL) and time.monotonic() < deadline:
            self._reap(self.history)
            time.sleep(_POLL_SECS)
        self._reap(self.history)

    def _reap(self, nodes: Iterable[LocalNode]) -> None:
        for node in nodes:
            node.process.poll()
        if self.rendezvous is not None:
            self.rendezvous.poll()


def free_port() -> int:
    """Below the ports that the kernel gives to connections: free again when the store is started
    anew."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
