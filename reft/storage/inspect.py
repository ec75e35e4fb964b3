"""Inspects the memory of a job, live or dead, on one or several nodes: ``reft inspect``, ``reft
verify``.

Both commands read the arenas' headers; ``verify`` also reads every block. The commands start no
process and change nothing. Whether a version can be recovered is decided by the same plan that a
restart uses.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reft.errors import LayoutError, PersistError
from reft.grid import BlockKey, VersionId
from reft.memory.arena import Arena, scan
from reft.memory.header import ArenaHeader, ArenaState, Entry
from reft.memory.jobdir import find_job_id, find_jobs, is_job_dir, live_processes
from reft.recover.decide import offline_topology, plan_recovery
from reft.recover.inventory import ArenaRecord, Inventory, open_job
from reft.recover.plan import NotRecoverable, format_bytes_from
from reft.storage.persisted import STORAGE_KEY, find_markers

# Node, file name of the arena, and key of the block, as in the recovery plan
BadBlock = tuple[str, str, BlockKey]


@dataclass(frozen=True)
class ArenaReport:
    """The state of one arena file."""

    node: str  # Node that holds the file
    path: Path
    header: ArenaHeader | None  # Header of the arena; None if EMPTY
    nbytes: int  # Size of the file in bytes
    # Blocks whose bytes do not match their checksum; None if the blocks were not read
    bad_blocks: tuple[BlockKey, ...] | None = None

    @property
    def state(self) -> ArenaState:
        return self.header.state if self.header else ArenaState.EMPTY

    @property
    def own_bytes(self) -> int:
        return sum(e.nbytes for e in self._entries if e.owner)

    @property
    def redundant_bytes(self) -> int:
        """Bytes that protect other ranks."""
        return sum(e.nbytes for e in self._entries if not e.owner)

    @property
    def _entries(self) -> tuple[Entry, ...]:
        return self.header.entries if self.header else ()

    def to_json(self) -> dict[str, Any]:
        header = self.header
        return {
            "node": self.node,
            "path": str(self.path),
            "state": str(self.state),
            "coordinate": str(header.coordinate) if header else None,
            "incarnation": header.label.incarnation if header else None,
            "step": header.label.step if header else None,
            "layout": header.layout if header else None,
            "protection": header.scheme if header else None,
            "blocks": len(self._entries),
            "own_bytes": self.own_bytes,
            "redundant_bytes": self.redundant_bytes,
            "memory_bytes": self.nbytes,
            "sealed_unix_secs": header.sealed_unix_secs if header else None,
            "bad_blocks": None
            if self.bad_blocks is None
            else [
                f"{key.section} block {key.index} of member {key.member}" for key in self.bad_blocks
            ],
        }


@dataclass(frozen=True)
class VersionReport:
    """One version in a job's memory."""

    label: VersionId
    # Arenas that hold the version, or into which it was being written
    arenas: tuple[ArenaReport, ...]
    ranks: int  # World size of the job
    recoverable: bool  # True if every byte is present and, if verified, correct
    # Why the version is not recoverable; or, if it is, the sources of its bytes
    reasons: tuple[str, ...]

    @property
    def committed(self) -> bool:
        return any(a.state is ArenaState.COMMITTED for a in self.arenas)

    @property
    def scheme(self) -> str:
        """Protection scheme of the version; "" if its arenas do not record one."""
        return next((a.header.scheme for a in self.arenas if a.header and a.header.scheme), "")

    @property
    def whole_ranks(self) -> int:
        return len({a.header.coordinate for a in self.arenas if a.header and a.state.whole})

    @property
    def nbytes(self) -> int:
        return sum(a.own_bytes + a.redundant_bytes for a in self.arenas)

    @property
    def sealed_unix_secs(self) -> float | None:
        return max(
            (a.header.sealed_unix_secs for a in self.arenas if a.header and a.state.whole),
            default=None,
        )

    def age_secs(self) -> float | None:
        sealed = self.sealed_unix_secs
        return None if sealed is None else time.time() - sealed

    def to_json(self) -> dict[str, Any]:
        return {
            "incarnation": self.label.incarnation,
            "step": self.label.step,
            "protection": self.scheme or None,
            "recoverable": self.recoverable,
            "committed": self.committed,
            "whole_ranks": self.whole_ranks,
            "ranks": self.ranks,
            "bytes": self.nbytes,
            "age_secs": self.age_secs(),
            "reasons": list(self.reasons),
            "arenas": [a.to_json() for a in self.arenas],
        }


@dataclass(frozen=True)
class JobReport:
    """The memory of one job on the inspected nodes."""

    job_id: str
    directories: Mapping[str, Path]  # Inspected directory of each node
    alive_because: Mapping[str, tuple[str, ...]]  # Processes of the job that live on each node
    versions: tuple[VersionReport, ...]  # All versions that were found, newest first
    # Version that a restart on these nodes would restore; None if there is none
    restores: VersionId | None
    why: tuple[str, ...]  # Reasons for this choice, from the recovery plan
    empty: tuple[ArenaReport, ...]  # Arenas that hold no version (state EMPTY)
    problems: tuple[str, ...]  # Arenas that could not be read, with the error
    verified: bool  # Whether every stored block was read and compared with its checksum

    @property
    def arenas(self) -> tuple[ArenaReport, ...]:
        return self.empty + tuple(a for v in self.versions for a in v.arenas)

    @property
    def bad_blocks(self) -> int:
        return sum(len(a.bad_blocks or ()) for a in self.arenas)

    @property
    def well(self) -> bool:
        """Whether a version can be restored and no damage was found."""
        return self.restores is not None and not self.problems and not self.bad_blocks

    def to_json(self) -> dict[str, Any]:
        restores = self.restores
        return {
            "job_id": self.job_id,
            "nodes": {
                node: {"path": str(path), "alive_because": list(self.alive_because[node])}
                for node, path in self.directories.items()
            },
            "restores": None
            if restores is None
            else {"incarnation": restores.incarnation, "step": restores.step},
            "why": list(self.why),
            "versions": [v.to_json() for v in self.versions],
            "empty_arenas": [a.to_json() for a in self.empty],
            "problems": list(self.problems),
            "verified": self.verified,
            "bad_blocks": self.bad_blocks,
        }


