"""The memory of a small job on several nodes, in real directories: PP1 x DP2, one rank per node."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from reft.grid import Coordinate, Degrees
from reft.memory.arena import Arena, ArenaHeader, ArenaState, Entry, checksum
from reft.memory.arena_files import arena_name
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.protect.blocks import Section
from reft.protect.placement import place_group
from reft.snapshot.plan import MemberPlan, PlacedBlock, SectionSizes, make_shard_plan

SECRET = bytes(range(32))
DEGREES = Degrees(1, 2, 1)
SIZES = SectionSizes(replicated_bytes=20_000, owned_bytes=(9_000, 9_000), host_bytes=(500, 500))
PLAN = make_shard_plan(SIZES, place_group(["node0", "node1"], copies=1), block_bytes=4096)


class JobMemory:
    """Directories ``<root>/node0`` and ``<root>/node1``, each with the job's memory."""

    def __init__(self, root: Path, job_id: str = "job") -> None:
        self.job_id = job_id
        self.memory_dirs = [root / f"node{d}" for d in range(DEGREES.dp)]
        self.jobs = [
            JobDir.open_or_create(path, job_id, path.name, secret=SECRET) for path in self.memory_dirs
        ]

    def take(self, label: Label, slot: int, states: Sequence[ArenaState]) -> None:
        """Write one version; member d gets as far as ``states[d]``."""
        for member, state in enumerate(states):
            path = self.path(member, slot)
            with Arena.create(
                path, PLAN.members[member].data_bytes, len(PLAN.members[0].blocks), SECRET
            ) as arena:
                self._write(arena, PLAN.members[member], label, state)

    def path(self, member: int, slot: int) -> Path:
        return self.jobs[member].path / arena_name(0, slot)

    def flip(self, member: int, slot: int, entry: Entry) -> None:
        with Arena.open(self.path(member, slot), SECRET, writable=True) as arena:
            arena.data[entry.arena_offset] ^= 1

    def entries(self, member: int, slot: int) -> tuple[Entry, ...]:
        with Arena.open(self.path(member, slot), SECRET) as arena:
            header = arena.header()
            assert header is not None
            return header.entries

    def _write(self, arena: Arena, plan: MemberPlan, label: Label, state: ArenaState) -> None:
        node = self.jobs[plan.member].node
        arena.begin(
            ArenaHeader(
                job_id=self.job_id,
                node=node,
                degrees=DEGREES,
                coordinate=Coordinate(0, plan.member, 0),
                label=label,
                state=ArenaState.EMPTY,
                layout="cd" * 16,
            )
        )
        if state is ArenaState.WRITING:
            return
        arena.seal([_store(arena, placed, plan.member, label) for placed in plan.blocks])
        if state is ArenaState.COMMITTED:
            arena.commit()


def _store(arena: Arena, placed: PlacedBlock, member: int, label: Label) -> Entry:
    key, nbytes = placed.key, placed.block.nbytes
    data = random.Random(f"{label} {key}").randbytes(nbytes)
    arena.data[placed.arena_offset : placed.arena_offset + nbytes] = data
    images: Mapping[Section, int] = {
        Section.REPLICATED: SIZES.replicated_bytes,
        Section.OWNED: SIZES.owned_bytes[key.member],
        Section.HOST: SIZES.host_bytes[key.member],
    }
    return Entry(
        key=key,
        start_bytes=placed.block.start_bytes,
        nbytes=nbytes,
        image_bytes=images[key.section],
        arena_offset=placed.arena_offset,
        checksum=checksum(data),
        owner=key.member == member,
    )
