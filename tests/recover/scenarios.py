"""The jobs of the recovery tests: what lies in the memory of their nodes, what is lost of it, what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reft.grid import Coordinate, Degrees, Label, Section, Topology
from reft.memory.arena import Arena

from .fleet import NEW, OLD, SECRET, Fleet, falsify_parities, place, without

WORLD_SIZE = 4
RING = Fleet(place(Degrees(1, 4, 1), "single"), scale=50, block_bytes=1024)
GRID = Fleet(place(Degrees(2, 2, 1), "replica"), scale=20, block_bytes=512)
AEC = Fleet(RING.topology, copies=0, parities=1, scale=50, block_bytes=1024)
RS2 = Fleet(RING.topology, copies=0, parities=2, scale=50, block_bytes=1024)
DEAD = Coordinate(0, 2, 0)  # The newcomer, killed while it completes the version


@dataclass(frozen=True)
class Scenario:
    fleet: Fleet = RING
    labels: tuple[Label, ...] = (NEW,)  # versions in memory, by slot
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
_FIVE = Fleet(place(Degrees(1, 5, 1), "single"), copies=0, parities=1, scale=50, block_bytes=1024, uneven=0)
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
NOT_OVER_MPI = ("peer_killed",)  # Sockets are not counted there, and a rank that dies ends the MPI job


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
        falsify_parities(root / "parity_of_other_data" / node / arena, lambda entry: entry.start_bytes == 0)
    damage(root / "shrunk_corrupt" / "n0" / arena, Section.OWNED, member=1, index=2)
    damage(root / "shrunk_corrupt" / "n2" / arena, Section.HOST, member=2)
    damage(root / "merged_corrupt" / "n1" / "rank1-slot0.arena", Section.REPLICATED, member=1)
    damage(root / "merged_corrupt" / "n2" / arena, Section.HOST, member=2)
    damage(root / "corrupt_while_completing" / "n1" / arena, Section.REPLICATED, member=1)
    damage(root / "corrupt_in_a_moved_group" / "n0" / arena, Section.REPLICATED, member=0)
    damage(root / "older_in_one_group" / "n2" / "rank0-slot1.arena", Section.OWNED, member=1)
    # Both sources of a block of the newer version: only the older one is whole.
    for node, slot in (("n0", 1), ("n1", 1)):
        damage(root / "older_version" / node / f"rank0-slot{slot}.arena", Section.REPLICATED, member=1)
