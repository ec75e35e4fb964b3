"""Chooses a job's protection: evaluates the cost of every alternative and selects one. Pure.

All ranks have the same inputs (placement, sizes, memory, tolerance) and therefore make the same
choice. An alternative consists of a scheme for the replicated section
(:class:`reft.protect.codes.Scheme`) and, if ranks own ZeRO partitions, a way to protect the
partitions (:class:`reft.policy.loads.PartitionSurvival`). Recomputing partitions is chosen if
the block requests it, or if it is bit-exact and was measured to be faster than sending them.

Among the alternatives that fit into memory and survive the requested number of lost nodes, the
one that moves the fewest bytes is chosen. If no alternative meets both conditions, the one that
survives most losses is chosen, and :attr:`Choice.needed` lists what would have to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from rich.filesize import decimal

from reft.config import AOR
from reft.errors import ConfigError
from reft.grid import Topology, ring_order
from reft.policy.loads import (
    OPTIMIZER_BYTES,
    LinkRates,
    PartitionSurvival,
    RankSections,
    TrafficEstimate,
    group_loads,
)
from reft.protect.codes import Scheme
from reft.protect.placement import fatal

GIB = 2**30
_MOST_TESTS = 30_000
"""Limit on the work to compute a scheme's tolerance: sets of lost nodes to test, times members.
A scheme above this limit is not considered automatically."""
TOO_MANY_TESTS = (
    "members of a group share nodes, and too many losses would have to be tested; the one that is "
    '"protection" in the configuration (or --protection of a plan) is still tested'
)
_MOST_COMBINED = 16
"""Largest number of losses for which combinations of copies and parities are considered. Beyond
this number, parities alone never move more bytes than a combination."""


@dataclass(frozen=True)
class ChoiceInputs:
    """The inputs of the choice.

    Attributes:
        topology: placement of the ranks.
        sections: sizes of each rank's state.
        arenas: number of versions that each rank keeps in memory.
        block_bytes: largest size of a block.
        memory_bytes: memory that may be reserved on each node; None if unknown.
        exact: whether a host recomputes a ZeRO partition bit for bit, so that the partition need
            not be sent.
        rates: rates of links and processors; None if recomputing is impossible, or may be chosen
            only on request.
    """

    topology: Topology
    sections: tuple[RankSections, ...]
    arenas: int = 2
    block_bytes: int = 4 * 2**20
    memory_bytes: Mapping[str, int] | None = None
    exact: bool = True
    rates: LinkRates | None = None

    @property
    def owns(self) -> bool:
        """Whether ranks own ZeRO partitions."""
        return any(s.owned_bytes for s in self.sections)

    @property
    def recomputable(self) -> bool:
        """Whether peers can recompute a partition. At ZeRO-3 they cannot, because they lack the
        weights."""
        return self.owns and any(s.replicated_bytes for s in self.sections)


@dataclass(frozen=True)
class Alternative:
    """One possible protection, with its cost."""

    scheme: Scheme
    # Way to protect ZeRO partitions; None if there are no partitions, or the scheme protects
    # nothing
    owned_by: PartitionSurvival | None
    loads: Mapping[int, TrafficEstimate]  # Traffic of the busiest rank of each stage
    # Node with the greatest lack of memory or, if none lacks any, with least memory left
    node: str
    memory_bytes: int  # Bytes that would be reserved on ``node``
    limit_bytes: int | None  # Bytes that may be reserved on ``node``; None if unknown
    fatal: tuple[str, ...]  # A smallest set of nodes whose loss is not survived
    # False if this alternative recomputes partitions although that is neither requested nor faster,
    # or does not recompute them although that is requested
    available: bool = True
    # Seconds in each step to send the partitions, and to recompute them exactly; None if unknown
    partition_secs: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return f"{self.scheme}{AOR}" if self.owned_by is PartitionSurvival.AOR else str(self.scheme)

    @property
    def tolerance(self) -> int:
        """Number of node losses that every sharding group survives, computed from the placement
        (P4)."""
        return len(self.fatal) - 1

    @property
    def busiest(self) -> TrafficEstimate:
        return max(self.loads.values(), key=lambda load: (load.moved_bytes, load.memory_bytes))

    @property
    def fits_memory(self) -> bool:
        return self.limit_bytes is None or self.memory_bytes <= self.limit_bytes

    @property
    def lacking_bytes(self) -> int:
        return self.memory_bytes - (self.limit_bytes or 0)

    @property
    def cost(self) -> tuple[int, int, int, int, str]:
        """Sort key, cheapest first: bytes moved, then memory, then complexity of decoding."""
        load = self.busiest
        return (
            load.moved_bytes,
            self.memory_bytes,
            self.scheme.parities,
            self.scheme.copies,
            self.name,
        )

    def why_not(self, wanted: int) -> str | None:
        """Return why this alternative does not meet a tolerance of ``wanted``; None if it does."""
        if not self.available:
            return (
                f'recomputing is chosen only where "{AOR}" asks for it, or where it is exact and '
                "cheaper"
                if self.owned_by is PartitionSurvival.AOR
                else f'"{AOR}" asks for recomputing'
            )
        if not self.fits_memory:
            return (
                f"needs {_memory(self.memory_bytes)} of host memory on {self.node}, "
                f"{_memory(self.limit_bytes or 0)} may be used"
            )
        if self.tolerance < wanted:
            lost = " and ".join(self.fatal[:3]) + (
                f" and {len(self.fatal) - 3} more" if len(self.fatal) > 3 else ""
            )
            return f"the loss of {lost} is fatal: tolerance {self.tolerance}, wanted {wanted}"
        return None


@dataclass(frozen=True)
class Choice:
    """The result of a choice.

    Attributes:
        wanted: requested tolerance (number of node losses).
        chosen: the chosen alternative.
        alternatives: all alternatives for which the groups are large enough, the cheapest first.
        excluded: names of the schemes that are impossible here, each with the reason.
        reason: why ``chosen`` was chosen, as text.
        needed: changes that would reach the requested tolerance, as text.
    """

    wanted: int
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    excluded: tuple[tuple[str, str], ...]
    reason: str
    needed: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        return self.chosen.why_not(self.wanted) is None

    def of(self, name: str) -> Alternative:
        known = {alternative.name: alternative for alternative in self.alternatives}
        if name not in known:
            why = dict(self.excluded).get(name, f"known: {', '.join(known)}")
            raise ConfigError(f"protection {name} is not possible here: {why}")
        return known[name]

    def why_not_chosen(self, alternative: Alternative) -> str:
        if alternative is self.chosen:
            return ""
        more = alternative.busiest.moved_bytes - self.chosen.busiest.moved_bytes
        moves = (
            f"moves {decimal(more)} more a step"
            if more
            else "moves as much, but takes more memory or decoding"
        )
        return alternative.why_not(self.wanted) or moves


def choose(
    situation: ChoiceInputs,
    wanted: int,
    *,
    recompute: bool = False,
    also: Sequence[Scheme] = (),
    beyond: int = 0,
) -> Choice:
    """Evaluate every alternative and choose one. Deterministic.

    Args:
        situation: the inputs.
        wanted: number of node losses that every sharding group should survive.
        recompute: True if ring peers must recompute partitions (AOR), as ``auto+aor`` requests.
            Alternatives that send partitions are still evaluated.
        also: further schemes to evaluate.
        beyond: also evaluate schemes that survive this many more losses than requested.
    """
    candidates, excluded = _candidates(situation, wanted, also, beyond)
    alternatives = sorted(
        _evaluate(situation, candidates, recompute), key=lambda alternative: alternative.cost
    )
    usable = [a for a in alternatives if a.available and a.fits_memory]
    best = max((a.tolerance for a in usable), default=0)
    good = [a for a in usable if a.tolerance >= min(wanted, best)]
    smallest = min((a for a in alternatives if a.available), key=lambda a: (a.memory_bytes, a.cost))
    chosen = good[0] if good else smallest
    needed = (
        () if chosen.why_not(wanted) is None else tuple(_needed(situation, wanted, alternatives))
    )
    reason = _reason(chosen, wanted, usable, situation)
    return Choice(wanted, chosen, tuple(alternatives), tuple(excluded), reason, needed)


def _candidates(
    situation: ChoiceInputs, wanted: int, also: Sequence[Scheme], beyond: int
) -> tuple[list[Scheme], list[tuple[str, str]]]:
    topology = situation.topology
    size = topology.degrees.dp
    groups = [topology.group_nodes(pp, tp) for pp, tp in topology.groups()]
    together = max(nodes.count(node) for nodes in groups for node in set(nodes))
    spread = max(len(set(nodes)) for nodes in groups)
    most = max(wanted * together, max((s.copies + s.parities for s in also), default=0)) + beyond
    # No scheme can recover a group that has lost all its members.
    most = min(most, size)
    found, excluded = [Scheme()], []
    family = [
        Scheme(a, t - a)
        for t in range(1, most + 1)
        for a in (range(t, -1, -1) if t <= _MOST_COMBINED else (t, 0))
    ]
    for scheme in dict.fromkeys((*family, *also)):
        total = scheme.copies + scheme.parities
        if not total:
            continue
        if why := scheme.why_no_room(size):
            excluded.append((str(scheme), why))
        # Only the tolerance of a combination of copies and parities needs many tests
        # (:func:`reft.protect.placement.fatal_nodes`).
        elif (
            together > 1
            and scheme.copies
            and scheme.parities
            and scheme not in also
            and size * comb(spread, min(total, spread // 2)) > _MOST_TESTS
        ):
            excluded.append((str(scheme), TOO_MANY_TESTS))
        else:
            found.append(scheme)
    return found, excluded


def _evaluate(
    situation: ChoiceInputs, schemes: Sequence[Scheme], recompute: bool
) -> Iterator[Alternative]:
    topology, limits = situation.topology, situation.memory_bytes
    dp, most = topology.degrees.dp, max(s.owned_bytes for s in situation.sections)
    for scheme in schemes:
        lost = fatal(topology, scheme.copies, scheme.parities)
        protected = scheme.copies + scheme.parities > 0
        peers, rates = min(scheme.copies + scheme.parities, dp - 1), situation.rates
        secs = (
            rates.partition_secs(peers * most / OPTIMIZER_BYTES)
            if rates and peers and most
            else None
        )
        cheaper = situation.exact and secs is not None and secs[1] < secs[0]
        ways: list[PartitionSurvival | None] = [None]
        if situation.owns and protected:
            # Whether partitions are sent or recomputed: the number of peers that keep a partition
            # is the number of losses that the scheme survives.
            ways = [PartitionSurvival.PEER]
            if situation.recomputable:
                ways.append(PartitionSurvival.AOR)
        for way in ways:
            of_ranks, busiest = (
                rank_loads(situation, scheme, way or PartitionSurvival.PEER),
                dict[int, TrafficEstimate](),
            )
            for rank, load in sorted(of_ranks.items()):
                pp = topology.coordinates[rank].pp
                busiest[pp] = max(busiest.get(pp, load), load, key=lambda load: load.moved_bytes)
            memory = node_bytes(topology, of_ranks)
            node = max(memory, key=lambda n: memory[n] - (limits[n] if limits is not None else 0))
            yield Alternative(
                scheme=scheme,
                owned_by=way,
                loads=busiest,
                node=node,
                memory_bytes=memory[node],
                limit_bytes=None if limits is None else limits[node],
                fatal=lost,
                available=recompute or cheaper
                if way is PartitionSurvival.AOR
                else way is None or not recompute,
                partition_secs=secs,
            )


def rank_loads(
    situation: ChoiceInputs, scheme: Scheme, owned_by: PartitionSurvival
) -> dict[int, TrafficEstimate]:
    topology, found = situation.topology, dict[int, TrafficEstimate]()
    for pp, tp in topology.groups():
        ranks = topology.group(pp, tp)
        loads = group_loads(
            [situation.sections[rank] for rank in ranks],
            ring_order(topology.group_nodes(pp, tp)),
            scheme,
            owned_by,
            arenas=situation.arenas,
            block_bytes=situation.block_bytes,
            exact=situation.exact,
        )
        found |= zip(ranks, loads, strict=True)
    return found


def node_bytes(topology: Topology, loads: Mapping[int, TrafficEstimate]) -> dict[str, int]:
    memory = dict.fromkeys(sorted(set(topology.nodes)), 0)
    for rank, load in loads.items():
        memory[topology.nodes[rank]] += load.memory_bytes
    return memory


# ---- messages ----

SENT_AFTER_ALL = (
    "a host cannot repeat a GPU's optimizer bit for bit, unless it is reft.ExactAdam, so every "
    "partition is sent as well"
)


def _reason(
    chosen: Alternative, wanted: int, usable: Sequence[Alternative], situation: ChoiceInputs
) -> str:
    load, limit = chosen.busiest, chosen.limit_bytes
    parts = [
        f"survives the loss of {_nodes(chosen.tolerance)}, {wanted} wanted",
        f"{decimal(load.to_host_bytes)} to the host"
        + (f", {decimal(load.sent_bytes)} to peers" if load.sent_bytes else ""),
        f"{_memory(chosen.memory_bytes)} on the fullest node"
        + ("" if limit is None else f", {_memory(limit)} may be used"),
    ]
    if chosen.owned_by is not None:
        sent, secs = chosen.owned_by is PartitionSurvival.PEER, chosen.partition_secs
        why = (
            f'recomputing them takes "{AOR}" in the protection' if sent else f'"{AOR}" asks for it'
        )
        if secs is not None:
            why = (
                f"sending costs a step {secs[0]:.2g} s, recomputing {secs[1]:.2g} s where it is "
                "exact"
            )
        how = f"ZeRO partitions are {'sent to' if sent else 'recomputed by'} peers"
        parts.append(f"{how}: {why}" if situation.recomputable else how)
        parts += [] if sent or situation.exact else [SENT_AFTER_ALL]
    others = [a for a in usable if a is not chosen and a.tolerance >= chosen.tolerance]
    if chosen.why_not(wanted) is None and others:
        parts.append(f"the cheapest of {len(others) + 1} schemes that do")
    return "; ".join(parts)


def _needed(
    situation: ChoiceInputs, wanted: int, alternatives: Sequence[Alternative]
) -> Iterator[str]:
    """Yield changes that would reach the requested tolerance, as text, the most specific first."""
    topology = situation.topology
    reaching = [a for a in alternatives if a.tolerance >= wanted]
    tight = [a for a in reaching if a.available and not a.fits_memory]
    if not reaching and not any(a.fits_memory for a in alternatives):
        tight = [a for a in alternatives if not a.tolerance]
    for a in sorted(tight, key=lambda a: a.lacking_bytes)[:1]:
        yield (
            f"{a.name} would survive {_nodes(a.tolerance)}, with {_memory(a.lacking_bytes)} more "
            f"of host memory on {a.node} than the {_memory(a.limit_bytes or 0)} that reft may use "
            "there: raise memory_limit_bytes, enlarge the memory directory, keep fewer versions "
            "(arenas), or use more nodes"
        )
    for a in [a for a in reaching if not a.available and a.fits_memory][:1]:
        yield f"{a.name} would do: {a.why_not(wanted)}"
    size = topology.degrees.dp
    if not reaching and size <= wanted:
        yield (
            f"a data-parallel degree of {size} cannot survive {_nodes(wanted)}: at least "
            f"{wanted + 1} are needed, each on its own node"
        )
    elif not reaching:
        spread = {group: len(set(topology.group_nodes(*group))) for group in topology.groups()}
        pp, tp = min(spread, key=lambda group: spread[group])
        apart = f"them on at least {wanted + 1}, best one per node"
        if spread[pp, tp] > wanted:
            apart = "every member on its own node"
        if len(topology.groups()) == 1:
            change = f"use at least {wanted + 1} nodes"
        else:
            change = (
                f"put {apart} (for example with a rank order that separates data-parallel peers: "
                "--rank-order across-nodes)"
            )
        yield (
            f"the {size} members of the sharding group pp{pp}.tp{tp} sit on {spread[pp, tp]} "
            f"node(s); {change}"
        )


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _memory(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
