"""Restoring the newest whole version: plan, verify, decode what is lost, transfer, until nothing is corrupt.

Every rank goes through the same stages; each ends in an exchange, so that all fall down the ladder, or
fail, together.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from reft.blocks import Section
from reft.faults import FaultPlan
from reft.load.exchange import Flaw, Ledger, Repair, gather_inventories
from reft.load.inventory import Inventory, take_inventory
from reft.load.local import ArenaSet, opened_arenas
from reft.load.plan import (
    BlockSource,
    Fetch,
    NotRecoverable,
    RecoveryPlan,
    SourceKind,
    plan_recovery,
)
from reft.load.rebuild import Decoder
from reft.load.sift import LayoutSpec, listing
from reft.load.transfer import (
    DEFAULT_WINDOW_BYTES,
    RoomFor,
    Sink,
    TransferStats,
    execute,
    verify_sources,
)
from reft.store.label import Label
from reft.topology import Topology

logger = logging.getLogger(__name__)

Prepare = Callable[[bytes], None]
"""Takes this coordinate's verified host image and gives the live state the shape it describes."""


@dataclass(frozen=True)
class RecoveryOutcome:
    """A restored version. ``plan`` and ``repaired`` are the same on all ranks, ``stats`` is this rank's."""

    plan: RecoveryPlan
    stats: TransferStats
    repaired: tuple[Repair, ...] = ()
    rounds: int = 1

    @property
    def label(self) -> Label:
        return self.plan.label

    def __str__(self) -> str:
        lines = [f"{self.plan}", f"  this rank: {self.stats}, {self.rounds} rounds"]
        return "\n".join(lines + [f"  repaired: {repair}" for repair in self.repaired])


def recover(
    inventories: Sequence[Inventory],
    topology: Topology,
    rank: int,
    *,
    job_id: str,
    job_dir: Path,
    secret: bytes,
    prepare: Prepare,
    sink: Sink,
    layout: LayoutSpec = None,
    group: dist.ProcessGroup | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    faults: FaultPlan | None = None,
    timeout_secs: float | None = None,
) -> RecoveryOutcome | NotRecoverable:
    """Restore the newest whole version: plan, verify, transfer, and again until nothing is corrupt.

    Called on all ranks with equal ``inventories``, ``topology``, ``job_id`` and ``layout``; all come
    to the same result. Nothing is touched before every source of the plan was verified; then
    ``prepare`` gets the host image, then ``sink`` the blocks of the other sections. If bytes are
    damaged on the way and the plan is made again, both are called again. If the result is then
    :class:`NotRecoverable`, the live state has to be restored from elsewhere.

    Args:
        inventories: of all nodes, as gathered; those of nodes without ranks are not used.
        topology: placement of the running incarnation.
        rank: this global rank.
        job_id: the job.
        job_dir: this node's directory of the job.
        secret: the job's secret: messages about corrupt blocks carry it (P11).
        prepare: takes this coordinate's host image, before the first block.
        sink: takes the blocks of the replicated and owned images of this coordinate.
        layout, group, window_bytes, faults, timeout_secs: see :func:`plan_recovery`, :func:`execute`.

    Raises:
        TransferError: if a peer is gone, or could not restore its part (the message says which and why).
        Exception: on the rank where it happened: whatever ``prepare`` or ``sink`` raised.
    """
    present: Sequence[Inventory] = [i for i in inventories if i.node in topology.nodes]
    ledger = Ledger(topology, secret, group)
    node = topology.nodes[rank]
    courier = _Courier(topology, rank, group, window_bytes, timeout_secs)
    for attempt in count(1):
        # Ends: a plan never uses a source in the ledger, so every further round enters new ones, and
        # what a round decodes is stored, so the next finds fewer lost blocks.
        plan = plan_recovery(present, topology, job_id=job_id, layout=layout, bad=ledger.bad)
        if isinstance(plan, NotRecoverable):
            return plan
        with opened_arenas(job_dir, [i for i in present if i.node == node], secret) as courier.arenas:
            if plan.rebuilds:
                courier.rebuild(plan, ledger, job_dir, secret)
            elif courier.carry_out(plan, ledger, prepare, sink, faults):
                outcome = RecoveryOutcome(plan, courier.stats(), ledger.repairs(plan), attempt)
                _report(outcome, rank)
                return outcome
        if plan.rebuilds:
            reads = rank == topology.local_ranks(node)[0]
            mine = take_inventory(job_dir, node, secret) if reads else None
            present = gather_inventories(mine, secret, group)
    raise AssertionError("unreachable")


