"""Takes the inventory of the arenas on a node after a restart, and merges those of all nodes.

An arena is a shared-memory file with one rank's part of a version. An inventory contains the
arenas' headers and block tables (place and checksum of each block), but no data. It is sent to
other hosts as msgpack in a message with a MAC keyed by the job's secret, never as pickle (P11). A
block table is transposed to columns of bytes, in which neighbouring blocks hardly differ, and
compressed to about ten bytes per block, most of which are its checksum.

Every rank summarizes a part of its node's arenas without block tables (:func:`summarize`). The
merged summaries of all ranks (:func:`merge_summaries`) show which node holds which version. Every
arena that is not used is named in a note, so that a user who expected a recovery sees the cause.

The members of a sharding group (the data-parallel peers with the same pp and tp) take part in its
recovery. After a restart they may run on different nodes than before (P7). So if a node holds
arenas of a group but runs no member of it, one of its other ranks takes part to read these arenas.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np

from reft.errors import ArenaError, TransferError
from reft.grid import Coordinate, Degrees, Topology, VersionId
from reft.memory.arena import Arena, is_decoded, scan
from reft.memory.header import (
    ArenaHeader,
    ArenaState,
    checksum,
    decode_header,
    encode_header,
    pack_entries,
    unpack_entries,
)
from reft.memory.jobdir import JobDir
from reft.recover.plan import BlockSource, Fetch, Group

logger = logging.getLogger(__name__)

_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class ArenaRecord:
    """One arena that was found on a node."""

    node: str  # Node on which the arena was found (``header.node``: on which it was written)
    path: str  # File name within the node's job directory
    header: ArenaHeader  # Header, with the block table

    @property
    def usable(self) -> bool:
        return self.header.state.whole

    @property
    def committed(self) -> bool:
        return self.header.state is ArenaState.COMMITTED


@dataclass(frozen=True)
class Inventory:
    """The arenas of one node."""

    node: str
    arenas: tuple[ArenaRecord, ...]
    problems: tuple[str, ...] = ()  # Descriptions of files that could not be read

    def pack(self) -> bytes:
        arenas = [[record.path, *_pack_header(record.header)] for record in self.arenas]
        body: bytes = msgpack.packb([self.node, arenas, list(self.problems)])
        return body

    @classmethod
    def unpack(cls, body: bytes) -> Inventory:
        try:
            node, arenas, problems = msgpack.unpackb(body)
            records = tuple(
                ArenaRecord(node, path, _unpack_header(head, table)) for path, head, table in arenas
            )
            return cls(node, records, tuple(problems))
        except (ValueError, TypeError, ArenaError, zlib.error) as error:
            raise TransferError(
                f"an inventory of {len(body)} bytes carries the job's secret but cannot be read "
                f"({error!r}): run the same version of reft on every node"
            ) from error


def _pack_header(header: ArenaHeader) -> tuple[bytes, bytes]:
    table = pack_entries(header.entries)
    rows = np.frombuffer(table, np.uint8).reshape(max(1, len(header.entries)), -1)
    columns = zlib.compress(rows.T.tobytes(), _COMPRESSION_LEVEL)
    return encode_header(header, b""), msgpack.packb([len(header.entries), columns])


def _unpack_header(head: bytes, packed: bytes) -> ArenaHeader:
    header, _ = decode_header(head)
    if header is None:
        raise ValueError("an arena without a header")
    count, compressed = msgpack.unpackb(packed)
    columns = np.frombuffer(zlib.decompress(compressed), np.uint8)
    rows = columns.reshape(-1, count).T if count else columns
    return replace(header, entries=unpack_entries(rows.tobytes()))


OpenArenas = Mapping[tuple[str, str], Arena]  # Opened arenas by (node, file name)


@dataclass(frozen=True)
class ArenaStore:
    """A directory of arenas that this rank can read: its node's memory, or a version on storage.

    This rank receives from its peers what other nodes hold: inventories (:meth:`Inventory.pack`)
    and blocks (:mod:`reft.recover.transfer`).
    """

    directory: Path  # A missing directory counts as empty
    node: str  # Node of this rank
    secret: bytes  # Secret of the job, with which the arenas were authenticated
    is_wanted: Callable[[Path], bool] = lambda path: True  # Whether to read a file

    def inventory(self) -> Inventory:
        """List the arenas. Unreadable files raise no error, but are listed in ``problems``."""
        arenas: list[ArenaRecord] = []
        problems: list[str] = []
        for path, found in scan(self.directory, self.secret, is_wanted=self.is_wanted):
            if isinstance(found, str):
                problems.append(found)
                continue
            with found:
                header = found.header()
            if header is not None:
                arenas.append(ArenaRecord(self.node, path.name, header))
        logger.info(
            "inventory of node %s: %d arenas, %d unreadable", self.node, len(arenas), len(problems)
        )
        return Inventory(self.node, tuple(arenas), tuple(problems))

    @contextmanager
    def opened(
        self, inventory: Inventory, *, wait: bool = True
    ) -> Iterator[dict[tuple[str, str], Arena]]:
        """Open the usable arenas for reading, and close them at the end of the ``with`` block.

        An arena that was removed since the inventory is left out: its blocks then count as corrupt,
        and the next plan uses other sources. An arena stays mapped as long as views of its memory
        exist.

        Args:
            inventory: the arenas.
            wait: whether to close the arenas before the ``with`` block ends; otherwise a background
                thread closes them.
        """
        arenas: dict[tuple[str, str], Arena] = {}
        try:
            for record in inventory.arenas:
                try:
                    if record.usable:
                        arenas[record.node, record.path] = Arena.open(
                            self.directory / record.path, self.secret
                        )
                except (ArenaError, OSError) as error:
                    logger.warning(
                        "node %s: arena %s cannot be opened: %s", record.node, record.path, error
                    )
            yield arenas
        finally:
            if wait:
                _close(arenas)
            else:
                # Unmapping can take a fifth as long as reading did. Training should not wait for
                # it.
                threading.Thread(
                    target=_close, args=(arenas,), name="reft-unmap", daemon=True
                ).start()


def _close(arenas: OpenArenas) -> None:
    for arena in arenas.values():
        arena.close()


def open_job(job_dirs: Sequence[Path]) -> dict[str, JobDir]:
    """Open the memory directories of one job.

    Args:
        job_dirs: one directory for each node, perhaps copied from other hosts.

    Returns:
        The directories by node id. If several have the same id, each one's key is ``ID@PATH``.

    Raises:
        AuthenticationError: a directory belongs to another user, or its secret is missing.
        ArenaError: the directories belong to several jobs, or none is given.
    """
    jobs = [JobDir.open(path) for path in job_dirs]
    if len({(job.job_id, job.secret) for job in jobs}) != 1:
        found = ", ".join(f"{job.path} ({job.job_id})" for job in jobs) or "none"
        raise ArenaError(
            f"found the directories {found}; expected one job, and its secret in all of them: give "
            "--job"
        )
    names = [job.node for job in jobs]
    return {
        job.node if names.count(job.node) == 1 else f"{job.node}@{job.path}": job for job in jobs
    }


def find_corrupt(
    label: VersionId, fetches: Iterable[Fetch], arenas: OpenArenas
) -> frozenset[BlockSource]:
    """Find sources that cannot be read, or whose bytes no longer match their checksum (P5).

    Args:
        label: the version that the arenas must hold.
        fetches: blocks to check; a block that several ranks need is read only once.
        arenas: opened arenas.
    """
    current: dict[tuple[str, str], bool] = {}
    bad: set[BlockSource] = set()
    for source, fetch in {fetch.source: fetch for fetch in fetches}.items():
        place = fetch.node, fetch.arena
        if place not in current:
            header = arenas[place].header() if place in arenas else None
            current[place] = header is not None and header.label == label and header.state.whole
        if not current[place] or not matches(fetch, arenas):
            bad.add(source)
    for (node, arena), count in Counter((source.node, source.arena) for source in bad).items():
        logger.warning(
            "node %s: %s: %d blocks of %s are corrupt or unreadable", node, arena, count, label
        )
    return frozenset(bad)


def stored_bytes(fetch: Fetch, arenas: OpenArenas) -> memoryview:
    """Return a view of the source's bytes in its mapped arena, without checking them.

    The view is shorter than ``fetch.nbytes`` if the arena ends earlier.
    """
    return arenas[fetch.node, fetch.arena].data[
        fetch.arena_offset : fetch.arena_offset + fetch.nbytes
    ]


def matches(fetch: Fetch, arenas: OpenArenas) -> bool:
    """Whether the source's bytes match the checksum that was computed when they were copied."""
    data = stored_bytes(fetch, arenas)
    # P5: compare the length, too: the checksum could be that of a shorter block.
    return len(data) == fetch.nbytes and checksum(data) == fetch.checksum


