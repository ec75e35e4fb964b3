"""The last part of a version on one rank: from copied bytes to a sealed arena, with what only peers have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from reft.config import FaultPoint, Variant
from reft.control.control import WorkerControl
from reft.errors import ArenaError, TransferError
from reft.faults import FaultPlan
from reft.grid import Topology
from reft.snapshot.committing.baselines import PeerTraffic
from reft.snapshot.committing.exchange import RingExchange
from reft.snapshot.committing.protocol import Cause
from reft.snapshot.filling import Filling
from reft.snapshot.layout import GroupLayout
from reft.snapshot.recompute import PeerOptimizers
from reft.snapshot.request import SnapshotRequest, WorkerOptions
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.traffic import Kind


class Sealer:
    """Seals the versions of one rank. Used by the worker thread.

    Args:
        control: carries what peers send.
        topology: who is where.
        options: fixed settings.
        stats: counters to update.
        faults: injected faults.
    """

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

    def let_go(self) -> None:
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
