"""One run of the demonstration's job over local nodes, with failures on the way, and what came of it."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from reft.env import ENV_EVENTS
from reft.tools.demo.cluster import KillKind, LocalCluster, LocalClusterError
from reft.tools.demo.history import Event, EventReader, History, Incarnation, failure_to_step

SOURCES = ("local", "copy", "peer", "parity", "disk")
_POLL_SECS = 0.01
_INTO_STEP = 0.4
"""A node is killed when so much of a step's usual time has gone by: in the middle of the next one."""
_FIRST_STEP_SECS = 0.2
_END_SECS = 15.0  # when the launcher of a node has failed, the others have so long to end, too
_MOST_STEP_LINES = 40
_WHAT_HAPPENED = {
    KillKind.NODE: "is killed, its memory is gone,",
    KillKind.PROCESS: "loses a trainer",
    KillKind.STOP: "stands still",
}


class Kill(NamedTuple):
    """One failure to make: node ``node`` fails while step ``step + 1`` is computed."""

    step: int
    node: int


class Failure(NamedTuple):
    """One failure that was made: at a Unix time, when ``step`` was done and the next one was computed."""

    step: int
    node: int
    kind: str
    time: float


class Job:
    """Runs the job to its end, or until it cannot go on: until ``deadline``, of ``time.monotonic``. ``say``
    tells people something, with a style; ``kills`` are in order."""

    def __init__(
        self,
        cluster: LocalCluster,
        steps: int,
        deadline: float,
        say: Callable[[str, str], None],
        *,
        kills: Sequence[Kill] = (),
        kind: KillKind = KillKind.NODE,
    ) -> None:
        self.cluster = cluster
        self.history = History()
        self.failures: list[Failure] = []
        self._steps, self._deadline, self._say = steps, deadline, say
        self._kind, self._pending = kind, list(kills)
        self._reader = EventReader(Path(cluster.env[ENV_EVENTS]))
        self._lives_ended = 0
        self._restored: set[int] = set()
        self._resumed: set[int] = set()
        self._stopped: list[int] = []

    def run(self) -> str | None:
        """Run it; nothing of it is left afterwards but its logs and events. Returns why it could not finish;
        None: it did."""
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
            return f"the failures {left} could not be injected: the job had already ended"
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
            if now > self._deadline:
                return (
                    f"the time is up (--timeout); the run of {self.cluster.job_id} has reached step "
                    f"{self.history.last_step} of {self._steps}"
                )
            time.sleep(_POLL_SECS)

    def _fail_nodes(self) -> None:
        """Make the failures that are due, all of one step at once, and replace what was lost."""
        life = self.history.current
        if not self._pending or life.number <= self._lives_ended or life.last_step < self._pending[0].step:
            return
        step = self._pending[0].step
        done_at = min(min(times.values()) for s, times in life.steps.items() if s >= step)
        first_done = [min(times.values()) for _, times in sorted(life.steps.items())]
        lengths = [b - a for a, b in pairwise(first_done)][-8:] or [_FIRST_STEP_SECS]
        if time.time() < done_at + _INTO_STEP * statistics.median(lengths):
            return
        due = [kill for kill in self._pending if kill.step == step]
        del self._pending[: len(due)]
        self._lives_ended, last_step = life.number, life.last_step
        for kill in due:
            self.failures.append(Failure(last_step, kill.node, str(self._kind), time.time()))
            node = self.cluster.kill_node(kill.node, self._kind)
            self._say(f"{node.node_id} {_WHAT_HAPPENED[self._kind]} in step {last_step + 1}", "bold red")
        for kill in due if self._kind is not KillKind.PROCESS else ():
            node = self.cluster.start_node(kill.node)
            self._say(f"{node.node_id} starts in its place, with empty memory", "yellow")
        if self._kind is KillKind.STOP:
            self._stopped += [kill.node for kill in due]

    def _take_in(self) -> None:
        for event in self._reader.poll():
            self.history.feed(event)
            if event.rank >= 0:
                self._narrate(event, self.history.incarnation_of(event))

    def _narrate(self, event: Event, life: Incarnation) -> None:
        if event.kind == "attached" and len(life.nodes) == len(self.cluster.current):
            self._say(f"all ranks are attached, start {life.number}", "")
        elif event.kind == "restored" and len(life.restored) == len(life.nodes):
            if life.number not in self._restored:
                self._restored.add(life.number)
                self._say(_restored_text(life), "bold magenta")
        elif event.kind == "step":
            step, loss = event.fields["step"], event.fields["loss"]
            if life.number > 1 and life.number not in self._resumed:
                self._resumed.add(life.number)
                since = [f.time for f in self.failures if f.time < event.time]
                if since:
                    self._say(
                        f"step {step} is done {event.time - since[-1]:.1f} s after the failure", "bold green"
                    )
                # Nodes that stood still run on, now that the job trains without them.
                for index in self._stopped:
                    self.cluster.resume_node(index)
                    self._say(f"node{index} runs again; the job has continued without it", "yellow")
                self._stopped.clear()
            every = -(-self._steps // _MOST_STEP_LINES)
            if event.rank == 0 and (step % every == 0 or step == self._steps):
                committed = f"  snapshot {max(life.committed)}" if life.committed else ""
                self._say(f"step {step}/{self._steps}  loss {loss:.6f}{committed}", "")


def _restored_text(life: Incarnation) -> str:
    first, origin = _origin(life)
    parts = ", ".join(f"{kind} {nbytes / 1e6:.2f} MB" for kind, nbytes in origin.items() if nbytes)
    return (
        f"state of step {first['version']} restored from {first['source']} in {first['secs']:.2f} s ({parts})"
    )


def _origin(life: Incarnation) -> tuple[dict[str, Any], dict[str, int]]:
    """Source, version and the slowest rank's seconds of a restore (``none`` if nothing had been committed);
    bytes by where they came from, all ranks together."""
    events = [event.fields for event in life.restored.values()]
    found = {"source": "none", "version": 0, **(events[0] if events else {})}
    found["secs"] = max((float(fields["secs"]) for fields in events), default=0.0)
    return found, {s: sum(int(f["bytes_from"].get(s, 0)) for f in events) for s in SOURCES}


# -- the verdict ----------------------------------------------------------------------------------------


def make_report(
    steps: int, history: History, reference: History, failures: Sequence[Failure], problem: str | None = None
) -> dict[str, Any]:
    """What two runs left behind, as plain values.

    ``losses`` are those of steps 1 to ``steps`` that stand at the end (None: never reached);
    ``max_abs_loss_difference`` is over all times that a step was computed, 0.0 only if equal to the last bit
    (None: some loss is missing); ``good``: training finished, and not one bit differs.
    """
    lives = [history.incarnations[n] for n in sorted(history.incarnations)]
    difference = loss_difference(history, reference, steps)
    return {
        "steps": steps,
        "tolerance": next((life.tolerance for life in lives if life.tolerance is not None), None),
        "failures": [failure._asdict() for failure in failures],
        "recoveries": find_recoveries(lives, failures),
        "losses": _standing(history, steps),
        "reference_losses": _standing(reference, steps),
        "max_abs_loss_difference": difference,
        "snapshots": _count_snapshots(lives),
        "problem": problem,
        "good": problem is None and difference == 0.0,
    }


def find_recoveries(lives: Sequence[Incarnation], failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """One per incarnation, after the first to train, that came as far as a step.

    A failure during a recovery belongs to the recovery that succeeded in the end: it is counted from
    the first failure since the last step of the one before.
    """
    found = []
    for before, life in pairwise(life for life in lives if life.steps):
        began, done = before.first_step_times[0], life.first_step_times[1]
        since = [failure.time for failure in failures if began <= failure.time <= done]
        first, origin = _origin(life)
        found.append(
            {
                "source": first["source"],
                "version": first["version"],
                "lost_steps": before.last_step - first["version"],
                "load_secs": first["secs"],
                "failure_to_step_secs": done - min(since) if since else None,
                "bytes_from": origin,
                "failure_to_step": failure_to_step(life, min(since)) if since else {},
            }
        )
    return found


def loss_difference(history: History, reference: History, steps: int) -> float | None:
    """Largest absolute difference over all steps; also between two computations of one step."""
    worst = 0.0
    for step in range(1, steps + 1):
        found, expected = history.losses.get(step), reference.losses.get(step)
        if not found or not expected:
            return None
        worst = max(worst, *(_difference(a, b) for a in found for b in expected))
    return worst


def _difference(found: str, expected: str) -> float:
    if found == expected:
        return 0.0
    difference = abs(float.fromhex(found) - float.fromhex(expected))
    # Unequal bits never count as equal: not NaN against a number, not 0.0 against -0.0.
    return math.inf if math.isnan(difference) else difference or math.ulp(0.0)


def _standing(history: History, steps: int) -> list[float | None]:
    losses = history.losses
    return [float.fromhex(losses[s][-1]) if s in losses else None for s in range(1, steps + 1)]


def _count_snapshots(lives: Sequence[Incarnation]) -> dict[str, Any]:
    """Versions committed by all ranks (the restored state counts once more) and given up; host memory of a
    version and what is sent for it, on the rank where it is most; seconds of the training thread per version,
    on the slowest rank."""
    counters = [c for life in lives for c in life.counters.values()]
    slowest = [
        max(c["stall_secs_median"] or 0.0 for c in life.counters.values()) for life in lives if life.counters
    ]
    return {
        "committed": sum(len(life.committed) for life in lives),
        "skipped": sum(len(life.skipped) for life in lives),
        "bytes_per_rank": max((int(c["bytes_per_rank"]) for c in counters), default=0),
        "sent_bytes": max((sum(c["traffic"]["sent"].values()) for c in counters), default=0),
        "stall_secs_median": statistics.median(slowest) if slowest else None,
    }
