"""What it costs one rank to plan a recovery, against the size of the job: pure computation, no
processes.

The job is Llama-2 34B under ZeRO-1 with one copy on the ring, one node of eight ranks lost. What
the other ranks would send is made here with the code that would send it; what is timed is what one
rank then does:

- agree: read the summaries of all ranks, sift them, and decide from the verdicts of all sharding
  groups;
- tables: unpack the block tables of its own sharding group;
- group: judge the versions, choose the sources and cut the transfers into waves, for its own group.

The rank measured is the first one of the lost node, which fetches everything. Only "agree" grows
with the job; the rest depends on the size of the sharding group alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from common import MIB
from results import machine

from reft.grid import Coordinate, Degrees, Topology, VersionId
from reft.memory.header import ArenaHeader, ArenaState, Entry
from reft.protect.placement import place_group
from reft.recover.decide import (
    GroupStatus,
    decide,
    decode_verdicts,
    encode_verdicts,
    judge,
    plan_decided,
)
from reft.recover.inventory import (
    ArenaRecord,
    Inventory,
    Summary,
    arenas_to_report,
    merge_summaries,
    participants,
    summarize,
)
from reft.recover.plan import RecoveryPlan
from reft.recover.transfer import make_moves
from reft.snapshot.plan import SectionSizes, make_shard_plan

PARAMETERS = 34_000_000_000
RANKS_PER_NODE = 8
BLOCK_BYTES = 4 * MIB
HOST_BYTES = 64 * 1024
OLD, NEW = VersionId(1, 99), VersionId(1, 100)
JOB = "llama-2-34b"

SHAPES = {
    "groups of 8": [Degrees(8, 8, 8), Degrees(64, 8, 8), Degrees(256, 8, 8)],
    "64 to 128 groups": [Degrees(8, 8, 8), Degrees(16, 32, 8), Degrees(16, 128, 8)],
}
"""512, 4,096 and 16,384 ranks: by more groups of the same size (no model of 48 layers has so many;
it shows what the number of groups costs), and by larger groups."""


class Job:
    """The memory that a job left behind."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees
        # A node holds the tensor-parallel ranks of one replica of a stage.
        coordinates = tuple(
            Coordinate(pp, dp, tp)
            for pp in range(degrees.pp)
            for dp in range(degrees.dp)
            for tp in range(degrees.tp)
        )
        nodes = [f"node{rank // RANKS_PER_NODE:05}" for rank in range(degrees.world_size)]
        self.written = Topology(degrees, coordinates, tuple(nodes))
        self.lost = nodes[0]
        self.topology = Topology(
            degrees, coordinates, tuple("new" if node == self.lost else node for node in nodes)
        )
        groups = degrees.pp * degrees.tp
        owned = 12 * PARAMETERS // degrees.world_size
        self._sizes = SectionSizes(
            2 * PARAMETERS // groups, (owned,) * degrees.dp, (HOST_BYTES,) * degrees.dp
        )

    def records(self, pp: int, tp: int) -> list[ArenaRecord]:
        """The arenas of one sharding group that are left: two versions a rank, block tables
        included."""
        plan = make_shard_plan(
            self._sizes, place_group(self.written.group_nodes(pp, tp), 1, 0), BLOCK_BYTES
        )
        found = []
        for dp, member in enumerate(plan.members):
            entries = tuple(
                Entry(
                    key=placed.key,
                    start_bytes=placed.block.start_bytes,
                    nbytes=placed.block.nbytes,
                    image_bytes=self._image_bytes(placed.key.section, placed.key.member),
                    arena_offset=placed.arena_offset,
                    checksum=hash((placed.key.section, placed.key.member, placed.key.index))
                    % 2**63,
                    owner=placed.key.member == dp,
                )
                for placed in member.blocks
            )
            found += self._pair(Coordinate(pp, dp, tp), entries)
        return [record for record in found if record.node != self.lost]

    def _image_bytes(self, section: str, member: int) -> int:
        sizes = self._sizes
        return {
            "replicated": sizes.replicated_bytes,
            "owned": sizes.owned_bytes[member],
            "host": sizes.host_bytes[member],
        }[section]

    def _pair(self, at: Coordinate, entries: tuple[Entry, ...]) -> list[ArenaRecord]:
        rank = self.written.rank_of(at)
        header = ArenaHeader(
            job_id=JOB,
            node=self.written.nodes[rank],
            degrees=self.degrees,
            coordinate=at,
            label=OLD,
            state=ArenaState.COMMITTED,
            entries=entries,
            layout="0" * 64,
        )
        return [
            ArenaRecord(
                header.node,
                f"rank{rank % RANKS_PER_NODE}-slot{slot}.arena",
                replace(header, label=label),
            )
            for slot, label in enumerate((OLD, NEW))
        ]

    def summaries(self) -> list[bytes]:
        """What every rank tells all others. Block tables are no part of it."""
        told = []
        for rank, at in enumerate(self.topology.coordinates):
            node = self.topology.nodes[rank]
            records = [] if node == "new" else self._pair(at, ())
            mine = arenas_to_report(records, self.topology, rank, job_id=JOB)
            told.append(summarize(node, mine).encode())
        return told


