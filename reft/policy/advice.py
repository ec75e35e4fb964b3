"""What to change about a job's nodes, from speeds and failures. Pure.

Rules and thresholds are DLRover's where REFERENCE, section 3, gives them; the others say what they are by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any

from reft.errors import ConfigError

WORTH = 0.2
"""A worker more is worth it from here on, of what the others do on average (DLRover)."""
_ROUNDING = 1e-9
_OFTEN = 3
_MEMORY_RISK, _MEMORY_ROOM = 0.9, 1.25
"""Ours: DLRover acts before memory runs out, REFERENCE gives no threshold."""


class Action(StrEnum):
    """What is advised."""

    REPLACE = "replace"
    DROP = "drop"
    ADD = "add"
    REMOVE = "remove"
    MEMORY = "memory"


@dataclass(frozen=True)
class Slow:
    """Something that is slower than its peers.

    Attributes:
        name: for people.
        nodes: where it is.
        factor: how many times as long as its peers it takes.
        why: what is slow of it.
    """

    name: str
    nodes: tuple[str, ...]
    factor: float
    why: str = ""


@dataclass(frozen=True)
class Speed:
    """How fast a job was.

    Attributes:
        workers: that it had.
        per_sec: steps of the same global batch, or samples.
    """

    workers: int
    per_sec: float

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.per_sec > 0:
            raise ConfigError(f"found {self}; expected at least one worker and a speed above 0")


@dataclass(frozen=True)
class Memory:
    """Of a node's host.

    Attributes:
        node: its name.
        used_bytes, total_bytes: at the fullest, and in all; what limits it may be a control group.
        of: what it is the memory of, for people.
        runs_out: how it is running out, for people; "" where it is not.
    """

    node: str
    used_bytes: int
    total_bytes: int
    of: str = "the host"
    runs_out: str = ""


@dataclass(frozen=True)
class Situation:
    """What is known of a job.

    Attributes:
        nodes: that train.
        spares: that wait for a place.
        slow: named stragglers.
        losses: how often a node was lost.
        speeds: that were measured, the present one last.
        most_nodes: that the job may have; None: not known, and none more is advised.
        memory: of nodes whose memory is known.
    """

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    slow: tuple[Slow, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)
    speeds: tuple[Speed, ...] = ()
    most_nodes: int | None = None
    memory: tuple[Memory, ...] = ()


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Attributes:
        action: what.
        nodes: with which; none where it is a number of nodes.
        workers: nodes of the job afterwards.
        why: for people.
        memory_bytes: that a node should have, where that is advised.
    """

    action: Action
    nodes: tuple[str, ...]
    workers: int
    why: str
    memory_bytes: int | None = None

    def __str__(self) -> str:
        what = ", ".join(self.nodes) or f"to {self.workers} nodes"
        return f"{self.action} {what}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "action": str(self.action), "nodes": list(self.nodes), "said": str(self)}


def advise(seen: Situation) -> tuple[Advice, ...]:
    """Everything that is advised, what helps most first; no node twice."""
    found = [*_about_stragglers(seen), *_about_losses(seen), *_about_memory(seen)]
    told: set[str] = set()
    kept = []
    for advice in found:
        if told.isdisjoint(advice.nodes):
            kept.append(advice)
            told.update(advice.nodes)
    return (*kept, *_about_workers(seen))


# -- stragglers -----------------------------------------------------------------------------------------


def dropping_pays(nodes: int, factor: float) -> bool:
    """Whether a synchronous job of the same global batch is faster without a node that takes ``factor`` times
    as long: the others then have n / (n - 1) of their work, where they wait for it now."""
    return nodes > 1 and factor > nodes / (nodes - 1)


def _about_stragglers(seen: Situation) -> Iterable[Advice]:
    n, spares = len(seen.nodes), list(seen.spares)
    told: set[tuple[str, ...]] = set()
    for slow in sorted(seen.slow, key=lambda s: -s.factor):
        if len(slow.nodes) != 1 or slow.nodes in told:
            continue  # a link: no node is to blame; or another rank of a node whose place is given away
        told.add(slow.nodes)
        why = f" ({slow.why})" if slow.why else ""
        said = f"{slow.name} takes {slow.factor:.2f} times as long as its peers{why}"
        if spares:
            yield Advice(Action.REPLACE, slow.nodes, n, f"{said}; spare {spares.pop(0)} waits for a place")
        elif dropping_pays(n, slow.factor):
            gain = slow.factor * (n - 1) / n - 1
            yield Advice(
                Action.DROP, slow.nodes, n - 1, f"{said}, and no spare waits; without it {gain:.0%} faster"
            )
        else:
            yield Advice(
                Action.REPLACE,
                slow.nodes,
                n,
                f"{said}; no spare waits, and without it the job is slower",
            )


def _about_losses(seen: Situation) -> Iterable[Advice]:
    """A node that was lost three times or more, and as often as all others together."""
    total = sum(seen.losses.values())
    for node, times in seen.losses.items():
        if node in seen.nodes and times >= _OFTEN and 2 * times >= total:
            yield Advice(
                Action.REPLACE, (node,), len(seen.nodes), f"it was lost {times} times, of {total} in all"
            )


def _about_memory(seen: Situation) -> Iterable[Advice]:
    for memory in seen.memory:
        if memory.runs_out:
            yield Advice(Action.MEMORY, (memory.node,), len(seen.nodes), memory.runs_out)
            continue
        part = memory.used_bytes / memory.total_bytes
        if part >= _MEMORY_RISK:
            wanted = ceil(_MEMORY_ROOM * memory.used_bytes / 2**20) * 2**20
            yield Advice(
                *(Action.MEMORY, (memory.node,), len(seen.nodes)),
                f"{part:.0%} of the memory of {memory.of} was in use; give it {wanted / 2**30:.1f} GiB "
                f"before it runs out",
                wanted,
            )


# -- how many workers -----------------------------------------------------------------------------------


def gain_of_workers(before: Speed, after: Speed) -> float:
    """(change of speed / change of workers) / (speed / workers), the latter of the smaller job: 1 scales
    perfectly, 0 gains nothing.

    Raises:
        ConfigError: both have as many workers.
    """
    if before.workers == after.workers:
        raise ConfigError(f"found {before} and {after}; expected different numbers of workers")
    less, more = sorted((before, after), key=lambda speed: speed.workers)
    change = (more.per_sec - less.per_sec) / (more.workers - less.workers)
    return change / (less.per_sec / less.workers)


def _about_workers(seen: Situation) -> Iterable[Advice]:
    """DLRover's rule: more while the last increase was worth it; back where it was not."""
    if not seen.speeds:
        return
    now = seen.speeds[-1]
    newest = {speed.workers: speed for speed in seen.speeds}
    fewer = max((w for w in newest if w < now.workers), default=None)
    if fewer is None:
        return
    gain = gain_of_workers(newest[fewer], now)
    said = (
        f"from {fewer} to {now.workers} nodes each one more brought {gain:.0%} of what one of {fewer} does "
        f"({newest[fewer].per_sec:.3g} to {now.per_sec:.3g} a second)"
    )
    if gain < WORTH - _ROUNDING:
        yield Advice(Action.REMOVE, (), fewer, f"{said}, less than {WORTH:.0%}")
        return
    wanted = now.workers + (now.workers - fewer)
    if seen.most_nodes is not None and (wanted := min(wanted, seen.most_nodes)) > now.workers:
        yield Advice(Action.ADD, (), wanted, f"{said}, at least {WORTH:.0%}")
