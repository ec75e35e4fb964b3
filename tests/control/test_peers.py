"""Bytes between pairs of ranks, and what their peers hear of one that leaves."""

from __future__ import annotations

import random
import threading

import pytest

from reft.control.overlay import Overlay
from reft.control.transport import Buffers
from reft.errors import TransferError

from .ranks import DEADLINE_SECS, on_all, per_node


@pytest.mark.parametrize("overlays", [per_node(3, 2)], indirect=True, ids=["3x2"])
def test_p6_a_rank_that_leaves_is_heard_by_peers_in_an_exchange_that_it_has_no_part_in(
    overlays: list[Overlay],
) -> None:
    waits = threading.Barrier(6)

    def act(rank: int) -> None:
        waits.wait(DEADLINE_SECS)
        if rank == 5:
            overlays[rank].close()
        elif rank == 0:  # its peer never comes
            with pytest.raises((OSError, EOFError)):
                overlays[rank].peers.stream({}, {1: Buffers([memoryview(bytearray(9))])})
            overlays[rank].close()
        elif rank == 1:
            with pytest.raises((OSError, EOFError)):
                overlays[rank].peers.stream({}, {2: Buffers([memoryview(bytearray(9))])})
            overlays[rank].close()
        else:
            with pytest.raises(TransferError):
                overlays[rank].tree.reduce_min([rank])

    on_all(act, 6)


@pytest.mark.parametrize("overlays", [per_node(2, 3)], indirect=True, ids=["2x3"])
def test_bytes_are_exchanged_round_a_ring_in_both_directions(overlays: list[Overlay]) -> None:
    rng = random.Random(2)
    sizes = [0, 1, 5_000_000, 17, *[rng.randrange(2000) for _ in range(200)]]

    def data(source: int, target: int, turn: int) -> list[bytes]:
        return [random.Random(f"{source} {target} {turn} {i}").randbytes(n) for i, n in enumerate(sizes)]

    def act(rank: int) -> None:
        after, before = (rank + 1) % 6, (rank - 1) % 6
        for turn in range(2):
            into = {peer: [bytearray(n) for n in sizes] for peer in (after, before)}
            overlays[rank].peers.stream(
                {peer: [memoryview(b) for b in data(rank, peer, turn)] for peer in into},
                {peer: Buffers([memoryview(b) for b in buffers]) for peer, buffers in into.items()},
            )
            for peer, buffers in into.items():
                assert [bytes(b) for b in buffers] == data(peer, rank, turn)

    on_all(act, 6)
