"""Advice about a job's nodes, from their speeds, failures and memory: ``reft advise``.

Rules and thresholds are DLRover's where its paper gives them. :func:`situation` gathers the facts
about a job. :func:`advise`, and :func:`scale_plan` for DLRover's operator, are pure.
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

# A further worker pays off if it adds this share of the mean speed of the others (DLRover).
WORTH = 0.2
_ROUNDING = 1e-9
_OFTEN = 3  # Losses of a node after which it is replaced
# Share of a memory in use at which more memory is advised, and the factor of the advised size.
# DLRover acts before memory runs out, but the paper gives no threshold.
_MEMORY_RISK, _MEMORY_ROOM = 0.9, 1.25
_MIN_STEPS = 50  # Steps of a round whose speed is measured (DLRover's window)
_API_VERSION, _ROLE = "elastic.iml.github.io/v1alpha1", "worker"


class AdvisedAction(StrEnum):
    REPLACE = "replace"
    DROP = "drop"
    ADD = "add"
    REMOVE = "remove"
    MEMORY = "memory"


@dataclass(frozen=True)
class SpeedSample:
    """The speed of a job with a number of workers."""

    workers: int
    per_sec: float  # Steps per second at one global batch size, or samples per second


class Memory(NamedTuple):
    """The fullest memory of a node's host."""

    node: str
    use: MemoryUse
    runs_out: str = ""  # Forecast of when it is full; empty if it is not running out


@dataclass(frozen=True)
class JobSituation:
    """The facts about a job from which advice follows."""

    nodes: tuple[str, ...]  # Nodes that train
    spares: tuple[str, ...] = ()  # Nodes that wait for a place
    slow: tuple[Straggler, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)  # How often each node was lost
    speeds: tuple[SpeedSample, ...] = ()  # Measured speeds, the current one last
    most_nodes: int | None = None  # Most nodes that the job may have; None: no more are advised
    memory: tuple[Memory, ...] = ()  # Memory of the nodes that report it


@dataclass(frozen=True)
class Advice:
    """One thing to change."""

    action: AdvisedAction
    nodes: tuple[str, ...]  # Empty if the action concerns the number of nodes
    workers: int  # Nodes of the job afterwards
    why: str
    memory_bytes: int | None = None  # Advised size of the node's memory, if memory is advised

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
        paths: the job's memory on one or several nodes.
        board: reports of all nodes; None if there are none.
        most_nodes: most nodes that the job may have; None: no more nodes are advised.
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
    """The fullest memory of every node that reports it, or of this node if none does."""
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
    """The speed in each earlier round: its committed steps over the time since its first step."""
    samples = []
    for row, following in pairwise(rounds):
        # "ending" and "gathering" precede the start of the round.
        skipped = ("ending", "gathering", "first_step")
        began = row.unix_secs + sum(s for part, s in row.secs.items() if part not in skipped)
        ended = min(following.failed_unix_secs or following.unix_secs, following.unix_secs)
        steps = following.newest_step - (row.resumed_step or 0)
        if steps >= _MIN_STEPS and ended > began and row.nodes:
            samples.append(SpeedSample(len(row.nodes), steps / (ended - began)))
    return samples


# -- advice ----------------------------------------------------------------------------------------


def advise(job: JobSituation) -> tuple[Advice, ...]:
    """All advice, the most helpful first. No node is named twice."""
    named: set[str] = set()
    kept = []
    for advice in (*_about_stragglers(job), *_about_losses(job), *_about_memory(job)):
        if named.isdisjoint(advice.nodes):
            kept.append(advice)
            named.update(advice.nodes)
    return (*kept, *_about_workers(job))


def dropping_pays(nodes: int, factor: float) -> bool:
    """Whether a synchronous job of the same global batch is faster without a slow node.

    Without the node, the other nodes do n / (n - 1) of their work; with it, they wait.

    Args:
        nodes: number of nodes of the job.
        factor: time of the slow node over that of the others.
    """
    return nodes > 1 and factor > nodes / (nodes - 1)


def _about_stragglers(job: JobSituation) -> Iterator[Advice]:
    n, spares = len(job.nodes), list(job.spares)
    handled: set[tuple[str, ...]] = set()
    for slow in sorted(job.slow, key=lambda s: -s.factor):
        # A link has two nodes, neither of which is to blame. One slow rank of a node is enough.
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
    """Replace a node that was lost three times or more, and at least as often as all others."""
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
    """The gain of a further worker, as a share of the speed of a worker in the smaller job.

    Args:
        before: speed with one number of workers.
        after: speed with another number of workers.

    Returns:
        1 if the job scales perfectly, 0 if it gains nothing.
    """
    less, more = sorted((before, after), key=lambda speed: speed.workers)
    change = (more.per_sec - less.per_sec) / (more.workers - less.workers)
    return change / (less.per_sec / less.workers)


def _about_workers(job: JobSituation) -> Iterator[Advice]:
    """DLRover's rule: more workers while the last increase was worth it, else back."""
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
    """A ScalePlan of the schema of its operator.

    The operator creates the pods that ``replicas`` lacks; listing them in ``createPods`` as well
    would create them twice. A node is removed if a spare takes its place. Otherwise it is migrated:
    the new pod starts before the old one ends.

    Args:
        job: name of the job.
        number: number of the plan.
        advice: the advice that the plan follows.
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
