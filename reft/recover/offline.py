"""``reft persist``: the newest recoverable version of a dead job, in DeepSpeed's files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from reft.errors import LayoutError, PersistError
from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.header import Entry
from reft.memory.jobdir import newest_record
from reft.recover.decide import offline_topology, plan_verified
from reft.recover.inventory import ArenaSet, Inventory, open_job, opened_arenas, take_inventory
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline
from reft.storage import fence
from reft.storage.export import write_deepspeed_files
from reft.storage.persist import PersistOptions, PersistProgress, VersionSource, write_version
from reft.storage.persisted import STORAGE_KEY, PersistedInfo, find_markers, job_directory
from reft.storage.staging import SourceBlock

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
    job_id, secret = jobs[0].job_id, jobs[0].secret
    inventories = [take_inventory(job.path, node, secret) for node, job in nodes.items()]
    with ExitStack() as stack:
        arenas: dict[tuple[str, str], Arena] = {}
        for job, inventory in zip(jobs, inventories, strict=True):
            arenas.update(stack.enter_context(opened_arenas(job.path, inventory, secret)))
        topology = offline_topology(inventories, job_id)
        plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id)
        while isinstance(plan, RecoveryPlan) and plan.rebuilds:
            # Ends: each round stores lost blocks, or finds sources that no later round uses.
            folder = TemporaryDirectory(prefix=".decoded-", dir=job_dirs[0].parent)
            scratch = Path(stack.enter_context(folder))
            decoded, refused = rebuild_offline(plan, arenas, scratch, f"decoded {scratch.name}", secret)
            arenas.update(stack.enter_context(opened_arenas(scratch, decoded, secret)))
            inventories.append(decoded)
            plan, bad = plan_verified(inventories, topology, arenas, job_id=job_id, bad=bad | refused)
        if isinstance(plan, NotRecoverable):
            raise plan.error()
        records = [newest_record(job.path, plan.label.incarnation) for job in jobs]
        _, fingerprint = max((r for r in records if r is not None), default=(0, None))
        noted = max(job.noted_incarnation() for job in jobs)
        source = _source(plan, inventories, arenas, job_id=job_id, secret=secret, fingerprint=fingerprint)
        return _export(
            source, plan, len(bad), directory, noted_incarnation=noted, keep=keep, progress=progress
        )


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
            inventory = take_inventory(info.path, STORED, STORAGE_KEY)
            arenas = stack.enter_context(opened_arenas(info.path, inventory, STORAGE_KEY))
            try:
                topology = offline_topology([inventory], info.job_id)
            except LayoutError as error:
                problems.append(f"{info.path}: {error}")
                continue
            plan, bad = plan_verified([inventory], topology, arenas, job_id=info.job_id)
            if isinstance(plan, NotRecoverable):
                problems.append(f"{info.path}: {'; '.join(plan.reasons)}")
                continue
            # Records of the working directory are this process's alone.
            source = _source(
                plan,
                [inventory],
                arenas,
                job_id=info.job_id,
                secret=STORAGE_KEY,
                fingerprint=info.fingerprint,
            )
            return _export(
                source, plan, len(bad), directory, noted_incarnation=0, keep=keep, progress=progress
            )
    raise PersistError(
        f"{stored} holds no whole version that reft wrote ({'; '.join(problems) or 'no marker was found'}); "
        f"give the job's directory in persist.dir"
    )


def _export(
    source: VersionSource,
    plan: RecoveryPlan,
    corrupt_blocks: int,
    directory: Path,
    *,
    noted_incarnation: int,
    keep: int,
    progress: Callable[[PersistProgress], None],
) -> OfflineResult:
    target = job_directory(directory, source.job_id)
    # By a person's command: it stands for whatever start has claimed the directory.
    writer = max(fence.claimed(target, source.job_id), noted_incarnation)
    options = PersistOptions(directory=target, keep=keep, progress=progress, export=write_deepspeed_files)
    return OfflineResult(write_version(replace(source, writer=writer), options), plan, corrupt_blocks)


def _source(
    plan: RecoveryPlan,
    inventories: Sequence[Inventory],
    arenas: ArenaSet,
    *,
    job_id: str,
    secret: bytes,
    fingerprint: str | None,
) -> VersionSource:
    headers = [r.header for i in inventories for r in i.arenas if r.usable and r.header.label == plan.label]
    of_group = {(h.coordinate.pp, h.coordinate.tp): h for h in headers}
    return VersionSource(
        job_id=job_id,
        label=plan.label,
        degrees=plan.degrees,
        headers={c: replace(of_group[c.pp, c.tp], coordinate=c) for c in plan.fetches},
        blocks={c: _own_blocks(plan, c, arenas) for c in sorted(plan.fetches)},
        secret=secret,
        node="offline",
        fingerprint=fingerprint,
    )


def _own_blocks(plan: RecoveryPlan, at: Coordinate, arenas: ArenaSet) -> list[SourceBlock]:
    """What the coordinate's own arena would give: its shard, its partition, its host state."""

    def block(f: Fetch) -> SourceBlock:
        size = plan.image_bytes(at, f.key.section)
        entry = Entry(f.key, f.start_bytes, f.nbytes, size, f.arena_offset, f.checksum, owner=True)
        return SourceBlock(entry, arenas[f.node, f.arena].data, f"{f.arena} of node {f.node}")

    return [block(f) for f in plan.fetches[at] if f.key.member == at.dp]
