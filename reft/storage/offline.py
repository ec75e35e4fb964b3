"""``reft persist``: writes a dead job's newest recoverable version as DeepSpeed's files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from reft.errors import LayoutError, PersistError
from reft.grid import STATE_SECTIONS, Coordinate, VersionId
from reft.memory.arena import Arena, scan
from reft.memory.fingerprint_record import newest_record
from reft.memory.header import Entry
from reft.recover.decide import offline_topology, plan_recovery, plan_verified
from reft.recover.inventory import ArenaStore, Inventory, OpenArenas, open_job
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline
from reft.storage import fence
from reft.storage.export import write_deepspeed_files
from reft.storage.persist import PersistOptions, PersistProgress, VersionSource, write_version
from reft.storage.persisted import STORAGE_KEY, PersistedInfo, find_markers, job_directory
from reft.storage.publish import BlockInFile

logger = logging.getLogger(__name__)

STORED = "storage"  # Stands in place of a node's id for arenas on storage
# Longest wait in seconds for ranks of a running job that are writing their arenas
_HOLD_SECS = 10.0
_POLL_SECS = 0.02


@dataclass(frozen=True)
class OfflineResult:
    """A version that was written without the job's processes."""

    checkpoint: PersistedInfo  # The checkpoint that was written
    plan: RecoveryPlan  # Recovery plan, which names the version and the sources of its blocks
    # Number of blocks that did not match their checksum and were read from another source
    corrupt_blocks: int


def persist_offline(
    job_dirs: Sequence[Path],
    directory: Path,
    *,
    keep: int = 2,
    progress: Callable[[PersistProgress], None] = lambda progress: None,
) -> OfflineResult:
    """Write the newest recoverable version as a DeepSpeed checkpoint, without the job's processes.

    As in a recovery, a plan selects the version and the source of each block. Blocks of lost
    nodes are read from their copies. If the job is running, its arenas are pinned (locked
    against overwriting) until the version is written; training continues, but skips versions for
    which no arena is free.

    Args:
        job_dirs: the job's memory directories of all remaining nodes, reachable from this host.
        directory: persist directory to write to.
        keep: number of newest checkpoints that are kept.
        progress: called while blocks are written, and at each phase.

    Raises:
        ArenaError: the directories belong to different jobs.
        PersistError: the checkpoint cannot be written.
        UnrecoverableError: no version is complete; the message says what is missing.
        LayoutError: no arena records the layout.
    """
    nodes = open_job(job_dirs)
    jobs = [*nodes.values()]
    places = [ArenaStore(job.path, node, job.secret) for node, job in nodes.items()]
    with ExitStack() as stack:
        held = _hold(places, jobs[0].job_id, stack)
        of_held = [replace(place, is_wanted=held.__contains__) for place in places]
        found = _find(of_held, jobs[0].job_id, stack)
        if isinstance(found.plan, NotRecoverable):
            raise found.plan.error()
        _release_others(held, found.plan.label)
        records = [newest_record(job.path, found.plan.label.incarnation) for job in jobs]
        _, fingerprint = max((r for r in records if r is not None), default=(0, None))
        noted = max(job.noted_incarnation() for job in jobs)
        source = replace(
            found.source(found.plan, jobs[0].secret), fingerprint=fingerprint, writer=noted
        )
        return _export(source, found, directory, keep, progress)


def export_stored(
    stored: Path,
    directory: Path,
    *,
    keep: int = 2,
    progress: Callable[[PersistProgress], None] = lambda progress: None,
) -> OfflineResult:
    """Write the newest intact version in a job's persist directory (on storage) as a DeepSpeed
    checkpoint, as :func:`persist_offline` does with a version in memory.

    Raises:
        PersistError: there is no intact version, or the checkpoint cannot be written.
    """
    infos, problems = find_markers(stored)
    for info in reversed([info for info in infos if info.arenas]):
        with ExitStack() as stack:
            try:
                found = _find([ArenaStore(info.path, STORED, STORAGE_KEY)], info.job_id, stack)
            except LayoutError as error:
                problems.append(f"{info.path}: {error}")
                continue
            if isinstance(found.plan, NotRecoverable):
                problems.append(f"{info.path}: {'; '.join(found.plan.reasons)}")
                continue
            # No other process reads the records in this working directory, so any key can
            # authenticate them.
            source = replace(found.source(found.plan, STORAGE_KEY), fingerprint=info.fingerprint)
            return _export(source, found, directory, keep, progress)
    raise PersistError(
        f"{stored} holds no whole version that reft wrote "
        f"({'; '.join(problems) or 'no marker was found'}); give the job's directory in persist.dir"
    )


