"""Restoring the newest whole version: decide, plan, decode what is lost, transfer and verify, until nothing
is corrupt.

Two things are said to the whole job: who holds which version (summaries without block tables), and what each
sharding group can recover. From these all ranks decide on the same version. Everything else stays in the
sharding group: its block tables, its plan, its refused sources, its bytes. Every rank goes through the same
stages; each ends in an agreement of all, so that all fall down the ladder, or fail, together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import msgpack

from reft.control.control import ControlGroup
from reft.faults import FaultPlan
from reft.grid import Topology
from reft.naming import Label
from reft.recover.complete import Completing, Completion, plan_kept
from reft.recover.courier import Courier, Prepare
from reft.recover.decide import (
    Decision,
    Group,
    Verdict,
    decide,
    decode_verdicts,
    encode_verdicts,
    judge,
    plan_decided,
)
from reft.recover.exchange import Exchange
from reft.recover.inventory import ArenaRecord, Inventory, take_inventory
from reft.recover.ledger import Ledger, Repair
from reft.recover.local import close_behind, opened_arenas
from reft.recover.parts import parts_of, spoken_for, tables_of
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.reshape import Piece, Resize, decode_pieces, encode_pieces
from reft.recover.sift import Sifted, Summary, listing, sift, summarize
from reft.recover.sources import GroupSources
from reft.recover.transfer import DEFAULT_WINDOW_BYTES, Copy, TransferStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryOutcome:
    """A restored version: ``plan`` and ``repaired`` of the sharding group, ``stats`` of this rank."""

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


class Recovery:
    """One recovery, on one rank. Made on all ranks with equal arguments, but for the directory.

    Args:
        topology: placement of the running incarnation.
        control: connections to all ranks.
        job_id: the job.
        job_dir: this node's directory of the job.
        secret: the job's secret.
        completing: how this incarnation stores versions, to complete the version on nodes that hold nothing
            of it; None: it is not completed. Given on all ranks or on none.
        resizable: whether a version that was written at another data-parallel degree may be restored.
        window_bytes, faults: see :func:`execute`.
    """

    def __init__(
        self,
        topology: Topology,
        control: ControlGroup,
        *,
        job_id: str,
        job_dir: Path,
        secret: bytes,
        completing: Completing | None = None,
        resizable: bool = False,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        faults: FaultPlan | None = None,
    ) -> None:
        self._topology = topology
        self._rank = rank = control.rank
        self._at = topology.coordinates[rank]
        self._node = topology.nodes[rank]
        self._job_id = job_id
        self._job_dir = job_dir
        self._secret = secret
        self._completing = completing
        self._resizable = resizable
        self._faults = faults
        self._exchange = Exchange(topology, control)
        self._ledger = Ledger(self._exchange)
        self._courier = Courier(topology, control, self._ledger, window_bytes)
        self._found: _Found

    def survey(self) -> RecoveryPlan | NotRecoverable:
        """See what there is and decide. Collective; nothing is touched.

        Returns:
            The plan of this rank's sharding group, for the version that all ranks decided on.

        Raises:
            TransferError: a peer is gone, or could not read its memory.
        """
        self._look()
        self._plan()
        return self._found.plans[self._group] if self._found.plans else self._found.refused()

    @property
    def has_other_layouts(self) -> bool:
        """Whether the survey found memory of this job that this one cannot take up as it is; the same on all
        ranks."""
        return self._found.sifted.layout_mismatch

    @property
    def _group(self) -> Group:
        return self._at.pp, self._at.tp

    def restore(self, prepare: Prepare, copy: Copy) -> RecoveryOutcome | NotRecoverable:
        """Carry out the plan: verify, transfer, until nothing is corrupt. Collective; after a survey.

        ``prepare`` gets the verified host image and ``copy`` the blocks of the other sections, which are
        verified by what it returns (of a version of another data-parallel degree those with wanted bytes in
        them). Where a block is corrupt, some of the state has been written by then: the plan is made again,
        and both are called again. If the result is then :class:`NotRecoverable`, the live state has to be
        restored from elsewhere.

        Args:
            prepare: takes this coordinate's host image, before the first block.
            copy: takes the blocks of the replicated and owned images of this coordinate.

        Raises:
            TransferError: if a peer is gone, or could not restore its part (the message says which and why).
            Exception: on the rank where it happened: whatever ``prepare`` or ``copy`` raised.
        """
        for attempt in count(1):
            # Ends: a plan never uses a source in the ledger, so every further round enters new ones, and
            # what a round decodes is stored, so the next finds fewer lost blocks.
            found = self._found
            if not found.plans:
                return found.refused()
            with opened_arenas(
                self._job_dir, [found.inventory], self._secret, close=close_behind
            ) as self._courier.arenas:
                self._courier.take_up(found.plans, found.parts, self._group)
                decodes = found.decision.decodes
                if decodes:
                    self._courier.rebuild(self._job_dir, self._secret)
                elif self._carry_out(found, prepare, copy):
                    plan = found.plans[self._group]
                    repairs = self._ledger.repairs(plan)
                    outcome = RecoveryOutcome(plan, self._courier.stats(), repairs, attempt)
                    _report(outcome, self._rank)
                    return outcome
            if decodes:
                self._look()
            self._plan()
        raise AssertionError("unreachable")

    def _carry_out(self, found: _Found, prepare: Prepare, copy: Copy) -> bool:
        """Collective. False if a source turned out corrupt anywhere; it is then in the ledger."""
        resize = Resize(found.plans[self._group].written_dp, self._topology.degrees.dp)
        with ExitStack() as stack:
            completion = self._completion(found)
            if completion is not None:
                stack.callback(completion.close)
            pieces = self._courier.bring_host(prepare, resize, completion)
            if pieces is None:
                return False
            if resize.old != resize.new:
                self._ask(found, pieces)
                self._courier.take_up(found.plans, found.parts, self._group)
            return self._courier.bring_state(copy, self._faults, completion)

    def _ask(self, found: _Found, pieces: Sequence[Piece]) -> None:
        """Collective: who takes part in a sharding group hears what its members want of the partitions, and
        plans for that."""
        bodies = {peer: b"" for peers in found.parts.values() for peer in peers}
        bodies |= dict.fromkeys(found.parts[self._group], mine := encode_pieces(pieces))
        told = {**self._exchange.control.swap(bodies), self._rank: mine}

        def planned() -> bool:
            for group, records in found.tables.items():
                members = enumerate(self._topology.group(*group))
                wanted = {dp: decode_pieces(told[rank]) for dp, rank in members}
                of_version = found.decision, found.sifted, group, found.sources[group]
                found.plans[group] = plan_decided(*of_version, records, wanted=wanted)
            return False

        self._exchange.agree(planned, f"planning for the partitions of {found.decision.label}")

    def _completion(self, found: _Found) -> Completion | None:
        plan, tables = found.plans[self._group], found.tables[self._group]
        if self._completing is None or plan.resized:
            return None
        stored = next(r.header for r in tables if r.header.label == plan.label)
        how, secret = self._completing, self._secret
        return Completion(plan, self._at, how, node=self._node, stored=stored, secret=secret)

    # -- what there is --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Collective: say what this node holds, hear what the others do, and get the block tables of the
        sharding groups that this rank takes part in."""
        mine: list[ArenaRecord] = []

        def summarized() -> bytes:
            inventory = take_inventory(self._job_dir, self._node, self._secret)
            mine.extend(
                spoken_for(
                    *(inventory.arenas, self._topology, self._rank),
                    job_id=self._job_id,
                    any_dp=self._resizable,
                )
            )
            is_first = self._topology.local_ranks(self._node)[0] == self._rank
            problems = inventory.problems if is_first else ()
            return summarize(
                *(self._node, mine, self._topology),
                job_id=self._job_id,
                problems=problems,
                any_dp=self._resizable,
            ).encode()

        labels: dict[tuple[int, int], Label] = {}
        told = self._exchange.gather(summarized, "taking inventory")
        summaries = [Summary.decode(body, self._topology, labels) for body in told]
        sifted = sift(summaries, self._topology, job_id=self._job_id)
        parts = parts_of(sifted, self._rank)
        self._found = _Found(sifted, parts, self._swap_tables(mine, parts))

    def _swap_tables(
        self, mine: Sequence[ArenaRecord], parts: Mapping[Group, tuple[int, ...]]
    ) -> dict[Group, list[ArenaRecord]]:
        """Whole arenas of the groups this rank takes part in, on all nodes; in (node, name) order."""
        tables = tables_of(mine, parts, self._topology, job_id=self._job_id, any_dp=self._resizable)
        packed = {group: Inventory(self._node, tuple(records)).pack() for group, records in tables.items()}
        bodies: dict[int, list[bytes]] = {}
        for group in sorted(parts):
            for peer in parts[group]:
                bodies.setdefault(peer, []).append(packed[group])
        told = self._exchange.control.swap(
            {peer: msgpack.packb(messages) for peer, messages in bodies.items()}
        )
        for body in told.values():
            for packed_table in msgpack.unpackb(body):
                for record in Inventory.unpack(packed_table).arenas:
                    at = record.header.coordinate
                    tables[at.pp, at.tp].append(record)
        for records in tables.values():
            records.sort(key=lambda r: (r.node, r.path))
        return tables

    def _plan(self) -> None:
        """Collective: judge the versions of the own group, hear the others, decide, and plan."""
        found = self._found
        sources = {}

        def judged() -> bytes:
            for group, records in found.tables.items():
                sources[group] = judge(group, records, found.sifted.sizes, self._ledger.bad)
            if self._at.dp:
                return b""
            return encode_verdicts({at: Verdict.of(s) for at, s in sources[self._group].items()})

        told = self._exchange.gather(judged, "judging the versions in memory")
        speakers = {(pp, tp): self._topology.group(pp, tp)[0] for pp, tp in self._topology.groups()}
        decision = decide(found.sifted, {g: decode_verdicts(told[rank]) for g, rank in speakers.items()})
        found.plans = {}
        if isinstance(decision, NotRecoverable):
            found.refusal = decision
            return
        found.decision = decision
        found.sources = {group: of_group[decision.label] for group, of_group in sources.items()}
        for group, records in found.tables.items():
            of_version = found.sources[group]
            plan = plan_decided(decision, found.sifted, group, of_version, records)
            if self._completing is not None and not decision.decodes and not plan.resized:
                held = [r for r in records if r.header.label == decision.label]
                plan = replace(plan, kept=plan_kept(group, of_version, held, self._topology))
            found.plans[group] = plan
        here = [r for records in found.tables.values() for r in records if r.node == self._node]
        used = tuple(r for r in here if r.header.label == decision.label)
        found.inventory = Inventory(self._node, used)


