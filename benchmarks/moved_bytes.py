"""How many bytes a recovery moves between nodes when one node of a job is replaced, leaves or
joins, and the fewest that any assignment of ranks to nodes would move.

Computed from the plan that the recovery itself makes, without processes. The job is ZeRO-1 with one
pipeline stage: 2 bytes per parameter are on every rank (weights), 12 are cut into one partition for
each rank. A node is one rank. Host state (a few kilobytes) and the version that protects the
restored state again (one step's exchange) are left out.

The minimum: each rank's weights and partition, less what is in the memory of its own node, with the
best assignment of ranks to nodes (minimum-weight matching). A block that a rank decodes from parity
counts as its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx
from results import machine

from reft.grid import Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.arena import arena_name, decoded_name
from reft.memory.header import ArenaHeader, ArenaState, Entry
from reft.protect.codes import Scheme
from reft.protect.placement import place_group
from reft.recover.decide import GroupStatus, ImageRange, decide, judge, plan_decided
from reft.recover.inventory import ArenaRecord, merge_summaries, summarize
from reft.recover.plan import Fetch, RecoveryPlan
from reft.snapshot.plan import SectionSizes, ShardPlan, make_shard_plan

SCHEMES = ("arc", "aec", "rs:2")
BLOCK_BYTES = 4096
PARAMETERS = 720_720  # A multiple of every degree up to 16, so that all partitions are equal
REPLICATED_BYTES, OWNED_BYTES = 2 * PARAMETERS, 12 * PARAMETERS
HOST_BYTES = 64
JOB, LABEL, GROUP = "job", VersionId(1, 100), (0, 0)
STATE = (Section.REPLICATED, Section.OWNED)


@dataclass(frozen=True)
class Memory:
    """The memory of a job of one rank per node, and which of its nodes are gone.

    Attributes:
        members: data-parallel degree; the ranks were on the nodes ``n0``, ``n1``, ...
        scheme: protection.
        lost: nodes whose memory cannot be read.
    """

    members: int
    scheme: Scheme
    lost: frozenset[str] = frozenset()

    @property
    def plan(self) -> ShardPlan:
        sizes = SectionSizes(
            REPLICATED_BYTES,
            (OWNED_BYTES // self.members,) * self.members,
            (HOST_BYTES,) * self.members,
        )
        nodes = node_names(self.members)
        placement = place_group(nodes, self.scheme.copies, self.scheme.parities)
        return make_shard_plan(sizes, placement, BLOCK_BYTES)

    def records(self) -> list[ArenaRecord]:
        plan = self.plan
        return [
            ArenaRecord(node, arena_name(0, 0), self._header(plan, dp))
            for dp, node in enumerate(node_names(self.members))
            if node not in self.lost
        ]

    def _header(self, plan: ShardPlan, dp: int) -> ArenaHeader:
        sizes = {
            Section.REPLICATED: REPLICATED_BYTES,
            Section.OWNED: OWNED_BYTES // self.members,
            Section.HOST: HOST_BYTES,
        }
        entries = tuple(
            Entry(
                key=placed.key,
                start_bytes=placed.block.start_bytes,
                nbytes=placed.block.nbytes,
                image_bytes=sizes.get(placed.key.section, placed.block.nbytes),
                arena_offset=placed.arena_offset,
                checksum=hash(placed.key),
                owner=placed.key.member == dp and placed.key.section is not Section.PARITY,
            )
            for placed in plan.members[dp].blocks
        )
        return ArenaHeader(
            job_id=JOB,
            node=f"n{dp}",
            degrees=Degrees(1, self.members, 1),
            coordinate=Coordinate(0, dp, 0),
            label=LABEL,
            state=ArenaState.COMMITTED,
            entries=entries,
            layout="layout",
            scheme=str(self.scheme),
            coding="" if plan.code is None else plan.code.describe(),
        )


def node_names(number: int) -> tuple[str, ...]:
    return tuple(f"n{dp}" for dp in range(number))


def place_ranks(nodes: Sequence[str], racks: Mapping[str, str] | None = None) -> Topology:
    """Place one rank on each node, in this order."""
    degrees = Degrees(1, len(nodes), 1)
    names = () if racks is None else tuple(racks[node] for node in nodes)
    return Topology(degrees, degrees.coordinates(), tuple(nodes), racks=names)


def partition(dp: int, members: int) -> tuple[int, int]:
    """Return begin and end of a rank's partition in the whole owned state."""
    length = OWNED_BYTES // members
    return dp * length, (dp + 1) * length


