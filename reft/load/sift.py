"""Sorting what was found in memory: which arenas may serve, which are left aside, and why.

Pure. Everything that is left aside is named, so that a person who expected a recovery sees what is
missing and what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reft.load.inventory import ArenaRecord, Inventory
from reft.load.sources import Gap
from reft.store.label import Label
from reft.topology import Coordinate, Topology

LayoutSpec = str | Mapping[tuple[int, int], str] | None
"""Expected layout hash: one for the whole job, one per (pp, tp), or any (None)."""

_MOST_NAMED = 6


@dataclass(frozen=True)
class Sifted:
    """The arenas of one job.

    Attributes:
        by_label: SEALED and COMMITTED arenas of the right degrees and layout, per label.
        unfinished: arenas of the job that were being written when their rank died.
        misfits: what other degrees or layouts were found, in words, with their newest label.
        notes: everything left aside, in words.
        present: nodes that sent an inventory or have ranks.
        bare: those of them that hold no arena of this job.
    """

    job_id: str
    topology: Topology
    by_label: Mapping[Label, tuple[ArenaRecord, ...]]
    unfinished: tuple[ArenaRecord, ...]
    misfits: tuple[str, ...]
    notes: tuple[str, ...]
    newest_committed: Label | None
    present: tuple[str, ...]
    bare: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not (self.by_label or self.unfinished or self.misfits)

    @property
    def layout_mismatch(self) -> bool:
        return bool(self.misfits)

    def explain(self, label: Label, gaps: Sequence[Gap]) -> str:
        """Why ``label`` is not whole: what is missing, and whose arenas are gone."""
        text = f"not whole, {len(gaps)} missing: {listing(map(str, gaps))}"
        found = {record.header.coordinate for record in self.by_label[label]}
        gone = [c for c in self.topology.degrees.coordinates() if c not in found]
        if gone:
            text += f". No arena of this version from {listing(self._whereabouts(c) for c in gone)}"
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
                f"layout. Start with the degrees and the model the memory was written with, resume from a "
                f"persisted checkpoint, or remove the memory with `reft clean` to start anew"
            )
        return (
            f"only unfinished versions were found: {listing(map(_describe, self.unfinished))}. "
            f"{self._nodes()}. The job stopped before its first snapshot was complete on every rank"
        )

    def _whereabouts(self, coordinate: Coordinate) -> str:
        usable = (record for records in self.by_label.values() for record in records)
        seen = [r for r in (*usable, *self.unfinished) if r.header.coordinate == coordinate]
        if not seen:
            return f"{coordinate} (nothing of it on any node that is present: its node is lost)"
        seen.sort(key=lambda r: r.header.label, reverse=True)
        held = ", ".join(f"{r.header.label} {r.header.state}" for r in seen)
        return f"{coordinate} (node {seen[0].node} holds only {held})"

    def _nodes(self) -> str:
        text = f"Nodes present: {listing(self.present)}"
        if self.bare:
            text += f"; without memory of this job (new or emptied): {listing(self.bare)}"
        return text


def listing(items: Iterable[str], most: int = _MOST_NAMED) -> str:
    """A comma-separated list that stays readable: the first few, then how many more."""
    every = list(items)
    if len(every) > most:
        return f"{', '.join(every[:most])} and {len(every) - most} more"
    return ", ".join(every) or "none"


def sift(inventories: Sequence[Inventory], topology: Topology, *, job_id: str, layout: LayoutSpec) -> Sifted:
    """Sort the arenas of all inventories; see :class:`Sifted`."""
    by_label: dict[Label, list[ArenaRecord]] = {}
    unfinished: list[ArenaRecord] = []
    misfits: dict[str, Label] = {}
    ignored: dict[str, list[str]] = {}
    ours: list[ArenaRecord] = []
    for record in _records(inventories):
        header = record.header
        place = f"{record.path} on node {record.node}"
        if header.job_id != job_id:
            ignored.setdefault(f"of another job, {header.job_id!r} instead of {job_id!r}", []).append(place)
            continue
        ours.append(record)
        misfit = _misfit(record, topology, layout)
        if misfit:
            misfits[misfit] = max(misfits.get(misfit, header.label), header.label)
            ignored.setdefault(f"of another layout, {misfit}", []).append(place)
        elif record.usable:
            by_label.setdefault(header.label, []).append(record)
        else:
            unfinished.append(record)
            ignored.setdefault(f"not finished ({header.label} {header.state})", []).append(place)
    present = tuple(sorted({i.node for i in inventories} | set(topology.nodes)))
    return Sifted(
        job_id=job_id,
        topology=topology,
        by_label={label: tuple(records) for label, records in by_label.items()},
        unfinished=tuple(unfinished),
        misfits=tuple(f"{what} (newest {label})" for what, label in sorted(misfits.items())),
        notes=_notes(inventories, ignored),
        newest_committed=max((r.header.label for r in ours if r.committed), default=None),
        present=present,
        bare=tuple(node for node in present if node not in {r.node for r in ours}),
    )


def _records(inventories: Sequence[Inventory]) -> list[ArenaRecord]:
    """Every arena once, in (node, name) order: several ranks of a node may have sent the same ones."""
    unique: dict[tuple[str, str], ArenaRecord] = {}
    for inventory in inventories:
        for record in inventory.arenas:
            unique.setdefault((record.node, record.path), record)
    return [unique[place] for place in sorted(unique)]


def _misfit(record: ArenaRecord, topology: Topology, layout: LayoutSpec) -> str | None:
    header = record.header
    if header.degrees != topology.degrees:
        return f"{header.degrees} instead of {topology.degrees}"
    at = header.coordinate
    limits = (topology.degrees.pp, topology.degrees.dp, topology.degrees.tp)
    if not all(0 <= i < limit for i, limit in zip((at.pp, at.dp, at.tp), limits, strict=True)):
        return f"coordinate {at} outside {topology.degrees}"
    expected = layout.get((at.pp, at.tp)) if isinstance(layout, Mapping) else layout
    if expected is not None and header.layout != expected:
        return f"layout {header.layout[:12]} instead of {expected[:12]} at pp{at.pp}.tp{at.tp}"
    return None


def _describe(record: ArenaRecord) -> str:
    header = record.header
    return f"{header.label} of {header.coordinate}, {header.state}, in {record.path} on node {record.node}"


def _notes(inventories: Sequence[Inventory], ignored: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    problems = sorted({f"node {i.node}: {problem}" for i in inventories for problem in i.problems})
    return tuple(f"left aside, {why}: {listing(places)}" for why, places in sorted(ignored.items())) + tuple(
        problems
    )
