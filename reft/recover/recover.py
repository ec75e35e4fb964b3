"""Restores the newest complete version from the arenas of all nodes.

An arena is a shared-memory file with one rank's part of a version, cut into blocks. The steps are:
choose the version, plan a source for every block, decode lost blocks from parity, transfer and
verify all blocks. If a source proves corrupt, the ranks plan again without it, until all sources
are intact.

All ranks exchange two things: which node holds which version (summaries without block tables), and
which versions each sharding group (the data-parallel peers with the same pp and tp) can recover.
From these all ranks choose the same version. Everything else stays within the sharding group: block
tables, plan, refused sources, and the bytes. All ranks go through the same stages, and at the end
of each stage agree on its result, so that all continue, plan again or fail together.

A version of a different layout (pp, dp, tp) is recovered in the same way, in the sharding groups of
the job that wrote it. If only the number of replicas differs, each old group is handled by the new
group with the same (pp, tp). If the number of stages or slices differs, all ranks take part in all
old groups.
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
    ArenaStore,
    Inventory,
    InventorySummary,
    OpenArenas,
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
    """This rank, as it takes part in a recovery.

    All ranks create this object, with equal arguments except for ``control`` and ``place``.
    """

    topology: Topology
    control: ControlGroup
    job_id: str
    # Directory of arenas: the job's memory on this node, or the node's part of a stored version
    place: ArenaStore
    faults: FaultPlan | None = None
    # Size of the receive buffers, and also of the buffers for blocks that wait to be decoded
    window_bytes: int = DEFAULT_WINDOW_BYTES

    @property
    def at(self) -> Coordinate:
        return self.topology.coordinates[self.control.rank]

    def gather(self, stage: Callable[[], bytes], doing: str) -> list[bytes]:
        """Run ``stage`` on every rank and gather the results. Collective.

        Args:
            stage: function that returns this rank's message.
            doing: description of the stage, for the error message.

        Returns:
            The messages of all ranks, in rank order.

        Raises:
            TransferError: the stage failed on another rank.
            Exception: this rank's stage failed; the other ranks have been informed.
        """
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
        """Run ``stage`` on every rank; return whether it returned True on any rank. Collective.

        Ranks exchange only a few bytes unless one of them fails.

        Args:
            stage: function that returns this rank's flag.
            doing: description of the stage, for the error message.

        Raises:
            TransferError: the stage failed on another rank.
            Exception: this rank's stage failed; the other ranks have been informed.
        """
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


# Function that does this rank's part of a stage, and returns the sources that it found corrupt
RecoveryStage = Callable[[], frozenset[BlockSource] | None]


class CorruptionKind(StrEnum):
    """Place where a block is corrupt: in its arena, or only on arrival.

    OTHER_DATA means a parity block whose bytes are intact, but which was computed from other data.
    """

    STORED = "corrupt or unreadable in"
    IN_TRANSIT = "corrupt on the way from"
    OTHER_DATA = "computed from other data than the version's, in"


@dataclass(frozen=True)
class Repair:
    """One stored block that could not be used, and its replacement."""

    label: VersionId  # Version to which the block belongs
    fetch: Fetch  # The block and the source that could not be used
    flaw: CorruptionKind
    replaced_by: str = ""  # Text that names the source that was used instead

    def __str__(self) -> str:
        fetch = self.fetch
        block = describe_block(fetch.pp, fetch.tp, fetch.key)
        return (
            f"{block}, {self.label}: {fetch.nbytes} bytes {self.flaw} {fetch.arena} on node "
            f"{fetch.node}; restored from {self.replaced_by}"
        )


class BadSources:
    """The corrupt sources found so far.

    All ranks that take part in the recovery of a sharding group know the same corrupt sources of
    that group.
    """

    def __init__(self, me: Participant) -> None:
        self._me = me
        self._findings: dict[BlockSource, Repair] = {}

    @property
    def bad(self) -> frozenset[BlockSource]:
        return frozenset(self._findings)

    def in_transit(self, node: str, label: VersionId) -> list[Fetch]:
        """Return blocks of a version that arrived corrupt from ``node``.

        Such a block may be intact in its arena.
        """
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
        stage: RecoveryStage,
        flaw: CorruptionKind,
    ) -> bool:
        """Run ``stage`` on every rank, and record the sources that any rank refuses. Collective.

        If a stage fails on a rank, all ranks learn of the error. If a stage refuses a source as
        corrupt, only the participants in the source's sharding group learn of the refusal.

        Args:
            plans: plans of the sharding groups in which this rank takes part.
            parts: ranks that take part in each of these groups.
            stage: function that does this rank's part, and returns the sources that it refuses.
            flaw: where the refused blocks are corrupt.

        Returns:
            Whether any rank refused a source.

        Raises:
            TransferError: a peer is gone, or its stage failed.
            BrokenOffError: this rank's stage failed, and it has closed its connections.
            Exception: this rank's stage failed; the other ranks have been informed.
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
        """Return the corrupt sources of a sharding group, with the sources used instead.

        Args:
            plan: the group's plan that was carried out.
        """
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
            # A block that was only read to decode others does not appear in the final plan.
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
    """Decode the output of :func:`pack_sources`; empty input gives an empty set."""
    return frozenset(
        BlockSource(node, arena, BlockKey(Section(section), member, index))
        for node, arena, section, member, index in (msgpack.unpackb(body) if body else ())
    )