# -- summaries of the inventories, without block tables --------------------------------------------


def arenas_to_report(
    records: Iterable[ArenaRecord],
    topology: Topology,
    rank: int,
    *,
    job_id: str,
    any_layout: bool = False,
) -> list[ArenaRecord]:
    """Return the arenas that a rank reports to the other ranks.

    Each arena of a node is reported by exactly one rank of that node: by the first rank that reads
    arenas for the arena's sharding group, or, if the arena cannot be used, by the node's first
    rank.

    Args:
        records: all arenas of the rank's node.
        topology: placement of the running job.
        rank: the rank.
        job_id: name of the job.
        any_layout: whether arenas of other layouts can be used.
    """
    node = topology.nodes[rank]

    def speaker(record: ArenaRecord) -> int:
        at = record.header.coordinate
        if not _fits(record.header, topology, job_id, any_layout):
            return topology.local_ranks(node)[0]
        return topology.readers(node, at.pp, at.tp)[0]

    return [record for record in records if speaker(record) == rank]


def block_tables(
    records: Iterable[ArenaRecord],
    groups: Iterable[Group],
    topology: Topology,
    *,
    job_id: str,
    any_layout: bool = False,
) -> dict[Group, list[ArenaRecord]]:
    """Return the complete arenas that can be used for each of the given sharding groups.

    Arenas of other jobs or other parallel degrees are left out, even if they have the same version
    id (P7).

    Args:
        records: arenas to choose from.
        groups: (pp, tp) of each group.
        topology: placement of the running job.
        job_id: name of the job.
        any_layout: whether arenas of other layouts can be used.
    """
    tables: dict[Group, list[ArenaRecord]] = {group: [] for group in groups}
    for record in records:
        at = record.header.coordinate
        if (
            record.usable
            and (at.pp, at.tp) in tables
            and _fits(record.header, topology, job_id, any_layout)
        ):
            tables[at.pp, at.tp].append(record)
    return tables