@dataclass
class _Courier:
    """Carries plans out on one rank and adds up what it moved."""

    topology: Topology
    rank: int
    group: dist.ProcessGroup | None
    window_bytes: int
    timeout_secs: float | None
    arenas: ArenaSet = field(default_factory=dict)
    moved: list[TransferStats] = field(default_factory=list)

    def rebuild(self, plan: RecoveryPlan, ledger: Ledger, job_dir: Path, secret: bytes) -> None:
        """Collective: decode what no node holds, so that the next plan finds it. Corrupt sources go to
        the ledger; what they are part of is decoded in a later round, in another way."""
        at = self.topology.coordinates[self.rank]
        part = replace(
            plan, fetches={c: plan.rebuilds[c].fetches if c in plan.rebuilds else () for c in plan.fetches}
        )

        def verify() -> frozenset[BlockSource]:
            # In a stage without messages: whoever fails here leaves no peer waiting for one.
            decoder.reserve()
            return verify_sources(part, self.topology, self.rank, self.arenas)

        def move() -> frozenset[BlockSource]:
            return self._move(part, take, None, room_for=room_for, counted=False)

        def room_for(fetch: Fetch) -> torch.Tensor | None:
            room = decoder.room_for(fetch)
            return None if room is None else torch.from_numpy(room)

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            decoder.take(fetch, data.numpy(), stays=fetch.kind is SourceKind.LOCAL)

        node = self.topology.nodes[self.rank]
        with closing(Decoder(plan, at, job_dir, node, secret, kept_bytes=self.window_bytes)) as decoder:
            if not ledger.share(part, verify, Flaw.STORED):
                ledger.share(part, move, Flaw.IN_TRANSIT)
                ledger.share(part, decoder.store, Flaw.OTHER_DATA)

    def carry_out(
        self, plan: RecoveryPlan, ledger: Ledger, prepare: Prepare, sink: Sink, faults: FaultPlan | None
    ) -> bool:
        """Collective. False if a source turned out corrupt anywhere; it is then in the ledger.

        Every stage ends in an exchange: a rank that fails in one is known to all before the next.
        """
        nbytes = plan.image_bytes(self.topology.coordinates[self.rank], Section.HOST)
        host = torch.empty(nbytes, dtype=torch.uint8)

        def verify() -> frozenset[BlockSource]:
            return verify_sources(plan, self.topology, self.rank, self.arenas)

        def move_host() -> frozenset[BlockSource]:
            def keep(fetch: Fetch, data: torch.Tensor) -> None:
                host[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data

            return self._move(plan.only(Section.HOST), keep, None)

        def prepare_state() -> frozenset[BlockSource]:
            prepare(host.numpy().tobytes())
            return frozenset()

        def move_state() -> frozenset[BlockSource]:
            return self._move(plan.only(Section.REPLICATED, Section.OWNED), sink, faults)

        stages = (verify, move_host, prepare_state, move_state)
        flaws = {verify: Flaw.STORED}
        return not any(ledger.share(plan, s, flaws.get(s, Flaw.IN_TRANSIT)) for s in stages)

    def _move(
        self,
        plan: RecoveryPlan,
        sink: Sink,
        faults: FaultPlan | None,
        *,
        room_for: RoomFor = lambda fetch: None,
        counted: bool = True,
    ) -> frozenset[BlockSource]:
        result = execute(
            plan,
            self.topology,
            self.rank,
            self.arenas,
            sink,
            group=self.group,
            room_for=room_for,
            window_bytes=self.window_bytes,
            faults=faults,
            timeout_secs=self.timeout_secs,
        )
        # What is read in order to decode does not restore anything yet: only its sending counts.
        self.moved.append(result.stats if counted else replace(result.stats, bytes_from={}))
        return result.bad

    def stats(self) -> TransferStats:
        """Everything moved so far: bytes add up, buffers are reused."""
        total: Counter[str] = Counter({str(kind): 0 for kind in SourceKind})
        for part in self.moved:
            total.update(part.bytes_from)
        return TransferStats(
            bytes_from=dict(total),
            sent_bytes=sum(part.sent_bytes for part in self.moved),
            buffer_bytes=max(part.buffer_bytes for part in self.moved),
            waves=sum(part.waves for part in self.moved),
            secs=sum(part.secs for part in self.moved),
        )


def _report(outcome: RecoveryOutcome, rank: int) -> None:
    logger.info("recovered step %d: %s", outcome.label.step, outcome.stats)
    if rank == 0 and outcome.repaired:
        repairs = listing(map(str, outcome.repaired))
        logger.warning("repaired while step %d was recovered: %s", outcome.label.step, repairs)
