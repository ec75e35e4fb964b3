"""The running layout of a rank's snapshots: images, plan and identity, agreed with its group."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reft.control.control import ControlGroup
from reft.grid import Coordinate, Degrees, Topology
from reft.memory.header import TABLE, Entry, pack_entries
from reft.protect.blocks import Section
from reft.protect.codes import Scheme
from reft.protect.placement import GroupPlacement, place_group
from reft.snapshot.plan import MemberPlan, SectionSizes, ShardPlan, make_shard_plan
from reft.state.catalogue import SectionImage


@dataclass(frozen=True)
class LiveImages:
    """The stage image of this rank as it lies in the engine's memory.

    Attributes:
        replicated: equal on all DP peers.
        owned: this rank's ZeRO partition.
        signature: changes when the images would have other tensors.
        gradients: of the newest step, by member whose partition is recomputed here.
        gradient_bytes: of one partition, if partitions are recomputed at all; the same on all members, and
            whether or not this rank keeps any under the scheme in force.
    """

    replicated: SectionImage
    owned: SectionImage
    signature: Hashable
    gradients: Mapping[int, SectionImage] = field(default_factory=dict)
    gradient_bytes: int = 0


@dataclass(frozen=True)
class GroupLayout:
    """What the members of one sharding group agreed on."""

    plan: ShardPlan
    member: int
    layout_hash: str

    @property
    def mine(self) -> MemberPlan:
        return self.plan.members[self.member]

    @cached_property
    def table(self) -> NDArray[np.void]:
        """The packed entries of this member's blocks in arena order, :data:`reft.memory.header.TABLE`. Every
        version fills in its checksums and the true lengths of the host blocks."""
        sizes = self.plan.sizes
        entries = []
        for placed in self.mine.blocks:
            key, block = placed.key, placed.block
            images = {
                Section.REPLICATED: sizes.replicated_bytes,
                Section.OWNED: sizes.owned_bytes[key.member],
            }
            entries.append(
                Entry(
                    key=key,
                    start_bytes=block.start_bytes,
                    nbytes=block.nbytes,
                    image_bytes=images.get(key.section, block.nbytes),
                    arena_offset=placed.arena_offset,
                    checksum=0,
                    owner=key.member == self.member and key.section is not Section.PARITY,
                )
            )
        return np.frombuffer(pack_entries(entries), TABLE)


def layout_hash(degrees: Degrees, coordinate: Coordinate, sizes: SectionSizes) -> str:
    """Identity of a group's layout: versions of another layout are refused at recovery."""
    text = f"{degrees}|{coordinate.pp}|{coordinate.tp}|{sizes.replicated_bytes}|{sizes.owned_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def agree_on_layout(
    control: ControlGroup,
    topology: Topology,
    images: LiveImages,
    *,
    scheme: Scheme,
    block_bytes: int,
    host_bytes: int,
) -> GroupLayout:
    """Gather the section sizes of all ranks and plan this rank's group; equal on all its members. Collective
    over all ranks."""
    gathered = control.gather_ints(
        [images.replicated.nbytes, images.owned.nbytes, host_bytes, images.gradient_bytes]
    )
    at = topology.coordinates[control.rank]
    ranks = topology.group(at.pp, at.tp)
    sizes = SectionSizes(
        replicated_bytes=gathered[control.rank][0],
        owned_bytes=tuple(gathered[r][1] for r in ranks),
        host_bytes=tuple(gathered[r][2] for r in ranks),
        gradient_bytes=tuple(gathered[r][3] for r in ranks),
    )
    placement: GroupPlacement = place_group(
        topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities
    )
    return GroupLayout(
        plan=make_shard_plan(sizes, placement, block_bytes),
        member=at.dp,
        layout_hash=layout_hash(topology.degrees, at, sizes),
    )


def layout_under(layout: GroupLayout, scheme: Scheme) -> GroupLayout:
    """The same sections of the same group, protected in another way. Pure: every member plans the same."""
    old = layout.plan
    placement = replace(old.placement, copies=scheme.copies, parities=scheme.parities)
    return replace(layout, plan=make_shard_plan(old.sizes, placement, old.block_bytes))
