"""Restoring the newest whole version: decide, plan, decode what is lost, transfer and verify, until nothing
is corrupt.

Two things are said to the whole job: who holds which version (summaries without block tables), and what each
sharding group can recover. From these all ranks decide on the same version. Everything else stays in the
sharding group: its block tables, its plan, its refused sources, its bytes. Every rank goes through the same
stages; each ends in an agreement of all, so that all fall down the ladder, or fail, together.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import torch

from reft.errors import ReftError
from reft.grid import BlockKey, Coordinate, Section, Topology
from reft.memory.arena import Arena, is_decoded
from reft.memory.header import ArenaHeader, ArenaState, Entry
from reft.naming import Label
from reft.protect.codes import Scheme
from reft.protect.placement import place_group
from reft.recover.decide import (
    Decision,
    Verdict,
    decide,
    decode_verdicts,
    encode_verdicts,
    judge,
    plan_decided,
)
from reft.recover.inventory import (
    ArenaRecord,
    ArenaSet,
    Findings,
    Group,
    Inventory,
    Summary,
    arenas_to_tell,
    find_corrupt,
    listing,
    parts_of,
    put_together,
    summarize,
    tables_of,
)
from reft.recover.plan import BlockSource, Fetch, NotRecoverable, RecoveryPlan, SourceKind
from reft.recover.sources import GroupSources, Piece, Resize, plan_fetches
from reft.recover.stages import Flaw, Ledger, Participant, Repair, Stage
from reft.recover.transfer import Copy, Sink, TransferStats, execute

logger = logging.getLogger(__name__)


# Completing a recovered version where a member has nothing of it: its node is new, or lost its memory.
#
# What the others hold stays where it lies. The newcomer gets, besides what it restores, the blocks that it
# has to keep for its ring peers. Each block is verified in the buffer in which it came, and copied from there
# into the tensors, if they need it, and into the newcomer's arena. Once every block is there the arena is
# sealed under the version's own label: the version is then as protected as before the loss, and who holds
# it has written nothing. Until then the arena says WRITING, and a recovery that starts over does not look
# at it (P3).
#
# Only for copies: where a code, recomputation, another scheme or another ring is in force, or anything is in
# the way, the restored state is taken again as a version of its own.


@dataclass(frozen=True)
class Room:
    start_bytes: int  # the block's offset in its section's image
    nbytes: int  # its length; of a host block the room for it
    arena_offset: int  # from the start of the arena's data region

    def fits(self, fetch: Fetch) -> bool:
        exact = fetch.key.section is not Section.HOST
        return fetch.start_bytes == self.start_bytes and (
            fetch.nbytes == self.nbytes if exact else fetch.nbytes <= self.nbytes
        )


@dataclass(frozen=True)
class Blueprint:
    """What a member's arena holds: the blocks' places in a data region of ``data_bytes``."""

    rooms: Mapping[BlockKey, Room]
    data_bytes: int


@dataclass(frozen=True)
class Completing:
    """How this incarnation stores versions."""

    scheme: str  # the protection in force
    path: Path | None  # the arena file to complete a version in; None if this rank has no slot without a file
    # lays out this rank's arena, from the bytes of the replicated image and of every member's owned image
    blueprint: Callable[[int, tuple[int, ...]], Blueprint]


def plan_kept(
    group: tuple[int, int], sources: GroupSources, records: Sequence[ArenaRecord], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """What members that hold nothing of the version have to keep for their ring peers. Pure. Returns per
    newcomer the blocks that it does not restore itself; empty where the version cannot be completed."""
    pp, tp = group
    at_home: dict[int, ArenaHeader] = {}
    for record in records:
        at = record.header.coordinate
        if topology.node_of(at) == record.node and not is_decoded(record.path):
            at_home[at.dp] = record.header
    schemes = {header.scheme for header in at_home.values()}
    if len(schemes) != 1 or not (name := schemes.pop()):
        return {}
    scheme = Scheme.parse(name)
    if not scheme.copies or scheme.parities:
        return {}
    placement = place_group(topology.group_nodes(pp, tp), scheme.copies, 0)
    for dp, header in at_home.items():
        kept = {entry.key.member for entry in header.entries if entry.key.section is Section.HOST}
        if kept != set(placement.kept_by(dp)):
            return {}
    needs = {
        Coordinate(pp, dp, tp): [
            block
            for member in placement.kept_by(dp)[1:]
            for section in (Section.OWNED, Section.HOST)
            for block in sources.images[section, member]
        ]
        for dp in range(topology.degrees.dp)
        if dp not in at_home
    }
    return plan_fetches(needs, topology)


class Completion:
    """One newcomer's arena, filled as blocks arrive. ``stored``: of any arena of the group that holds the
    version."""

    def __init__(
        self, plan: RecoveryPlan, me: Participant, how: Completing | None, stored: ArenaHeader
    ) -> None:
        self._plan = plan
        self._me = me
        kept = how is not None and me.at in plan.kept and stored.scheme == how.scheme
        self._how = how if kept else None
        self._layout = stored.layout
        self._rooms: Mapping[BlockKey, Room] = {}
        self._arena: Arena | None = None
        self._arrived: dict[BlockKey, Fetch] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Make the arena, whose memory is allocated as blocks arrive. Where there is no room the version is
        not completed here, and the job goes on."""
        plan, how = self._plan, self._how
        if how is None or how.path is None:
            return
        header = ArenaHeader(
            job_id=plan.job_id,
            node=self._me.node,
            degrees=plan.degrees,
            coordinate=self._me.at,
            label=plan.label,
            state=ArenaState.WRITING,
            layout=self._layout,
            scheme=how.scheme,
        )
        owned = tuple(plan.image_bytes(at, Section.OWNED) for at in sorted(plan.fetches))
        try:
            drawn = how.blueprint(plan.image_bytes(self._me.at, Section.REPLICATED), owned)
            arena = Arena.create(how.path, drawn.data_bytes, len(drawn.rooms), self._me.secret, touch=False)
            self._arena = arena
            arena.begin(header)
        except (ReftError, OSError) as error:  # the state is restored all the same
            self._give_up(error)
            return
        self._rooms = drawn.rooms

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s cannot be completed here; the version is taken again: %s", self._plan.label, error)
        self._rooms = {}

    def take(self, fetch: Fetch, data: torch.Tensor) -> None:
        """A verified block is here. Several threads may bring blocks at once."""
        arena, room = self._arena, self._rooms.get(fetch.key)
        if arena is None or room is None or not room.fits(fetch):
            return
        try:
            arena.write(room.arena_offset, data.numpy().data)
        except (ReftError, OSError) as error:
            self._give_up(error)
            return
        with self._lock:
            self._arrived[fetch.key] = fetch

    def seal(self) -> None:
        """Every block of the version has arrived everywhere: record it, if none is missing here."""
        arena = self._arena
        if arena is None or not self._rooms:
            return
        if missing := [key for key in self._rooms if key not in self._arrived]:
            logger.warning(
                "%s cannot be completed here; the version is taken again: %d of its blocks are stored in "
                "another shape, %s among them",
                *(self._plan.label, len(missing), missing[0]),
            )
            return
        image_bytes = {
            (section, at.dp): self._plan.image_bytes(at, section)
            for section in (Section.REPLICATED, Section.OWNED, Section.HOST)
            for at in self._plan.fetches
        }
        entries = [
            self._entry(key, room, image_bytes[key.section, key.member]) for key, room in self._rooms.items()
        ]
        try:
            arena.allocate()
            arena.seal(entries)
            if self._plan.committed:
                arena.commit()
        except (ReftError, OSError) as error:
            self._give_up(error)

    def _entry(self, key: BlockKey, room: Room, image_bytes: int) -> Entry:
        fetch = self._arrived[key]
        return Entry(
            key=key,
            start_bytes=fetch.start_bytes,
            nbytes=fetch.nbytes,
            image_bytes=image_bytes,
            arena_offset=room.arena_offset,
            checksum=fetch.checksum,
            owner=key.member == self._me.at.dp,
        )

    def close(self) -> None:
        """Let go of the arena. The file stays, for the versions to come."""
        self._rooms = {}
        if self._arena is not None:
            self._arena.unlock()
            self._arena.close()
            self._arena = None


