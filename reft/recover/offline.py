"""``reft persist``: the newest recoverable version of a dead job, in DeepSpeed's files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from reft.errors import LayoutError, PersistError
from reft.grid import STATE_SECTIONS, Coordinate
from reft.memory.arena import Arena
from reft.memory.header import Entry
from reft.memory.jobdir import newest_record
from reft.recover.decide import offline_topology, plan_verified
from reft.recover.inventory import ArenaSet, Inventory, Place, open_job
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline
from reft.storage import fence
from reft.storage.export import write_deepspeed_files
from reft.storage.persist import PersistOptions, PersistProgress, VersionSource, write_version
from reft.storage.persisted import STORAGE_KEY, PersistedInfo, find_markers, job_directory
from reft.storage.publish import SourceBlock

logger = logging.getLogger(__name__)

STORED = "storage"  # in the place of a node's id


@dataclass(frozen=True)
class OfflineResult:
    checkpoint: PersistedInfo  # what was written
    plan: RecoveryPlan  # which version, and where its blocks came from
    corrupt_blocks: int  # blocks that did not match their checksum and were replaced by copies


def persist_offline(
    job_dirs: Sequence[Path],
    directory: Path,
    *,
    keep: int = 2,
    progress: Callable[[PersistProgress], None] = lambda progress: None,
) -> OfflineResult:
    """Write the newest recoverable version as a DeepSpeed checkpoint, without the job's processes.

    The same plan as for a recovery decides which version that is and where each block is read, so
    blocks of lost nodes come from their copies.

    Args:
        job_dirs: the job's memory directories of all nodes that are left, made reachable here.

    Raises:
        ArenaError: if the directories are not one job's.
        PersistError: if it cannot be written.
        UnrecoverableError: if no version is whole; says what is missing.
        LayoutError: if there is nothing to take the layout from.
    """
    nodes = open_job(job_dirs)
    jobs = [*nodes.values()]
    places = [Place(job.path, node, job.secret) for node, job in nodes.items()]
    with ExitStack() as stack:
        found = _find(places, jobs[0].job_id, stack)
        if isinstance(found.plan, NotRecoverable):
            raise found.plan.error()
        records = [newest_record(job.path, found.plan.label.incarnation) for job in jobs]
        _, fingerprint = max((r for r in records if r is not None), default=(0, None))
        noted = max(job.noted_incarnation() for job in jobs)
        source = replace(found.source(found.plan, jobs[0].secret), fingerprint=fingerprint, writer=noted)
        return _export(source, found, directory, keep, progress)


def export_stored(
    stored: Path,
    directory: Path,
    *,
    keep: int = 2,
    progress: Callable[[PersistProgress], None] = lambda progress: None,
) -> OfflineResult:
    """The same of the newest sound version on storage, in a job's directory of persist.dir. Raises
    PersistError: there is none, or it cannot be written."""
    infos, problems = find_markers(stored)
    for info in reversed([info for info in infos if info.arenas]):
        with ExitStack() as stack:
            try:
                found = _find([Place(info.path, STORED, STORAGE_KEY)], info.job_id, stack)
            except LayoutError as error:
                problems.append(f"{info.path}: {error}")
                continue
            if isinstance(found.plan, NotRecoverable):
                problems.append(f"{info.path}: {'; '.join(found.plan.reasons)}")
                continue
            # Records of the working directory are this process's alone.
            source = replace(found.source(found.plan, STORAGE_KEY), fingerprint=info.fingerprint)
            return _export(source, found, directory, keep, progress)
    raise PersistError(
        f"{stored} holds no whole version that reft wrote ({'; '.join(problems) or 'no marker was found'}); "
        f"give the job's directory in persist.dir"
    )


@dataclass(frozen=True)
class _Found:
    """What lies in some places, opened, and what of it can be restored: all of that was verified."""

    plan: RecoveryPlan | NotRecoverable
    inventories: list[Inventory]
    arenas: ArenaSet
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


def _find(places: Sequence[Place], job_id: str, stack: ExitStack) -> _Found:
    """Raises LayoutError: there is nothing to take the layout from."""
    inventories: list[Inventory] = []
    arenas: dict[tuple[str, str], Arena] = {}

    def look(place: Place) -> None:
        inventories.append(place.inventory())
        arenas.update(stack.enter_context(place.opened(inventories[-1])))

    for place in places:
        look(place)
    topology = offline_topology(inventories, job_id)
    plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id)
    while isinstance(plan, RecoveryPlan) and plan.rebuilds:
        # Ends: each round stores lost blocks, or finds sources that no later round uses.
        folder = TemporaryDirectory(prefix=".decoded-", dir=places[0].directory.parent)
        scratch = Path(stack.enter_context(folder))
        decoded = replace(places[0], directory=scratch, node=f"decoded {scratch.name}")
        refused = rebuild_offline(plan, arenas, decoded)
        look(decoded)
        plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id, bad=bad | refused)
    return _Found(plan, inventories, arenas, len(bad))


def _export(
    source: VersionSource,
    found: _Found,
    directory: Path,
    keep: int,
    progress: Callable[[PersistProgress], None],
) -> OfflineResult:
    assert isinstance(found.plan, RecoveryPlan)
    target = job_directory(directory, source.job_id)
    # By a person's command: it stands for whatever start has claimed the directory.
    writer = max(fence.claimed(target, source.job_id), source.writer)
    options = PersistOptions(directory=target, keep=keep, progress=progress, export=write_deepspeed_files)
    written = write_version(replace(source, writer=writer), options)
    return OfflineResult(written, found.plan, found.corrupt_blocks)


def _blocks(plan: RecoveryPlan, at: Coordinate, arenas: ArenaSet) -> list[SourceBlock]:
    sizes = {section: plan.image_bytes(at, section) for section in STATE_SECTIONS}

    def block(f: Fetch) -> SourceBlock:
        place = f.start_bytes, f.nbytes, sizes[f.key.section], f.arena_offset
        entry = Entry(f.key, *place, f.checksum, owner=f.key.member == at.dp)
        return SourceBlock(entry, arenas[f.node, f.arena].data, f"{f.arena} of node {f.node}")

    return [block(f) for f in plan.fetches[at]]
