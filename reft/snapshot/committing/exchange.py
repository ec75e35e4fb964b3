"""What ring peers tell and send each other for every version: what only one rank has (``peer``, Gemini).

A rank's host state, its partition and the checksums of its replicated blocks go to its ring predecessors.
Where these recompute the partition (AOR), they first compare checksums: only blocks that differ are sent.
"""

from __future__ import annotations

from collections import Counter

import torch

from reft.control.control import WorkerControl
from reft.grid import Topology
from reft.snapshot.filling import Filling
from reft.snapshot.traffic import Kind


class RingExchange:
    """The exchange of one rank with the members of its sharding group.

    Args:
        control: carries the bytes.
        topology: who is where.
    """

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    def facts(self, filling: Filling) -> None:
        """Tell ring predecessors lengths and checksums; learn the successors'. Collective in the group.

        Raises:
            TransferError: a peer vanished or announced what was not agreed.
        """
        holders, kept = self._peers(filling)
        facts = filling.own_facts()
        incoming = {m: torch.empty(filling.facts_length(m), dtype=torch.int64) for m in kept}
        self._control.exchange(
            {rank: [facts] for rank in holders.values()}, {kept[m]: [t] for m, t in incoming.items()}
        )
        for rank in holders.values():
            self.count(filling, rank, Counter({Kind.CHECKSUMS: facts.nbytes}))
        for member, peer_facts in incoming.items():
            filling.expect(member, peer_facts)

    def blocks(self, filling: Filling) -> dict[int, torch.Tensor]:
        """Send the blocks that the predecessors lack, take those that this rank lacks. Collective.

        Returns:
            Which blocks have arrived, by member: see :meth:`Filling.check_received`.

        Raises:
            TransferError: a peer vanished.
        """
        holders, kept = self._peers(filling)
        me = filling.layout.member
        lacking = {m: filling.wanted(m) for m in kept}
        asked = {h: torch.ones(filling.facts_length(me) - 1, dtype=torch.uint8) for h in holders}
        if filling.layout.plan.sizes.recomputed:
            self._control.exchange(
                {kept[m]: [mask] for m, mask in lacking.items()}, {holders[h]: [t] for h, t in asked.items()}
            )
        self._control.exchange(
            {holders[h]: filling.selection(me, mask) for h, mask in asked.items()},
            {kept[m]: filling.selection(m, mask) for m, mask in lacking.items()},
        )
        for holder, mask in asked.items():
            self.count(filling, holders[holder], filling.selected_bytes(mask))
        return lacking

    def count(self, filling: Filling, rank: int, sent: Counter[Kind]) -> None:
        """Note what was sent to a rank, if it is on another node."""
        nodes = self._topology.nodes
        if nodes[rank] != nodes[self._control.rank]:
            filling.traffic.sent.update(sent)

    def _peers(self, filling: Filling) -> tuple[dict[int, int], dict[int, int]]:
        """Ranks by member: of those that keep this rank's bytes, and of those whose bytes it keeps."""
        at = self._topology.coordinates[self._control.rank]
        ranks = self._topology.group(at.pp, at.tp)
        placement, me = filling.layout.plan.placement, filling.layout.member
        return (
            {h: ranks[h] for h in placement.holders_of(me)[1:]},
            {m: ranks[m] for m in placement.kept_by(me)[1:]},
        )