def measure(degrees: Degrees) -> dict[str, Any]:
    """What one rank does, in seconds, and what it is sent."""
    job = Job(degrees)
    topology, rank, group = job.topology, 0, (0, 0)
    told = job.summaries()
    mine = job.records(*group)
    by_node: dict[str, list[ArenaRecord]] = {}
    for record in mine:
        by_node.setdefault(record.node, []).append(record)
    tables = [Inventory(node, tuple(found)).pack() for node, found in by_node.items()]

    marks = [time.process_time()]
    labels: dict[tuple[int, int], VersionId] = {}
    summaries = [Summary.decode(body, topology, labels) for body in told]
    findings = merge_summaries(summaries, topology, job_id=JOB)
    parts = participants(findings, rank)
    marks.append(time.process_time())

    records = [record for body in tables for record in Inventory.unpack(body).arenas]
    marks.append(time.process_time())

    sources = judge(group, records, findings.written)
    verdict = encode_verdicts({label: GroupStatus.of(found) for label, found in sources.items()})
    marks.append(time.process_time())

    decision = decide(findings, {each: decode_verdicts(verdict) for each in topology.groups()})
    marks.append(time.process_time())

    assert not hasattr(decision, "reasons"), decision
    plan = plan_decided(decision, findings, group, sources[NEW], records)
    moves = make_moves(plan, topology)
    marks.append(time.process_time())

    assert isinstance(plan, RecoveryPlan)
    assert list(parts) == [group]
    steps = [after - before for before, after in pairwise(marks)]
    return {
        "ranks": degrees.world_size,
        "degrees": str(degrees),
        "groups": degrees.pp * degrees.tp,
        "blocks_of_the_group": len(sources[NEW].stored or {})
        or sum(map(len, sources[NEW].images.values())),
        "summary_bytes": sum(map(len, told)),
        "table_bytes": sum(map(len, tables)),
        "agree_secs": steps[0] + steps[3],
        "tables_secs": steps[1],
        "group_secs": steps[2] + steps[4],
        "secs": sum(steps),
        "moves": len(moves),
    }


def best(degrees: Degrees, trials: int) -> dict[str, Any]:
    """The fastest of several trials: what else runs on the machine only adds."""
    return min((measure(degrees) for _ in range(trials)), key=lambda found: found["secs"])


def measure_all(trials: int = 3) -> dict[str, Any]:
    """Every shape; for the benchmark of the control plane."""
    return {
        "model": "Llama-2 34B, ZeRO-1, one copy, a node of 8 ranks lost; computed, no processes",
        "trials": trials,
        "shapes": {name: [best(d, trials) for d in shapes] for name, shapes in SHAPES.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [
        result["model"],
        f"{'':20}{'ranks':>8}{'groups':>8}{'agree s':>10}"
        f"{'tables s':>10}{'group s':>10}{'all s':>8}",
    ]
    for name, rows in result["shapes"].items():
        lines += [
            f"{name:20}{r['ranks']:8}{r['groups']:8}{r['agree_secs']:10.3f}{r['tables_secs']:10.3f}"
            f"{r['group_secs']:10.3f}{r['secs']:8.3f}"
            for r in rows
        ]
    return "\n".join(lines)


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--trials", type=int, default=3, help="of each size; the fastest counts (default 3)"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    options = made.parse_args()
    result = {**measure_all(options.trials), "machine": machine()}
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