def needed_ranges(dp: int, old: int, new: int) -> list[ImageRange]:
    """Return the ranges of the old ranks' images of which a new rank's images consist."""
    found = [ImageRange(Coordinate(0, 0, 0), Section.REPLICATED, 0, REPLICATED_BYTES)]
    begin, end = partition(dp, new)
    for member in range(old):
        first, last = partition(member, old)
        low, high = max(begin, first), min(end, last)
        if low < high:
            at = Coordinate(0, member, 0)
            found.append(ImageRange(at, Section.OWNED, low - first, high - low))
    return found


def make_plan(memory: Memory, topology: Topology, records: Sequence[ArenaRecord]) -> RecoveryPlan:
    """Plan the recovery as the ranks of a running job do."""
    inventory = [summarize(record.node, [record]) for record in records]
    findings = merge_summaries(inventory, topology, job_id=JOB, any_layout=True)
    sources = judge(GROUP, records, findings.written)
    statuses = {label: GroupStatus.of(found) for label, found in sources.items()}
    decision = decide(findings, {GROUP: statuses})
    assert not hasattr(decision, "reasons"), decision
    new = topology.degrees.dp
    wanted = {
        at: needed_ranges(at.dp, memory.members, new)
        for at in topology.coordinates
        if new != memory.members and not decision.decodes
    }
    return plan_decided(decision, findings, GROUP, sources[LABEL], records, wanted=wanted)


def decode(plan: RecoveryPlan, topology: Topology, records: Sequence[ArenaRecord]) -> list[Any]:
    """Return the arenas that hold the blocks which the plan decodes."""
    made = []
    for number, (at, rebuild) in enumerate(sorted(plan.rebuilds.items())):
        node = topology.node_of(at)
        entries = tuple(
            Entry(b.key, b.start_bytes, b.nbytes, REPLICATED_BYTES, 0, hash(b.key), owner=False)
            for b in rebuild.blocks
        )
        header = replace(records[0].header, node=node, entries=entries)
        made.append(ArenaRecord(node, decoded_name(str(at), number), header))
    return made


def between_nodes(fetches: Mapping[Coordinate, Iterable[Fetch]], topology: Topology) -> int:
    """Return the bytes of state that cross the network."""
    return sum(
        fetch.nbytes
        for at, each in fetches.items()
        for fetch in each
        if fetch.node != topology.node_of(at) and fetch.key.section is not Section.HOST
    )


@dataclass(frozen=True)
class Recovery:
    """What one recovery moves, in bytes.

    Attributes:
        restored: bytes that cross the network to restore all ranks.
        decoding: bytes that cross the network to decode lost blocks before.
        decoded: bytes of lost blocks, each counted once.
        fetches: the plan's sources, by rank.
    """

    restored: int
    decoding: int
    decoded: int
    fetches: Mapping[Coordinate, Sequence[Fetch]]

    @property
    def moved(self) -> int:
        return self.restored + self.decoding


def recover(memory: Memory, topology: Topology) -> Recovery:
    """Plan a recovery; what is lost is decoded first."""
    records = memory.records()
    first = plan = make_plan(memory, topology, records)
    if first.rebuilds:
        plan = make_plan(memory, topology, [*records, *decode(first, topology, records)])
        assert not plan.rebuilds
    inputs = {at: rebuild.fetches for at, rebuild in first.rebuilds.items()}
    return Recovery(
        restored=between_nodes(plan.fetches, topology),
        decoding=between_nodes(inputs, topology),
        decoded=sum(rebuild.nbytes for rebuild in first.rebuilds.values()),
        fetches=plan.fetches,
    )


