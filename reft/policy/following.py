"""Whether a job carries out its own advice, and when. Pure.

Advice about nodes is followed that has stood for 20 steps without a break: a straggler is replaced where a
spare waits, dropped where none waits and the others are faster alone; nodes that wait are taken in where each
one more is worth it, up to the number that a person has ordered. At most one is followed in ten minutes, none
so soon after an order of a person, never while the job recovers or changes, never below its fewest nodes, and
never where fewer node losses would be survived afterwards than were wished for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reft.policy.advice import Action, Advice

SUSTAINED_STEPS = 20
COOL_DOWN_SECS = 600.0
_FOLLOWED = (Action.REPLACE, Action.DROP, Action.ADD)


@dataclass(frozen=True)
class JobNow:
    """What decides.

    Attributes:
        nodes: that train.
        spares: that wait.
        least, most: nodes, of ``--nnodes``.
        settled: all nodes are there, have committed in this start of the job, and none is told to leave.
        tolerance: node losses that are survived now; None: not known.
        tolerance_without: the same without a node.
        wished: node losses that are to be survived.
        ordered_unix_secs: when nodes were ordered last, by a person or for advice; None: never.
        ordered_nodes: that a person has ordered since; None: no number.
        unix_secs: now.
    """

    nodes: tuple[str, ...]
    spares: int
    least: int
    most: int
    settled: bool
    tolerance: int | None
    wished: int
    unix_secs: float
    tolerance_without: Mapping[str, int | None] = field(default_factory=dict)
    ordered_unix_secs: float | None = None
    ordered_nodes: int | None = None


@dataclass(frozen=True)
class Decision:
    """What is done, if anything.

    Attributes:
        nodes: that the job is to have; None: nothing is done.
        without: nodes that leave.
        why: for people: the advice, or why none is followed.
    """

    nodes: int | None
    without: tuple[str, ...]
    why: str


class Sustained:
    """Tells for how many steps advice has stood without a break."""

    def __init__(self) -> None:
        self._since: dict[tuple[Action, tuple[str, ...], int], int] = {}

    def look(self, advice: Sequence[Advice], step: int) -> list[Advice]:
        """That which has stood for long. Where the job has gone back, all is counted anew."""
        now = {(a.action, a.nodes, a.workers): a for a in advice}
        if any(step < since for since in self._since.values()):
            self._since.clear()
        self._since = {key: self._since.get(key, step) for key in now}
        return [a for key, a in now.items() if step - self._since[key] >= SUSTAINED_STEPS]


def decide(sustained: Sequence[Advice], now: JobNow) -> Decision:
    """What to do about advice that has stood for long."""
    wanted = [a for a in sustained if a.action in _FOLLOWED]
    if not wanted:
        return _nothing("nothing was advised for long")
    if not now.settled:
        return _nothing("the job recovers, or changes its nodes")
    if now.ordered_unix_secs is not None and now.unix_secs - now.ordered_unix_secs < COOL_DOWN_SECS:
        return _nothing(f"an order was given less than {COOL_DOWN_SECS:.0f} s ago")
    if now.tolerance is None or now.tolerance < max(1, now.wished):
        return _nothing(f"{now.tolerance or 0} node losses are survived, {max(1, now.wished)} are needed")
    found = _nothing("")
    for advice in wanted:
        found = _decided(advice, now)
        if found.nodes is not None:
            return found
    return found


def _decided(advice: Advice, now: JobNow) -> Decision:
    size = len(now.nodes)
    if not set(advice.nodes) <= set(now.nodes):
        return _nothing("a node that is named does not train")
    if advice.action is Action.ADD:
        return _grown(advice, now)
    if advice.action is Action.REPLACE:
        return Decision(size, advice.nodes, str(advice)) if now.spares else _nothing("no spare waits")
    if size - 1 < now.least:
        return _nothing(f"the job needs {now.least} nodes (--nnodes)")
    survived = min((_known(now.tolerance_without.get(node)) for node in advice.nodes), default=-1)
    if survived < now.wished:
        return _nothing(f"without it {max(0, survived)} node losses would be survived, not {now.wished}")
    return Decision(size - 1, advice.nodes, str(advice))


def _grown(advice: Advice, now: JobNow) -> Decision:
    size = len(now.nodes)
    if now.ordered_nodes is not None and now.ordered_nodes <= size:
        return _nothing(f"{now.ordered_nodes} nodes were ordered")
    wanted = min(advice.workers, now.most, size + now.spares, now.ordered_nodes or now.most)
    return Decision(wanted, (), str(advice)) if wanted > size else _nothing("no node waits for a place")


def _known(tolerance: int | None) -> int:
    return -1 if tolerance is None else tolerance


def _nothing(why: str) -> Decision:
    return Decision(None, (), why)
