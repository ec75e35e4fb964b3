"""One run of the training job over local nodes, with failures on the way."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from reft.env import ENV_EVENTS
from reft.storage.persisted import job_directory
from reft.tools.demo.cluster import KillKind, LocalCluster, LocalNode
from reft.tools.demo.display import NodeView, Screen, View
from reft.tools.demo.history import Event, EventReader, History, Incarnation
from reft.tools.demo.options import DemoOptions, Kill
from reft.tools.demo.report import SOURCES, Failure

_POLL_SECS = 0.01
_LOOK_SECS = 0.1
_INTO_STEP = 0.4
"""A node is killed when so much of a step's usual time has gone by: in the middle of the next one."""
_FIRST_STEP_SECS = 0.2
_SETTLE_SECS = 15.0
"""When the launcher of a node has failed, the others have so long to end, too."""


@dataclass
class Job:
    """Runs the job to its end, or until it cannot go on.

    Args:
        name: ``training`` or ``reference``, for people.
        options: the command line.
        command: what the launchers start.
        directory: for logs, events and checkpoints.
        memory_root: for the nodes' memory.
        screen: told what happens.
        deadline: of ``time.monotonic``.
        kills: failures to make.
        persist_dir: where checkpoints appear, if they are asked for.
    """

    name: str
    options: DemoOptions
    command: list[str]
    directory: Path
    memory_root: Path
    screen: Screen
    deadline: float
    kills: tuple[Kill, ...] = ()
    persist_dir: Path | None = None
    history: History = field(default_factory=History)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = EventReader(self.directory / "events")
        self._pending = list(self.kills)
        self._lives_ended = 0
        self._told_restored: set[int] = set()
        self._told_steps: set[int] = set()
        self._told_of_disk = False
        self._stopped: list[tuple[int, int]] = []
        self._phase = "starting"
        self._looked = 0.0
        # Launchers that are killed leave files there.
        self._temporary = self.directory / "tmp"
        self._temporary.mkdir(parents=True)
        self._cluster = LocalCluster(
            command=self.command,
            directory=self.directory,
            nodes=self.options.nodes,
            procs_per_node=self.options.procs_per_node,
            options=("--max-restarts", str(self._own_restarts), "--rank-order", "across-nodes"),
            env={ENV_EVENTS: str(self.directory / "events"), "TMPDIR": str(self._temporary)},
            job_id=f"demo-{self.name}",
            memory_root=self.memory_root,
        )

    @property
    def _own_restarts(self) -> int:
        """A trainer that dies by itself uses up a restart; a lost node uses none."""
        return len({kill.step for kill in self.kills}) if self._kind is KillKind.PROCESS else 0

    @property
    def _kind(self) -> KillKind:
        return self.options.kill_kind

    @property
    def logs(self) -> list[Path]:
        """Of the launchers and their trainers, those that failed first."""
        nodes = sorted(self._cluster.history, key=lambda node: (node.killed, not node.process.poll()))
        return [node.log_path for node in nodes]

    def run(self) -> str | None:
        """Run it; nothing of it is left afterwards but its logs and events.

        Returns:
            Why it could not finish; None: it did.
        """
        try:
            with self._cluster as cluster:
                cluster.start()
                problem = self._watch()
                self._take_in()
                self._show()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if problem is None and self._pending:
            left = ", ".join(f"{kill.step}:{kill.node}" for kill in self._pending)
            return f"the failures {left} could not be made: the job had ended before"
        return problem

    # -- the loop ----------------------------------------------------------------------------------

    def _watch(self) -> str | None:
        failed_at: float | None = None
        while True:
            self._take_in()
            self._fail_nodes()
            now = time.monotonic()
            if now - self._looked > _LOOK_SECS:
                self._looked = now
                self._show()
                codes = [node.process.poll() for node in self._cluster.current.values()]
                if all(code is not None for code in codes):
                    return None if not any(codes) else self._failed_launchers()
                if any(codes) and failed_at is None:
                    failed_at = now
                if failed_at is not None and now - failed_at > _SETTLE_SECS:
                    return self._failed_launchers()
                if now > self.deadline:
                    return (
                        f"the time is over (--timeout {self.options.timeout_secs:.0f} s); the {self.name} "
                        f"run has done step {self.history.last_step} of {self.options.steps}"
                    )
            time.sleep(_POLL_SECS)

    def _failed_launchers(self) -> str:
        codes = {n.node_id: n.process.poll() for n in self._cluster.current.values()}
        failed = ", ".join(f"{name} (exit code {code})" for name, code in codes.items() if code)
        return f"the {self.name} run ended after step {self.history.last_step}: {failed}"

    def _take_in(self) -> None:
        for event in self._reader.poll():
            self.history.feed(event)
            if event.rank >= 0:
                self._narrate(event, self.history.incarnation_of(event))

    # -- failures ----------------------------------------------------------------------------------

    def _fail_nodes(self) -> None:
        """Make the failures that are due, all of one step at once, and replace what was lost."""
        life = self.history.current
        if not self._pending or life.number <= self._lives_ended or life.last_step < self._pending[0].step:
            return
        step = self._pending[0].step
        done_at = min(min(times.values()) for s, times in life.steps.items() if s >= step)
        if time.time() < done_at + _INTO_STEP * self._step_secs(life) or self._waits_for_disk(step):
            return
        due = [kill for kill in self._pending if kill.step == step]
        del self._pending[: len(due)]
        self._lives_ended = life.number
        last_step = life.last_step
        for kill in due:
            node = self._cluster.current[kill.node].node_id
            self.failures.append(Failure(last_step, kill.node, str(self._kind), time.time()))
            self._cluster.kill_node(kill.node, self._kind)
            self.screen.say(f"{node} {_WHAT_HAPPENED[self._kind]} in step {last_step + 1}", "bold red")
        for kill in due:
            self._replace(kill.node)

    def _waits_for_disk(self, step: int) -> bool:
        """Whether a checkpoint should be on disk by ``step``, but the first is still being written:
        steps of this small model are quicker than that."""
        interval, persist_dir = self.options.persist_interval, self.persist_dir
        if not interval or step < interval or persist_dir is None:
            return False
        if (job_directory(persist_dir, self._cluster.job_id) / "latest").exists():
            return False
        if not self._told_of_disk:
            self._told_of_disk = True
            self.screen.say(f"the failure of step {step} waits for the first checkpoint on disk", "yellow")
        return True

    def _replace(self, index: int) -> None:
        if self._kind is KillKind.PROCESS:
            return
        if self._kind is KillKind.STOP:
            self._stopped.append((index, self._lives_ended))
        node = self._cluster.replace_node(index)
        self.screen.say(f"{node.node_id} starts in its place, with empty memory", "yellow")

    @staticmethod
    def _step_secs(life: Incarnation) -> float:
        first_done = [min(times.values()) for _, times in sorted(life.steps.items())]
        steps = [b - a for a, b in pairwise(first_done)]
        return statistics.median(steps[-8:]) if steps else _FIRST_STEP_SECS

    def _wake_stopped(self, life: Incarnation) -> None:
        """Let nodes that stood still run on, once the job trains without them."""
        for index, number in list(self._stopped):
            if life.number > number:
                self._stopped.remove((index, number))
                self._cluster.resume_node(index)
                self.screen.say(f"node{index} runs on; the job has gone on without it", "yellow")

    # -- what people are told ----------------------------------------------------------------------

    def _narrate(self, event: Event, life: Incarnation) -> None:
        if event.kind == "restored" and len(life.restored) == len(life.nodes):
            self._tell_restored(life)
        elif event.kind == "step" and life.number > 1 and life.number not in self._told_steps:
            self._told_steps.add(life.number)
            since = [f.time for f in self.failures if f.time < event.time]
            if since:
                text = f"step {life.last_step} is done {event.time - since[-1]:.1f} s after the failure"
                self.screen.say(text, "bold green")
            self._wake_stopped(life)

    def _tell_restored(self, life: Incarnation) -> None:
        if life.number in self._told_restored:
            return
        self._told_restored.add(life.number)
        events = [event.fields for event in life.restored.values()]
        origin = {
            source: sum(int(fields["bytes_from"].get(source, 0)) for fields in events) for source in SOURCES
        }
        parts = ", ".join(f"{source} {count / 1e6:.2f} MB" for source, count in origin.items() if count)
        secs = max(float(fields["secs"]) for fields in events)
        version, kind = events[0]["version"], events[0]["source"]
        self.screen.say(
            f"state of step {version} restored from {kind} in {secs:.2f} s ({parts})", "bold magenta"
        )

    def _show(self) -> None:
        life = self.history.current
        step = max(life.losses, default=0)
        committed = [max(n.committed) for n in self.history.incarnations.values() if n.committed]
        protected = self.name == "training"
        self.screen.update(
            View(
                phase=_PHASES[self.name],
                step=step,
                steps=self.options.steps,
                loss=float.fromhex(life.losses[step]) if step else None,
                version=(committed[-1] if committed else 0) if protected else None,
                nodes=tuple(self._view(n) for n in self._cluster_nodes()) if protected else (),
            )
        )

    def _cluster_nodes(self) -> list[LocalNode]:
        return sorted(self._cluster.history, key=lambda node: (node.index, node.generation))

    def _view(self, node: LocalNode) -> NodeView:
        life = self.history.current
        ranks = life.ranks_of(node.node_id)
        return NodeView(
            name=node.node_id,
            state=self._state(node),
            ranks=" ".join(life.coordinates[rank] for rank in ranks),
            step=max((s for s, times in life.steps.items() if times.keys() & set(ranks)), default=0),
            version=max(life.committed, default=0) if ranks else 0,
        )

    def _state(self, node: LocalNode) -> str:
        code = node.process.poll()
        if node.killed and self._kind is KillKind.STOP:
            still = any(index == node.index for index, _ in self._stopped)
            return "stopped" if still else "replaced"
        if node.killed:
            return "dead"
        if code is not None:
            return "failed" if code else "ended"
        return self.history.state_of(node.node_id)


_WHAT_HAPPENED: Mapping[KillKind, str] = {
    KillKind.NODE: "is killed, its memory is gone,",
    KillKind.PROCESS: "loses a trainer",
    KillKind.STOP: "stands still",
}
_PHASES = {
    "training": "training with reft",
    "reference": "the same job, undisturbed, without reft",
}
