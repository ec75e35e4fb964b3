"""Who takes part in the recovery of which sharding group, and who speaks for which arena. Pure.

A group's members take part, and on every node that holds arenas of the group but runs no member of it one
rank that reads there: after a restart coordinates may run anywhere (P7).
"""

from __future__ import annotations

from collections.abc import Iterable

from reft.grid import Topology
from reft.recover.decide import Group
from reft.recover.inventory import ArenaRecord
from reft.recover.sift import LayoutSpec, Sifted, misfit


def spoken_for(
    records: Iterable[ArenaRecord],
    topology: Topology,
    rank: int,
    *,
    job_id: str,
    layout: LayoutSpec = None,
    any_dp: bool = False,
) -> list[ArenaRecord]:
    """The arenas of its node that a rank speaks for, so that each is told of once: those of sharding groups
    that it reads for, as the first of the node to do so; the first rank of the node also speaks for
    arenas that cannot serve."""
    node = topology.nodes[rank]

    def speaker(record: ArenaRecord) -> int:
        at = record.header.coordinate
        if not _fits(record, topology, job_id, layout, any_dp):
            return topology.local_ranks(node)[0]
        return topology.readers(node, at.pp, at.tp)[0]

    return [record for record in records if speaker(record) == rank]


def tables_of(
    records: Iterable[ArenaRecord],
    groups: Iterable[Group],
    topology: Topology,
    *,
    job_id: str,
    layout: LayoutSpec = None,
    any_dp: bool = False,
) -> dict[Group, list[ArenaRecord]]:
    """The whole arenas that may serve each of these sharding groups: of this job, its degrees and its layout,
    whatever else has the same label (P7)."""
    tables: dict[Group, list[ArenaRecord]] = {group: [] for group in groups}
    for record in records:
        at = record.header.coordinate
        if record.usable and (at.pp, at.tp) in tables and _fits(record, topology, job_id, layout, any_dp):
            tables[at.pp, at.tp].append(record)
    return tables


def _fits(record: ArenaRecord, topology: Topology, job_id: str, layout: LayoutSpec, any_dp: bool) -> bool:
    return record.header.job_id == job_id and not misfit(record, topology, layout, any_dp=any_dp)


def parts_of(sifted: Sifted, rank: int) -> dict[Group, tuple[int, ...]]:
    """The sharding groups that a rank takes part in, its own first, and all ranks that take part in each."""
    topology = sifted.topology
    node, at = topology.nodes[rank], topology.coordinates[rank]
    own = at.pp, at.tp
    reads = [g for g in topology.groups() if g != own and topology.readers(node, *g) == (rank,)]
    parts: dict[Group, tuple[int, ...]] = {}
    for group, nodes in sifted.nodes_with([own, *reads]).items():
        if group == own or node in nodes:
            readers = {reader for holder in nodes for reader in topology.readers(holder, *group)}
            parts[group] = tuple(sorted(readers.union(topology.group(*group))))
    return parts
