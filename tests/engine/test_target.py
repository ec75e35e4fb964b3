"""P5: what is copied and hashed in one pass has the checksum of the block, padding between tensors included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.engine.load.memory import write_and_hash
from reft.memory.header import checksum
from reft.memory.stream import PlainHashingCopier, hashing_copier
from reft.state.catalogue import SectionImage


@pytest.mark.parametrize("make", [hashing_copier, PlainHashingCopier])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.data())
def test_p5_any_part_of_an_image_is_written_and_hashed(make, sizes, data) -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    image = SectionImage([(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
    start = data.draw(st.integers(0, image.nbytes))
    stop = data.draw(st.integers(start, image.nbytes))
    block = torch.randint(1, 256, (stop - start,), dtype=torch.uint8)
    parts = []
    image.write_from(start, block, lambda *pair: parts.append(pair))
    assert write_and_hash(parts, block, make()) == checksum(block.numpy().data)
    found = torch.empty_like(block)
    image.read_into(start, found)
    pads = torch.ones(image.nbytes, dtype=torch.bool)
    for offset, spec in zip(image.offsets, image.specs, strict=True):
        pads[offset : offset + spec.shape[0]] = False
    assert torch.equal(found, torch.where(pads[start:stop], 0, block))
