"""Parity encoded chunk by chunk from live tensors is the parity of the blocks, whatever the sizes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.protect.placement import place_group
from reft.snapshot.copying.chunks import ParityEncoder
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state.catalogue import SectionImage
from tests.snapshot.devices import parity_of, random_bytes


@st.composite
def groups(draw):
    members = draw(st.integers(2, 6))
    parities = draw(st.integers(1, min(3, members - 1)))
    sizes = draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=6))
    block_bytes = draw(st.sampled_from([4096, 65_536]))
    chunk_bytes = draw(st.sampled_from([4096, 6_400, 65_536]))
    return members, parities, sizes, block_bytes, chunk_bytes


@settings(max_examples=80, deadline=None)
@given(groups(), st.integers(0, 2**32 - 1))
def test_chunks_in_any_order_of_making_give_the_block(group, seed):
    members, parities, sizes, block_bytes, chunk_bytes = group
    tensors = [random_bytes(n, seed + i) for i, n in enumerate(sizes)]
    image = SectionImage([(str(i), t) for i, t in enumerate(tensors)])
    placement = place_group([f"n{m}" for m in range(members)], 0, parities)
    plan = make_shard_plan(
        SectionSizes(image.nbytes, (0,) * members, (64,) * members), placement, block_bytes
    )
    blocks = {b.key: b.block for m in plan.members for b in m.own}
    for member in plan.members:
        encoder = ParityEncoder(image, blocks, chunk_bytes)
        targets = {p.key: torch.full((p.block.nbytes,), 7, dtype=torch.uint8) for p in member.parity}
        # As the worker does: all chunks of a version are cut first, and run one by one.
        chunks = [
            encoding
            for placed in member.parity
            for _, _, encoding in encoder.cut(placed, member.terms[placed.key].terms, targets[placed.key])
        ]
        for encoding in chunks:
            assert not encoding()
        for key, expected in parity_of(plan, member, image).items():
            np.testing.assert_array_equal(targets[key].numpy(), expected)
