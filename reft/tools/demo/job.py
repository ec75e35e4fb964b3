"""One run of the training job over local nodes, with failures on the way."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from reft.env import ENV_EVENTS
from reft.tools.demo.cluster import KillKind, LocalCluster, LocalClusterError
from reft.tools.demo.history import Event, EventReader, History, Incarnation
from reft.tools.demo.report import SOURCES, Failure

_POLL_SECS = 0.01
_INTO_STEP = 0.4
"""A node is killed when so much of a step's usual time has gone by: in the middle of the next one."""
_FIRST_STEP_SECS = 0.2
_END_SECS = 15.0
"""When the launcher of a node has failed, the others have so long to end, too."""
_MOST_STEP_LINES = 40
_WHAT_HAPPENED = {
    KillKind.NODE: "is killed, its memory is gone,",
    KillKind.PROCESS: "loses a trainer",
    KillKind.STOP: "stands still",
}


@dataclass(frozen=True, order=True)
class Kill:
    """One failure to make: node ``node`` fails while step ``step + 1`` is computed."""

    step: int
    node: int


@dataclass
class Job:
    """Runs the job to its end, or until it cannot go on.

    Attributes:
        cluster: what it runs on; not started yet.
        steps: of the whole job.
        deadline: of ``time.monotonic``.
        say: tells people something, with a style.
        kills: failures to make, in order. kind: how.
        history: what has happened so far. failures: that were made.
    """

    cluster: LocalCluster
    steps: int
    deadline: float
    say: Callable[[str, str], None]
    kills: Sequence[Kill] = ()
    kind: KillKind = KillKind.NODE
    history: History = field(default_factory=History)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = EventReader(Path(self.cluster.env[ENV_EVENTS]))
        self._pending: list[Kill] = []
        self._lives_ended = 0
        self._restored: set[int] = set()
        self._resumed: set[int] = set()
        self._stopped: list[int] = []

    def run(self) -> str | None:
        """Run it; nothing of it is left afterwards but its logs and events.

        Returns:
            Why it could not finish; None: it did.
        """
        self._pending = list(self.kills)
        # Launchers that are killed leave files there.
        temporary = Path(self.cluster.env["TMPDIR"])
        temporary.mkdir(parents=True)
        try:
            with self.cluster as cluster:
                cluster.start()
                problem = self._watch()
                self._take_in()
        except LocalClusterError as error:
            return str(error)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if problem is None and self._pending:
            left = ", ".join(f"{kill.step}:{kill.node}" for kill in self._pending)
            return f"the failures {left} could not be made: the job had ended before"
        return problem

    def _watch(self) -> str | None:
        failed_at: float | None = None
        while True:
            self._take_in()
            self._fail_nodes()
            now = time.monotonic()
            nodes = self.cluster.current.values()
            codes = {node.node_id: node.process.poll() for node in nodes}
            if any(codes.values()):
                failed_at = failed_at or now
            ended = all(code is not None for code in codes.values())
            if failed_at is not None and (ended or now - failed_at > _END_SECS):
                failed = ", ".join(f"{name} (exit code {code})" for name, code in codes.items() if code)
                return f"the run of {self.cluster.job_id} ended after step {self.history.last_step}: {failed}"
            if ended:
                return None
            if now > self.deadline:
                return (
                    f"the time is over (--timeout); the run of {self.cluster.job_id} has done step "
                    f"{self.history.last_step} of {self.steps}"
                )
            time.sleep(_POLL_SECS)

    # -- failures ----------------------------------------------------------------------------------

    def _fail_nodes(self) -> None:
        """Make the failures that are due, all of one step at once, and replace what was lost."""
        life = self.history.current
        if not self._pending or life.number <= self._lives_ended or life.last_step < self._pending[0].step:
            return
        step = self._pending[0].step
        done_at = min(min(times.values()) for s, times in life.steps.items() if s >= step)
        if time.time() < done_at + _INTO_STEP * _step_secs(life):
            return
        due = [kill for kill in self._pending if kill.step == step]
        del self._pending[: len(due)]
        self._lives_ended, last_step = life.number, life.last_step
        for kill in due:
            self.failures.append(Failure(last_step, kill.node, str(self.kind), time.time()))
            node = self.cluster.kill_node(kill.node, self.kind)
            self.say(f"{node.node_id} {_WHAT_HAPPENED[self.kind]} in step {last_step + 1}", "bold red")
        for kill in due if self.kind is not KillKind.PROCESS else ():
            node = self.cluster.replace_node(kill.node)
            self.say(f"{node.node_id} starts in its place, with empty memory", "yellow")
        if self.kind is KillKind.STOP:
            self._stopped += [kill.node for kill in due]

    def _wake_stopped(self) -> None:
        """Let nodes that stood still run on, now that the job trains without them."""
        for index in self._stopped:
            self.cluster.resume_node(index)
            self.say(f"node{index} runs on; the job has gone on without it", "yellow")
        self._stopped.clear()

    # -- what people are told ----------------------------------------------------------------------

    def _take_in(self) -> None:
        for event in self._reader.poll():
            self.history.feed(event)
            if event.rank >= 0:
                self._narrate(event, self.history.incarnation_of(event))

    def _narrate(self, event: Event, life: Incarnation) -> None:
        if event.kind == "attached" and len(life.nodes) == len(self.cluster.current):
            self.say(f"all ranks are attached, start {life.number}", "")
        elif event.kind == "restored" and len(life.restored) == len(life.nodes):
            if life.number not in self._restored:
                self._restored.add(life.number)
                self.say(_restored_text(life), "bold magenta")
        elif event.kind == "step":
            step, loss = event.fields["step"], event.fields["loss"]
            if life.number > 1 and life.number not in self._resumed:
                self._resumed.add(life.number)
                since = [f.time for f in self.failures if f.time < event.time]
                if since:
                    self.say(
                        f"step {step} is done {event.time - since[-1]:.1f} s after the failure", "bold green"
                    )
                self._wake_stopped()
            every = -(-self.steps // _MOST_STEP_LINES)
            if event.rank == 0 and (step % every == 0 or step == self.steps):
                committed = f"  snapshot {max(life.committed)}" if life.committed else ""
                self.say(f"step {step}/{self.steps}  loss {loss:.6f}{committed}", "")


def _step_secs(life: Incarnation) -> float:
    first_done = [min(times.values()) for _, times in sorted(life.steps.items())]
    steps = [b - a for a, b in pairwise(first_done)]
    return statistics.median(steps[-8:]) if steps else _FIRST_STEP_SECS


def _restored_text(life: Incarnation) -> str:
    events = [event.fields for event in life.restored.values()]
    origin = {kind: sum(int(f["bytes_from"].get(kind, 0)) for f in events) for kind in SOURCES}
    parts = ", ".join(f"{kind} {nbytes / 1e6:.2f} MB" for kind, nbytes in origin.items() if nbytes)
    secs, one = max(float(f["secs"]) for f in events), events[0]
    return f"state of step {one['version']} restored from {one['source']} in {secs:.2f} s ({parts})"
