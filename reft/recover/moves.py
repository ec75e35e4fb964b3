"""What crosses the network in a recovery, from which rank to which, and in which order.

Pure. Every rank that takes part computes the same order from the plan. Between two ranks blocks go in this
order, one after the other, so that a stream needs no frames; streams of different pairs do not wait for each
other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from reft.blocks import BlockKey
from reft.errors import TransferError
from reft.grid import Topology
from reft.recover.parity import stripes_of
from reft.recover.plan import BlockSource, Fetch, Rebuild, RecoveryPlan, SourceKind


@dataclass(frozen=True, slots=True)
class Move:
    """One block on its way from global rank ``src`` to ``dst``."""

    src: int
    dst: int
    fetch: Fetch


def serving_ranks(plan: RecoveryPlan, topology: Topology) -> dict[BlockSource, int]:
    """Which rank reads and sends each stored block that another node needs.

    Any rank of a node can read every arena there. Members of the block's sharding group do; of several the
    one with the fewest bytes so far. Where none of them runs, one other rank of the node does.

    Raises:
        TransferError: if a source lies on a node that has no rank.
    """
    demand: dict[BlockSource, int] = {}
    group_of: dict[BlockSource, tuple[int, int]] = {}
    for _, fetch in _network_fetches(plan):
        source = fetch.source
        demand[source] = demand.get(source, 0) + fetch.nbytes
        group_of[source] = fetch.pp, fetch.tp
    load: Counter[int] = Counter()
    ranks: dict[BlockSource, int] = {}
    for source, nbytes in demand.items():
        local = topology.readers(source.node, *group_of[source])
        if not local:
            raise TransferError(
                f"the plan takes {source.arena} from node {source.node}, where no rank runs; plan with the "
                f"inventories of nodes that have ranks: {', '.join(sorted(set(topology.nodes)))}"
            )
        ranks[source] = min(local, key=lambda rank: (load[rank], rank))
        load[ranks[source]] += nbytes
    return ranks


def _network_fetches(plan: RecoveryPlan) -> list[tuple[int, Fetch]]:
    """(position of the coordinate, fetch) of everything that is not read locally, in plan order."""
    return [
        (at, fetch)
        for at, coordinate in enumerate(sorted(plan.fetches))
        for fetch in plan.fetches[coordinate]
        if fetch.kind is not SourceKind.LOCAL
    ]


def make_moves(plan: RecoveryPlan, topology: Topology) -> list[Move]:
    """Every fetch that is not local, once. Dealt out so that at any time every rank talks to a different
    peer, and that what is decoded together arrives together.

    Raises:
        TransferError: if a source lies on a node that has no rank.
    """
    servers = serving_ranks(plan, topology)
    receivers = [topology.rank_of(c) for c in sorted(plan.fetches)]
    stripes = [_stripe_numbers(plan.rebuilds.get(c)) for c in sorted(plan.fetches)]
    turn: Counter[tuple[int, int]] = Counter()
    order: list[tuple[int, int, int, Move]] = []
    for at, fetch in _network_fetches(plan):
        src, dst = servers[fetch.source], receivers[at]
        distance = (dst - src) % topology.world_size
        number = stripes[at].get(fetch.key, turn[src, dst])
        order.append((number, distance, src, Move(src, dst, fetch)))
        turn[src, dst] += 1
    return [move for *_, move in sorted(order, key=lambda item: item[:3])]


def _stripe_numbers(rebuild: Rebuild | None) -> dict[BlockKey, int]:
    """For every block that is read in order to decode, which stripe of the rebuild it belongs to. A peer has
    hardly more than one block of a stripe, so that these are turns of its own."""
    stripes = () if rebuild is None else stripes_of(rebuild.blocks)
    return {key: number for number, stripe in enumerate(stripes) for lost in stripe for key, _ in lost.terms}