def _fits(header: ArenaHeader, topology: Topology, job_id: str, any_layout: bool) -> bool:
    return header.job_id == job_id and not _misfit(header, topology, any_layout=any_layout)


def sharding_groups(degrees: Degrees) -> tuple[Group, ...]:
    return tuple(product(range(degrees.pp), range(degrees.tp)))


def participants(findings: InventorySummary, rank: int) -> dict[Group, tuple[int, ...]]:
    """Return the sharding groups in which a rank takes part, beginning with the rank's own group.

    If any version was written with a different number of pipeline stages or tensor slices, all
    ranks take part in all groups.

    Args:
        findings: merged summaries of all nodes.
        rank: the rank.

    Returns:
        For each group in which the rank takes part, all ranks that take part in that group.
    """
    topology = findings.topology
    if others := {d for d in findings.written.values() if sharding_groups(d) != topology.groups()}:
        groups = set(topology.groups()).union(*map(sharding_groups, others))
        return dict.fromkeys(sorted(groups), tuple(range(topology.world_size)))
    node, at = topology.nodes[rank], topology.coordinates[rank]
    own = at.pp, at.tp
    reads = [g for g in topology.groups() if g != own and topology.readers(node, *g) == (rank,)]
    parts: dict[Group, tuple[int, ...]] = {}
    holders: dict[Group, set[str]] = {group: set() for group in (own, *reads)}
    for head in chain.from_iterable(findings.by_label.values()):
        if (nodes := holders.get((head.coordinate.pp, head.coordinate.tp))) is not None:
            nodes.add(head.node)
    for group, nodes in holders.items():
        if group == own or node in nodes:
            readers = {reader for holder in nodes for reader in topology.readers(holder, *group)}
            parts[group] = tuple(sorted(readers.union(topology.group(*group))))
    return parts


