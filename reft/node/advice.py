"""What to change about a job's nodes, from speeds and failures.

Rules and thresholds are DLRover's where REFERENCE, section 3, gives them; the others say what they
are by. :func:`situation` reads what is known from the board that the job's launchers keep and from
its history; :func:`advise` and :func:`scale_plan`, DLRover's words for it, are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

WORTH = 0.2  # a worker more is worth it from here on, of what the others do on average (DLRover)
_ROUNDING = 1e-9
_OFTEN = 3
_MEMORY_RISK, _MEMORY_ROOM = 0.9, 1.25
"""Ours: DLRover acts before memory runs out, REFERENCE gives no threshold."""
_LEAST_STEPS = 50  # of a round, to tell a speed from it: DLRover's window
_API_VERSION, _ROLE = "elastic.iml.github.io/v1alpha1", "worker"


class AdvisedAction(StrEnum):
    REPLACE = "replace"
    DROP = "drop"
    ADD = "add"
    REMOVE = "remove"
    MEMORY = "memory"


@dataclass(frozen=True)
class SpeedSample:
    """How fast a job was with so many workers: steps of the same global batch, or samples."""

    workers: int
    per_sec: float


class Memory(NamedTuple):
    """Of a node's host, what is fullest; ``runs_out``: how it is running out, for people; "": it is
    not."""

    node: str
    use: MemoryUse
    runs_out: str = ""


@dataclass(frozen=True)
class JobSituation:
    """What is known of a job: the nodes that train, the spares that wait for a place, named
    stragglers, how often a node was lost, speeds that were measured, the present one last, and of
    nodes whose memory is known, that. ``most_nodes``: that the job may have; None: not known, and
    none more is advised."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    slow: tuple[Straggler, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)
    speeds: tuple[SpeedSample, ...] = ()
    most_nodes: int | None = None
    memory: tuple[Memory, ...] = ()


@dataclass(frozen=True)
class Advice:
    """One thing to change, with which nodes (none where it is a number of them), and why.
    ``workers``: nodes of the job afterwards; ``memory_bytes``: that a node should have, where that
    is advised."""

    action: AdvisedAction
    nodes: tuple[str, ...]
    workers: int
    why: str
    memory_bytes: int | None = None

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


# -- what is known ---------------------------------------------------------------------------------


def situation(
    paths: Sequence[Path], board: ReportBoard | None, most_nodes: int | None
) -> JobSituation:
    rounds = max((read_history(path) for path in paths), key=len, default=[])
    nodes = () if board is None else board.nodes
    present = [node for node in nodes if node.seen is not HealthSignal.OFFLINE]
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


def _memory(path: Path, reports: Sequence[NodeReport]) -> Iterable[Memory]:
    """Of every node that tells of its memory; of this one where none does."""
    told = [
        (r.node, r.memory, str(r.runs_out[0]) if r.runs_out else "") for r in reports if r.memory
    ]
    if not told:
        here = tuple(
            MemoryUse(b.name, b.used_bytes, b.used_bytes, b.limit_bytes) for b in bounds(path)
        )
        told = [(JobDir.open(path).node, here, "")]
    return [
        Memory(node, use, said) for node, uses, said in told if (use := fullest(uses)) is not None
    ]


def _speeds(rounds: Sequence[RoundReport]) -> list[SpeedSample]:
    """Of the rounds before the present one: committed steps over the time from the first step
    on."""
    found = []
    for this, after in pairwise(rounds):
        before_it = ("ending", "gathering", "first_step")  # the former lie before the round's start
        began = this.unix_secs + sum(
            secs for part, secs in this.secs.items() if part not in before_it
        )
        ended = min(after.failed_unix_secs or after.unix_secs, after.unix_secs)
        steps = after.newest_step - (this.resumed_step or 0)
        if steps >= _LEAST_STEPS and ended > began and this.nodes:
            found.append(SpeedSample(len(this.nodes), steps / (ended - began)))
    return found


# -- what is advised -------------------------------------------------------------------------------


def advise(seen: JobSituation) -> tuple[Advice, ...]:
    """Everything that is advised, what helps most first; no node twice."""
    found = [*_about_stragglers(seen), *_about_losses(seen), *_about_memory(seen)]
    told: set[str] = set()
    kept = []
    for advice in found:
        if told.isdisjoint(advice.nodes):
            kept.append(advice)
            told.update(advice.nodes)
    return (*kept, *_about_workers(seen))


def dropping_pays(nodes: int, factor: float) -> bool:
    """Whether a synchronous job of the same global batch is faster without a node that takes
    ``factor`` times as long: the others then have n / (n - 1) of their work, where they wait for it
    now."""
    return nodes > 1 and factor > nodes / (nodes - 1)


