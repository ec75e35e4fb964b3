"""Whether a recovered version is as well protected as this session would store it, and how a node that holds
nothing of it comes to that (P3)."""

from __future__ import annotations

from collections.abc import Iterable

from reft.engine.coordinates import local_rank
from reft.engine.session import Session
from reft.memory.arena_files import arena_name
from reft.memory.header import ArenaHeader
from reft.protect.placement import place_group
from reft.recover.complete import Blueprint, Completing, Room
from reft.recover.recover import RecoveryOutcome
from reft.snapshot.plan import SectionSizes, make_shard_plan


def completing(session: Session) -> Completing | None:
    """How the recovered version is completed on a node that holds nothing of it, in a slot without a file;
    None where its arena cannot be laid out before the session starts."""
    config = session.config
    if config.memory_limit_bytes is not None or config.recompute:
        return None
    record, at = session.protection.record, session.coordinate
    slots = (session.memory.job_dir.path / arena_name(local_rank(), n) for n in range(config.arena_count))

    def blueprint(replicated_bytes: int, owned_bytes: tuple[int, ...]) -> Blueprint:
        scheme, members = record.parsed, len(owned_bytes)
        plan = make_shard_plan(
            SectionSizes(replicated_bytes, owned_bytes, (config.host_state_bytes,) * members),
            place_group(session.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities),
            config.block_bytes,
        )
        mine = plan.members[at.dp]
        rooms = {
            b.key: Room(b.block.start_bytes, b.block.nbytes, b.arena_offset)
            for b in mine.blocks
            if b.block.nbytes
        }
        return Blueprint(rooms, mine.data_bytes)

    return Completing(record.scheme, next((p for p in slots if not p.exists()), None), blueprint)


def is_still_protected(session: Session, held: Iterable[ArenaHeader], outcome: RecoveryOutcome) -> bool:
    """Whether the recovered version lies as this incarnation would store it: every rank has the arena of its
    own coordinate, of a job of these degrees, whole, in its own slots, protected by the scheme in force, and
    nothing had to be repaired.
    It then stays as it is until a newer version is committed; to take it again would gain nothing.
    Collective.

    Args:
        held: the arenas in this rank's slots that hold the version.
    """
    scheme, at = session.protection.record.scheme, session.coordinate
    mine = at, session.topology.degrees, scheme
    here = not outcome.repaired and any((h.coordinate, h.degrees, h.scheme) == mine for h in held)
    return all(values[0] for values in session.control.gather_ints([int(here)]))