def find_job_dirs(memory_dirs: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the jobs' directories by job id. Each given path is a memory directory (with a
    directory for each job), or the directory of one job.
    """
    found: dict[str, list[Path]] = {}
    for memory_dir in memory_dirs:
        for path in [memory_dir] if is_job_dir(memory_dir) else find_jobs(memory_dir):
            paths = found.setdefault(find_job_id(path), [])
            if path not in paths:
                paths.append(path)
    return found


def inspect_job(job_dirs: Sequence[Path], verify: bool = False) -> JobReport:
    nodes = open_job(job_dirs)
    job_id = next(iter(nodes.values())).job_id
    alive = {node: live_processes(job.path) for node, job in nodes.items()}
    found = {node: job.scan() for node, job in nodes.items()}
    return _report(job_id, {node: job.path for node, job in nodes.items()}, alive, found, verify)


def inspect_stored(stored: Path, verify: bool = False) -> JobReport:
    """Do what :func:`inspect_job` does for a job's directory in a persist directory (on
    storage).

    Raises:
        PersistError: the directory holds no version.
    """
    infos, problems = find_markers(stored)
    infos = [info for info in infos if info.arenas]
    if not infos:
        raise PersistError(
            f"{stored} holds no version that reft wrote "
            f"({'; '.join(problems) or 'no marker was found'}); give the job's directory in "
            "persist.dir"
        )
    found = {info.tag: scan(info.path, STORAGE_KEY) for info in infos}
    return _report(
        infos[-1].job_id, {i.tag: i.path for i in infos}, dict.fromkeys(found, ()), found, verify
    )


def _report(
    job_id: str,
    directories: Mapping[str, Path],
    alive_because: Mapping[str, tuple[str, ...]],
    scanned: Mapping[str, Sequence[tuple[Path, Arena | str]]],
    verify: bool,
) -> JobReport:
    arenas: list[ArenaReport] = []
    problems: list[str] = []
    with ExitStack() as stack:
        for node, of_node in scanned.items():
            for path, found in of_node:
                if isinstance(found, str):
                    problems.append(f"node {node}: {found}")
                else:
                    arenas.append(_report_arena(node, path, stack.enter_context(found), verify))
    inventories = [
        Inventory(
            n,
            tuple(
                ArenaRecord(n, a.path.name, a.header) for a in arenas if a.node == n and a.header
            ),
        )
        for n in scanned
    ]
    bad = [(a.node, a.path.name, key) for a in arenas for key in a.bad_blocks or ()]
    restores, why = _judge(inventories, job_id, bad)
    return JobReport(
        job_id=job_id,
        directories=directories,
        alive_because=alive_because,
        versions=tuple(_report_versions(arenas, inventories, job_id, bad)),
        restores=restores,
        why=why,
        empty=tuple(a for a in arenas if a.header is None),
        problems=tuple(problems),
        verified=verify,
    )


def _report_arena(node: str, path: Path, arena: Arena, verify: bool) -> ArenaReport:
    # Pin the arena before its header is read. Otherwise a live trainer could overwrite the
    # arena, and new bytes would be compared with checksums of the old version.
    pinned = verify and arena.lock_shared()
    header = arena.header()
    report = ArenaReport(node, path, header, arena.file_bytes)
    if not verify or header is None or not header.state.whole:
        return report
    bad = tuple(e.key for e in header.entries if not arena.verify(e))
    if bad and not pinned and arena.header() != header:
        return replace(report, header=arena.header())
    return replace(report, bad_blocks=bad)


def _report_versions(
    arenas: Sequence[ArenaReport],
    inventories: Sequence[Inventory],
    job_id: str,
    bad: Collection[BadBlock],
) -> Iterator[VersionReport]:
    for label in sorted({a.header.label for a in arenas if a.header}, reverse=True):
        holders = tuple(a for a in arenas if a.header and a.header.label == label)
        only = [
            replace(i, arenas=tuple(r for r in i.arenas if r.header.label == label))
            for i in inventories
        ]
        restores, reasons = _judge(only, job_id, bad)
        ranks = max(a.header.degrees.world_size for a in holders if a.header)
        yield VersionReport(label, holders, ranks, restores == label, reasons)


def _judge(
    inventories: Sequence[Inventory], job_id: str, bad: Collection[BadBlock]
) -> tuple[VersionId | None, tuple[str, ...]]:
    """Return the version that a restart would restore from these inventories (None if there is
    none), and the plan's reasons.
    """
    if not any(record.usable for inventory in inventories for record in inventory.arenas):
        return None, ("no rank finished writing it",)
    try:
        topology = offline_topology(inventories, job_id)
    except LayoutError as error:
        return None, (str(error),)
    plan = plan_recovery(inventories, topology, job_id=job_id, bad=bad)
    if isinstance(plan, NotRecoverable):
        return None, plan.reasons
    return plan.label, (f"bytes from: {format_bytes_from(plan.bytes_from)}", *plan.rejected)
