"""``reft advise``: which nodes of a job to replace, add or remove, and which need more memory.

Rules and thresholds are those of the DLRover paper as far as it gives them. :func:`situation`
gathers the facts about a job. :func:`advise`, and :func:`scale_plan`, which writes advice in the
format of DLRover's Kubernetes operator, are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from reft.memory.files import bounds
from reft.memory.jobdir import JobDir
from reft.node.history import RoundReport, read_history
from reft.node.memory_watch import MemoryUse, fullest
from reft.node.report import HealthSignal, NodeReport, ReportBoard
from reft.node.stragglers import Straggler

# A further worker pays off if it adds at least this share of the other workers' mean speed
# (DLRover).
WORTH = 0.2
_ROUNDING = 1e-9
_OFTEN = 3  # Losses of a node after which it is replaced
# More memory is advised from this share in use, namely this multiple of the largest use. DLRover
# acts before memory runs out, too, but its paper gives no threshold.
_MEMORY_RISK, _MEMORY_ROOM = 0.9, 1.25
_MIN_STEPS = 50  # Fewest steps of a round from which its speed is computed (DLRover's window)
_API_VERSION, _ROLE = "elastic.iml.github.io/v1alpha1", "worker"


class AdvisedAction(StrEnum):
    REPLACE = "replace"
    DROP = "drop"
    ADD = "add"
    REMOVE = "remove"
    MEMORY = "memory"


@dataclass(frozen=True)
class SpeedSample:
    """A job's measured speed with a certain number of workers."""

    workers: int
    per_sec: float  # Steps per second if the global batch is fixed, otherwise samples per second


class Memory(NamedTuple):
    """That memory of a node's host of which the largest share is in use."""

    node: str
    use: MemoryUse
    runs_out: str = ""  # Text that says when the memory will be full; empty if it will not be


@dataclass(frozen=True)
class JobSituation:
    """The facts about a job from which advice follows."""

    nodes: tuple[str, ...]  # Nodes that train
    spares: tuple[str, ...] = ()  # Nodes that wait for a place
    slow: tuple[Straggler, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)  # Number of losses of each node
    speeds: tuple[SpeedSample, ...] = ()  # Measured speeds, the current one last
    # Largest number of nodes that the job may have; None: never advise more nodes
    most_nodes: int | None = None
    memory: tuple[Memory, ...] = ()  # Fullest memory of each node that reports its memories


@dataclass(frozen=True)
class Advice:
    """One change that a user is advised to make."""

    action: AdvisedAction
    nodes: tuple[str, ...]  # Nodes concerned; empty if the action is about the number of nodes
    workers: int  # Number of nodes that the job has after the action
    why: str
    memory_bytes: int | None = None  # Advised size of the node's memory; None for other actions

    def __str__(self) -> str:
        what = ", ".join(self.nodes) or f"to {self.workers} nodes"
        return f"{self.action} {what}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "action": str(self.action),
            "nodes": list(self.nodes),
            "said": str(self),
        }


# -- gathering facts -------------------------------------------------------------------------------


def situation(
    paths: Sequence[Path], board: ReportBoard | None, most_nodes: int | None
) -> JobSituation:
    """Gather the facts about a job.

    Args:
        paths: the job's memory directories on one or several nodes.
        board: reports of all nodes; None if there are none.
        most_nodes: largest number of nodes that the job may have; None: never advise more nodes.
    """
    rounds = max((read_history(path) for path in paths), key=len, default=[])
    nodes = () if board is None else board.nodes
    present = [node for node in nodes if node.observed_signal is not HealthSignal.OFFLINE]
    training = [report for report in present if not report.spare]
    speeds = _speeds(rounds)
    if now := [report.steps_per_sec for report in training if report.steps_per_sec]:
        speeds.append(SpeedSample(len(training), min(now)))
    return JobSituation(
        nodes=tuple(r.node for r in training) or tuple(rounds[-1].nodes if rounds else ()),
        spares=tuple(report.node for report in present if report.spare),
        slow=() if board is None else board.slow,
        losses=Counter(node for r in rounds for node in r.lost),
        speeds=tuple(speeds),
        most_nodes=most_nodes,
        memory=tuple(_memory(paths[0], present)),
    )