_MOST_NAMED = 6


class Head(NamedTuple):
    """The header of an arena without its block table."""

    label: VersionId
    state: ArenaState
    coordinate: Coordinate
    node: str
    path: str
    degrees: Degrees  # Parallel degrees of the job that wrote the arena
    job_id: str

    @property
    def place(self) -> tuple[str, str]:
        """The node and the local rank to which the arena's file belongs.

        A local rank has several arena files (slots), which count as one place. A file may contain
        bytes of another rank.
        """
        return self.node, self.path.partition("-slot")[0]

    def __str__(self) -> str:
        return (
            f"{self.label} of {self.coordinate}, {self.state}, in {self.path} on node {self.node}"
        )


class Summary(NamedTuple):
    """The arenas that one rank reports, without block tables."""

    node: str
    heads: tuple[Head, ...]
    problems: tuple[str, ...]  # Reasons why files could not be read

    def encode(self) -> bytes:
        """Encode with msgpack, about 40 bytes per arena."""
        jobs = list(
            dict.fromkeys((h.job_id, h.degrees.pp, h.degrees.dp, h.degrees.tp) for h in self.heads)
        )
        rows = []
        for h in self.heads:
            job = jobs.index((h.job_id, h.degrees.pp, h.degrees.dp, h.degrees.tp))
            at = h.coordinate
            rows.append(
                [h.label.incarnation, h.label.step, str(h.state), at.pp, at.dp, at.tp, h.path, job]
            )
        body: bytes = msgpack.packb([self.node, jobs, rows, self.problems])
        return body

    @classmethod
    def decode(
        cls, body: bytes, topology: Topology, known: dict[tuple[int, int], VersionId]
    ) -> Summary:
        """Decode the output of :meth:`encode`.

        Args:
            body: the encoded summary.
            topology: source of the coordinate objects; all summaries share them, to save memory.
            known: version ids decoded so far; all summaries share them, to save memory.
        """
        node, jobs, rows, problems = msgpack.unpackb(body)
        written = [(Degrees(*degrees), job_id) for job_id, *degrees in jobs]
        heads = []
        for incarnation, step, state, pp, dp, tp, path, job in rows:
            label = known.get((incarnation, step))
            if label is None:
                label = known[incarnation, step] = VersionId(incarnation, step)
            at = topology.coordinate_at(pp, dp, tp)
            heads.append(Head(label, _STATES[state], at, node, path, *written[job]))
        return cls(node, tuple(heads), tuple(problems))


_STATES = {str(state): state for state in ArenaState}


