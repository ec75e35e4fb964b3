"""Coordinates, nodes and sharding groups of ranks; identities of versions, sections and blocks.

TorchElastic reassigns ranks after every failure, so nothing that outlives a process is keyed by
rank. The key is the coordinate (pp, dp, tp) and the job's incarnation (promise P7).
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
    """The placement of one incarnation: coordinate and node of every global rank.

    Attributes:
        degrees: parallel degrees.
        coordinates: coordinate of each global rank; every coordinate occurs exactly once.
        nodes: node id of each global rank; ranks of one node share a memory directory.
        hosts: failure domain of each global rank: a host, or what the user declared as one. Empty
            if every node is a failure domain.
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
        """The topology's own coordinate object if there is one, which avoids thousands of equal
        objects."""
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
        """Failure domain of every member of the sharding group (pp, tp), ordered by dp (P4)."""
        return tuple(self.failure_domains[r] for r in self.group(pp, tp))

    @property
    def failure_domains(self) -> tuple[str, ...]:
        """Failure domain of each global rank."""
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
        """Ranks that read a node's bytes of the sharding group (pp, tp).

        These are the group's members on that node or, if there are none, one of the node's ranks.
        Empty if the node has no rank.
        """
        here = self.local_ranks(node)
        members = tuple(
            r for r in here if (self.coordinates[r].pp, self.coordinates[r].tp) == (pp, tp)
        )
        return members or here[(at := (pp * self.degrees.tp + tp) % max(1, len(here))) : at + 1]


def ring_order(nodes: Sequence[str]) -> tuple[int, ...]:
    """Order the members of a sharding group in a ring whose neighbours are on distinct nodes.

    The ring takes the first member of every node, then the second of every node, and so on. If at
    most half of the members are on one node, the successor of each member is on another node. With
    one member per node, this is the order 0..D-1. Pure; every rank computes the same.

    Args:
        nodes: node id of member d, for d = 0..D-1.
    """
    by_node: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        by_node.setdefault(node, []).append(member)
    queues = sorted(by_node.values(), key=lambda q: (-len(q), q[0]))
    if queues and len(queues[0]) == 1:
        return tuple(range(len(nodes)))
    # In a table with one row for each node, read column by column, the distance between two members
    # of a node is the number of nodes that still have members.
    ordered = [m for q in queues for m in q]
    stride = len(queues[0])
    return tuple(m for start in range(stride) for m in ordered[start::stride])


def topology(pp: int, dp: int | None = None, tp: int = 1) -> Any:
    """An order of ranks that survives the loss of a node:
    ``PipelineModule(topology=reft.topology(2, 2))``.

    DeepSpeed's own order (pipe, data, model) gives consecutive ranks to the data-parallel peers of
    a stage, and launchers place consecutive ranks on one node. Peers then share a node, and its
    loss takes all copies of their stage. In this order, all ranks of a replica (pp x tp) precede
    the next replica, so peers are on different nodes if a replica fills at least one node.

    Args:
        pp: pipeline stages.
        dp: data-parallel replicas; None computes them from the world size.
        tp: tensor-parallel degree; its groups have consecutive ranks.

    Returns:
        A ``deepspeed`` ``ProcessTopology`` with the axes data, pipe, model. For an engine without a
        pipeline, ``PipelineParallelGrid(topology=...)`` turns it into an ``mpu``.

    Raises:
        LayoutError: a degree is below 1.
        SizeError: the world size is not a multiple of the ranks of a replica.
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
    """``nbytes``, rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


class Section(StrEnum):
    """The section that a block belongs to.

    - ``REPLICATED``: state that is equal on all data-parallel peers.
    - ``OWNED``: the ZeRO partition of one rank.
    - ``HOST``: the host state of one rank.
    - ``PARITY``: parities of the replicated section, under an erasure code.
    - ``CHECKSUMS``: checksums of a member's replicated blocks, kept by its ring peers under an
      erasure code, to verify decoded blocks.
    - ``GRADIENTS``: gradients of a ring peer's partition, stored while a version is being made;
      they are not part of the version.
    """

    REPLICATED = "replicated"
    OWNED = "owned"
    HOST = "host"
    PARITY = "parity"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"


STATE_SECTIONS = (Section.REPLICATED, Section.OWNED, Section.HOST)
"""The sections that are restored; the other sections help to restore them."""


@dataclass(frozen=True, order=True)
class BlockKey:
    """Identity of a block within its sharding group and version."""

    section: Section  # Section of the stage image
    # dp index of the shard (replicated), of the owner (owned, host, checksums) or of the member
    # that computed it (parity)
    member: int
    index: int  # Position within that shard, 0-based


@dataclass(frozen=True, order=True)
class VersionId:
    """A version of the job's state.

    Versions are ordered by incarnation first. A later incarnation starts from the best available
    version, so its versions replace all older ones, even those with a higher step that a
    disconnected node has taken.
    """

    incarnation: int  # 1 for the first start of the job; incremented by every restart
    step: int  # Optimizer steps that the state contains (DeepSpeed's ``global_steps``)

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"


def given_up(labels: Iterable[VersionId]) -> dict[VersionId, VersionId]:
    """Versions that the job abandoned by going back to an earlier step.

    A version is abandoned if a later incarnation has a version whose step is not higher.

    Returns:
        For each abandoned version, that version of the later incarnation.
    """
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
    """A change of the number of replicas, and the source of each new replica's host state."""

    old: int  # Replicas before
    new: int  # Replicas after

    def host_from(self, dp: int) -> int:
        """The old replica whose host state the new replica ``dp`` takes: its own if it existed,
        otherwise another one's, for the parts that are equal on all replicas."""
        return dp % self.old

    def is_new(self, dp: int) -> bool:
        """Whether replica ``dp`` did not exist before, so its own state is not in the version."""
        return dp >= self.old

    def __str__(self) -> str:
        return f"DP{self.old} to DP{self.new}"


def only_replicas_differ(was: Degrees, now: Degrees) -> bool:
    return was != now and (was.pp, was.tp) == (now.pp, now.tp)
