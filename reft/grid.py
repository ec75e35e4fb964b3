"""Coordinates, nodes and sharding groups of ranks; identities of versions, sections and blocks.

TorchElastic reassigns ranks after every failure, so nothing that outlives a process is identified
by its rank, but by its coordinate (pp, dp, tp) and the number of the job's start (incarnation)
(promise P7).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

from reft.errors import LayoutError, SizeError


@dataclass(frozen=True, order=True)
class Coordinate:
    """Position of a rank: pipeline stage, data-parallel replica, tensor-parallel slice; from 0."""

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
        """Return every coordinate once, in the order of (pp, dp, tp)."""
        return tuple(
            Coordinate(*c) for c in product(range(self.pp), range(self.dp), range(self.tp))
        )

    def __str__(self) -> str:
        return f"PP{self.pp}xDP{self.dp}xTP{self.tp}"


@dataclass(frozen=True)
class Topology:
    """The placement in one start of the job: coordinate and node of every global rank.

    Attributes:
        degrees: parallel degrees.
        coordinates: coordinate of each global rank; every coordinate occurs exactly once.
        nodes: node id of each global rank; ranks of the same node share a memory directory.
        hosts: failure domain of each global rank: its host, or its node if the user gave the node
            an id. Empty if every node is a failure domain.
        racks: rack or switch of each global rank, "" if unknown. Empty if no rank knows its rack.
    """

    degrees: Degrees
    coordinates: tuple[Coordinate, ...]
    nodes: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    racks: tuple[str, ...] = ()

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
        """Return a coordinate; the topology's own object if possible, to avoid many equal ones."""
        return self._coordinate_by_place.get((pp, dp, tp)) or Coordinate(pp, dp, tp)

    @property
    def world_size(self) -> int:
        return len(self.coordinates)

    def rank_of(self, coordinate: Coordinate) -> int:
        return self._rank_by_coordinate[coordinate]

    def node_of(self, coordinate: Coordinate) -> str:
        return self.nodes[self.rank_of(coordinate)]

    def group(self, pp: int, tp: int) -> tuple[int, ...]:
        """Return the global ranks of the sharding group (pp, tp), ordered by dp."""
        return tuple(self.rank_of(Coordinate(pp, dp, tp)) for dp in range(self.degrees.dp))

    def group_nodes(self, pp: int, tp: int) -> tuple[str, ...]:
        """Return the failure domain of each member of the sharding group (pp, tp), by dp (P4)."""
        return tuple(self.failure_domains[r] for r in self.group(pp, tp))

    @property
    def failure_domains(self) -> tuple[str, ...]:
        """Failure domain of each global rank."""
        return self.hosts or self.nodes

    def groups(self) -> tuple[tuple[int, int], ...]:
        """Return all sharding groups, each as (pp, tp)."""
        return tuple(product(range(self.degrees.pp), range(self.degrees.tp)))

    @cached_property
    def _ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @cached_property
    def _rack_by_node(self) -> dict[str, str]:
        return dict(zip(self.nodes, self.racks, strict=False))

    def nearest(self, node: str, others: Collection[str]) -> Collection[str]:
        """Return those of ``others`` that are in the rack of ``node``; all if none is, or if the
        rack is unknown."""
        rack = self._rack_by_node.get(node)
        if not rack:
            return others
        return [other for other in others if self._rack_by_node.get(other) == rack] or others

    def local_ranks(self, node: str) -> tuple[int, ...]:
        return self._ranks_by_node.get(node, ())

    def readers(self, node: str, pp: int, tp: int) -> tuple[int, ...]:
        """Return the ranks on ``node`` that read what this node stores for a sharding group.

        These are the members of the group (pp, tp) on that node; if there are none, one other rank
        of the node. Empty if the node has no rank.
        """
        here = self.local_ranks(node)
        members = tuple(
            r for r in here if (self.coordinates[r].pp, self.coordinates[r].tp) == (pp, tp)
        )
        return members or here[(at := (pp * self.degrees.tp + tp) % max(1, len(here))) : at + 1]