def _memory(path: Path, reports: Sequence[NodeReport]) -> Iterator[Memory]:
    """Find the fullest memory of each node that reports its memories; if none does, of this one."""
    known = []
    for report in reports:
        if report.memory:
            runs_out = str(report.runs_out[0]) if report.runs_out else ""
            known.append((report.node, report.memory, runs_out))
    if not known:
        uses = [MemoryUse(b.name, b.used_bytes, b.used_bytes, b.limit_bytes) for b in bounds(path)]
        known = [(JobDir.open(path).node, tuple(uses), "")]
    for node, uses_of_node, runs_out in known:
        use = fullest(uses_of_node)
        if use is not None:
            yield Memory(node, use, runs_out)


def _speeds(rounds: Sequence[RoundReport]) -> list[SpeedSample]:
    """Compute the speed in each earlier round: committed steps over its training time."""
    samples = []
    for row, following in pairwise(rounds):
        # Add the parts from the start of the round to its first step. The parts "ending" and
        # "gathering" come before the start.
        skipped = ("ending", "gathering", "first_step")
        began = row.unix_secs + sum(s for part, s in row.secs.items() if part not in skipped)
        ended = min(following.failed_unix_secs or following.unix_secs, following.unix_secs)
        steps = following.newest_step - (row.resumed_step or 0)
        if steps >= _MIN_STEPS and ended > began and row.nodes:
            samples.append(SpeedSample(len(row.nodes), steps / (ended - began)))
    return samples


# -- advice ----------------------------------------------------------------------------------------


def advise(job: JobSituation) -> tuple[Advice, ...]:
    """Give all advice about a job, the most helpful first. No node is named twice."""
    named: set[str] = set()
    kept = []
    for advice in (*_about_stragglers(job), *_about_losses(job), *_about_memory(job)):
        if named.isdisjoint(advice.nodes):
            kept.append(advice)
            named.update(advice.nodes)
    return (*kept, *_about_workers(job))


def applicable(job: JobSituation, advices: Sequence[Advice]) -> Advice | None:
    """Return the first advice that ``reft scale`` can carry out at once; None if there is none.

    Nodes can be replaced or added only by nodes that wait, and memory only by a person.
    """
    for advice in advices:
        if advice.action in (AdvisedAction.DROP, AdvisedAction.REMOVE):
            return advice
        if advice.action is AdvisedAction.REPLACE and job.spares:
            return advice
        added = advice.workers - len(job.nodes)
        if advice.action is AdvisedAction.ADD and len(job.spares) >= added:
            return advice
    return None


def dropping_pays(nodes: int, factor: float) -> bool:
    """Whether a synchronous job with a fixed global batch is faster without its slow node.

    Without the slow node, each other node does n / (n - 1) times its work. With it, they wait.

    Args:
        nodes: number of nodes of the job.
        factor: the slow node's time over that of the others.
    """
    return nodes > 1 and factor > nodes / (nodes - 1)


def _about_stragglers(job: JobSituation) -> Iterator[Advice]:
    n, spares = len(job.nodes), list(job.spares)
    handled: set[tuple[str, ...]] = set()
    for slow in sorted(job.slow, key=lambda s: -s.factor):
        # Skip links, because either of the two nodes may be the cause; name each node once.
        if len(slow.nodes) != 1 or slow.nodes in handled:
            continue
        handled.add(slow.nodes)
        cause = f" ({slow.why})" if slow.why else ""
        why = f"{slow.name} takes {slow.factor:.2f} times as long as its peers{cause}"
        if spares:
            why += f"; spare {spares.pop(0)} is waiting"
            yield Advice(AdvisedAction.REPLACE, slow.nodes, n, why)
        elif dropping_pays(n, slow.factor):
            why += f", and no spare waits; without it {slow.factor * (n - 1) / n - 1:.0%} faster"
            yield Advice(AdvisedAction.DROP, slow.nodes, n - 1, why)
        else:
            why += "; no spare waits, and without it the job is slower"
            yield Advice(AdvisedAction.REPLACE, slow.nodes, n, why)


def _about_losses(job: JobSituation) -> Iterator[Advice]:
    """Advise to replace a node that was lost three times or more: half of all losses or more."""
    total = sum(job.losses.values())
    for node, times in job.losses.items():
        if node in job.nodes and times >= _OFTEN and 2 * times >= total:
            why = f"it was lost {times} times, of {total} in all"
            yield Advice(AdvisedAction.REPLACE, (node,), len(job.nodes), why)


