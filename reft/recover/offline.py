"""``reft persist``: the newest recoverable version in the memory of a dead job, as a checkpoint on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.jobdir import newest_record
from reft.recover.decide import offline_topology, plan_verified
from reft.recover.inventory import ArenaSet, Inventory, open_job, opened_arenas, stored_bytes, take_inventory
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import rebuild_offline
from reft.storage import fence
from reft.storage.persist import PersistOptions, PersistProgress, VersionSource, write_version
from reft.storage.persisted import PersistedInfo, job_directory
from reft.storage.staging import SourceBlock

logger = logging.getLogger(__name__)


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
        target = job_directory(directory, job_id)
        # By a person's command: it stands for whatever start has claimed the directory.
        writer = max(fence.claimed(target, job_id), *(job.noted_incarnation() for job in jobs))
        found = _source(plan, inventories, arenas, job_id, secret)
        source = replace(found, fingerprint=fingerprint, writer=writer)
        options = PersistOptions(directory=target, keep=keep, progress=progress)
        return OfflineResult(write_version(source, options), plan, len(bad))


def _source(
    plan: RecoveryPlan, inventories: Sequence[Inventory], arenas: ArenaSet, job_id: str, secret: bytes
) -> VersionSource:
    headers = [r.header for i in inventories for r in i.arenas if r.usable and r.header.label == plan.label]
    layouts = {(h.coordinate.pp, h.coordinate.tp): h.layout for h in headers}
    return VersionSource(
        job_id=job_id,
        label=plan.label,
        degrees=plan.degrees,
        layouts={c: layouts[c.pp, c.tp] for c in plan.fetches},
        blocks={c: _own_blocks(plan, c, arenas) for c in sorted(plan.fetches)},
        secret=secret,
        node="offline",
    )


def _own_blocks(plan: RecoveryPlan, at: Coordinate, arenas: ArenaSet) -> list[SourceBlock]:
    """What the coordinate's own arena would give: its shard, its partition, its host state."""

    def block(fetch: Fetch) -> SourceBlock:
        return SourceBlock(
            key=fetch.key,
            start_bytes=fetch.start_bytes,
            image_bytes=plan.image_bytes(at, fetch.key.section),
            checksum=fetch.checksum,
            data=stored_bytes(fetch, arenas),
            origin=f"{fetch.arena} of node {fetch.node}",
        )

    return [block(f) for f in plan.fetches[at] if f.key.member == at.dp]