def ring_order(nodes: Sequence[str]) -> tuple[int, ...]:
    """Order the members of a sharding group in a ring in which neighbours are on different nodes.

    If no node has more than half of the members, the successor of each member is on a different
    node. With one member per node, the order is 0..D-1. Pure; every rank computes the same.

    Args:
        nodes: node id of each member, in the order of their dp index.

    Returns:
        The dp indices of the members, in the order of the ring.
    """
    by_node: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        by_node.setdefault(node, []).append(member)
    queues = sorted(by_node.values(), key=lambda q: (-len(q), q[0]))
    if queues and len(queues[0]) == 1:
        return tuple(range(len(nodes)))
    # List the members node by node, and take every n-th one, where n is the number of members on
    # the fullest node. Two members that are taken consecutively are then on different nodes.
    ordered = [m for q in queues for m in q]
    stride = len(queues[0])
    return tuple(m for start in range(stride) for m in ordered[start::stride])


def topology(pp: int, dp: int | None = None, tp: int = 1) -> Any:
    """Make a numbering of ranks with which a job survives the loss of a node.

    Example: ``PipelineModule(topology=reft.topology(2, 2))``.

    DeepSpeed's own order of axes (pipe, data, model) gives consecutive ranks to the data-parallel
    peers of a stage, and launchers place consecutive ranks on the same node. Then a node may hold
    all peers of a stage, and its loss loses all copies of their state. Here, all ranks of one
    replica (pp x tp) come before those of the next replica, so peers are on different nodes if a
    replica fills at least one node.

    Args:
        pp: number of pipeline stages.
        dp: number of data-parallel replicas; None: computed from the world size.
        tp: tensor-parallel degree; the ranks of a tensor-parallel group are consecutive.

    Returns:
        A ``deepspeed`` ``ProcessTopology`` with the axes data, pipe, model. For an engine without a
        pipeline, ``PipelineParallelGrid(topology=...)`` makes an ``mpu`` from it.

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
"""Unit of alignment: tensors, shards and blocks begin at multiples of it, so that their bytes can
be viewed in place as any dtype."""


def aligned(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """Return ``nbytes``, rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


class Section(StrEnum):
    """The part of the state to which a block belongs.

    - ``REPLICATED``: state that is equal on all data-parallel peers.
    - ``OWNED``: the ZeRO partition of one rank.
    - ``HOST``: the host state of one rank (random states, schedulers, counters ...).
    - ``PARITY``: parities of the replicated section, if an erasure code is used.
    - ``CHECKSUMS``: with an erasure code, the checksums of a member's replicated blocks, which its
      ring peers store to verify decoded blocks.
    - ``GRADIENTS``: gradients of a ring peer's partition, stored while a version is being taken.
      They are not part of the version.
    """

    REPLICATED = "replicated"
    OWNED = "owned"
    HOST = "host"
    PARITY = "parity"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"


STATE_SECTIONS = (Section.REPLICATED, Section.OWNED, Section.HOST)
"""The sections that are restored. The other sections only serve to restore these."""


@dataclass(frozen=True, order=True)
class BlockKey:
    """Identity of a block within its sharding group and version."""

    section: Section
    # dp index of the member that stores the block as its own shard (replicated), that owns the
    # state (owned, host, checksums), or that computed the block (parity)
    member: int
    index: int  # Position among the member's blocks of this section, from 0


@dataclass(frozen=True, order=True)
class VersionId:
    """Identity of a version of the job's state.

    Versions are ordered by incarnation (start of the job) first, then by step. A later start
    continues from the best version available to it, so its versions replace all older ones, even
    those with a higher step that a disconnected node may have taken.
    """

    incarnation: int  # Number of the start of the job; 1 for the first, incremented by each restart
    step: int  # Number of optimizer steps in the state (DeepSpeed's ``global_steps``)

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"


def given_up(labels: Iterable[VersionId]) -> dict[VersionId, VersionId]:
    """Find the versions that the job abandoned when a restart went back to an earlier step.

    A version is abandoned if a later start (incarnation) has a version whose step is not higher.

    Returns:
        For each abandoned version, a version of the later start whose step is not higher.
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

    old: int  # Number of replicas before the change
    new: int  # Number of replicas after the change

    def host_from(self, dp: int) -> int:
        """Return the old replica whose host state the new replica ``dp`` takes.

        It is the replica with the same index; if that did not exist, a different one, of whose host
        state only the parts that are equal on all replicas are used.
        """
        return dp % self.old

    def is_new(self, dp: int) -> bool:
        """Whether replica ``dp`` did not exist before, so that the version has no state of it."""
        return dp >= self.old

    def __str__(self) -> str:
        return f"DP{self.old} to DP{self.new}"


def only_replicas_differ(was: Degrees, now: Degrees) -> bool:
    return was != now and (was.pp, was.tp) == (now.pp, now.tp)
