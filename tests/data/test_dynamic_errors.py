"""``order="dynamic"``: micro-batches that cannot be read, and steps that nobody waits for."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from torch.distributed import HashStore

import reft
from reft.data import order as batches
from reft.data.order import JobPosition, Order
from reft.errors import ConfigError
from tests.data.life import Damaged

MICRO, STEP, STEPS = 2, 8, 3
STEP_0, STEP_1, STEP_2 = ([*range(first, first + STEP)] for first in range(0, STEP * STEPS, STEP))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        ((), [STEP_0, STEP_1, STEP_2]),
        ((7,), [STEP_0[:6], STEP_1, STEP_2]),
        ((4, 7), [STEP_0[:4], STEP_1, STEP_2]),
        ((0, 23), [STEP_0[2:], STEP_1, STEP_2[:6]]),
        ((8, 10, 12, 14), [STEP_0, STEP_2]),
    ],
)
def test_p8_the_step_of_a_micro_batch_that_is_left_out_ends_with_the_last_one_that_is_read(
    bad: tuple[int, ...], wanted: list[list[int]], workers: int
) -> None:
    options: dict[str, Any] = {"order": "dynamic", "step_samples": STEP, "num_workers": workers}
    one = reft.data.loader(Damaged(STEP * STEPS, *bad), MICRO, name="left out", **options)
    reading, found, step = iter(one), list[list[int]](), list[int]()
    while True:
        try:
            step += next(reading).tolist()
        except ValueError:
            continue
        except StopIteration:
            break
        # The step is whole where its last micro-batch is trained on: a version of it goes on behind.
        whole_steps = (max(step) // STEP + 1) * STEP
        assert one.state_dict()["consumed"] == (whole_steps if one.ends_step else whole_steps - STEP)
        if one.ends_step:
            found.append(step)
            step = []
    assert not step, "a step without an end"
    assert found == wanted


def test_p6_a_replica_without_a_micro_batch_of_a_step_does_not_let_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    monkeypatch.setattr(batches, "job_store", lambda replicas: store)
    options: dict[str, Any] = {"order": "dynamic", "step_samples": 2 * MICRO, "dp_size": 2}
    one = reft.data.loader(Damaged(STEP * STEPS, MICRO), MICRO, name="none left", dp_rank=1, **options)
    with pytest.raises(ConfigError, match="no micro-batch of the step that can be read"):
        next(iter(one))


@pytest.mark.parametrize("turns", list(itertools.permutations(range(3))))
def test_p8_replicas_that_do_not_wait_for_each_other_read_every_sample_once(
    turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an evaluation, where no step keeps them together: one reads to the end before the next begins."""
    store = HashStore()
    monkeypatch.setattr(batches, "job_store", lambda replicas: store)
    monkeypatch.setattr(batches, "readers", lambda replicas: replicas)
    order = Order(STEP * STEPS, 0, shuffle=False)
    made = [batches.SharedBatches(order, MICRO, STEP, drop_last=False, name="read") for _ in turns]
    taken = [one.begin_at(JobPosition(), (replica, 3), 0) for replica, one in enumerate(made)]
    seen = [sample for replica in turns for keys in made[replica] for _, sample in keys]
    for one in taken:
        one.leave(JobPosition(0, STEP * STEPS), 3)
    assert sorted(seen) == list(range(STEP * STEPS))
    assert store.num_keys() <= 1, "lines that nobody reads any more are left"


@pytest.mark.parametrize("seed", range(20))
def test_p8_each_micro_batch_is_taken_once_whoever_is_faster(seed: int) -> None:
    rng, store = random.Random(seed), HashStore()
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ledgers: dict[int, batches.SharedLedger] = {}

    class Raced:
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

    ledgers |= {replica: batches.SharedLedger(store, "ledger", range(5, 35)) for replica in (1, 2)}
    ledgers[0] = batches.SharedLedger(Raced(), "ledger", range(5, 35))
    for _ in range(100):
        take(rng.randrange(3))
    assert sorted(piece for pieces in taken.values() for piece in pieces) == list(range(5, 35))
    assert all(taken.values())
    sibling = batches.SharedLedger(store, "ledger", range(5, 35))
    assert [sibling.take(1, number) for number in range(len(taken[1]))] == taken[1], (
        "a rank of the same replica"
    )