@dataclass(frozen=True)
class InventorySummary:
    """The merged summaries of all nodes."""

    job_id: str
    topology: Topology
    # SEALED and COMMITTED arenas that can be used, by version. All arenas listed for one version
    # were written in the same layout.
    by_label: Mapping[VersionId, tuple[Head, ...]]
    unfinished: tuple[Head, ...]  # Arenas of the job that were being written when their rank died
    # Descriptions of layouts that cannot be used, each with the newest version in it
    misfits: tuple[str, ...]
    notes: tuple[str, ...]  # Descriptions of all arenas that are not used
    newest_committed: VersionId | None  # Newest version marked committed in any arena of the job
    present: tuple[str, ...]  # Nodes that sent a summary or run ranks of the job
    bare: tuple[str, ...]  # Present nodes without an arena of the job

    @property
    def empty(self) -> bool:
        return not (self.by_label or self.unfinished or self.misfits)

    def holders(self, label: VersionId) -> frozenset[tuple[str, str]]:
        """Return the places (node, local rank) that have a complete arena of a version.

        Arenas that hold only blocks decoded by a recovery do not count, because ranks do not seal
        versions in such arenas.
        """
        return frozenset(head.place for head in self.by_label[label] if not is_decoded(head.path))

    @cached_property
    def written(self) -> dict[VersionId, Degrees]:
        """Parallel degrees of the job that wrote each version."""
        return {label: heads[0].degrees for label, heads in self.by_label.items()}

    def committed(self, label: VersionId) -> bool:
        return any(head.state is ArenaState.COMMITTED for head in self.by_label[label])

    def explain(self, label: VersionId, gaps: Sequence[str], count: int) -> str:
        """Explain why a version is incomplete: its gaps, and the ranks without an arena of it.

        Args:
            label: the version.
            gaps: descriptions of the first gaps.
            count: total number of gaps.
        """
        text = f"not whole, {count} missing: {listing(gaps, count=count)}"
        found = {head.coordinate for head in self.by_label[label]}
        gone = [c for c in self.written[label].coordinates() if c not in found]
        if gone:
            named = [self._whereabouts(c) for c in gone[:_MOST_NAMED]]
            text += f". No arena of this version from {listing(named, count=len(gone))}"
        return f"{text}. {self._nodes()}"

    def why_no_candidate(self) -> str:
        """Explain to the user why there is no version to choose from, and what to do."""
        if self.empty:
            return (
                f"no arena of job {self.job_id!r} was found. {self._nodes()}. Either the job never "
                "took a snapshot, or every node that held one is gone"
            )
        if self.misfits:
            return (
                f"found {listing(self.misfits)}, expected {self.topology.degrees} and the running "
                "model's layout. Start with the degrees and the model that wrote the memory; or "
                f"write a checkpoint from it with `reft persist --job {self.job_id} --out DIR`, "
                "convert that with `python -m deepspeed.checkpoint.ds_to_universal` and load it "
                "into a new job; or remove the memory with `reft clean` to start from the beginning"
            )
        return (
            f"only unfinished versions were found: {listing(map(str, self.unfinished))}. "
            f"{self._nodes()}. The job stopped before its first snapshot was complete on every rank"
        )

    def _whereabouts(self, coordinate: Coordinate) -> str:
        usable = (head for heads in self.by_label.values() for head in heads)
        seen = [head for head in (*usable, *self.unfinished) if head.coordinate == coordinate]
        if not seen:
            return f"{coordinate} (nothing of it on any node that is present: its node is lost)"
        seen.sort(key=lambda head: head.label, reverse=True)
        held = ", ".join(f"{head.label} {head.state}" for head in seen)
        return f"{coordinate} (node {seen[0].node} holds only {held})"

    def _nodes(self) -> str:
        text = f"Nodes present: {listing(self.present)}"
        if self.bare:
            text += f"; without memory of this job (new or emptied): {listing(self.bare)}"
        return text


def listing(items: Iterable[str], most: int = _MOST_NAMED, *, count: int | None = None) -> str:
    """Join the first ``most`` items with commas, and append the number of the others."""
    every = list(items)
    count = len(every) if count is None else count
    if count > most:
        return f"{', '.join(every[:most])} and {count - most} more"
    return ", ".join(every) or "none"


