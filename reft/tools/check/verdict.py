"""Which nodes are bad, from what all have measured. Pure.

As DLRover's node check: nodes reduce in pairs, twice. A pair is bad where the reduction fails or takes long.
In the second round whoever was in a bad pair is with somebody from a good one, so that who is in a bad pair
twice is bad itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

Pair = tuple[int, ...]
"""Two nodes, three where their number is odd, by their indices."""


@dataclass(frozen=True)
class Alone:
    """What a node can do by itself; in units of work per second, more is better.

    Attributes:
        matmul_flops: per second, of its processor, or the slowest of its devices.
        memory_bytes: copied per second, likewise.
        link_bytes: per second from the host to the slowest of its devices; None: there is none.
    """

    matmul_flops: float
    memory_bytes: float
    link_bytes: float | None = None


@dataclass(frozen=True)
class Bad:
    """A node that should be left out."""

    node: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Of all nodes.

    Attributes:
        bad: in the order of their indices.
        unclear: what cannot be told: which of two it is.
    """

    bad: tuple[Bad, ...] = ()
    unclear: tuple[str, ...] = field(default=())

    @property
    def well(self) -> bool:
        return not self.bad and not self.unclear

    def to_json(self) -> dict[str, Any]:
        return {"well": self.well, **asdict(self)}


_MEASURES = {
    "matmul_flops": "multiplies matrices",
    "memory_bytes": "copies memory",
    "link_bytes": "copies to its device",
}


def first_pairs(nodes: Sequence[int]) -> tuple[Pair, ...]:
    """Neighbours."""
    return _pairs(sorted(nodes))


def second_pairs(nodes: Sequence[int], first: Mapping[int, float | None]) -> tuple[Pair, ...]:
    """The quickest with the slowest; ``first``: seconds of each in the first round, None if it failed."""
    order = sorted(nodes, key=lambda n: (first.get(n) is None, first.get(n) or 0.0, n))
    crossed = [n for i in range((len(order) + 1) // 2) for n in {i: None, len(order) - 1 - i: None}]
    return _pairs([order[i] for i in crossed])


def _pairs(nodes: Sequence[int]) -> tuple[Pair, ...]:
    if len(nodes) < 2:
        return ()
    pairs = [tuple(nodes[i : i + 2]) for i in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2:
        pairs[-1] = (*pairs[-1], nodes[-1])
    return tuple(pairs)


def judge(
    names: Sequence[str],
    alone: Mapping[int, Alone],
    rounds: Sequence[tuple[Sequence[Pair], Mapping[int, float | None]]],
    factor: float,
) -> Verdict:
    """
    Args:
        names: of all nodes, by index.
        alone: what each measured by itself; who is missing has not answered.
        rounds: the pairs of each round, and the seconds of every node in it (None: it failed; missing: it has
            not answered).
        factor: how many times as slow as the median of the others a node, or a pair, has to be.
    """
    reasons: dict[int, list[str]] = {n: [] for n in range(len(names))}
    for node, why in reasons.items():
        if node not in alone:
            why.append("it does not answer")
    for measure, words in _MEASURES.items():
        found = {n: float(v) for n, a in alone.items() if (v := getattr(a, measure)) is not None}
        for node, value in found.items():
            others = [v for n, v in found.items() if n != node]
            if others and median(others) > factor * value:
                times = median(others) / max(value, 1e-9)
                reasons[node].append(f"it {words} {times:.1f} times slower than the others")
    unclear = []
    for together, said in _accused(rounds, factor):
        if len(together) == 1:
            reasons[together[0]].append(said)
        elif not any(reasons[node] for node in together):
            unclear.append(f"one of {', '.join(names[n] for n in together)}: {said}")
    bad = tuple(Bad(names[n], tuple(why)) for n, why in reasons.items() if why)
    return Verdict(bad, tuple(unclear))


def _accused(
    rounds: Sequence[tuple[Sequence[Pair], Mapping[int, float | None]]], factor: float
) -> list[tuple[list[int], str]]:
    """Who was in a bad pair in every round, and how bad the last was; those together who were so in the last
    one, and cannot be told apart."""
    bad = [_slow_pairs(pairs, secs, factor) for pairs, secs in rounds]
    always = set.intersection(*(set(b) for b in bad)) if bad else set()
    last = rounds[-1][0] if rounds else ()
    found = ([node for node in pair if node in always] for pair in last)
    return [(together, f"all-reduce with others {bad[-1][together[0]]}") for together in found if together]


def _slow_pairs(pairs: Sequence[Pair], secs: Mapping[int, float | None], factor: float) -> dict[int, str]:
    """The nodes of bad pairs, and why."""
    times = {pair: [secs.get(n) for n in pair] for pair in pairs}
    took = {pair: max(t for t in ts if t is not None) for pair, ts in times.items() if None not in ts}
    bad: dict[int, str] = {}
    for pair in pairs:
        if pair not in took:
            bad |= dict.fromkeys(pair, "fails, or takes too long")
            continue
        others = [t for other, t in took.items() if other != pair]
        if others and took[pair] > factor * median(others):
            slower = took[pair] / median(others)
            bad |= dict.fromkeys(pair, f"takes {slower:.1f} times as long as in other pairs")
    return bad
