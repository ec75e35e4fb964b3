"""What ranks tell each other during recovery: inventories, and which sources are refused.

Collectives over the gloo group of all ranks. Messages are bytes under the job's secret, never pickle
(P11). An error on one rank reaches all, so that nobody waits for a rank that has given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgpack
import torch.distributed as dist

from reft.blocks import BlockKey, Section
from reft.comm.collectives import PeerLostError, allgather_bytes
from reft.errors import ReftError, TransferError
from reft.load.inventory import Inventory
from reft.load.plan import BlockSource, Fetch, RecoveryPlan, SourceKind, describe_block
from reft.mac import authenticate, check_authentic
from reft.store.label import Label
from reft.topology import Topology

logger = logging.getLogger(__name__)

_FINDINGS = b"reft-findings-1"


class BrokenOffError(ReftError, RuntimeError):
    """This rank cannot go on while peers wait for what it was to send: they hear of it when it ends."""


def gather_inventories(
    inventory: Inventory | None, secret: bytes, group: dist.ProcessGroup | None = None
) -> tuple[Inventory, ...]:
    """Inventories of all nodes, equal on all ranks. One rank per node gives one, the others None.

    Raises:
        AuthenticationError: if one does not carry the job's secret.
        TransferError: if a peer is gone.
    """
    messages = allgather_bytes(b"" if inventory is None else inventory.encode(secret), group)
    return tuple(Inventory.decode(message, secret) for message in messages if message)


class Flaw(StrEnum):
    """What is wrong with a stored block: its bytes, those that arrived, or, of a parity whose bytes are in
    order, the data it was computed from."""

    STORED = "corrupt or unreadable in"
    IN_TRANSIT = "corrupt on the way from"
    OTHER_DATA = "computed from other data than the version's, in"


@dataclass(frozen=True)
class Repair:
    """One stored block that could not be used, and what took its place.

    Attributes:
        label: version it belonged to.
        block: the block in words.
        nbytes: its length.
        node: node that holds it.
        arena: file that holds it.
        flaw: what was wrong with it.
        replaced_by: where the restored bytes came from, in words.
    """

    label: Label
    block: str
    nbytes: int
    node: str
    arena: str
    flaw: Flaw
    replaced_by: str

    def __str__(self) -> str:
        return (
            f"{self.block}, {self.label}: {self.nbytes} bytes {self.flaw} {self.arena} on node "
            f"{self.node}; restored from {self.replaced_by}"
        )


@dataclass(frozen=True)
class _Finding:
    label: Label
    fetch: Fetch
    flaw: Flaw


class Ledger:
    """The sources refused so far, the same on all ranks.

    Args:
        topology: placement of the running incarnation.
        secret: the job's secret.
        group: gloo group of all ranks; the default group if None.
    """

    def __init__(self, topology: Topology, secret: bytes, group: dist.ProcessGroup | None) -> None:
        self._topology = topology
        self._secret = secret
        self._group = group
        self._findings: dict[BlockSource, _Finding] = {}

    @property
    def bad(self) -> frozenset[BlockSource]:
        """Sources no plan may use."""
        return frozenset(self._findings)

    def share(self, plan: RecoveryPlan, stage: Callable[[], frozenset[BlockSource]], flaw: Flaw) -> bool:
        """Run ``stage`` on every rank and enter the sources it refused on any; collective.

        Args:
            plan: the plan being carried out.
            stage: does this rank's part and returns the sources it refuses.
            flaw: why.

        Returns:
            Whether any rank refused a source.

        Raises:
            TransferError: if a peer is gone, or its stage failed.
            BrokenOffError: this rank's own stage failed so that the peers cannot be told.
            Exception: what this rank's own stage raised, after the peers were told.
        """
        failure: Exception | None = None
        found: frozenset[BlockSource] = frozenset()
        try:
            found = stage()
        except (PeerLostError, BrokenOffError):
            raise
        except Exception as error:
            failure = error
        errors, sources = self._exchange(failure, found)
        if failure is not None:
            raise failure
        if errors:
            raise TransferError(f"{plan.label} was not restored on every rank: {'; '.join(errors)}")
        by_source = {f.source: f for fetches in plan.fetches.values() for f in fetches} if sources else {}
        for source in sources:
            fetch = by_source[source]
            here = flaw is Flaw.IN_TRANSIT and fetch.kind is SourceKind.LOCAL
            self._findings[source] = _Finding(plan.label, fetch, Flaw.STORED if here else flaw)
        return bool(sources)

    def _exchange(
        self, failure: Exception | None, found: frozenset[BlockSource]
    ) -> tuple[list[str], list[BlockSource]]:
        rows = [[s.node, s.arena, str(s.key.section), s.key.member, s.key.index] for s in sorted(found)]
        body = msgpack.packb([None if failure is None else repr(failure), rows])
        errors: list[str] = []
        sources: set[BlockSource] = set()
        messages = allgather_bytes(authenticate(body, self._secret, _FINDINGS), self._group)
        for rank, message in enumerate(messages):
            error, found_rows = msgpack.unpackb(check_authentic(message, self._secret, _FINDINGS))
            if error is not None:
                where = f"{self._topology.coordinates[rank]}, node {self._topology.nodes[rank]}"
                errors.append(f"rank {rank} ({where}) failed with {error}")
            for node, arena, section, member, index in found_rows:
                sources.add(BlockSource(node, arena, BlockKey(Section(section), member, index)))
        return errors, sorted(sources)

    def repairs(self, plan: RecoveryPlan) -> tuple[Repair, ...]:
        """Every source refused, and what ``plan``, which was carried out, used instead."""
        used: dict[tuple[int, int, BlockKey], set[str]] = {}
        for fetches in plan.fetches.values():
            for f in fetches:
                used.setdefault((f.pp, f.tp, f.key), set()).add(f"{f.arena} on node {f.node}")
        repairs = []
        for source, finding in self._findings.items():
            fetch = finding.fetch
            # What was only read to decode something else has no place of its own in the plan.
            places = sorted(used.get((fetch.pp, fetch.tp, fetch.key), ()))
            instead = ", ".join(places) or "other blocks of its stripe"
            if finding.label != plan.label:
                instead = f"an older version, {plan.label}, for want of another source"
            block = describe_block(fetch.pp, fetch.tp, fetch.key)
            repairs.append(
                Repair(
                    finding.label,
                    block,
                    fetch.nbytes,
                    source.node,
                    source.arena,
                    finding.flaw,
                    instead,
                )
            )
        return tuple(repairs)
