"""Host memory registered with a device's driver: chunks, and transfers that stay within them."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reft.snapshot.copying import cuda as copy_cuda
from reft.snapshot.copying.pinning import PinnedRanges
from tests.snapshot.simulated_cuda import SimulatedCuda, SimulatedCudaEngine


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


def test_everything_pinned_is_unpinned_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_cuda, "cuda", cuda := SimulatedCuda())
    engine = SimulatedCudaEngine(torch.device("cuda", 0), chunk_bytes=2 * mmap.PAGESIZE)
    kept = [memoryview(mmap.mmap(-1, n * mmap.PAGESIZE - 7)) for n in (1, 2, 5)]
    for memory in kept:
        assert engine.register(memory)
    runtime = cuda.runtime
    assert sum(runtime.registered.values()) == 8 * mmap.PAGESIZE
    assert all(0 < n <= 2 * mmap.PAGESIZE and not a % mmap.PAGESIZE for a, n in runtime.calls)
    engine.close()
    assert runtime.registered == {}