Prepare = Callable[[Mapping[Coordinate, bytes], Degrees], Sequence[ImageRange]]
"""Function that prepares the live state for the blocks to come.

Its arguments are the verified host images (serialized host state) of the ranks that
:func:`~reft.recover.decide.host_state_sources` names, and the layout of the version. If that layout
differs from the job's, it returns the ranges of other images that this rank needs.
"""


@dataclass(frozen=True)
class RecoveryOutcome:
    """The result of a successful recovery."""

    plan: RecoveryPlan  # The plan that was carried out, for this rank's sharding group
    stats: TransferStats  # Transfers of this rank
    repaired: tuple[Repair, ...] = ()  # Corrupt blocks of the sharding group
    rounds: int = 1  # Number of plans that were tried, the last one included

    @property
    def label(self) -> VersionId:
        return self.plan.label

    def __str__(self) -> str:
        lines = [f"{self.plan}", f"  this rank: {self.stats}, {self.rounds} rounds"]
        return "\n".join(lines + [f"  repaired: {repair}" for repair in self.repaired])


class Recovery:
    """One recovery on one rank.

    Args:
        me: this rank.
        completing: how the running job stores versions. With it, the recovery also fills the arena
            of each rank whose node has none of the version. None: it fills none. Must be given on
            all ranks or on none.
        any_layout: whether versions of other layouts may be restored.
    """

    def __init__(
        self, me: Participant, *, completing: StoreConfig | None = None, any_layout: bool = False
    ) -> None:
        self._me = me
        self._topology = me.topology
        self._rank = me.control.rank
        self._completing = completing
        self._any_layout = any_layout
        self._ledger = BadSources(me)
        self._arenas: OpenArenas = {}
        self._moved: list[TransferStats] = []
        self._found: _GroupFindings

    def survey(self) -> RecoveryPlan | NotRecoverable:
        """Take inventory, choose the version and plan. Collective; no memory is changed.

        Returns:
            The plan of this rank's sharding group for the chosen version, or the reasons why no
            version can be recovered.
        """
        self._poll()
        self._plan()
        return self._found.own if self._found.plans else self._found.refusal

    @property
    def _group(self) -> Group:
        return self._me.at.pp, self._me.at.tp

    def restore(self, prepare: Prepare, copy: Copy) -> RecoveryOutcome | NotRecoverable:
        """Carry out the plan, and plan again as long as a source is corrupt. Collective.

        Call this after :meth:`survey`. When a block proves corrupt, a part of the state may already
        be written; with the next plan ``prepare`` and ``copy`` are called again.

        Args:
            prepare: called with the verified host images.
            copy: called with each block of the other sections; returns the block's checksum. For a
                version of a different layout, called only with blocks that contain the ranges that
                ``prepare`` returned.

        Returns:
            The outcome. If it is :class:`NotRecoverable`, the live state may be incomplete, and has
            to be restored from another source.

        Raises:
            TransferError: a peer is gone, or could not restore its part; the message names the
                cause.
            Exception: ``prepare`` or ``copy`` failed on this rank.
        """
        for attempt in count(1):
            # This loop terminates: no plan uses a source that was refused before, so every
            # repetition either refuses new sources, or has fewer lost blocks, because decoded
            # blocks have been stored.
            found = self._found
            if not found.plans:
                return found.refusal
            with self._me.place.opened(found.inventory, wait=False) as self._arenas:
                decodes = found.decision.decodes
                if decodes:
                    self._decode_lost()
                elif self._carry_out(prepare, copy):
                    repairs = self._ledger.repairs(self._found.own)
                    outcome = RecoveryOutcome(self._found.own, self._stats(), repairs, attempt)
                    _report(outcome, self._rank)
                    return outcome
            if decodes:
                self._poll()
            self._plan()
        raise AssertionError("unreachable")

    def _decode_lost(self) -> None:
        """Decode blocks that no node holds, and store them, so that the next plan finds them.

        Collective. Corrupt sources are recorded; blocks that could not be decoded because of them
        are decoded from other sources when the ranks plan again.
        """
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
            # Allocate in a stage without transfers: if one rank cannot allocate, no peer waits for
            # a block from that rank.
            self._share(part, reserve, CorruptionKind.STORED)
            if not self._share(part, move, CorruptionKind.IN_TRANSIT):
                self._share(part, store, CorruptionKind.OTHER_DATA)

    def _carry_out(self, prepare: Prepare, copy: Copy) -> bool:
        """Restore the state according to the plan. Collective.

        After every stage all ranks agree on its result, so that an error on one rank stops all
        ranks before the next stage.

        Returns:
            True if the state is restored; False if any rank found a corrupt source, which is then
            recorded.
        """
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

    def _all_right(self, *stages: RecoveryStage) -> bool:
        """Run the stages in order; stop and return False once any rank has refused a source."""
        known = {group: plan.with_kept() for group, plan in self._found.plans.items()}
        return not any(self._share(known, stage, CorruptionKind.IN_TRANSIT) for stage in stages)

    def _share(
        self, plans: Mapping[Group, RecoveryPlan], stage: RecoveryStage, flaw: CorruptionKind
    ) -> bool:
        """Run a stage with :meth:`BadSources.share`; return whether any rank refused a source.

        If blocks arrived corrupt, their senders then check them in the arenas, to distinguish
        damaged memory from a damaged transfer.
        """
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
        # Blocks that are read for decoding are not restored yet, so count only the sent bytes.
        self._moved.append(stats if counted else replace(stats, bytes_from={}))
        return bad

    def _stats(self) -> TransferStats:
        """Add up all transfers so far; transfers share buffers, so take the largest buffer size."""
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
        """Send this rank's needed ranges to the participants of each sharding group, then plan.

        Collective. The new plans contain the blocks with the ranges that all ranks need.
        """
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

        self._me.agree(planned, f"planning for the requested ranges of {found.decision.label}")

    # -- inventory and plan ------------------------------------------------------------------------

    def _poll(self) -> None:
        """Take inventory on all ranks. Collective.

        Summaries are exchanged with all ranks, and block tables with the ranks that take part in
        the same sharding groups.
        """
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
        """Gather the block tables of the complete arenas of this rank's groups from all nodes.

        Returns:
            The arenas of each group, sorted by node and name.
        """
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
        """Choose the version to restore, and plan for this rank's groups. Collective.

        Each group checks which versions it can recover; all ranks exchange the results and choose
        the same version.
        """
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
        # Add groups that exist only in other layouts. No rank reports on these, because every rank
        # takes part in them and has checked them.
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
    """Findings of a survey for the sharding groups in which this rank takes part."""

    findings: InventorySummary  # Versions on each node, for the whole job
    # Groups in which this rank takes part, beginning with its own, and the ranks that take part in
    # each group
    parts: Mapping[Group, tuple[int, ...]]
    # Complete arenas on all nodes, of the groups in ``parts``
    tables: Mapping[Group, list[ArenaRecord]]
    # The chosen version; not set while ``plans`` is empty
    decision: Decision = field(init=False)
    # Usable blocks of the chosen version in each group
    sources: Mapping[Group, GroupSources] = field(default_factory=dict)
    # Plan of each group; empty if no version can be recovered
    plans: dict[Group, RecoveryPlan] = field(default_factory=dict)
    # Plan of this rank's own group; if the version has different stages or slices, of all groups
    own: RecoveryPlan = field(init=False)
    # Reasons why no version can be recovered; not set if there are plans
    refusal: NotRecoverable = field(init=False)
    # Arenas on this node that hold the chosen version
    inventory: Inventory = field(default_factory=lambda: Inventory("", ()))


def _report(outcome: RecoveryOutcome, rank: int) -> None:
    logger.info("recovered step %d: %s", outcome.label.step, outcome.stats)
    if rank == 0 and outcome.repaired:
        repairs = listing(map(str, outcome.repaired))
        logger.warning("repaired while step %d was recovered: %s", outcome.label.step, repairs)
