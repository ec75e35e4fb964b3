"""Where the ranks of a hybrid-parallel job sit, and what versions and blocks are called:
coordinates, nodes, sharding groups, labels, sections. The words that saving, storing and loading
share.

Ranks are reassigned by TorchElastic after every failure, so nothing that outlives a process is
keyed by rank. The key is the coordinate (pp, dp, tp) and the job incarnation (promise P7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

from reft.errors import LayoutError, SizeError


@dataclass(frozen=True, order=True)
class Coordinate:
    """Position of a rank: pipeline stage, data-parallel replica, tensor-parallel slice
    (0-based)."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp}.dp{self.dp}.tp{self.tp}"


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a job; ``pp * dp * tp`` is the world size."""

    pp: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinates(self) -> tuple[Coordinate, ...]:
        """Every coordinate once, in (pp, dp, tp) order."""
        return tuple(
            Coordinate(*c) for c in product(range(self.pp), range(self.dp), range(self.tp))
        )

    def __str__(self) -> str:
        return f"PP{self.pp}xDP{self.dp}xTP{self.tp}"


@dataclass(frozen=True)
class Topology:
    """The placement of one incarnation: which coordinate and which node every global rank has.

    Attributes:
        degrees: parallel degrees.
        coordinates: coordinate of each global rank, each coordinate exactly once.
        nodes: node id of each global rank: ranks with the same one share their memory directory.
        hosts: what fails as one (the failure domain) for each global rank: a host, or what its user
            declared to be one. Empty: every node is a host.
    """

    degrees: Degrees
    coordinates: tuple[Coordinate, ...]
    nodes: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expected = set(self.degrees.coordinates())
        if len(self.coordinates) != len(self.nodes) or set(self.coordinates) != expected:
            raise LayoutError(
                f"found {len(self.coordinates)} ranks at {len(set(self.coordinates))} distinct "
                f"coordinates on {len(self.nodes)} node entries; expected every coordinate of "
                f"{self.degrees} exactly once. reft needs a plain pp x dp x tp grid: expert or "
                f"sequence parallel ranks are not supported."
            )

    @cached_property
    def _rank_by_coordinate(self) -> dict[Coordinate, int]:
        return {c: r for r, c in enumerate(self.coordinates)}

    @cached_property
    def _coordinate_by_place(self) -> dict[tuple[int, int, int], Coordinate]:
        return {(c.pp, c.dp, c.tp): c for c in self.coordinates}

    def coordinate_at(self, pp: int, dp: int, tp: int) -> Coordinate:
        """The coordinate, the topology's own where it has it, which saves making thousands of equal
        ones."""
        return self._coordinate_by_place.get((pp, dp, tp)) or Coordinate(pp, dp, tp)

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    def rank_of(self, coordinate: Coordinate) -> int:
        return self._rank_by_coordinate[coordinate]

    def node_of(self, coordinate: Coordinate) -> str:
        return self.nodes[self.rank_of(coordinate)]

    def group(self, pp: int, tp: int) -> tuple[int, ...]:
        """Global ranks of the sharding group (pp, tp), ordered by dp."""
        return tuple(self.rank_of(Coordinate(pp, dp, tp)) for dp in range(self.degrees.dp))

    def group_nodes(self, pp: int, tp: int) -> tuple[str, ...]:
        """Host of every member of the sharding group (pp, tp), ordered by dp: placement and
        tolerance count what fails as one (P4)."""
        return tuple(self.failure_domains[r] for r in self.group(pp, tp))

    @property
    def failure_domains(self) -> tuple[str, ...]:
        """What fails as one, for each global rank."""
        return self.hosts or self.nodes

    def groups(self) -> tuple[tuple[int, int], ...]:
        """All sharding groups as (pp, tp)."""
        return tuple(product(range(self.degrees.pp), range(self.degrees.tp)))

    @cached_property
    def _ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def local_ranks(self, node: str) -> tuple[int, ...]:
        return self._ranks_by_node.get(node, ())

    def readers(self, node: str, pp: int, tp: int) -> tuple[int, ...]:
        """Ranks that read what a node holds of the sharding group (pp, tp): the group's members
        there; where none of them runs, one of the node's ranks. Empty where no rank runs at all."""
        here = self.local_ranks(node)
        members = tuple(
            r for r in here if (self.coordinates[r].pp, self.coordinates[r].tp) == (pp, tp)
        )
        return members or here[(at := (pp * self.degrees.tp + tp) % max(1, len(here))) : at + 1]


def ring_order(nodes: Sequence[str]) -> tuple[int, ...]:
    """Order the members of a sharding group in a ring whose neighbours sit on distinct nodes.

    Members are dealt out node by node (first of every node, second of every node, ...), so that
    with at most half of the members on one node the successor of a member is on another node.
    With one member per node this is the plain order 0..D-1. Pure; every rank computes the same.

    Args:
        nodes: node id of member d, for d = 0..D-1.
    """
    by_node: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        by_node.setdefault(node, []).append(member)
    queues = sorted(by_node.values(), key=lambda q: (-len(q), q[0]))
    if queues and len(queues[0]) == 1:
        return tuple(range(len(nodes)))
    # Columns of the table "one row per node" laid end to end: two members of one node are as far
    # apart as the number of nodes that still have members.
    ordered = [m for q in queues for m in q]
    stride = len(queues[0])
    return tuple(m for start in range(stride) for m in ordered[start::stride])


