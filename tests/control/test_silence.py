"""Who lives and does not answer is named, and waited for only so long (P6)."""

from __future__ import annotations

import queue
import threading

import pytest

from reft.control.overlay import Overlay
from reft.control.transport import Buffers

from .ranks import DEADLINE_SECS, on_all, per_node


@pytest.mark.parametrize("overlays", [per_node(3, 2), per_node(20, 2)], indirect=True, ids=["3x2", "20x2"])
def test_p6_who_lives_and_does_not_answer_is_named_to_all_and_the_vote_ends_well(
    overlays: list[Overlay],
) -> None:
    world_size = len(overlays)
    silent = world_size - 1
    name, named = f"rank {silent} on node node{silent // 2}", [threading.Event() for _ in overlays]

    def hear(rank: int, missing: list[str]) -> None:
        if name in missing:
            named[rank].set()

    for rank, one in enumerate(overlays):
        one.tree.limits.patience_secs = 0.3
        one.tree.limits.on_silence = lambda missing, secs, rank=rank: hear(rank, missing)

    def act(rank: int) -> list[int]:
        if rank == silent:
            assert all(event.wait(DEADLINE_SECS) for event in named[:silent])
        return overlays[rank].tree.reduce_min([rank])

    for _ in range(2):
        assert on_all(act, world_size) == [[0]] * world_size


@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_peer_that_sends_nothing_is_named(overlays: list[Overlay]) -> None:
    """Before it has connected, and after."""
    missing: queue.Queue[list[str]] = queue.Queue()
    overlays[1].peers.limits.patience_secs = 0.1
    overlays[1].peers.limits.on_silence = lambda names, secs: missing.put(names)

    def act(rank: int) -> None:
        if rank == 0:
            assert missing.get(timeout=DEADLINE_SECS) == ["rank 0 on node node0"]
            overlays[0].peers.stream({1: [memoryview(b"x")]}, {})
        else:
            overlays[1].peers.stream({}, {0: Buffers([memoryview(bytearray(1))])})

    for _ in range(2):
        on_all(act, 2)
        while not missing.empty():
            missing.get()