def find_minimum(memory: Memory, nodes: Collection[str], decoded: int) -> int:
    """Return the fewest bytes that any assignment of ranks to ``nodes`` moves.

    Args:
        memory: the memory of the job.
        nodes: nodes on which the job goes on; new ones hold nothing.
        decoded: bytes of lost blocks; each is at hand where it is decoded.
    """
    old, new = memory.members, len(nodes)
    kept = {record.node: record.header.entries for record in memory.records()}
    held = {
        node: {
            section: sorted(
                (
                    e.start_bytes + partition(e.key.member, old)[0] * (section is Section.OWNED),
                    e.nbytes,
                )
                for e in kept.get(node, ())
                if e.key.section is section
            )
            for section in STATE
        }
        for node in nodes
    }
    graph = networkx.Graph()
    for node in nodes:
        weights = sum(nbytes for _, nbytes in held[node][Section.REPLICATED])
        for dp in range(new):
            begin, end = partition(dp, new)
            own = sum(
                max(0, min(end, start + nbytes) - max(begin, start))
                for start, nbytes in held[node][Section.OWNED]
            )
            graph.add_edge(node, dp, weight=weights + own)
    pairs = networkx.max_weight_matching(graph, maxcardinality=True)
    at_hand = sum(graph.edges[pair]["weight"] for pair in pairs)
    return new * REPLICATED_BYTES + OWNED_BYTES - at_hand - decoded


def measure(members: int, scheme: Scheme) -> dict[str, dict[str, float]]:
    """Return what each event moves and the minimum, as parts of the state (weights and optimizer of
    one replica)."""
    old = node_names(members)
    middle = members // 2
    without = (*old[:middle], *old[middle + 1 :])
    events = {
        "replaced": (old[middle], (*old[:middle], "new", *old[middle + 1 :])),
        # As before ranks were kept: in the order of the names, the new node's last
        "replaced, ranks by name": (old[0], (*old[1:], "new")),
        "the last leaves": (old[-1], old[:-1]),
        "the middle one leaves": (old[middle], without),
        "joined": (None, (old[0], "new", *old[1:])),
    }
    found = {}
    for event, (lost, nodes) in events.items():
        memory = Memory(members, scheme, frozenset({lost} if lost else ()))
        done = recover(memory, place_ranks(nodes))
        fewest = find_minimum(memory, nodes, done.decoded)
        state = REPLICATED_BYTES + OWNED_BYTES
        found[event] = {
            "moved": done.moved / state,
            "minimum": fewest / state,
            "decoding": done.decoding / state,
        }
    return found


def measure_racks(scheme: Scheme, *, alternate: bool) -> dict[str, float]:
    """Return the bytes between two racks of four nodes, one of which is replaced in its rack,
    without and with the racks known, as parts of the state.

    Args:
        scheme: protection.
        alternate: whether neighbours on the ring are in different racks.
    """
    nodes = [*node_names(3), "new", *node_names(8)[4:]]
    racks = {n: "a" if (i % 2 == 0 if alternate else i < 4) else "b" for i, n in enumerate(nodes)}
    memory = Memory(8, scheme, frozenset({"n3"}))
    found = {}
    for name, known in (("without", None), ("with", racks)):
        topology = place_ranks(nodes, known)
        crossing = sum(
            fetch.nbytes
            for at, fetches in recover(memory, topology).fetches.items()
            for fetch in fetches
            if racks[fetch.node] != racks[topology.node_of(at)]
        )
        found[name] = crossing / (REPLICATED_BYTES + OWNED_BYTES)
    return found


def measure_all(degrees: Sequence[int]) -> dict[str, Any]:
    possible = [
        (name, members)
        for name in SCHEMES
        for members in degrees
        if Scheme.parse(name).why_no_room(members) is None
    ]
    return {
        "what": "computed from recovery plans, in parts of one replica's state; ZeRO-1",
        "events": {
            f"{name}, DP {members}": measure(members, Scheme.parse(name))
            for name, members in possible
        },
        "racks": {
            f"{name}, {order}": measure_racks(Scheme.parse(name), alternate=order == "alternating")
            for name in SCHEMES
            for order in ("rack by rack", "alternating")
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Format the result as Markdown tables."""
    events = list(next(iter(result["events"].values())))
    lines = [f"| | {' | '.join(events)} |", "|---" * (len(events) + 1) + "|"]
    for case, found in result["events"].items():
        cells = [f"{each['moved']:.2f} ({each['minimum']:.2f})" for each in found.values()]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines += ["", "| racks | unknown | known |", "|---|---|---|"]
    lines += [
        f"| {case} | {found['without']:.2f} | {found['with']:.2f} |"
        for case, found in result["racks"].items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--degrees", type=int, nargs="+", default=list(range(2, 17)), help="of data parallelism"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    result = measure_all(options.degrees)
    if options.json:
        print(json.dumps({**result, "machine": machine()}, indent=2))
    else:
        print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