def _about_stragglers(seen: JobSituation) -> Iterable[Advice]:
    n, spares = len(seen.nodes), list(seen.spares)
    told: set[tuple[str, ...]] = set()
    for slow in sorted(seen.slow, key=lambda s: -s.factor):
        if len(slow.nodes) != 1 or slow.nodes in told:
            # a link: no node is to blame; or another rank of a node whose place is given away
            continue
        told.add(slow.nodes)
        why = f" ({slow.why})" if slow.why else ""
        said = f"{slow.name} takes {slow.factor:.2f} times as long as its peers{why}"
        if spares:
            yield Advice(
                AdvisedAction.REPLACE, slow.nodes, n, f"{said}; spare {spares.pop(0)} is waiting"
            )
        elif dropping_pays(n, slow.factor):
            said += f", and no spare waits; without it {slow.factor * (n - 1) / n - 1:.0%} faster"
            yield Advice(AdvisedAction.DROP, slow.nodes, n - 1, said)
        else:
            said += "; no spare waits, and without it the job is slower"
            yield Advice(AdvisedAction.REPLACE, slow.nodes, n, said)


def _about_losses(seen: JobSituation) -> Iterable[Advice]:
    """A node that was lost three times or more, and as often as all others together."""
    total = sum(seen.losses.values())
    for node, times in seen.losses.items():
        if node in seen.nodes and times >= _OFTEN and 2 * times >= total:
            said = f"it was lost {times} times, of {total} in all"
            yield Advice(AdvisedAction.REPLACE, (node,), len(seen.nodes), said)


def _about_memory(seen: JobSituation) -> Iterable[Advice]:
    for node, use, runs_out in seen.memory:
        said, wanted = runs_out, None
        if not said and (part := use.peak_bytes / use.limit_bytes) >= _MEMORY_RISK:
            wanted = ceil(_MEMORY_ROOM * use.peak_bytes / 2**20) * 2**20
            said = (
                f"{part:.0%} of the memory of {use.name} was in use; give it {wanted / 2**30:.1f} "
                "GiB "
                f"before it runs out"
            )
        if said:
            yield Advice(AdvisedAction.MEMORY, (node,), len(seen.nodes), said, wanted)


def estimate_gain(before: SpeedSample, after: SpeedSample) -> float:
    """(change of speed / change of workers) / (speed / workers), the latter of the smaller job,
    between different numbers of workers: 1 scales perfectly, 0 gains nothing."""
    less, more = sorted((before, after), key=lambda speed: speed.workers)
    change = (more.per_sec - less.per_sec) / (more.workers - less.workers)
    return change / (less.per_sec / less.workers)


def _about_workers(seen: JobSituation) -> Iterable[Advice]:
    """DLRover's rule: more while the last increase was worth it; back where it was not."""
    if not seen.speeds:
        return
    now = seen.speeds[-1]
    newest = {speed.workers: speed for speed in seen.speeds}
    fewer = max((w for w in newest if w < now.workers), default=None)
    if fewer is None:
        return
    gain = estimate_gain(newest[fewer], now)
    said = (
        f"from {fewer} to {now.workers} nodes, each additional node added {gain:.0%} of the speed "
        "of one "
        f"of {fewer} ({newest[fewer].per_sec:.3g} to {now.per_sec:.3g} a second)"
    )
    if gain < WORTH - _ROUNDING:
        yield Advice(AdvisedAction.REMOVE, (), fewer, f"{said}, less than {WORTH:.0%}")
        return
    wanted = now.workers + (now.workers - fewer)
    if seen.most_nodes is not None and (wanted := min(wanted, seen.most_nodes)) > now.workers:
        yield Advice(AdvisedAction.ADD, (), wanted, f"{said}, at least {WORTH:.0%}")


# -- in the words of DLRover's operator ------------------------------------------------------------


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
    """A ScalePlan of the schema in REFERENCE, section 3. The operator makes what ``replicas``
    lacks, so that ``createPods`` has none, or it would make them twice. A node is removed where one
    of the ``spares`` takes its place; a migration is a replacement whose new pod comes before the
    old one goes."""

    def resource(nbytes: int) -> dict[str, str]:
        return {"cpu": str(cpu), "memory": f"{nbytes // 2**20}Mi"}

    numbers = [a.workers for a in advice if a.action in (AdvisedAction.ADD, AdvisedAction.REMOVE)]
    dropped = [n for a in advice if a.action is AdvisedAction.DROP for n in a.nodes]
    replaced = [n for a in advice if a.action is AdvisedAction.REPLACE for n in a.nodes]
    moved = [(n, memory_bytes) for n in replaced[spares:]]
    moved += [(n, a.memory_bytes) for a in advice if a.memory_bytes is not None for n in a.nodes]
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
            "removePods": [{"name": node, "type": _ROLE} for node in replaced[:spares] + dropped],
            "migratePods": [{"name": node, "resource": resource(nbytes)} for node, nbytes in moved],
            "psHosts": [],
        },
    }