def _about_memory(job: JobSituation) -> Iterator[Advice]:
    for node, use, runs_out in job.memory:
        share = use.peak_bytes / use.limit_bytes
        if runs_out:
            yield Advice(AdvisedAction.MEMORY, (node,), len(job.nodes), runs_out)
        elif share >= _MEMORY_RISK:
            needed = ceil(_MEMORY_ROOM * use.peak_bytes / 2**20) * 2**20
            why = (
                f"{share:.0%} of the memory of {use.name} was in use; give it "
                f"{needed / 2**30:.1f} GiB before it runs out"
            )
            yield Advice(AdvisedAction.MEMORY, (node,), len(job.nodes), why, needed)


def estimate_gain(before: SpeedSample, after: SpeedSample) -> float:
    """Compute what each additional worker adds, relative to a worker's speed in the smaller job.

    Args:
        before: speed with one number of workers.
        after: speed with a different number of workers.

    Returns:
        1 if the job scales perfectly, 0 if it gains nothing.
    """
    less, more = sorted((before, after), key=lambda speed: speed.workers)
    change = (more.per_sec - less.per_sec) / (more.workers - less.workers)
    return change / (less.per_sec / less.workers)


def _about_workers(job: JobSituation) -> Iterator[Advice]:
    """Apply DLRover's rule: add workers if the last increase was worth it, else take them back."""
    if not job.speeds:
        return
    now = job.speeds[-1]
    newest = {speed.workers: speed for speed in job.speeds}
    fewer = max((workers for workers in newest if workers < now.workers), default=None)
    if fewer is None:
        return
    gain = estimate_gain(newest[fewer], now)
    why = (
        f"from {fewer} to {now.workers} nodes, each additional node added {gain:.0%} of the speed "
        f"of one of {fewer} ({newest[fewer].per_sec:.3g} to {now.per_sec:.3g} a second)"
    )
    if gain < WORTH - _ROUNDING:
        yield Advice(AdvisedAction.REMOVE, (), fewer, f"{why}, less than {WORTH:.0%}")
    elif job.most_nodes is not None:
        more = min(now.workers + (now.workers - fewer), job.most_nodes)
        if more > now.workers:
            yield Advice(AdvisedAction.ADD, (), more, f"{why}, at least {WORTH:.0%}")


# -- for DLRover's operator ------------------------------------------------------------------------


def scale_plan(
    job: str,
    number: int,
    advice: Sequence[Advice],
    *,
    workers: int,
    spares: int,
    cpu: int,
    memory_bytes: int,
) -> dict[str, Any]:
    """Make a ScalePlan, a Kubernetes object for DLRover's operator.

    The operator itself creates the pods that are missing from ``replicas``; listing them in
    ``createPods`` as well would create them twice. A node to be replaced is removed if a spare can
    take its place. Otherwise it is migrated: the new pod starts before the old one ends.

    Args:
        job: name of the job.
        number: number of the plan.
        advice: the advice to carry out.
        workers: current number of nodes of the job.
        spares: number of nodes that wait for a place.
        cpu: cores of a node.
        memory_bytes: memory of a node.
    """

    def resource(nbytes: int) -> dict[str, str]:
        return {"cpu": str(cpu), "memory": f"{nbytes // 2**20}Mi"}

    numbers = [a.workers for a in advice if a.action in (AdvisedAction.ADD, AdvisedAction.REMOVE)]
    dropped = [n for a in advice if a.action is AdvisedAction.DROP for n in a.nodes]
    replaced = [n for a in advice if a.action is AdvisedAction.REPLACE for n in a.nodes]
    migrated = [(n, memory_bytes) for n in replaced[spares:]]
    migrated += [(n, a.memory_bytes) for a in advice if a.memory_bytes is not None for n in a.nodes]
    removed = replaced[:spares] + dropped
    replicas = numbers[-1] if numbers else workers - len(dropped)
    return {
        "apiVersion": _API_VERSION,
        "kind": "ScalePlan",
        "metadata": {"name": f"{job}-scaleplan-{number}", "labels": {"scale-type": "auto"}},
        "spec": {
            "ownerJob": job,
            "replicaResourceSpecs": {
                _ROLE: {"replicas": replicas, "resource": resource(memory_bytes)}
            },
            "createPods": [],
            "removePods": [{"name": node, "type": _ROLE} for node in removed],
            "migratePods": [
                {"name": node, "resource": resource(nbytes)} for node, nbytes in migrated
            ],
            "psHosts": [],
        },
    }