def topology(pp: int, dp: int | None = None, tp: int = 1) -> Any:
    """The order of ranks that survives the loss of a node:
    ``PipelineModule(topology=reft.topology(2, 2))``.

    DeepSpeed's own order (pipe, data, model) numbers the data-parallel peers of a stage one after
    the other, and launchers number the ranks of a node one after the other: peers share a node,
    which takes every copy of their stage along. Here a whole replica (pp x tp ranks) comes before
    the next one, so that peers are as far apart as they can be: on different nodes where a replica
    fills at least a node.

    Args:
        pp: pipeline stages.
        dp: data-parallel replicas; left out: as many as the ranks of this start make.
        tp: tensor-parallel degree; its groups stay side by side.

    Returns:
        A ``deepspeed`` ``ProcessTopology`` with the axes data, pipe, model. For an engine without a
        pipeline, ``PipelineParallelGrid(topology=...)`` makes an ``mpu`` of it.

    Raises:
        LayoutError: a degree is below 1.
        SizeError: the ranks of this start make no whole number of replicas.
    """
    if dp is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        dp, rest = divmod(world_size, max(1, pp * tp))
        if rest:
            raise SizeError(
                f"reft.topology found {world_size} ranks, which make no whole replicas of {pp} x "
                f"{tp} ranks; start the job on nodes with a multiple of {pp * tp} trainers"
            )
    from deepspeed.runtime.pipe.topology import ProcessTopology

    degrees = Degrees(pp, dp, tp)
    if min(pp, dp, tp) < 1:
        raise LayoutError(f"reft.topology found {degrees}; write degrees of at least 1")
    return ProcessTopology(axes=["data", "pipe", "model"], dims=[dp, pp, tp])


ALIGNMENT_BYTES = 64
"""Tensor, shard and block boundaries are multiples of this, so that any dtype can be viewed in
place."""


def aligned(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """``nbytes``, rounded up to whole units."""
    return -(-nbytes // unit) * unit


class Section(StrEnum):
    """What a block is part of.

    The stage image has three sections: ``REPLICATED`` is equal on every data-parallel peer,
    ``OWNED`` is the ZeRO partition of one, ``HOST`` what one rank's host knows. Under an erasure
    code a member also stores ``PARITY`` of the replicated section, and its ring peers keep the
    ``CHECKSUMS`` of its replicated blocks, so that what is decoded can be verified. ``GRADIENTS``
    of a ring peer's partition lie beside a version while it is being made, and are no part of it.
    """

    REPLICATED = "replicated"
    OWNED = "owned"
    HOST = "host"
    PARITY = "parity"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"


STATE_SECTIONS = (Section.REPLICATED, Section.OWNED, Section.HOST)
"""The sections that are restored; the others serve to restore them."""


@dataclass(frozen=True, order=True)
class BlockKey:
    """Identity of a block within its sharding group and version."""

    section: Section  # section of the stage image
    # dp index of the shard (replicated), of the owner (owned, host, checksums) or of the member
    # that computed it (parity)
    member: int
    index: int  # position within that shard, 0-based


@dataclass(frozen=True, order=True)
class VersionId:
    """A version of the job's state.

    Ordered by incarnation first: a later incarnation starts from the best version there was, so
    what it commits replaces everything older, also where a node that was cut off ran further."""

    incarnation: int  # 1 for the first start of the job, one more after every restart
    step: int  # optimizer steps that the state has seen (DeepSpeed's ``global_steps``)

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"


def given_up(labels: Iterable[VersionId]) -> dict[VersionId, VersionId]:
    """Versions of a future that the job went back behind, each with the version that says so: one
    of a later incarnation whose step is not higher."""
    line: list[VersionId] = []
    passed: dict[VersionId, VersionId] = {}
    for label in sorted(set(labels), reverse=True):
        later = [at for at in line if at.incarnation > label.incarnation and at.step <= label.step]
        if later:
            passed[label] = later[-1]
        else:
            line.append(label)
    return passed


@dataclass(frozen=True)
class Resize:
    """Other replicas: what a rank takes up that is not a part of an image."""

    old: int
    new: int

    def host_from(self, dp: int) -> int:
        """The old member whose host state the new member ``dp`` takes up: its own where there was
        one, else another one's, for what is equal on all."""
        return dp % self.old

    def is_new(self, dp: int) -> bool:
        """Whether there was no such member before: what is a rank's own is not in the version."""
        return dp >= self.old

    def __str__(self) -> str:
        return f"DP{self.old} to DP{self.new}"


def only_replicas_differ(was: Degrees, now: Degrees) -> bool:
    return was != now and (was.pp, was.tp) == (now.pp, now.tp)
