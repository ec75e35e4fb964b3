"""What was found in memory, without its block tables: which arenas may serve, which are left aside, and why.

Pure. Every rank sums up a part of its node (:func:`summarize`); the summaries of all together
(:func:`put_together`) say who holds which version. Everything that is left aside is named, so that a person
who expected a recovery sees what is missing and what to change. A sharding group's members take part in its
recovery, and on every node that holds arenas of the group but runs no member of it one rank that reads there:
after a restart coordinates may run anywhere (P7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgpack

from reft.grid import Coordinate, Degrees, Topology
from reft.memory.arena import is_decoded
from reft.memory.header import ArenaHeader, ArenaState
from reft.naming import Label
from reft.recover.inventory import ArenaRecord


def arenas_to_tell(
    records: Iterable[ArenaRecord], topology: Topology, rank: int, *, job_id: str, any_dp: bool = False
) -> list[ArenaRecord]:
    """The arenas of its node that a rank speaks for, so that each is told of once: those of sharding groups
    that it reads for, as the first of the node to do so; the first rank of the node also speaks for
    arenas that cannot serve."""
    node = topology.nodes[rank]

    def speaker(record: ArenaRecord) -> int:
        at = record.header.coordinate
        if not _fits(record.header, topology, job_id, any_dp):
            return topology.local_ranks(node)[0]
        return topology.readers(node, at.pp, at.tp)[0]

    return [record for record in records if speaker(record) == rank]


def tables_of(
    records: Iterable[ArenaRecord],
    groups: Iterable[Group],
    topology: Topology,
    *,
    job_id: str,
    any_dp: bool = False,
) -> dict[Group, list[ArenaRecord]]:
    """The whole arenas that may serve each of these sharding groups: of this job and its degrees,
    whatever else has the same label (P7)."""
    tables: dict[Group, list[ArenaRecord]] = {group: [] for group in groups}
    for record in records:
        at = record.header.coordinate
        if record.usable and (at.pp, at.tp) in tables and _fits(record.header, topology, job_id, any_dp):
            tables[at.pp, at.tp].append(record)
    return tables


def _fits(header: ArenaHeader, topology: Topology, job_id: str, any_dp: bool) -> bool:
    return header.job_id == job_id and not _misfit(header, topology, any_dp=any_dp)


def parts_of(findings: Findings, rank: int) -> dict[Group, tuple[int, ...]]:
    """The sharding groups that a rank takes part in, its own first, and all ranks that take part in each."""
    topology = findings.topology
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


Group = tuple[int, int]  # a sharding group: (pp, tp)

_MOST_NAMED = 6


class Head(NamedTuple):
    """An arena without its block table: whose bytes of which version lie where."""

    label: Label
    state: ArenaState
    coordinate: Coordinate
    node: str
    path: str
    degrees: Degrees  # of the job that wrote it
    job_id: str

    @property
    def place(self) -> tuple[str, str]:
        """Where arenas lie, whosever bytes they hold: (node, local rank). Slots of one rank are one place."""
        return self.node, self.path.partition("-slot")[0]

    def __str__(self) -> str:
        return f"{self.label} of {self.coordinate}, {self.state}, in {self.path} on node {self.node}"


class Summary(NamedTuple):
    node: str
    heads: tuple[Head, ...]
    problems: tuple[str, ...]  # why files could not be read

    def encode(self) -> bytes:
        """Bytes to send: about 40 per arena."""
        jobs = list(dict.fromkeys((h.job_id, h.degrees.pp, h.degrees.dp, h.degrees.tp) for h in self.heads))
        rows = []
        for h in self.heads:
            job = jobs.index((h.job_id, h.degrees.pp, h.degrees.dp, h.degrees.tp))
            at = h.coordinate
            rows.append([h.label.incarnation, h.label.step, str(h.state), at.pp, at.dp, at.tp, h.path, job])
        body: bytes = msgpack.packb([self.node, jobs, rows, self.problems])
        return body

    @classmethod
    def decode(cls, body: bytes, topology: Topology, known: dict[tuple[int, int], Label]) -> Summary:
        """Inverse of :meth:`encode`. ``known``: labels met so far, shared by all summaries of a job."""
        node, jobs, rows, problems = msgpack.unpackb(body)
        written = [(Degrees(*degrees), job_id) for job_id, *degrees in jobs]
        heads = []
        for incarnation, step, state, pp, dp, tp, path, job in rows:
            label = known.get((incarnation, step))
            if label is None:
                label = known[incarnation, step] = Label(incarnation, step)
            at = topology.coordinate_at(pp, dp, tp)
            heads.append(Head(label, _STATES[state], at, node, path, *written[job]))
        return cls(node, tuple(heads), tuple(problems))


_STATES = {str(state): state for state in ArenaState}


@dataclass(frozen=True)
class Findings:
    job_id: str
    topology: Topology
    # SEALED and COMMITTED arenas of the right degrees and layout, per label. All of one label were written by
    # a job of one data-parallel degree.
    by_label: Mapping[Label, tuple[Head, ...]]
    unfinished: tuple[Head, ...]  # arenas of the job that were being written when their rank died
    misfits: tuple[str, ...]  # what other degrees or layouts were found, in words, with their newest label
    notes: tuple[str, ...]  # everything left aside, in words
    newest_committed: Label | None  # newest label marked committed in any arena of this job
    present: tuple[str, ...]  # nodes that sent a summary or have ranks
    bare: tuple[str, ...]  # those of them that hold no arena of this job

    @property
    def empty(self) -> bool:
        return not (self.by_label or self.unfinished or self.misfits)

    def holders(self, label: Label) -> frozenset[tuple[str, str]]:
        """Places that hold ``label`` whole. What a recovery decoded is further redundancy of its version, not
        a place that seals versions."""
        return frozenset(head.place for head in self.by_label[label] if not is_decoded(head.path))

    @property
    def sizes(self) -> dict[Label, int]:
        """Per label the members of every sharding group when it was written."""
        return {label: heads[0].degrees.dp for label, heads in self.by_label.items()}

    def committed(self, label: Label) -> bool:
        return any(head.state is ArenaState.COMMITTED for head in self.by_label[label])

    def explain(self, label: Label, gaps: Sequence[str], count: int) -> str:
        """Why ``label`` is not whole: what is missing, and whose arenas are gone."""
        text = f"not whole, {count} missing: {listing(gaps, count=count)}"
        found = {head.coordinate for head in self.by_label[label]}
        written = replace(self.topology.degrees, dp=self.sizes[label])
        gone = [c for c in written.coordinates() if c not in found]
        if gone:
            named = [self._whereabouts(c) for c in gone[:_MOST_NAMED]]
            text += f". No arena of this version from {listing(named, count=len(gone))}"
        return f"{text}. {self._nodes()}"

    def why_no_candidate(self) -> str:
        """Why there is no version to look at, and what to do."""
        if self.empty:
            return (
                f"no arena of job {self.job_id!r} was found. {self._nodes()}. Either the job never took a "
                f"snapshot, or every node that held one is gone"
            )
        if self.misfits:
            return (
                f"found {listing(self.misfits)}, expected {self.topology.degrees} and the running model's "
                "layout. Start with the degrees and the model that wrote the memory; or write a checkpoint "
                f"from it with `reft persist --job {self.job_id} --out DIR`, convert that with `python -m "
                "deepspeed.checkpoint.ds_to_universal` and load it into a new job; or remove the memory "
                "with `reft clean` to start from the beginning"
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
    """A comma-separated list that stays readable: the first few, then how many more."""
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


def put_together(
    summaries: Sequence[Summary], topology: Topology, *, job_id: str, any_dp: bool = False
) -> Findings:
    """Put the summaries of all nodes together; see :class:`Findings` and :func:`_misfit`."""
    by_label: dict[Label, list[Head]] = {}
    unfinished: list[Head] = []
    misfits: dict[str, Label] = {}
    ignored: dict[str, list[str]] = {}
    committed: list[Label] = []
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
        if what := _misfit(head, topology, any_dp=any_dp):
            misfits[what] = max(misfits.get(what, head.label), head.label)
            leave_aside(head, f"of another layout, {what}")
        elif head.state.whole:
            by_label.setdefault(head.label, []).append(head)
        else:
            unfinished.append(head)
            leave_aside(head, f"not finished ({head.label} {head.state})")
    for label, heads in by_label.items():
        by_label[label], others = _of_one_dp(heads, topology.degrees.dp)
        for head in others:
            leave_aside(head, f"of another data-parallel degree under the same name, {label}")
    present = tuple(sorted({s.node for s in summaries} | set(topology.nodes)))
    notes = [
        f"not used, {why}: {listing(sorted(places), count=len(places))}"
        for why, places in sorted(ignored.items())
    ]
    return Findings(
        job_id=job_id,
        topology=topology,
        by_label={label: tuple(heads) for label, heads in by_label.items()},
        unfinished=tuple(sorted(unfinished, key=lambda head: (head.node, head.path))),
        misfits=tuple(f"{what} (newest {label})" for what, label in sorted(misfits.items())),
        notes=(*notes, *sorted({f"node {s.node}: {problem}" for s in summaries for problem in s.problems})),
        newest_committed=max(committed, default=None),
        present=present,
        bare=tuple(node for node in present if node not in with_memory),
    )


def _of_one_dp(heads: Sequence[Head], dp: int) -> tuple[list[Head], list[Head]]:
    """Arenas of one label that belong together, and the others: where two degrees gave versions one name,
    those of the running job's degree, else those of the largest."""
    sizes = {head.degrees.dp for head in heads}
    size = dp if dp in sizes else max(sizes)
    return [h for h in heads if h.degrees.dp == size], [h for h in heads if h.degrees.dp != size]


def _misfit(arena: ArenaHeader | Head, topology: Topology, *, any_dp: bool) -> str | None:
    """Why an arena of this job cannot serve the running one, in words. ``any_dp``: one that was written at
    another data-parallel degree may (:mod:`reft.recover.reshape`)."""
    written, at = arena.degrees, arena.coordinate
    if written != topology.degrees and not (
        any_dp and (written.pp, written.tp) == (topology.degrees.pp, topology.degrees.tp)
    ):
        return f"{written} instead of {topology.degrees}"
    if not (0 <= at.pp < written.pp and 0 <= at.dp < written.dp and 0 <= at.tp < written.tp):
        return f"coordinate {at} outside {written}"
    return None
