"""The jobs of ``mttr.py``: one that reft keeps alive; under torchrun one with DeepSpeed's
checkpoints, and one with NVIDIA's local checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from job_events import Event, EventReader, History, failure_to_step
from local_cluster import KillKind, LocalCluster, LocalNode, free_port

from examples.llama import PRETRAIN
from reft.env import ENV_EVENTS

_STORE = """
import json, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
port = int(sys.argv[1])
timeout = timedelta(seconds=60)
store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout)
print(json.dumps({"endpoint": f"127.0.0.1:{port}"}), flush=True)
signal.pause()
"""
_START_SECS = 240.0


class TorchrunCluster(LocalCluster):
    """The same nodes under ``torchrun``. Its store is a process of its own, as reft's is, and not
    shared with trainers, which would not meet again after a restart ("Gloo connectFullMesh
    failed")."""

    def _environment(self, name: str) -> dict[str, str]:
        memory = str((self.memory_root or self.directory) / name)  # gone with the node
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PEERS_MEMORY": memory}
        return {**super()._environment(name), **own}

    def _rendezvous_arguments(self, port: int) -> list[str]:
        return ["-c", _STORE, str(port or free_port())]

    def _arguments(self, name: str, memory_dir: Path) -> list[str]:
        return [
            *("-m", "torch.distributed.run"),
            *("--nnodes", str(self.nodes), "--nproc-per-node", str(self.procs_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--rdzv-id", self.job_id),
            *("--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1"),
            *self.options,
            *self.command,
        ]


@dataclass(frozen=True)
class Recovered:
    """One recovery.

    Attributes:
        secs: from the kill to the end of the first step after it, on the last rank.
        parts: of these seconds, as far as they are known.
        lost_steps: steps that had been done on a rank and were done again.
    """

    secs: float
    parts: dict[str, float]
    lost_steps: int


@dataclass
class Job:
    """A job that is killed again and again.

    Args:
        system: ``reft``, ``torchrun`` or ``nvidia``.
        trainer: arguments of ``examples.llama`` without where it saves.
        save_interval: steps between DeepSpeed's checkpoints, under torchrun, 0: none; NVIDIA's are
            of every step.
        reft: further settings of reft.
        peers: folder of NVIDIA's packages.
    """

    system: str
    directory: Path
    memory_root: Path
    nodes: int
    procs_per_node: int
    spares: int
    trainer: Sequence[str]
    save_interval: int
    reft: Mapping[str, Any] = field(default_factory=dict)
    peers: Path | None = None
    history: History = field(default_factory=History)
    _first: dict[int, dict[int, Event]] = field(default_factory=dict)
    """First step of every process, by pid."""

    def __post_init__(self) -> None:
        trainer = [*self.trainer, "--save-dir", str(self.directory / "checkpoints")]
        if self.system == "reft":
            trainer += ["--reft", json.dumps({"enabled": True, **self.reft})]
        else:
            interval = 1 if self.system == "nvidia" else self.save_interval
            trainer += ["--save-interval", str(interval)]
        script = [PRETRAIN]
        if self.system == "nvidia":
            script = [str(Path(__file__).parent / "peers" / "nvidia_job.py"), str(self.peers)]
        kind = LocalCluster if self.system == "reft" else TorchrunCluster
        self.cluster = kind(
            command=[*script, *trainer],
            directory=self.directory,
            nodes=self.nodes,
            procs_per_node=self.procs_per_node,
            options=("--max-restarts", "1000"),
            env={ENV_EVENTS: str(self.directory / "events"), "TMPDIR": str(self.directory)},
            job_id="mttr",
            memory_root=self.memory_root,
        )
        self._reader = EventReader(self.directory / "events")
        self._pids: dict[int, float] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self._last_step = 0

    @property
    def world(self) -> int:
        return self.nodes * self.procs_per_node

    def start(self) -> None:
        """Start it and wait until it trains, its spares waiting."""
        began = time.time()
        self.cluster.start()
        self._wait_for_step_after(began)
        for index in range(self.nodes, self.nodes + self.spares):
            self.cluster.start_node(index)

    def run_for(self, secs: float) -> None:
        """Let it train, and take in what it tells."""
        until = time.monotonic() + secs
        while time.monotonic() < until:
            self._take_in()
            time.sleep(0.1)

    def kill(self, index: int, kind: KillKind) -> LocalNode:
        self._take_in()
        return self.cluster.kill_node(index, kind)

    def wait_for_recovery(self, killed_at: float) -> Recovered:
        """Wait until every rank has done a step in a process that began after ``killed_at``."""
        last = self._last_step
        first = self._wait_for_step_after(killed_at)
        done = max(event.time for event in first.values())
        lost = max(0, last - min(event.fields["step"] for event in first.values()) + 1)
        # What reft knows of the parts is told a moment later.
        self.run_for(1.0)
        parts = failure_to_step(self.history.current, killed_at) if self.system == "reft" else {}
        return Recovered(done - killed_at, parts or self._trainers_parts(first), lost)

    def _trainers_parts(self, first: dict[int, Event]) -> dict[str, float]:
        """What the slowest trainer says of its own start."""
        told = [self._ready[event.pid] for event in first.values()]
        return {
            name.removesuffix("_secs"): max(fields[name] for fields in told)
            for name in told[0]
            if name.endswith("_secs")
        }

    def _wait_for_step_after(self, moment: float) -> dict[int, Event]:
        """First step of the process of every rank, all begun after ``moment``."""
        found: dict[int, Event] = {}

        def done() -> bool:
            for event in self._take_in():
                if event.kind == "step" and self._pids[event.pid] > moment:
                    found.setdefault(event.rank, event)
            return len(found) == self.world

        self.cluster.wait_until(
            done, _START_SECS, f"a step on all {self.world} ranks of {self.system}"
        )
        return found

    def _take_in(self) -> list[Event]:
        events = self._reader.poll()
        for event in events:
            self.history.feed(event)
            if event.rank >= 0:
                self._pids.setdefault(event.pid, event.time)
            if event.kind == "ready":
                self._ready[event.pid] = dict(event.fields)
            elif event.kind == "step":
                self._last_step = max(self._last_step, event.fields["step"])
        return events

    def differing_steps(self) -> list[int]:
        """Steps that were done more than once, with different losses."""
        return sorted(step for step, losses in self.history.losses.items() if len(set(losses)) > 1)
