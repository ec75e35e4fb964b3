"""The order in which a recovery plan's blocks cross the network: fixed waves of bounded size.

Pure. Every rank that takes part computes the same waves from the plan, posts its sends and receives of a
wave and waits for them, so nothing can wait in a circle and nobody holds more than the window. A rank that
also sends for other sharding groups goes through the waves of all of them in step: the rank in the lowest
wave can always proceed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from reft.blocks import ALIGNMENT_BYTES, BlockKey
from reft.errors import TransferError
from reft.load.parity import stripes_of
from reft.load.plan import BlockSource, Fetch, Rebuild, RecoveryPlan, SourceKind
from reft.topology import Topology


@dataclass(frozen=True, slots=True)
class Move:
    """One block on its way from global rank ``src`` to ``dst``."""

    src: int
    dst: int
    fetch: Fetch

    @property
    def buffer_bytes(self) -> int:
        return padded_bytes(self.fetch.nbytes)


Wave = tuple[Move, ...]


def padded_bytes(nbytes: int) -> int:
    """``nbytes`` rounded up, so that every block in a buffer can be viewed as any dtype."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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


def make_waves(plan: RecoveryPlan, topology: Topology, window_bytes: int) -> tuple[Wave, ...]:
    """Cut all transfers between nodes into waves. Pure; the same on all ranks.

    In a wave no rank sends or receives more than ``window_bytes``, except for a single block that is
    larger. Every fetch that is not local is in exactly one wave.

    Args:
        window_bytes: most bytes that a rank sends, and most that it receives, in one wave.
    """
    waves: dict[int, list[Move]] = defaultdict(list)
    budget = _Budget(window_bytes)
    for move in _in_rotation(plan, topology):
        waves[budget.place(move)].append(move)
    return tuple(tuple(waves[w]) for w in sorted(waves))


def waves_of(
    plans: Iterable[RecoveryPlan], topology: Topology, rank: int, window_bytes: int
) -> tuple[Wave, ...]:
    """This rank's part of the waves of several sharding groups, without those that it has no part in.

    Args:
        plans: of all groups that the rank takes part in, one of which at most it belongs to.
        window_bytes: see :func:`make_waves`; it bounds what is sent for each group.
    """
    every = [make_waves(plan, topology, window_bytes) for plan in plans]
    merged = (
        tuple(move for wave in waves for move in wave if rank in (move.src, move.dst))
        for waves in zip_longest(*every, fillvalue=())
    )
    return tuple(wave for wave in merged if wave)


class _Budget:
    """Finds the first wave with room for a block on both sides."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._used: Counter[tuple[str, int, int]] = Counter()
        self._first_open: Counter[tuple[str, int]] = Counter()

    def place(self, move: Move) -> int:
        ends = (("send", move.src), ("receive", move.dst))
        nbytes = move.buffer_bytes
        for end in ends:
            # Waves that once had no room are closed for good: keeps the search short.
            while not self._fits(end, self._first_open[end], nbytes):
                self._first_open[end] += 1
        wave = max(self._first_open[end] for end in ends)
        while not all(self._fits(end, wave, nbytes) for end in ends):
            wave += 1
        for end in ends:
            self._used[*end, wave] += nbytes
        return wave

    def _fits(self, end: tuple[str, int], wave: int, nbytes: int) -> bool:
        used = self._used.get((*end, wave), 0)
        return used == 0 or used + nbytes <= self._window_bytes


def _network_fetches(plan: RecoveryPlan) -> list[tuple[int, Fetch]]:
    """(position of the coordinate, fetch) of everything that is not read locally, in plan order."""
    return [
        (at, fetch)
        for at, coordinate in enumerate(sorted(plan.fetches))
        for fetch in plan.fetches[coordinate]
        if fetch.kind is not SourceKind.LOCAL
    ]


def _in_rotation(plan: RecoveryPlan, topology: Topology) -> list[Move]:
    """All moves, dealt out so that at any time every rank talks to a different peer, and that what is decoded
    together arrives together."""
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
