"""Restoring the newest whole version: decide, plan, decode what is lost, transfer and verify, until
nothing is corrupt.

Two things are said to the whole job: who holds which version (summaries without block tables), and
what each sharding group can recover. From these all ranks decide on the same version. Everything
else stays in the sharding group: its block tables, its plan, its refused sources, its bytes. Every
rank goes through the same stages; each ends in an agreement of all, so that all fall down the
ladder, or fail, together.

A version of another layout is recovered in the same way. Its sharding groups are those of the job
that wrote
it: with other replicas alone, each is taken up by its successor; with other stages or slices all
ranks take part in all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import chain, count
from typing import Any

import msgpack
import torch

from reft.control.control import ControlGroup
from reft.errors import PeerLostError, TransferError
from reft.faults import FaultPlan
from reft.grid import BlockKey, Coordinate, Degrees, Section, Topology, VersionId
from reft.recover.decide import (
    Decision,
    GroupStatus,
    ImageRange,
    Wanted,
    decide,
    decode_verdicts,
    encode_verdicts,
    judge,
    plan_decided,
)
from reft.recover.inventory import (
    ArenaRecord,
    ArenaSet,
    ArenaStore,
    Inventory,
    InventorySummary,
    Summary,
    arenas_to_report,
    block_tables,
    find_corrupt,
    listing,
    merge_summaries,
    participants,
    sharding_groups,
    summarize,
)
from reft.recover.plan import (
    BlockSource,
    Fetch,
    Group,
    GroupSources,
    NotRecoverable,
    RecoveryPlan,
    SourceKind,
    describe_block,
)
from reft.recover.rebuild import ArenaRebuilder, Decoder, StoreConfig, plan_kept
from reft.recover.transfer import (
    DEFAULT_WINDOW_BYTES,
    BrokenOffError,
    Copy,
    Sink,
    TransferStats,
    execute,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Participant:
    """A rank that takes part in a recovery, and how it goes through stages with the others. Made on
    all ranks with equal arguments, but for the directory."""

    topology: Topology
    control: ControlGroup
    job_id: str
    place: ArenaStore  # the job's memory on this node, or this node's part of a version on storage
    faults: FaultPlan | None = None
    # receive buffers; room for blocks that wait to be decoded
    window_bytes: int = DEFAULT_WINDOW_BYTES

    @property
    def at(self) -> Coordinate:
        return self.topology.coordinates[self.control.rank]

    def gather(self, stage: Callable[[], bytes], doing: str) -> list[bytes]:
        """Run ``stage`` on every rank; what it returned on each, in rank order, on all. Collective.
        ``doing``: what for, for the error message."""
        mine, failure = b"", None
        try:
            mine = stage()
        except Exception as error:
            failure = error
        bodies = self._tell_all(mine, failure, doing)
        if failure is not None:
            raise failure
        return bodies

    def agree(self, stage: Callable[[], bool], doing: str) -> bool:
        """Run ``stage`` on every rank; whether it said yes on any. Collective, and a few bytes
        where all is well."""
        said, failure = False, None
        try:
            said = stage()
        except (PeerLostError, BrokenOffError):
            raise
        except Exception as error:
            failure = error
        failed, any_said = self.control.any_of(failure is not None, said)
        if failed:
            self._tell_all(b"", failure, doing)
        if failure is not None:
            raise failure
        return any_said

    def _tell_all(self, mine: bytes, failure: Exception | None, doing: str) -> list[bytes]:
        errors: list[str] = []
        bodies: list[bytes] = []
        told = self.control.gather_bytes(
            msgpack.packb([None if failure is None else repr(failure), mine])
        )
        for rank, message in enumerate(told):
            error, body = msgpack.unpackb(message)
            bodies.append(body)
            if error is not None:
                where = f"{self.topology.coordinates[rank]}, node {self.topology.nodes[rank]}"
                errors.append(f"rank {rank} ({where}) failed with {error}")
        if errors and failure is None:
            raise TransferError(f"{doing} did not succeed on every rank: {'; '.join(errors)}")
        return bodies


# does this rank's part; the sources that it refuses
Stage = Callable[[], frozenset[BlockSource] | None]


class CorruptionKind(StrEnum):
    """What is wrong with a stored block: its bytes, those that arrived, or, of a parity whose bytes
    are in order, the data it was computed from."""

    STORED = "corrupt or unreadable in"
    IN_TRANSIT = "corrupt on the way from"
    OTHER_DATA = "computed from other data than the version's, in"


@dataclass(frozen=True)
class Repair:
    """One stored block that could not be used, and what took its place."""

    label: VersionId  # version it belonged to
    fetch: Fetch
    flaw: CorruptionKind
    replaced_by: str = ""  # where the restored bytes came from, in words

    def __str__(self) -> str:
        fetch = self.fetch
        block = describe_block(fetch.pp, fetch.tp, fetch.key)
        return (
            f"{block}, {self.label}: {fetch.nbytes} bytes {self.flaw} {fetch.arena} on node "
            f"{fetch.node}; restored from {self.replaced_by}"
        )


class BadSources:
    """The sources refused so far; of one sharding group the same on all ranks that take part in
    it."""

    def __init__(self, me: Participant) -> None:
        self._me = me
        self._findings: dict[BlockSource, Repair] = {}

    @property
    def bad(self) -> frozenset[BlockSource]:
        return frozenset(self._findings)

    def in_transit(self, node: str, label: VersionId) -> list[Fetch]:
        """What of a version arrived corrupt from this node: its bytes may be in order there."""
        found = [
            f
            for f in self._findings.values()
            if f.flaw is CorruptionKind.IN_TRANSIT and f.label == label
        ]
        return [f.fetch for f in found if f.fetch.node == node]

    def share(
        self,
        plans: Mapping[Group, RecoveryPlan],
        parts: Mapping[Group, Iterable[int]],
        stage: Stage,
        flaw: CorruptionKind,
    ) -> bool:
        """Run ``stage`` on every rank and enter the sources it refused on any. Collective on all
        ranks: an error of one reaches all, what one refused those that take part in its sharding
        group.

        Args:
            parts: the ranks that take part in each of these groups.

        Returns:
            Whether any rank refused a source.

        Raises:
            TransferError: if a peer is gone, or its stage failed.
            BrokenOffError: this rank's own stage failed so that the peers cannot be told.
            Exception: what this rank's own stage raised, after the peers were told.
        """
        found: frozenset[BlockSource] = frozenset()

        def refuses() -> bool:
            nonlocal found
            found = stage() or frozenset()
            return bool(found)

        label = next(iter(plans.values())).label
        if not self._me.agree(refuses, f"the recovery of {label}"):
            return False
        fetches = {
            group: {f.source: f for at in plan.fetches.values() for f in at}
            for group, plan in plans.items()
        }
        bodies: dict[int, set[BlockSource]] = {}
        for group, of_group in fetches.items():
            for peer in parts[group]:
                bodies.setdefault(peer, set()).update(found & of_group.keys())
        told = self._me.control.swap({peer: pack_sources(sorted(s)) for peer, s in bodies.items()})
        sources = found.union(*map(unpack_sources, told.values()))
        known = {
            source: fetch for of_group in fetches.values() for source, fetch in of_group.items()
        }
        for source in sorted(sources & known.keys()):
            fetch = known[source]
            here = flaw is CorruptionKind.IN_TRANSIT and fetch.kind is SourceKind.LOCAL
            self._findings[source] = Repair(label, fetch, CorruptionKind.STORED if here else flaw)
        return True

    def repairs(self, plan: RecoveryPlan) -> tuple[Repair, ...]:
        """Every source refused in the plan's sharding group, and what ``plan``, which was carried
        out, used instead."""
        groups: set[Group] = set()
        used: dict[tuple[int, int, BlockKey], set[str]] = {}
        for fetches in plan.fetches.values():
            for f in fetches:
                groups.add((f.pp, f.tp))
                used.setdefault((f.pp, f.tp, f.key), set()).add(f"{f.arena} on node {f.node}")
        repairs = []
        for finding in self._findings.values():
            fetch = finding.fetch
            if (fetch.pp, fetch.tp) not in groups:
                continue
            # What was only read to decode something else has no place of its own in the plan.
            places = sorted(used.get((fetch.pp, fetch.tp, fetch.key), ()))
            instead = ", ".join(places) or "other blocks of its stripe"
            if finding.label != plan.label:
                instead = f"an older version, {plan.label}, because no other source is left"
            repairs.append(replace(finding, replaced_by=instead))
        return tuple(repairs)


def pack_sources(sources: Iterable[BlockSource]) -> bytes:
    rows = [[s.node, s.arena, str(s.key.section), s.key.member, s.key.index] for s in sources]
    body: bytes = msgpack.packb(rows)
    return body


def unpack_sources(body: bytes) -> frozenset[BlockSource]:
    """Inverse of :func:`pack_sources`; of nothing it is nothing."""
    return frozenset(
        BlockSource(node, arena, BlockKey(Section(section), member, index))
        for node, arena, section, member, index in (msgpack.unpackb(body) if body else ())
    )


Prepare = Callable[[Mapping[Coordinate, bytes], Degrees], Sequence[ImageRange]]
"""Takes the verified host images that :func:`~reft.recover.decide.host_state_sources` names, and
the layout that they are of, and gives the live state the shape they describe. Where that is another
layout than this job's, what is returned says which bytes of the other images this coordinate
needs."""


@dataclass(frozen=True)
class RecoveryOutcome:
    """A restored version: ``plan`` and ``repaired`` of the sharding group, ``stats`` of this
    rank."""

    plan: RecoveryPlan
    stats: TransferStats
    repaired: tuple[Repair, ...] = ()
    rounds: int = 1

    @property
    def label(self) -> VersionId:
        return self.plan.label

    def __str__(self) -> str:
        lines = [f"{self.plan}", f"  this rank: {self.stats}, {self.rounds} rounds"]
        return "\n".join(lines + [f"  repaired: {repair}" for repair in self.repaired])


class Recovery:
    """One recovery, on one rank. ``completing``: how this incarnation stores versions, to complete
    the version on nodes that hold nothing of it; None: it is not completed. Given on all ranks or
    on none. ``any_layout``: whether a version that was written in another layout may be
    restored."""

    def __init__(
        self, me: Participant, *, completing: StoreConfig | None = None, any_layout: bool = False
    ) -> None:
        self._me = me
        self._topology = me.topology
        self._rank = me.control.rank
        self._completing = completing
        self._any_layout = any_layout
        self._ledger = BadSources(me)
        self._arenas: ArenaSet = {}
        self._moved: list[TransferStats] = []
        self._found: _GroupFindings

    def survey(self) -> RecoveryPlan | NotRecoverable:
        """See what there is and decide. Collective; nothing is touched. Returns the plan of this
        rank's sharding group, for the version that all ranks decided on."""
        self._poll()
        self._plan()
        return self._found.own if self._found.plans else self._found.refusal

    @property
    def _group(self) -> Group:
        return self._me.at.pp, self._me.at.tp

    def restore(self, prepare: Prepare, copy: Copy) -> RecoveryOutcome | NotRecoverable:
        """Carry out the plan: verify, transfer, until nothing is corrupt. Collective; after a
        survey.

        ``prepare`` gets the verified host images and ``copy`` the blocks of the other sections,
        which are verified by what it returns (of a version of another layout those with wanted
        bytes in them). Where a block is corrupt, some of the state has been written by then: the
        plan is made again, and both are called again. If the result is then
        :class:`NotRecoverable`, the live state has to be restored from elsewhere.

        Raises:
            TransferError: if a peer is gone, or could not restore its part (the message says which
            and why). Exception: on the rank where it happened: whatever ``prepare`` or ``copy``
            raised.
        """
        for attempt in count(1):
            # Ends: a plan never uses a source in the ledger, so every further round enters new
            # ones, and what a round decodes is stored, so the next finds fewer lost blocks.
            found = self._found
            if not found.plans:
                return found.refusal
            with self._me.place.opened(found.inventory, wait=False) as self._arenas:
                decodes = found.decision.decodes
                if decodes:
                    self._rebuild()
                elif self._carry_out(prepare, copy):
                    repairs = self._ledger.repairs(self._found.own)
                    outcome = RecoveryOutcome(self._found.own, self._stats(), repairs, attempt)
                    _report(outcome, self._rank)
                    return outcome
            if decodes:
                self._poll()
            self._plan()
        raise AssertionError("unreachable")

    def _rebuild(self) -> None:
        """Collective: decode what no node holds, so that the next plan finds it. Corrupt sources go
        to the ledger; what they are part of is decoded in a later round, in another way."""
        part = {group: plan.to_decode() for group, plan in self._found.plans.items()}

        def move() -> frozenset[BlockSource]:
            return self._move([*part.values()], take, room_for=room_for, counted=False)

        def room_for(fetch: Fetch) -> torch.Tensor | None:
            room = decoders[fetch.pp, fetch.tp].room_for(fetch)
            return None if room is None else torch.from_numpy(room)

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            decoders[fetch.pp, fetch.tp].take(
                fetch, data.numpy(), stays=fetch.kind is SourceKind.LOCAL
            )

        def reserve() -> None:
            for decoder in decoders.values():
                decoder.reserve()

        def store() -> frozenset[BlockSource]:
            return frozenset[BlockSource]().union(
                *(decoder.store() for decoder in decoders.values())
            )

        me, mine = (
            self._me,
            {g: p for g, p in self._found.plans.items() if self._me.at in p.rebuilds},
        )
        with ExitStack() as stack:
            decoders = {
                group: stack.enter_context(
                    closing(Decoder(plan, me.at, me.place, kept_bytes=me.window_bytes // len(mine)))
                )
                for group, plan in mine.items()
            }
            # In a stage without messages: whoever fails here leaves no peer waiting for one.
            self._share(part, reserve, CorruptionKind.STORED)
            if not self._share(part, move, CorruptionKind.IN_TRANSIT):
                self._share(part, store, CorruptionKind.OTHER_DATA)

    def _carry_out(self, prepare: Prepare, copy: Copy) -> bool:
        """Collective. False if a source turned out corrupt anywhere; it is then in the ledger.

        Every stage ends in an agreement: a rank that fails in one is known to all before the
        next."""
        me, own, plans = self._me, self._found.own, self._found.plans
        sizes: Counter[Coordinate] = Counter()
        for fetch in own.fetches[me.at]:
            if fetch.key.section is Section.HOST:
                sizes[Coordinate(fetch.pp, fetch.key.member, fetch.tp)] += fetch.nbytes
        hosts = {at: torch.empty(nbytes, dtype=torch.uint8) for at, nbytes in sizes.items()}
        pieces: Sequence[ImageRange] = ()
        tables = chain.from_iterable(self._found.tables.values())
        stored = next(r.header for r in tables if r.header.label == own.label)
        with closing(ArenaRebuilder(own, me.at, me.place, self._completing, stored)) as completion:

            def keep(fetch: Fetch, data: torch.Tensor) -> None:
                host = hosts[Coordinate(fetch.pp, fetch.key.member, fetch.tp)]
                host[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data
                completion.take(fetch, data)

            def move_host() -> frozenset[BlockSource]:
                return self._move([plan.only(Section.HOST) for plan in plans.values()], keep)

            def prepare_state() -> None:
                nonlocal pieces
                pieces = prepare(
                    {at: host.numpy().tobytes() for at, host in hosts.items()}, own.written
                )

            def move_state() -> frozenset[BlockSource]:
                only = [plan.only(Section.REPLICATED, Section.OWNED) for plan in plans.values()]
                return self._move(only, completion.take, copy=copy, faults=me.faults)

            def move_kept() -> frozenset[BlockSource]:
                kept = [plan.to_keep() for plan in plans.values()]
                return self._move(kept, completion.take, counted=False)

            if not self._all_right(completion.begin, move_host, prepare_state):
                return False
            if own.other_layout:
                self._ask(pieces)
            return self._all_right(move_state, move_kept, completion.seal)

    def _all_right(self, *stages: Stage) -> bool:
        """Go through the stages up to the first in which some rank refused a source."""
        known = {group: plan.with_kept() for group, plan in self._found.plans.items()}
        return not any(self._share(known, stage, CorruptionKind.IN_TRANSIT) for stage in stages)

    def _share(
        self, plans: Mapping[Group, RecoveryPlan], stage: Stage, flaw: CorruptionKind
    ) -> bool:
        """:meth:`BadSources.share`; what arrived corrupt is looked at where it is stored, to tell
        why."""
        parts, label = self._found.parts, self._found.own.label
        refused = self._ledger.share(plans, parts, stage, flaw)
        if refused and flaw is CorruptionKind.IN_TRANSIT:
            suspects = self._ledger.in_transit(self._me.place.node, label)
            look = partial(find_corrupt, label, suspects, self._arenas)
            self._ledger.share(plans, parts, look, CorruptionKind.STORED)
        return refused

    def _move(
        self, plans: Sequence[RecoveryPlan], sink: Sink, *, counted: bool = True, **options: Any
    ) -> frozenset[BlockSource]:
        stats, bad = execute(
            *(plans, self._topology, self._me.control, self._arenas, sink),
            window_bytes=self._me.window_bytes,
            **options,
        )
        # What is read in order to decode does not restore anything yet: only its sending counts.
        self._moved.append(stats if counted else replace(stats, bytes_from={}))
        return bad

    def _stats(self) -> TransferStats:
        """Everything moved so far: bytes add up, buffers are reused."""
        total: Counter[str] = Counter({str(kind): 0 for kind in SourceKind})
        for part in self._moved:
            total.update(part.bytes_from)
        return TransferStats(
            bytes_from=dict(total),
            sent_bytes=sum(part.sent_bytes for part in self._moved),
            buffer_bytes=max(part.buffer_bytes for part in self._moved),
            secs=sum(part.secs for part in self._moved),
        )

    def _ask(self, pieces: Sequence[ImageRange]) -> None:
        """Collective: who takes part in a sharding group hears what ranks want of its images, and
        plans for that."""
        found = self._found
        mine = msgpack.packb([[p.of.pp, p.of.dp, p.of.tp, str(p.section), *p[2:]] for p in pieces])
        bodies = {peer: b"" for peers in found.parts.values() for peer in peers}
        bodies |= dict.fromkeys(found.parts[self._group], mine)
        told = {**self._me.control.swap(bodies), self._rank: mine}

        def planned() -> bool:
            wanted = {
                self._topology.coordinates[rank]: [
                    ImageRange(Coordinate(pp, dp, tp), Section(section), start, nbytes)
                    for pp, dp, tp, section, start, nbytes in msgpack.unpackb(body)
                ]
                for rank, body in told.items()
                if body
            }
            self._plan_groups(wanted)
            return False

        self._me.agree(planned, f"planning for what is wanted of {found.decision.label}")

    # -- what there is -----------------------------------------------------------------------------

    def _poll(self) -> None:
        """Collective: say what this node holds, hear what the others do, and get the block tables
        of the sharding groups that this rank takes part in."""
        mine: list[ArenaRecord] = []

        def summarized() -> bytes:
            inventory = self._me.place.inventory()
            mine.extend(
                arenas_to_report(
                    *(inventory.arenas, self._topology, self._rank),
                    job_id=self._me.job_id,
                    any_layout=self._any_layout,
                )
            )
            is_first = self._topology.local_ranks(self._me.place.node)[0] == self._rank
            problems = inventory.problems if is_first else ()
            return summarize(self._me.place.node, mine, problems).encode()

        labels: dict[tuple[int, int], VersionId] = {}
        told = self._me.gather(summarized, "taking inventory")
        summaries = [Summary.decode(body, self._topology, labels) for body in told]
        findings = merge_summaries(
            summaries, self._topology, job_id=self._me.job_id, any_layout=self._any_layout
        )
        parts = participants(findings, self._rank)
        self._found = _GroupFindings(findings, parts, self._swap_tables(mine, parts))

    def _swap_tables(
        self, mine: Sequence[ArenaRecord], parts: Mapping[Group, tuple[int, ...]]
    ) -> dict[Group, list[ArenaRecord]]:
        """Whole arenas of the groups this rank takes part in, on all nodes; in (node, name)
        order."""
        tables = block_tables(
            mine, parts, self._topology, job_id=self._me.job_id, any_layout=self._any_layout
        )
        packed = {
            group: Inventory(self._me.place.node, tuple(records)).pack()
            for group, records in tables.items()
        }
        bodies: dict[int, list[bytes]] = {}
        for group in sorted(parts):
            for peer in parts[group]:
                bodies.setdefault(peer, []).append(packed[group])
        told = self._me.control.swap(
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
                sources[group] = judge(group, records, found.findings.written, self._ledger.bad)
            if self._me.at.dp:
                return b""
            return encode_verdicts(
                {at: GroupStatus.of(s) for at, s in sources[self._group].items()}
            )

        told = self._me.gather(judged, "judging the versions in memory")
        speakers = {(pp, tp): self._topology.group(pp, tp)[0] for pp, tp in self._topology.groups()}
        verdicts = {group: decode_verdicts(told[rank]) for group, rank in speakers.items()}
        # also those of other layouts, which all ranks have judged
        for group, of_group in sources.items():
            verdicts.setdefault(group, {label: GroupStatus.of(s) for label, s in of_group.items()})
        decision = decide(found.findings, verdicts)
        found.plans = {}
        if isinstance(decision, NotRecoverable):
            found.refusal = decision
            return
        found.decision = decision
        found.sources = {
            g: s for g, of in sources.items() if (s := of.get(decision.label)) is not None
        }
        self._plan_groups({})
        here = [
            r for records in found.tables.values() for r in records if r.node == self._me.place.node
        ]
        used = tuple(r for r in here if r.header.label == decision.label)
        found.inventory = Inventory(self._me.place.node, used)

    def _plan_groups(self, wanted: Wanted) -> None:
        found, decision = self._found, self._found.decision
        for group, of_version in found.sources.items():
            records = found.tables[group]
            plan = plan_decided(decision, found.findings, group, of_version, records, wanted=wanted)
            if self._completing is not None and not decision.decodes and not plan.other_layout:
                held = [r for r in records if r.header.label == decision.label]
                plan = replace(plan, kept=plan_kept(group, of_version, held, self._topology))
            found.plans[group] = plan
        in_groups = (
            sharding_groups(found.findings.written[decision.label]) == self._topology.groups()
        )
        own = [found.plans[self._group]] if in_groups else [*found.plans.values()]
        found.own = RecoveryPlan.joined(own, found.findings.notes)


@dataclass
class _GroupFindings:
    findings: InventorySummary  # who holds which version, in the whole job
    # the groups that this rank takes part in, its own first, and the ranks that do
    parts: Mapping[Group, tuple[int, ...]]
    tables: Mapping[Group, list[ArenaRecord]]  # their whole arenas on all nodes
    # the version; there is none before it was decided, and where ``plans`` is empty
    decision: Decision = field(init=False)
    # what they have of the version
    sources: Mapping[Group, GroupSources] = field(default_factory=dict)
    # their plans; empty if nothing can be recovered
    plans: dict[Group, RecoveryPlan] = field(default_factory=dict)
    # that of the own group; of a version with other stages or slices, of all groups
    own: RecoveryPlan = field(init=False)
    # why nothing can be; there is none where there are plans
    refusal: NotRecoverable = field(init=False)
    # arenas on this node that hold the version
    inventory: Inventory = field(default_factory=lambda: Inventory("", ()))


def _report(outcome: RecoveryOutcome, rank: int) -> None:
    logger.info("recovered step %d: %s", outcome.label.step, outcome.stats)
    if rank == 0 and outcome.repaired:
        repairs = listing(map(str, outcome.repaired))
        logger.warning("repaired while step %d was recovered: %s", outcome.label.step, repairs)
