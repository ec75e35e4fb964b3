"""The exchange with ring peers: what only one rank has, its holders take (``peer``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from reft.snapshot.arenas import Filling
from reft.snapshot.control import ControlGroup
from reft.snapshot.traffic import Kind
from reft.topology import Topology


def exchange_with_peers(control: ControlGroup, topology: Topology, filling: Filling) -> int:
    """Send this rank's owned and host blocks to its ring predecessors, take its successors'. Collective.

    Returns:
        Bytes received, compared with their owners' checksums (P5).

    Raises:
        TransferError: a peer vanished, or announced what was not agreed.
        ArenaError: a block arrived changed.
    """
    layout = filling.layout
    at = topology.coordinates[control.rank]
    ranks = topology.group(at.pp, at.tp)
    holders = layout.plan.placement.holders_of(layout.member)[1:]
    kept = layout.plan.placement.kept_by(layout.member)[1:]
    facts = filling.own_facts()
    incoming = {m: torch.empty(filling.facts_length(m), dtype=torch.int64) for m in kept}
    control.exchange({ranks[h]: [facts] for h in holders}, {ranks[m]: [t] for m, t in incoming.items()})
    for member, peer_facts in incoming.items():
        filling.expect(member, peer_facts)
    control.exchange(
        {ranks[h]: filling.outgoing() for h in holders},
        {ranks[m]: filling.incoming(m) for m in kept},
    )
    count_sent(control, topology, filling, [ranks[h] for h in holders], filling.outgoing_bytes())
    return filling.check_received()


def count_sent(
    control: ControlGroup,
    topology: Topology,
    filling: Filling,
    receivers: Iterable[int],
    each: Counter[Kind],
) -> None:
    """Count bytes by kind that went to ranks on other nodes."""
    nodes = topology.nodes
    for rank in receivers:
        if nodes[rank] != nodes[control.rank]:
            filling.traffic.sent.update(each)
