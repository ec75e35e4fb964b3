"""For every block that a sharding group needs, where it comes from. Pure.

Every rank that takes part computes the same without talking. Sources found corrupt are left out, so that
planning again after a failed check falls down the ladder: local, then the owner on another node, then a
copy. Blocks that are stored nowhere are decoded first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from reft.blocks import BlockKey, Section
from reft.grid import Coordinate, Topology
from reft.recover.parity import LostBlock, stripes_of
from reft.recover.plan import Fetch, Rebuild, SourceKind
from reft.recover.sources import GroupSources, SourceBlock


def plan_group(
    needs: Mapping[Coordinate, Sequence[SourceBlock]],
    sources: GroupSources,
    topology: Topology,
    layout: str,
) -> tuple[dict[Coordinate, tuple[Fetch, ...]], dict[Coordinate, Rebuild]]:
    """What every member of one sharding group fetches, and what some of them decode before.

    Args:
        needs: the blocks that each of them needs.
        sources: what the group has of the version, without gaps.
        topology: placement of the new incarnation.
        layout: the group's layout hash.
    """
    return plan_fetches(needs, topology), _choose_decoders([*needs], sources, topology, layout)


def _choose_decoders(
    members: Sequence[Coordinate], sources: GroupSources, topology: Topology, layout: str
) -> dict[Coordinate, Rebuild]:
    """Give the lost blocks of every stripe, decoded from the same others, to a member whose node holds a
    parity of it; of those to the one that decodes the fewest bytes so far."""
    work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
    stripes = [
        (_members_near(stripe, sources, topology, members), stripe) for stripe in stripes_of(sources.lost)
    ]
    # Those with the fewest choices first, so that the others even out the load.
    for near, stripe in sorted(stripes, key=lambda choice: len(choice[0])):
        chosen = min(near, key=lambda c: (sum(b.nbytes for b in work[c]), c))
        work[chosen] += stripe
    image_bytes = _replicated_bytes(sources)
    return {
        coordinate: Rebuild(
            tuple(blocks),
            image_bytes,
            layout,
            _rebuild_fetches(sources, blocks, coordinate, topology.node_of(coordinate)),
        )
        for coordinate, blocks in work.items()
        if blocks
    }


def _members_near(
    stripe: Sequence[LostBlock], group: GroupSources, topology: Topology, members: Sequence[Coordinate]
) -> list[Coordinate]:
    """Those whose node holds a parity of the stripe; all of them where there is none."""
    parities = {node for lost in stripe for key in lost.parities for node in group.stored[key].nodes}
    return [c for c in members if topology.node_of(c) in parities] or list(members)


def _replicated_bytes(group: GroupSources) -> int:
    """Size of the group's replicated image, lost blocks included."""
    stored = [b.start_bytes + b.nbytes for b in group.images[Section.REPLICATED, -1]]
    return max(stored + [b.start_bytes + b.nbytes for b in group.lost], default=0)


def _rebuild_fetches(
    group: GroupSources, blocks: Sequence[LostBlock], coordinate: Coordinate, node: str
) -> tuple[Fetch, ...]:
    keys = dict.fromkeys(BlockKey(Section.CHECKSUMS, b.key.member, 0) for b in blocks)
    keys.update(dict.fromkeys(key for b in blocks for key, _ in b.terms))
    fetches = []
    for key in keys:
        kind, nodes = _rung(group.stored[key], node)
        fetches.append(_fetch(group.stored[key], coordinate, kind, nodes[0]))
    return tuple(fetches)


def _rung(block: SourceBlock, node: str) -> tuple[SourceKind, tuple[str, ...]]:
    """The highest rung that has the block for a coordinate on ``node``, and the nodes to choose from.

    Later kinds go below COPY; only they need more than one node per block.
    """
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    if block.owner_nodes:
        return SourceKind.PEER, block.owner_nodes
    return SourceKind.COPY, block.all_nodes


def plan_fetches(
    needs: Mapping[Coordinate, Sequence[SourceBlock]], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Pick one source per needed block; of equal ones the node that serves the fewest bytes so far.

    Blocks with the fewest choices are settled first, so that those with a choice even out the load.
    """
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    # What one member fetches, most others fetch from the same place: each fetch is made once.
    made: dict[tuple[int, SourceKind, str], Fetch] = {}

    def fetch_of(block: SourceBlock, coordinate: Coordinate, kind: SourceKind, node: str) -> Fetch:
        case = id(block), kind, node
        if case not in made:
            made[case] = _fetch(block, coordinate, kind, node)
        return made[case]

    for coordinate, blocks in needs.items():
        node = topology.node_of(coordinate)
        slots: list[Fetch | None] = [None] * len(blocks)
        chosen[coordinate] = slots
        for at, block in enumerate(blocks):
            kind, nodes = _rung(block, node)
            if len(nodes) > 1:
                open_choices.append((len(nodes), coordinate, at, block, kind, nodes))
                continue
            slots[at] = fetch_of(block, coordinate, kind, nodes[0])
            if kind is not SourceKind.LOCAL:
                load[nodes[0]] += block.nbytes
    for _, coordinate, at, block, kind, nodes in sorted(open_choices, key=lambda choice: choice[:3]):
        best = min(nodes, key=lambda node: (load[node], node))
        load[best] += block.nbytes
        chosen[coordinate][at] = fetch_of(block, coordinate, kind, best)
    return {c: tuple(f for f in slots if f is not None) for c, slots in chosen.items()}


def _fetch(block: SourceBlock, coordinate: Coordinate, kind: SourceKind, node: str) -> Fetch:
    arena, arena_offset = block.nodes[node]
    return Fetch(
        key=block.key,
        pp=coordinate.pp,
        tp=coordinate.tp,
        start_bytes=block.start_bytes,
        nbytes=block.nbytes,
        checksum=block.checksum,
        kind=kind,
        node=node,
        arena=arena,
        arena_offset=arena_offset,
    )