def summarize(node: str, records: Iterable[ArenaRecord], problems: Sequence[str] = ()) -> Summary:
    heads = (
        Head(h.label, h.state, h.coordinate, r.node, r.path, h.degrees, h.job_id)
        for r in records
        for h in (r.header,)
    )
    return Summary(node, tuple(heads), tuple(problems))


def merge_summaries(
    summaries: Sequence[Summary], topology: Topology, *, job_id: str, any_layout: bool = False
) -> InventorySummary:
    """Merge the summaries of all nodes.

    Args:
        summaries: summaries of all ranks.
        topology: placement of the running job.
        job_id: name of the job.
        any_layout: whether versions of other layouts can be used.
    """
    by_label: dict[VersionId, list[Head]] = {}
    unfinished: list[Head] = []
    misfits: dict[str, VersionId] = {}
    ignored: dict[str, list[str]] = {}
    committed: list[VersionId] = []
    with_memory: set[str] = set()

    def leave_aside(head: Head, why: str) -> None:
        ignored.setdefault(why, []).append(f"{head.path} on node {head.node}")

    for head in (head for summary in summaries for head in summary.heads):
        if head.job_id != job_id:
            leave_aside(head, f"of another job, {head.job_id!r} instead of {job_id!r}")
            continue
        with_memory.add(head.node)
        if head.state is ArenaState.COMMITTED:
            committed.append(head.label)
        if what := _misfit(head, topology, any_layout=any_layout):
            misfits[what] = max(misfits.get(what, head.label), head.label)
            leave_aside(head, f"of another layout, {what}")
        elif head.state.whole:
            by_label.setdefault(head.label, []).append(head)
        else:
            unfinished.append(head)
            leave_aside(head, f"not finished ({head.label} {head.state})")
    for label, heads in by_label.items():
        # If arenas of several layouts have the same version id, use those of the running job's
        # layout, or if there are none, of the largest layout.
        found = {head.degrees for head in heads}
        largest = max(found, key=lambda d: (d == topology.degrees, d.world_size, d.pp, d.dp))
        for head in (head for head in heads if head.degrees != largest):
            leave_aside(head, f"of another layout under the same name, {label}")
        by_label[label] = [head for head in heads if head.degrees == largest]
    present = tuple(sorted({s.node for s in summaries} | set(topology.nodes)))
    notes = [
        f"not used, {why}: {listing(sorted(places), count=len(places))}"
        for why, places in sorted(ignored.items())
    ]
    return InventorySummary(
        job_id=job_id,
        topology=topology,
        by_label={label: tuple(heads) for label, heads in by_label.items()},
        unfinished=tuple(sorted(unfinished, key=lambda head: (head.node, head.path))),
        misfits=tuple(f"{what} (newest {label})" for what, label in sorted(misfits.items())),
        notes=(
            *notes,
            *sorted({f"node {s.node}: {problem}" for s in summaries for problem in s.problems}),
        ),
        newest_committed=max(committed, default=None),
        present=present,
        bare=tuple(node for node in present if node not in with_memory),
    )


def _misfit(arena: ArenaHeader | Head, topology: Topology, *, any_layout: bool) -> str | None:
    """Explain why the layout of an arena cannot be used by the running job; None if it can.

    Args:
        arena: header of the arena, which belongs to this job.
        topology: placement of the running job.
        any_layout: whether other layouts can be used (:mod:`reft.relayout.element_map`).
    """
    written, at = arena.degrees, arena.coordinate
    if written != topology.degrees and not any_layout:
        return f"{written} instead of {topology.degrees}"
    if not (0 <= at.pp < written.pp and 0 <= at.dp < written.dp and 0 <= at.tp < written.tp):
        return f"coordinate {at} outside {written}"
    return None
