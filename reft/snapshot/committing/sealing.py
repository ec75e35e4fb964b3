"""The last part of a version on one rank: from copied bytes to a sealed arena, with what only peers have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from reft.config import FaultPoint, Variant
from reft.control.control import WorkerControl
from reft.errors import ArenaError, TransferError
from reft.faults import FaultPlan
from reft.grid import Topology
from reft.snapshot.committing.protocol import Cause
from reft.snapshot.committing.request import SnapshotRequest, WorkerOptions
from reft.snapshot.filling import Filling
from reft.snapshot.layout import GroupLayout
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.stats import Kind, SnapshotStats


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


class PeerTraffic:
    """Gemini's inter-node traffic: a copy of everything a rank keeps, to another rank, over the network.

    The bytes land in memory that recovery knows nothing of; what it uses is the same in every variant.

    Args:
        control: carries the bytes.
        block_bytes: most bytes of a message.
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
        """Send to the next rank and receive from the one before. Collective.

        Returns:
            The rank that was sent to, and the bytes.

        Raises:
            TransferError: a peer vanished.
        """
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


class Sealer:
    """Seals the versions of one rank. Used by the worker thread."""

    def __init__(
        self,
        *,
        control: WorkerControl,
        topology: Topology,
        options: WorkerOptions,
        stats: SnapshotStats,
        faults: FaultPlan,
    ) -> None:
        self._stats = stats
        self._faults = faults
        self._ring = RingExchange(control, topology)
        recompute = options.recompute
        self.peer_optimizers = None if recompute is None else PeerOptimizers(recompute, stats.recompute)
        """Recompute what ring peers alone have; without them it is always sent."""
        self._peer_traffic = PeerTraffic(control, options.block_bytes)

    def adopt(self, layout: GroupLayout) -> None:
        """The next version has this layout. Collective."""
        self._peer_traffic.agree(layout.mine.data_bytes)

    def forget(self) -> None:
        """Keep no mapping of an arena: its memory may be given up."""
        if self.peer_optimizers is not None:
            self.peer_optimizers.forget()

    def committed(self, filling: Filling) -> None:
        """The version that the next one's partitions are recomputed from."""
        if self.peer_optimizers is not None:
            self.peer_optimizers.committed(filling)

    def try_seal(self, request: SnapshotRequest, filling: Filling, failure: Cause | None) -> Cause | None:
        """Complete a copied version and seal it. Collective in the group: also a rank that cannot seal takes
        part, since its peers wait for what it sends. They are told in the vote.

        Args:
            request: the version.
            filling: its arena.
            failure: why this rank cannot seal it; None if it can so far.

        Returns:
            Why it is not sealed; None if it is.

        Raises:
            TransferError: a peer is gone.
        """
        failure = failure or _attempt(filling.hash_rest)
        try:
            arrived = self.exchange(request, filling)
        except TransferError:
            raise
        except Exception as error:
            # Peers may wait for what this rank has not sent: only in new groups can it tell them.
            raise TransferError(f"the exchange broke off: {type(error).__name__}: {error}") from error
        failure = failure or _attempt(lambda: self._check(filling, arrived))
        return failure or _attempt(lambda: self._seal(request, filling))

    def _seal(self, request: SnapshotRequest, filling: Filling) -> None:
        self._faults.reach(FaultPoint.BEFORE_SEAL, request.label.step)
        filling.seal()
        # What was written to a file that is not there any more is no version (P3).
        lost = filling.arena.lost()
        if lost is not None:
            raise ArenaError(f"{filling.arena.path} {lost}")
        self._faults.reach(FaultPoint.AFTER_SEAL, request.label.step)

    def _check(self, filling: Filling, arrived: Mapping[int, torch.Tensor]) -> None:
        self._stats.peer_bytes += filling.check_received(arrived)

    def exchange(self, request: SnapshotRequest, filling: Filling) -> Mapping[int, torch.Tensor]:
        """Recompute what peers alone have, or take it from them. Collective in the group.

        Returns:
            What has arrived, to be checked; see :meth:`RingExchange.blocks`.
        """
        images, peers = request.images, self.peer_optimizers
        if peers is not None and images is not None:
            peers.recompute(filling, images, request.step)
        self._ring.facts(filling)
        if peers is not None and images is not None:
            peers.compare(filling, images, request.step)
        arrived = self._ring.blocks(filling)
        if request.variant is Variant.INTER_NODE:
            peer, nbytes = self._peer_traffic.send(filling.arena.data)
            self._ring.count(filling, peer, Counter({Kind.MIRROR: nbytes}))
        return arrived


def _attempt(act: Callable[[], object]) -> Cause | None:
    """Why it failed; None if it did not.

    Raises:
        TransferError: a peer is gone.
    """
    try:
        act()
    except TransferError:
        raise
    except Exception as error:  # whatever it is, training and peers go on (P6)
        return Cause.of(error)
    return None