def _hold(places: Sequence[ArenaStore], job_id: str, stack: ExitStack) -> dict[Path, Arena | None]:
    """Pin more arenas (take shared locks) until the pinned ones form a complete version. The job
    may be running.

    Nodes are visited one after another, so the first round over the nodes may pin different
    versions on different nodes. A pinned arena cannot be overwritten, so ranks that are ahead wait
    until the others have caught up to the same version.

    Returns:
        The pinned arenas by path; None for a file that cannot be read.
    """
    held: dict[Path, Arena | None] = {}
    deadline = time.monotonic() + _HOLD_SECS
    while True:
        written = False
        for place in places:
            for path, arena in scan(
                place.directory, place.secret, is_wanted=lambda path: path not in held
            ):
                if isinstance(arena, str):
                    held[path] = None
                elif stack.enter_context(arena).lock_shared():
                    held[path] = arena
                else:
                    written = True
                    arena.close()
        if not written or _is_whole(places, job_id, held) or time.monotonic() > deadline:
            return held
        time.sleep(_POLL_SECS)


def _is_whole(places: Sequence[ArenaStore], job_id: str, held: Collection[Path]) -> bool:
    inventories = [replace(place, is_wanted=held.__contains__).inventory() for place in places]
    if not any(record.usable for inventory in inventories for record in inventory.arenas):
        return False
    with suppress(LayoutError):  # The arenas pinned so far are too few to determine the layout
        topology = offline_topology(inventories, job_id)
        return isinstance(plan_recovery(inventories, topology, job_id=job_id), RecoveryPlan)
    return False


def _release_others(held: Mapping[Path, Arena | None], label: VersionId) -> None:
    """Release the arenas that hold other versions, so that the job can write into them during
    the export."""
    for arena in filter(None, held.values()):
        header = arena.header()
        if header is None or header.label != label:
            arena.unlock()


@dataclass(frozen=True)
class _OpenedPlaces:
    """Opened arena stores, and the plan for restoring a version from them. The version's blocks
    have been verified."""

    plan: RecoveryPlan | NotRecoverable
    inventories: list[Inventory]
    arenas: OpenArenas
    corrupt_blocks: int

    def source(self, plan: RecoveryPlan, secret: bytes) -> VersionSource:
        records = chain.from_iterable(inventory.arenas for inventory in self.inventories)
        headers = [r.header for r in records if r.usable and r.header.label == plan.label]
        of_group = {(h.coordinate.pp, h.coordinate.tp): h for h in headers}
        return VersionSource(
            job_id=plan.job_id,
            label=plan.label,
            degrees=plan.degrees,
            headers={c: replace(of_group[c.pp, c.tp], coordinate=c) for c in plan.fetches},
            blocks={c: _blocks(plan, c, self.arenas) for c in sorted(plan.fetches)},
            secret=secret,
            node="offline",
        )


def _find(places: Sequence[ArenaStore], job_id: str, stack: ExitStack) -> _OpenedPlaces:
    """Open stores of arenas, and repeat the planning until all blocks of the plan are verified.

    Raises:
        LayoutError: no arena records the layout.
    """
    inventories: list[Inventory] = []
    arenas: dict[tuple[str, str], Arena] = {}

    def look(place: ArenaStore) -> None:
        inventories.append(place.inventory())
        arenas.update(stack.enter_context(place.opened(inventories[-1])))

    for place in places:
        look(place)
    topology = offline_topology(inventories, job_id)
    plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id)
    while isinstance(plan, RecoveryPlan) and plan.rebuilds:
        # The loop terminates, because each round either decodes and stores lost blocks, or
        # excludes bad sources.
        folder = TemporaryDirectory(prefix=".decoded-", dir=places[0].directory.parent)
        scratch = Path(stack.enter_context(folder))
        decoded = ArenaStore(scratch, f"decoded {scratch.name}", places[0].secret)
        refused = rebuild_offline(plan, arenas, decoded)
        look(decoded)
        plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id, bad=bad | refused)
    return _OpenedPlaces(plan, inventories, arenas, len(bad))


def _export(
    source: VersionSource,
    found: _OpenedPlaces,
    directory: Path,
    keep: int,
    progress: Callable[[PersistProgress], None],
) -> OfflineResult:
    assert isinstance(found.plan, RecoveryPlan)
    target = job_directory(directory, source.job_id)
    # This command may write in the name of the newest incarnation, whichever has claimed the
    # directory.
    writer = max(fence.claimed(target, source.job_id), source.writer)
    options = PersistOptions(
        directory=target, keep=keep, progress=progress, export=write_deepspeed_files
    )
    written = write_version(replace(source, writer=writer), options)
    return OfflineResult(written, found.plan, found.corrupt_blocks)


def _blocks(plan: RecoveryPlan, at: Coordinate, arenas: OpenArenas) -> list[BlockInFile]:
    sizes = {section: plan.image_bytes(at, section) for section in STATE_SECTIONS}

    def block(f: Fetch) -> BlockInFile:
        place = f.start_bytes, f.nbytes, sizes[f.key.section], f.arena_offset
        entry = Entry(f.key, *place, f.checksum, owner=f.key.member == at.dp)
        return BlockInFile(entry, arenas[f.node, f.arena].data, f"{f.arena} of node {f.node}")

    return [block(f) for f in plan.fetches[at]]