@dataclass
class _Found:
    """What a survey found, and what is planned from it.

    Attributes:
        sifted: who holds which version, in the whole job.
        parts: the groups that this rank takes part in, its own first, and the ranks that do.
        tables: their whole arenas on all nodes.
        decision: the version; there is none before it was decided, and where ``plans`` is empty.
        sources: what they have of the version.
        plans: their plans, the own group's first; empty if nothing can be recovered.
        inventory: arenas on this node that hold the version.
    """

    sifted: Sifted
    parts: Mapping[Group, tuple[int, ...]]
    tables: Mapping[Group, list[ArenaRecord]]
    decision: Decision = field(init=False)
    sources: Mapping[Group, GroupSources] = field(default_factory=dict)
    plans: dict[Group, RecoveryPlan] = field(default_factory=dict)
    refusal: NotRecoverable | None = None
    inventory: Inventory = field(default_factory=lambda: Inventory("", ()))

    def refused(self) -> NotRecoverable:
        """Why nothing can be recovered."""
        assert self.refusal is not None
        return self.refusal


def _report(outcome: RecoveryOutcome, rank: int) -> None:
    logger.info("recovered step %d: %s", outcome.label.step, outcome.stats)
    if rank == 0 and outcome.repaired:
        repairs = listing(map(str, outcome.repaired))
        logger.warning("repaired while step %d was recovered: %s", outcome.label.step, repairs)
