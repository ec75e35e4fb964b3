"""Whole jobs as they lie in memory: inventories for the planner, arena files for the transfer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from reft.grid import STATE_SECTIONS, BlockKey, Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.arena import Arena
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum
from reft.protect.backend import NumpyBackend, combine_ragged
from reft.protect.codes import Scheme, pack_checksums
from reft.protect.placement import place_group
from reft.recover.inventory import (
    ArenaRecord,
    ArenaStore,
    Inventory,
    OpenArenas,
    matches,
    stored_bytes,
)
from reft.recover.plan import Fetch, RecoveryPlan
from reft.recover.rebuild import ArenaLayout, BlockSlot
from reft.snapshot.plan import PlacedBlock, SectionSizes, ShardPlan, make_shard_plan

JOB = "job-a"
SECRET = b"0123456789abcdef0123456789abcdef"
OLD, NEW = VersionId(1, 5), VersionId(1, 6)
_SHAPES = {
    "single": ((1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 3, 1), (3, 2, 1)),
    "replica": ((2, 2, 1), (2, 3, 1), (1, 2, 2), (2, 2, 2)),
    "shared": ((1, 4, 1), (1, 4, 2)),
}
SHAPES = [(Degrees(*degrees), kind) for kind, found in _SHAPES.items() for degrees in found]
"""Layouts of jobs, and how :func:`place` puts them on nodes."""


@dataclass(frozen=True)
class Fleet:
    """A job: where its ranks sat when it wrote the memory, and the sizes of its state. ``uneven``: bytes by which
    every member owns more than the one before it."""

    topology: Topology
    copies: int = 1
    parities: int = 0
    zero: int = 1
    block_bytes: int = 128
    scale: int = 1
    job_id: str = JOB
    uneven: int = 64

    def sizes(self, pp: int, tp: int) -> SectionSizes:
        dp = self.topology.degrees.dp
        owned = tuple(self.zero * self.scale * (200 + self.uneven * d + 8 * pp) for d in range(dp))
        host = tuple(90 + d + tp for d in range(dp))
        return SectionSizes(self.scale * (640 + 72 * pp + 8 * tp), owned, host)

    def directory(self, root: Path, node: str) -> Path:
        (root / node).mkdir(parents=True, exist_ok=True)
        return root / node

    def shard_plan(self, pp: int, tp: int) -> ShardPlan:
        placement = place_group(self.topology.group_nodes(pp, tp), self.copies, self.parities)
        sizes = self.sizes(pp, tp)
        return make_shard_plan(
            SectionSizes(
                sizes.replicated_bytes,
                sizes.owned_bytes,
                tuple(-(-n // 256) * 256 for n in sizes.host_bytes),
            ),
            placement,
            self.block_bytes,
        )

    def blueprint(self, at: Coordinate) -> ArenaLayout:
        mine = self.shard_plan(at.pp, at.tp).members[at.dp]
        rooms = {
            b.key: BlockSlot(b.block.start_bytes, b.block.nbytes, b.arena_offset)
            for b in mine.blocks
        }
        return ArenaLayout(rooms, mine.data_bytes)

    def image(self, at: Coordinate, section: Section, label: VersionId) -> np.ndarray:
        who = 99 if section is Section.REPLICATED else at.dp
        seed = (label.incarnation, label.step, at.pp, at.tp, who, zlib.crc32(section.encode()))
        return np.random.default_rng(seed).integers(
            0, 256, self.image_bytes(at, section), dtype=np.uint8
        )

    def content(self, at: Coordinate, placed: PlacedBlock, label: VersionId) -> np.ndarray:
        plan, key, start = self.shard_plan(at.pp, at.tp), placed.key, placed.block.start_bytes
        owner = Coordinate(at.pp, key.member, at.tp)
        if key.section in STATE_SECTIONS:
            return self.image(owner, key.section, label)[start : start + placed.block.nbytes]
        if key.section is Section.CHECKSUMS:
            own = [b for b in plan.members[key.member].own if b.key.section is Section.REPLICATED]
            sums = [checksum(np.ascontiguousarray(self.content(owner, b, label)).data) for b in own]
            return np.frombuffer(pack_checksums(sums), np.uint8)
        blocks = {b.key: b for m in plan.members for b in m.own}
        terms = plan.members[at.dp].terms[key].terms
        sources = [self.content(at, blocks[k], label) for k, _ in terms]
        out = np.zeros(placed.block.nbytes, np.uint8)
        combine_ragged(NumpyBackend(), (tuple(c for _, c in terms),), sources, (out,))
        return out

    def entries(self, at: Coordinate, label: VersionId, real: bool) -> tuple[Entry, ...]:
        member = self.shard_plan(at.pp, at.tp).members[at.dp]
        entries = []
        for placed in member.blocks:
            key, start = placed.key, placed.block.start_bytes
            owner = Coordinate(at.pp, key.member, at.tp)
            nbytes = image_bytes = placed.block.nbytes
            if key.section in STATE_SECTIONS:
                image_bytes = self.image_bytes(owner, key.section)
                nbytes = min(nbytes, image_bytes - start)
            digest = zlib.crc32(repr((label, at.pp, at.tp, key)).encode())
            if real:
                digest = checksum(np.ascontiguousarray(self.content(at, placed, label)).data)
            own = key.member == at.dp and key.section is not Section.PARITY
            entries.append(Entry(key, start, nbytes, image_bytes, placed.arena_offset, digest, own))
        return tuple(entries)

    def image_bytes(self, at: Coordinate, section: Section) -> int:
        sizes = self.sizes(at.pp, at.tp)
        return {
            Section.REPLICATED: sizes.replicated_bytes,
            Section.OWNED: sizes.owned_bytes[at.dp],
            Section.HOST: sizes.host_bytes[at.dp],
        }[section]

    def header(
        self,
        at: Coordinate,
        label: VersionId,
        state: ArenaState = ArenaState.COMMITTED,
        real: bool = False,
    ) -> ArenaHeader:
        return ArenaHeader(
            job_id=self.job_id,
            node=self.topology.node_of(at),
            degrees=self.topology.degrees,
            coordinate=at,
            label=label,
            state=state,
            entries=self.entries(at, label, real) if state.whole else (),
            sealed_unix_secs=1.0,
            layout=f"layout-{at.pp}-{at.tp}",
            scheme=str(Scheme(self.copies, self.parities)),
            coding=code.describe() if (code := self.shard_plan(at.pp, at.tp).code) else "",
        )

    def records(
        self,
        label: VersionId,
        states: Mapping[Coordinate, ArenaState] | ArenaState = ArenaState.COMMITTED,
        slot: int = 0,
    ) -> list[ArenaRecord]:
        every = self.topology.degrees.coordinates()
        wanted = states if isinstance(states, Mapping) else dict.fromkeys(every, states)
        return [
            ArenaRecord(
                self.topology.node_of(c),
                arena_name(self.topology, c, slot),
                self.header(c, label, state),
            )
            for c, state in wanted.items()
        ]

    def write(self, root: Path, *labels: VersionId, lost: Collection[str] = ()) -> None:
        """The arenas of all ranks but those on nodes that are ``lost``, with a slot for each version."""
        for slot, label in enumerate(labels):
            for at in self.topology.coordinates:
                if self.topology.node_of(at) not in lost:
                    self.write_arena(root, at, label, slot)

    def write_arena(self, root: Path, at: Coordinate, label: VersionId, slot: int = 0) -> Path:
        node_dir = self.directory(root, self.topology.node_of(at))
        plan = self.shard_plan(at.pp, at.tp).members[at.dp]
        header = self.header(at, label, real=True)
        path = node_dir / arena_name(self.topology, at, slot)
        with Arena.create(path, plan.data_bytes, len(plan.blocks), SECRET) as arena:
            arena.begin(header)
            for entry, placed in zip(header.entries, plan.blocks, strict=True):
                piece = np.ascontiguousarray(self.content(at, placed, label))
                arena.data[entry.arena_offset : entry.arena_offset + entry.nbytes] = piece.data
            arena.seal(header.entries)
            arena.commit()
        return path


def arena_name(topology: Topology, at: Coordinate, slot: int) -> str:
    local = topology.local_ranks(topology.node_of(at)).index(topology.rank_of(at))
    return f"rank{local}-slot{slot}.arena"


def place(degrees: Degrees, kind: str) -> Topology:
    """``replica``: a node holds all stages of one dp index; ``single``: one rank per node;
    ``shared``: two dp members of a group on every node."""
    coordinates = degrees.coordinates()
    names = {
        "replica": lambda c: f"n{c.dp}",
        "single": lambda c: f"n{coordinates.index(c)}",
        "shared": lambda c: f"n{c.pp}{c.tp}{c.dp // 2}",
    }
    return Topology(degrees, coordinates, tuple(names[kind](c) for c in coordinates))


def without(topology: Topology, lost: Collection[str]) -> Topology:
    return Topology(
        topology.degrees,
        topology.coordinates,
        tuple(f"new-{n}" if n in lost else n for n in topology.nodes),
    )


def inventories(
    records: Iterable[ArenaRecord], lost: Collection[str] = (), also: Iterable[str] = ()
) -> list[Inventory]:
    by_node: dict[str, list[ArenaRecord]] = {node: [] for node in also}
    for record in records:
        if record.node not in lost:
            by_node.setdefault(record.node, []).append(record)
    return [Inventory(node, tuple(found)) for node, found in sorted(by_node.items())]


def oracle(
    fleet: Fleet,
    records: Iterable[ArenaRecord],
    label: VersionId,
    bad: Collection[tuple[str, str, BlockKey]] = (),
) -> bool:
    """Brute force, byte by byte: is every byte of every image of ``label`` in some usable arena?"""
    masks = {}
    degrees = fleet.topology.degrees
    for at, section in product(degrees.coordinates(), STATE_SECTIONS):
        dp = -1 if section is Section.REPLICATED else at.dp
        masks[section, at.pp, at.tp, dp] = np.zeros(fleet.image_bytes(at, section), bool)
    for record in records:
        header = record.header
        if header.label != label or header.state not in (ArenaState.SEALED, ArenaState.COMMITTED):
            continue
        for e in header.entries:
            if (record.node, record.path, e.key) not in bad:
                dp = -1 if e.key.section is Section.REPLICATED else e.key.member
                mask = masks[e.key.section, header.coordinate.pp, header.coordinate.tp, dp]
                mask[e.start_bytes : e.start_bytes + e.nbytes] = True
    return all(mask.all() for mask in masks.values())


def check_plan(
    plan: RecoveryPlan,
    fleet: Fleet,
    topology: Topology,
    records: Iterable[ArenaRecord],
    bad: Collection[tuple[str, str, BlockKey]] = (),
) -> None:
    """Every fetch is a real, good block of the plan's version by the best level, and they tile the images."""
    stored = {
        (r.node, r.path, e.key): (r, e)
        for r in records
        if r.header.label == plan.label
        for e in r.header.entries
    }
    # Owners and nodes of every usable block, to judge the level that was chosen.
    holders: dict[tuple[int, int, BlockKey], set[tuple[str, bool]]] = {}
    for (node, name, key), (r, e) in stored.items():
        if (node, name, key) not in bad:
            group = r.header.coordinate
            holders.setdefault((group.pp, group.tp, key), set()).add((node, e.owner))
    assert set(plan.fetches) == set(topology.degrees.coordinates())
    for at, fetches in plan.fetches.items():
        for fetch in fetches:
            assert fetch.source not in bad, "P5: a corrupt source is used"
            record, entry = stored[fetch.source]
            assert record.header.state.whole
            assert (record.header.coordinate.pp, record.header.coordinate.tp) == (at.pp, at.tp)
            for name in ("start_bytes", "nbytes", "checksum", "arena_offset"):
                assert getattr(fetch, name) == getattr(entry, name)
            assert fetch.kind == expected_level(
                fetch, topology.node_of(at), holders[fetch.pp, fetch.tp, fetch.key]
            )
        for section in STATE_SECTIONS:
            pieces = [(f.start_bytes, f.nbytes) for f in fetches if f.key.section is section]
            at_byte = 0
            for start, nbytes in sorted(pieces):
                assert start == at_byte, f"{at} {section}: a gap or an overlap at {at_byte}"
                at_byte += nbytes
            assert at_byte == fleet.image_bytes(at, section) == plan.image_bytes(at, section)
    assert sum(plan.bytes_from.values()) == sum(
        f.nbytes for fs in plan.fetches.values() for f in fs
    )


