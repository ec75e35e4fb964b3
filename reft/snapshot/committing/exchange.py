"""What a version needs of other ranks before it is sealed: ring peers' bytes, and the baseline's mirror."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reft.control.control import WorkerControl
from reft.grid import Topology
from reft.memory.header import checksum
from reft.snapshot.filling import Filling
from reft.snapshot.stats import Kind


class RingExchange:
    """The exchange of one rank with the members of its sharding group."""

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    def facts(self, filling: Filling) -> None:
        """Tell ring predecessors lengths and checksums; learn the successors'. Collective in the group.
        Raises TransferError where a peer vanished or announced what was not agreed."""
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

    def differs(self, sums: Mapping[int, int]) -> bool:
        """Whether the successor has other sums. Collective in the group."""
        at = self._topology.coordinates[self._control.rank]
        ranks = self._topology.group(at.pp, at.tp)
        before, behind = (ranks[(at.dp + way) % len(ranks)] for way in (-1, 1))
        if len(ranks) == 1 or not sums:
            return False
        mine = torch.tensor([checksum(np.array([*sums.items()]).tobytes()) - 2**63])
        theirs = torch.empty_like(mine)
        self._control.exchange({before: [mine]}, {behind: [theirs]})
        return not torch.equal(mine, theirs)

    def blocks(self, filling: Filling) -> dict[int, torch.Tensor]:
        """Send the blocks that the predecessors lack, take those that this rank lacks. Collective. Returns
        which blocks have arrived, by member: see :meth:`Filling.check_received`."""
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


class PeerTraffic:
    """Gemini's inter-node traffic: a copy of everything a rank keeps, to another rank, over the network.

    The bytes land in memory that recovery knows nothing of; what it uses is the same in every variant.
    """

    def __init__(self, control: WorkerControl, block_bytes: int) -> None:
        self._control = control
        self._block_bytes = block_bytes
        self._sizes: Sequence[int] = ()
        self._memory: torch.Tensor | None = None

    def agree(self, nbytes: int) -> None:
        """Tell all ranks how much this one keeps. Collective."""
        self._sizes = [size for (size,) in self._control.gather_ints([nbytes])]
        self._memory = None

    def send(self, data: memoryview) -> tuple[int, int]:
        """Send to the next rank and receive from the one before. Collective. Returns the rank that was sent
        to, and the bytes."""
        rank, world = self._control.rank, self._control.world_size
        if world == 1:
            return rank, 0
        if self._memory is None:
            self._memory = torch.empty(self._sizes[rank - 1], dtype=torch.uint8)
        mine = torch.frombuffer(data, dtype=torch.uint8)[: self._sizes[rank]]
        self._control.exchange(
            {(rank + 1) % world: torch.split(mine, self._block_bytes)},
            {(rank - 1) % world: torch.split(self._memory, self._block_bytes)},
        )
        return (rank + 1) % world, mine.numel()