Prepare = Callable[[bytes, Resize], Sequence[Piece]]
"""Takes this coordinate's verified host image and gives the live state the shape it describes. Where the
version was written at another data-parallel degree, the host image is that of :meth:`Resize.host_from`, and
what is returned says which bytes of the partitions this coordinate needs."""


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
    """One recovery, on one rank. ``completing``: how this incarnation stores versions, to complete the
    version on nodes that hold nothing of it; None: it is not completed. Given on all ranks or on none.
    ``resizable``: whether a version that was written at another data-parallel degree may be restored."""

    def __init__(
        self, me: Participant, *, completing: Completing | None = None, resizable: bool = False
    ) -> None:
        self._me = me
        self._topology = me.topology
        self._rank = me.control.rank
        self._completing = completing
        self._resizable = resizable
        self._ledger = Ledger(me)
        self._arenas: ArenaSet = {}
        self._moved: list[TransferStats] = []
        self._found: _Found

    def survey(self) -> RecoveryPlan | NotRecoverable:
        """See what there is and decide. Collective; nothing is touched. Returns the plan of this rank's
        sharding group, for the version that all ranks decided on."""
        self._look()
        self._plan()
        return self._found.plans[self._group] if self._found.plans else self._found.refusal

    @property
    def has_other_layouts(self) -> bool:
        """Whether the survey found memory of this job that this one cannot take up as it is; the same on all
        ranks."""
        return bool(self._found.findings.misfits)

    @property
    def _group(self) -> Group:
        return self._me.at.pp, self._me.at.tp

    def restore(self, prepare: Prepare, copy: Copy) -> RecoveryOutcome | NotRecoverable:
        """Carry out the plan: verify, transfer, until nothing is corrupt. Collective; after a survey.

        ``prepare`` gets the verified host image and ``copy`` the blocks of the other sections, which are
        verified by what it returns (of a version of another data-parallel degree those with wanted bytes in
        them). Where a block is corrupt, some of the state has been written by then: the plan is made again,
        and both are called again. If the result is then :class:`NotRecoverable`, the live state has to be
        restored from elsewhere.

        Raises:
            TransferError: if a peer is gone, or could not restore its part (the message says which and why).
            Exception: on the rank where it happened: whatever ``prepare`` or ``copy`` raised.
        """
        for attempt in count(1):
            # Ends: a plan never uses a source in the ledger, so every further round enters new ones, and
            # what a round decodes is stored, so the next finds fewer lost blocks.
            found = self._found
            if not found.plans:
                return found.refusal
            with self._me.opened(found.inventory, wait=False) as self._arenas:
                decodes = found.decision.decodes
                if decodes:
                    self._rebuild()
                elif self._carry_out(prepare, copy):
                    repairs = self._ledger.repairs(self._own)
                    outcome = RecoveryOutcome(self._own, self._stats(), repairs, attempt)
                    _report(outcome, self._rank)
                    return outcome
            if decodes:
                self._look()
            self._plan()
        raise AssertionError("unreachable")

    @property
    def _own(self) -> RecoveryPlan:
        return self._found.plans[self._group]

    def _rebuild(self) -> None:
        """Collective: decode what no node holds, so that the next plan finds it. Corrupt sources go to
        the ledger; what they are part of is decoded in a later round, in another way."""
        part = {group: plan.to_decode() for group, plan in self._found.plans.items()}

        def move() -> frozenset[BlockSource]:
            return self._move([*part.values()], take, room_for=room_for, counted=False)

        def room_for(fetch: Fetch) -> torch.Tensor | None:
            room = decoder.room_for(fetch)
            return None if room is None else torch.from_numpy(room)

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            decoder.take(fetch, data.numpy(), stays=fetch.kind is SourceKind.LOCAL)

        with closing(self._me.decoder(self._own, self._me.at)) as decoder:
            # In a stage without messages: whoever fails here leaves no peer waiting for one.
            self._share(part, decoder.reserve, Flaw.STORED)
            if not self._share(part, move, Flaw.IN_TRANSIT):
                self._share(part, decoder.store, Flaw.OTHER_DATA)

    def _carry_out(self, prepare: Prepare, copy: Copy) -> bool:
        """Collective. False if a source turned out corrupt anywhere; it is then in the ledger.

        Every stage ends in an agreement: a rank that fails in one is known to all before the next."""
        own, plans = self._own, self._found.plans
        resize = Resize(own.written_dp, self._topology.degrees.dp)
        host = torch.empty(own.image_bytes(self._me.at, Section.HOST), dtype=torch.uint8)
        pieces: Sequence[Piece] = ()
        stored = next(r.header for r in self._found.tables[self._group] if r.header.label == own.label)
        with closing(Completion(own, self._me, self._completing, stored)) as completion:

            def keep(fetch: Fetch, data: torch.Tensor) -> None:
                host[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data
                completion.take(fetch, data)

            def move_host() -> frozenset[BlockSource]:
                return self._move([plan.only(Section.HOST) for plan in plans.values()], keep)

            def prepare_state() -> None:
                nonlocal pieces
                pieces = prepare(host.numpy().tobytes(), resize)

            def move_state() -> frozenset[BlockSource]:
                only = [plan.only(Section.REPLICATED, Section.OWNED) for plan in plans.values()]
                return self._move(only, completion.take, copy=copy, faults=self._me.faults)

            def move_kept() -> frozenset[BlockSource]:
                kept = [plan.to_keep() for plan in plans.values()]
                return self._move(kept, completion.take, counted=False)

            if not self._all_right(completion.begin, move_host, prepare_state):
                return False
            if own.resized:
                self._ask(pieces)
            return self._all_right(move_state, move_kept, completion.seal)

    def _all_right(self, *stages: Stage) -> bool:
        """Go through the stages up to the first in which some rank refused a source."""
        known = {group: plan.with_kept() for group, plan in self._found.plans.items()}
        return not any(self._share(known, stage, Flaw.IN_TRANSIT) for stage in stages)

    def _share(self, plans: Mapping[Group, RecoveryPlan], stage: Stage, flaw: Flaw) -> bool:
        """:meth:`Ledger.share`; what arrived corrupt is looked at where it is stored, to tell why."""
        parts, label = self._found.parts, self._own.label
        refused = self._ledger.share(plans, parts, stage, flaw)
        if refused and flaw is Flaw.IN_TRANSIT:
            suspects = self._ledger.in_transit(self._me.node, label)
            look = partial(find_corrupt, label, suspects, self._arenas)
            self._ledger.share(plans, parts, look, Flaw.STORED)
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

    def _ask(self, pieces: Sequence[Piece]) -> None:
        """Collective: who takes part in a sharding group hears what its members want of the partitions, and
        plans for that."""
        found, mine = self._found, msgpack.packb(list(pieces))
        bodies = {peer: b"" for peers in found.parts.values() for peer in peers}
        bodies |= dict.fromkeys(found.parts[self._group], mine)
        told = {**self._me.control.swap(bodies), self._rank: mine}

        def planned() -> bool:
            for group, records in found.tables.items():
                members = enumerate(self._topology.group(*group))
                wanted = {dp: [Piece(*row) for row in msgpack.unpackb(told[rank])] for dp, rank in members}
                of_version = found.decision, found.findings, group, found.sources[group]
                found.plans[group] = plan_decided(*of_version, records, wanted=wanted)
            return False

        self._me.agree(planned, f"planning for the partitions of {found.decision.label}")

    # -- what there is --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Collective: say what this node holds, hear what the others do, and get the block tables of the
        sharding groups that this rank takes part in."""
        mine: list[ArenaRecord] = []

        def summarized() -> bytes:
            inventory = self._me.inventory()
            mine.extend(
                arenas_to_tell(
                    *(inventory.arenas, self._topology, self._rank),
                    job_id=self._me.job_id,
                    any_dp=self._resizable,
                )
            )
            problems = inventory.problems if self._me.is_first_on_node else ()
            return summarize(self._me.node, mine, problems).encode()

        labels: dict[tuple[int, int], Label] = {}
        told = self._me.gather(summarized, "taking inventory")
        summaries = [Summary.decode(body, self._topology, labels) for body in told]
        findings = put_together(summaries, self._topology, job_id=self._me.job_id, any_dp=self._resizable)
        parts = parts_of(findings, self._rank)
        self._found = _Found(findings, parts, self._swap_tables(mine, parts))

    def _swap_tables(
        self, mine: Sequence[ArenaRecord], parts: Mapping[Group, tuple[int, ...]]
    ) -> dict[Group, list[ArenaRecord]]:
        """Whole arenas of the groups this rank takes part in, on all nodes; in (node, name) order."""
        tables = tables_of(mine, parts, self._topology, job_id=self._me.job_id, any_dp=self._resizable)
        packed = {group: Inventory(self._me.node, tuple(records)).pack() for group, records in tables.items()}
        bodies: dict[int, list[bytes]] = {}
        for group in sorted(parts):
            for peer in parts[group]:
                bodies.setdefault(peer, []).append(packed[group])
        told = self._me.control.swap({peer: msgpack.packb(messages) for peer, messages in bodies.items()})
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
                sources[group] = judge(group, records, found.findings.sizes, self._ledger.bad)
            if self._me.at.dp:
                return b""
            return encode_verdicts({at: Verdict.of(s) for at, s in sources[self._group].items()})

        told = self._me.gather(judged, "judging the versions in memory")
        speakers = {(pp, tp): self._topology.group(pp, tp)[0] for pp, tp in self._topology.groups()}
        decision = decide(found.findings, {g: decode_verdicts(told[rank]) for g, rank in speakers.items()})
        found.plans = {}
        if isinstance(decision, NotRecoverable):
            found.refusal = decision
            return
        found.decision = decision
        found.sources = {group: of_group[decision.label] for group, of_group in sources.items()}
        for group, records in found.tables.items():
            of_version = found.sources[group]
            plan = plan_decided(decision, found.findings, group, of_version, records)
            if self._completing is not None and not decision.decodes and not plan.resized:
                held = [r for r in records if r.header.label == decision.label]
                plan = replace(plan, kept=plan_kept(group, of_version, held, self._topology))
            found.plans[group] = plan
        here = [r for records in found.tables.values() for r in records if r.node == self._me.node]
        used = tuple(r for r in here if r.header.label == decision.label)
        found.inventory = Inventory(self._me.node, used)


@dataclass
class _Found:
    findings: Findings  # who holds which version, in the whole job
    # the groups that this rank takes part in, its own first, and the ranks that do
    parts: Mapping[Group, tuple[int, ...]]
    tables: Mapping[Group, list[ArenaRecord]]  # their whole arenas on all nodes
    # the version; there is none before it was decided, and where ``plans`` is empty
    decision: Decision = field(init=False)
    sources: Mapping[Group, GroupSources] = field(default_factory=dict)  # what they have of the version
    # their plans, the own group's first; empty if nothing can be recovered
    plans: dict[Group, RecoveryPlan] = field(default_factory=dict)
    refusal: NotRecoverable = field(init=False)  # why nothing can be; there is none where there are plans
    # arenas on this node that hold the version
    inventory: Inventory = field(default_factory=lambda: Inventory("", ()))


def _report(outcome: RecoveryOutcome, rank: int) -> None:
    logger.info("recovered step %d: %s", outcome.label.step, outcome.stats)
    if rank == 0 and outcome.repaired:
        repairs = listing(map(str, outcome.repaired))
        logger.warning("repaired while step %d was recovered: %s", outcome.label.step, repairs)