def expected_level(fetch: Fetch, node: str, holders: Collection[tuple[str, bool]]) -> str:
    if any(n == node for n, _ in holders):
        assert fetch.node == node
        return "local"
    owner_nodes = {n for n, owner in holders if owner}
    assert fetch.node in (owner_nodes or {n for n, _ in holders})
    return "peer" if owner_nodes else "copy"


@contextmanager
def opened(root: Path, nodes: Iterable[str]) -> Iterator[tuple[list[Inventory], OpenArenas]]:
    places = [ArenaStore(root / node, node, SECRET) for node in nodes]
    found = [place.inventory() for place in places]
    with ExitStack() as stack:
        each = [stack.enter_context(p.opened(i)) for p, i in zip(places, found, strict=True)]
        yield found, {key: arena for of_node in each for key, arena in of_node.items()}


def read_image(
    plan: RecoveryPlan, arenas: OpenArenas, at: Coordinate, section: Section
) -> np.ndarray:
    image = np.zeros(plan.image_bytes(at, section), np.uint8)
    for fetch in plan.fetches[at]:
        if fetch.key.section is section:
            assert matches(fetch, arenas)
            data = np.frombuffer(stored_bytes(fetch, arenas), np.uint8)
            image[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data
    return image


def falsify_parities(path: Path, only: Callable[[Entry], bool] = lambda entry: True) -> None:
    """Parities that match their checksums, but were computed from other data."""
    with Arena.open(path, SECRET, writable=True) as arena:
        header = arena.header()
        entries = list(header.entries)
        for number, entry in enumerate(entries):
            if entry.key.section is Section.PARITY and only(entry):
                arena.data[entry.arena_offset] ^= 1
                digest = checksum(arena.read_block(entry))
                entries[number] = replace(entry, checksum=digest)
        arena.begin(header)
        arena.seal(entries)


WORLD_SIZE = 4
RING = Fleet(place(Degrees(1, 4, 1), "single"), scale=50, block_bytes=1024)
GRID = Fleet(place(Degrees(2, 2, 1), "replica"), scale=20, block_bytes=512)
AEC = Fleet(RING.topology, copies=0, parities=1, scale=50, block_bytes=1024)
RS2 = Fleet(RING.topology, copies=0, parities=2, scale=50, block_bytes=1024)
DEAD = Coordinate(0, 2, 0)  # The newcomer, killed while it completes the version


@dataclass(frozen=True)
class Scenario:
    fleet: Fleet = RING
    labels: tuple[VersionId, ...] = (NEW,)  # versions in memory, by slot
    lost: tuple[str, ...] = ()  # nodes whose directories are gone; empty ones replace them
    topology: Topology | None = None  # new placement if it is not just the replacement
    older: Fleet | None = None  # a job of another layout, of which an older version is left

    @property
    def placement(self) -> Topology:
        return self.topology or without(self.fleet.topology, self.lost)


# Every coordinate runs on another node and under another rank than before.
_MOVED = Topology(Degrees(1, 4, 1), Degrees(1, 4, 1).coordinates()[::-1], ("n0", "n1", "n3", "n2"))
# Two groups change places, so that every node holds arenas of a group none of whose members it runs.
_PAIRS = Fleet(place(Degrees(2, 2, 1), "single"), scale=20, block_bytes=512)
_SWAPPED = Topology(Degrees(2, 2, 1), Degrees(2, 2, 1).coordinates(), ("n2", "n3", "n0", "n1"))
# Jobs that go on with four replicas where there were six, three, or five.
_SIX = Fleet(place(Degrees(1, 6, 1), "single"), copies=2, scale=50, block_bytes=1024, uneven=0)
_THREE = Fleet(place(Degrees(1, 3, 1), "single"), scale=50, block_bytes=1024, uneven=0)
_FIVE = Fleet(
    place(Degrees(1, 5, 1), "single"), copies=0, parities=1, scale=50, block_bytes=1024, uneven=0
)
_FOUR = place(Degrees(1, 4, 1), "single")
PADDING = 5  # Bytes at the end of the last old partition
# Two stages become one, with as many replicas as there were ranks, or the ranks of one stage become two.
_STAGES = Fleet(place(Degrees(2, 3, 1), "replica"), scale=50, block_bytes=1024)
_CODED = Fleet(_STAGES.topology, copies=0, parities=1, scale=50, block_bytes=1024)
_TWO = place(Degrees(2, 2, 1), "single")
RESIZED = {"shrunk": _SIX, "shrunk_corrupt": _SIX, "grown": _THREE, "shrunk_decoded": _FIVE}
RELAID = {"merged": _STAGES, "merged_corrupt": _STAGES, "merged_decoded": _CODED, "parted": _THREE}
OTHER_LAYOUTS = RESIZED | RELAID
SCENARIOS = {
    "nothing_lost": Scenario(),
    "node_lost": Scenario(lost=("n2",)),
    "node_of_two_lost": Scenario(GRID, lost=("n1",)),
    "coordinates_moved": Scenario(topology=_MOVED),
    "groups_moved": Scenario(_PAIRS, topology=_SWAPPED),
    "corrupt_in_a_moved_group": Scenario(_PAIRS, topology=_SWAPPED),
    "older_in_one_group": Scenario(_PAIRS, labels=(OLD, NEW), lost=("n3",)),
    "decoded": Scenario(AEC, lost=("n2",)),
    "two_decoded": Scenario(RS2, lost=("n1", "n2")),
    "corrupt_term": Scenario(AEC, labels=(OLD, NEW), lost=("n2",)),
    "corrupt_parity": Scenario(RS2, lost=("n2",)),
    "corrupt_checksums": Scenario(RS2, lost=("n0", "n3")),
    "parity_of_other_data": Scenario(RS2, lost=("n2",)),
    "corrupt_at_source": Scenario(lost=("n2",)),
    "corrupt_locally": Scenario(),
    "corrupt_on_the_way": Scenario(lost=("n2",)),
    "older_version": Scenario(labels=(OLD, NEW), lost=("n2",)),
    "beyond_tolerance": Scenario(lost=("n1", "n2")),
    "arena_vanished": Scenario(),
    "copy_fails": Scenario(lost=("n2",)),
    "prepare_fails": Scenario(lost=("n2",)),
    "no_room_to_decode": Scenario(AEC, lost=("n2",)),
    "injected_raise": Scenario(lost=("n2",)),
    "completed": Scenario(lost=("n2",)),
    "completed_again": Scenario(GRID, lost=("n1",)),
    "completed_beside": Scenario(lost=("n2",), older=_PAIRS),
    "no_room_to_complete": Scenario(lost=("n2",)),
    "another_scheme": Scenario(lost=("n2",)),
    "corrupt_while_completing": Scenario(lost=("n2",)),
    "shrunk": Scenario(_SIX, lost=("n4", "n5"), topology=_FOUR),
    "shrunk_corrupt": Scenario(_SIX, lost=("n4", "n5"), topology=_FOUR),
    "grown": Scenario(_THREE, topology=_FOUR),
    "shrunk_decoded": Scenario(_FIVE, lost=("n4",), topology=_FOUR),
    "merged": Scenario(_STAGES, lost=("n2",), topology=_FOUR),
    "merged_corrupt": Scenario(_STAGES, topology=_FOUR),
    "merged_decoded": Scenario(_CODED, lost=("n1",), topology=_FOUR),
    "parted": Scenario(_THREE, topology=_TWO),
    "peer_killed": Scenario(lost=("n2",)),
}


MORE = ("forged_message",)
NOT_OVER_MPI = (
    "peer_killed",
)  # Sockets are not counted there, and a rank that dies ends the MPI job


def damage(path: Path, section: Section, member: int, index: int = 0) -> None:
    with Arena.open(path, SECRET, writable=True) as arena:
        header = arena.header()
        entry = next(
            e
            for e in header.entries
            if (e.key.section, e.key.member, e.key.index) == (section, member, index)
        )
        arena.data[entry.arena_offset + entry.nbytes // 2] ^= 0x40


def prepare_memory(root: Path) -> None:
    for name, scenario in SCENARIOS.items():
        scenario.fleet.write(root / name, *scenario.labels, lost=scenario.lost)
        for at in scenario.older.topology.coordinates if scenario.older else ():
            if scenario.older.topology.node_of(at) not in scenario.lost:
                scenario.older.write_arena(root / name, at, OLD, slot=1)
    arena = "rank0-slot0.arena"
    damage(root / "corrupt_at_source" / "n1" / arena, Section.REPLICATED, member=1)
    damage(root / "corrupt_at_source" / "n0" / arena, Section.OWNED, member=0, index=1)
    damage(root / "corrupt_locally" / "n0" / arena, Section.HOST, member=0)
    # Nothing else is left to decode the newer version from.
    damage(root / "corrupt_term" / "n1" / "rank0-slot1.arena", Section.REPLICATED, member=1)
    damage(root / "corrupt_parity" / "n0" / arena, Section.PARITY, member=0, index=0)
    # Of the lost member's checksums two copies are left, this one where its blocks are decoded.
    damage(root / "corrupt_checksums" / "n1" / arena, Section.CHECKSUMS, member=3)
    for node in ("n0", "n1", "n3"):
        # The first parity of each stripe, which decoding prefers.
        falsify_parities(
            root / "parity_of_other_data" / node / arena, lambda entry: entry.start_bytes == 0
        )
    damage(root / "shrunk_corrupt" / "n0" / arena, Section.OWNED, member=1, index=2)
    damage(root / "shrunk_corrupt" / "n2" / arena, Section.HOST, member=2)
    damage(root / "merged_corrupt" / "n1" / "rank1-slot0.arena", Section.REPLICATED, member=1)
    damage(root / "merged_corrupt" / "n2" / arena, Section.HOST, member=2)
    damage(root / "corrupt_while_completing" / "n1" / arena, Section.REPLICATED, member=1)
    damage(root / "corrupt_in_a_moved_group" / "n0" / arena, Section.REPLICATED, member=0)
    damage(root / "older_in_one_group" / "n2" / "rank0-slot1.arena", Section.OWNED, member=1)
    # Both sources of a block of the newer version: only the older one is whole.
    for node, slot in (("n0", 1), ("n1", 1)):
        damage(
            root / "older_version" / node / f"rank0-slot{slot}.arena", Section.REPLICATED, member=1
        )
