"""The shard plan: exact cover, balance, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.grid import ALIGNMENT_BYTES, Section
from reft.protect.placement import place_group
from reft.snapshot.plan import SectionSizes, make_shard_plan


@st.composite
def plans(draw: st.DrawFn):
    count = draw(st.integers(1, 6))
    sizes = SectionSizes(
        replicated_bytes=draw(st.integers(0, 100_000)),
        owned_bytes=tuple(draw(st.integers(0, 30_000)) for _ in range(count)),
        host_bytes=tuple(draw(st.integers(1, 9_000)) for _ in range(count)),
    )
    placement = place_group([f"n{i}" for i in range(count)], draw(st.integers(0, 3)))
    return make_shard_plan(sizes, placement, draw(st.sampled_from([64, 4096, 65536])))


@given(plans())
def test_own_blocks_cover_every_image_exactly(plan) -> None:
    replicated = sorted(
        (b.block.start_bytes, b.block.nbytes)
        for m in plan.members
        for b in m.own
        if b.key.section is Section.REPLICATED
    )
    position = 0
    for start, nbytes in replicated:
        assert start == position
        assert 0 < nbytes <= plan.block_bytes
        position += nbytes
    assert position == plan.sizes.replicated_bytes
    for member in plan.members:
        for section, total in (
            (Section.OWNED, plan.sizes.owned_bytes),
            (Section.HOST, plan.sizes.host_bytes),
        ):
            mine = [b.block for b in member.own if b.key.section is section]
            assert sum(b.nbytes for b in mine) == total[member.member]
            assert [b.start_bytes for b in mine] == [
                sum(x.nbytes for x in mine[:i]) for i in range(len(mine))
            ]


@given(plans())
def test_shards_are_equal_to_within_one_alignment_unit(plan) -> None:
    shards = [sum(b.block.nbytes for b in m.own if b.key.section is Section.REPLICATED) for m in plan.members]
    assert max(shards) - min(shards) <= 2 * ALIGNMENT_BYTES


@given(plans())
def test_redundant_blocks_are_the_successors_own_blocks(plan) -> None:
    for member in plan.members:
        wanted = [b.block for k in plan.placement.kept_by(member.member)[1:] for b in plan.members[k].own]
        assert [b.block for b in member.redundant] == wanted


@given(plans())
def test_blocks_lie_apart_in_the_arena(plan) -> None:
    for member in plan.members:
        end = 0
        for placed in sorted(member.blocks, key=lambda b: b.arena_offset):
            assert placed.arena_offset >= end
            assert placed.arena_offset % ALIGNMENT_BYTES == 0
            end = placed.arena_offset + placed.block.nbytes
        assert end <= member.data_bytes


@pytest.mark.parametrize("block_bytes", [0, -64, 100])
def test_odd_block_sizes_are_refused(block_bytes: int) -> None:
    sizes = SectionSizes(1, (0,), (1,))
    with pytest.raises(ValueError, match="multiple of 64"):
        make_shard_plan(sizes, place_group(["A"], 0), block_bytes)
