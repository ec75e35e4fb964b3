"""Host memory registered with a device's driver: chunks, and transfers that stay within them."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reft.snapshot.copying.device import PinnedRanges


@given(
    sizes=st.lists(st.integers(1, 9 * mmap.PAGESIZE), min_size=1, max_size=4),
    spans=st.lists(st.tuples(st.integers(-9000, 50_000), st.integers(0, 60_000)), max_size=8),
)
def test_no_transfer_crosses_from_one_pinned_chunk_into_another(
    sizes: list[int], spans: list[tuple[int, int]]
) -> None:
    chunks: dict[int, int] = {}
    ranges = PinnedRanges(chunks.__setitem__, chunks.__delitem__, 2 * mmap.PAGESIZE)
    memories = [memoryview(mmap.mmap(-1, n)) for n in sizes]
    for memory in memories:
        ranges.add(memory)
    base = min(chunks)
    for offset, nbytes in spans:
        at = base + offset
        for length, pinned in ranges.split(at, nbytes):
            inside = [a for a, n in chunks.items() if a <= at < a + n]
            assert bool(inside) is pinned
            assert not pinned or at + length <= inside[0] + chunks[inside[0]]
            assert pinned or not any(at <= a < at + length for a in chunks)
            at += length
        assert at == base + offset + nbytes
    ranges.clear()
    assert chunks == {}


def test_memory_is_pinned_whole_or_not_at_all() -> None:
    chunks: dict[int, int] = {}

    def pin(address: int, nbytes: int) -> None:
        if len(chunks) == 2:
            raise RuntimeError("enough")
        chunks[address] = nbytes

    ranges = PinnedRanges(pin, chunks.__delitem__, mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    with pytest.raises(RuntimeError, match="enough"):
        ranges.add(memory)
    assert chunks == {}
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert ranges.split(address, len(memory)) == [(len(memory), False)]
