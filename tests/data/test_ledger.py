"""The ledger of a step: every micro-batch is handed out once, in whatever turns."""

from __future__ import annotations

import random

import pytest
from torch.distributed import HashStore

from reft.data.batches import SharedLedger


def test_each_is_handed_out_once_and_ranks_of_one_replica_are_given_the_same() -> None:
    store = HashStore()
    one, two, sibling = (SharedLedger(store, "ledger", range(3)) for _ in range(3))
    assert [one.take(0, 0), two.take(1, 0), one.take(0, 1), two.take(1, 1)] == [0, 1, 2, None]
    assert [sibling.take(0, 0), sibling.take(0, 1), sibling.take(0, 2)] == [0, 2, None]


@pytest.mark.parametrize("seed", range(20))
def test_each_is_handed_out_once_whoever_is_faster(seed: int) -> None:
    rng, store = random.Random(seed), HashStore()
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ledgers: dict[int, SharedLedger] = {}

    class Raced:
        """Another replica takes between this one's look and its write."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if rng.random() < 0.5:
                take(rng.randrange(1, 3))
            return store.compare_set(key, expected, desired)

    def take(replica: int) -> None:
        piece = ledgers[replica].take(replica, len(taken[replica]))
        if piece is not None:
            taken[replica].append(piece)

    ledgers |= {replica: SharedLedger(store, "ledger", range(5, 35)) for replica in (1, 2)}
    ledgers[0] = SharedLedger(Raced(), "ledger", range(5, 35))
    for _ in range(100):
        take(rng.randrange(3))
    assert sorted(piece for pieces in taken.values() for piece in pieces) == list(range(5, 35))
    assert all(taken.values())
