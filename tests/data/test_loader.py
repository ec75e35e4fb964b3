"""reft.data.loader: every sample exactly once per epoch, whatever interrupts and at every degree (P8)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import RepeatingLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import reft
from reft.data.order import Deal, JobPosition, Order
from reft.data.watch import LOADERS
from reft.engine.data import DataPosition
from reft.state.blob import capture_host_rng, capture_rng, same_host_rng
from tests.data.life import Engine, seed

Key = tuple[int, int]


class Named:
    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float, int]:
        self.read.append(index)
        seed = reft.data.sample_seed() >> 1
        return index, random.random(), float(np.random.rand()), float(torch.rand(())), seed


def noisy(samples: list[Any]) -> list[Any]:
    """A collation that draws as well, as masking does."""
    return [*samples, (0, random.random(), float(np.random.rand()), float(torch.rand(())), 0)]


DEGREES = st.integers(1, 5)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Per life the degree, the batch size, micro-batches that survive, and more that a failure undoes."""
    one = st.tuples(DEGREES, st.integers(1, 4), st.integers(0, 9), st.integers(0, 4))
    return draw(st.lists(one, min_size=1, max_size=6))


def read(deal: Deal, order: Order, at: JobPosition) -> tuple[list[list[Key]], JobPosition]:
    while not (count := deal.next(at)):
        at = deal.next_pass(at)
    parts = [order.part(at.consumed, count, deal.part(count, rank)) for rank in range(deal.dp_size)]
    return parts, deal.behind(at)


def test_the_samples_of_a_step_are_those_of_every_degree() -> None:
    """Twelve samples a step: as 4 x 3, 3 x 4, 2 x 3 x 2 and so on."""
    order = Order(600, 1, shuffle=True)
    found = set()
    for degree, batch, micro_batches in ((4, 3, 1), (3, 4, 1), (2, 3, 2), (1, 4, 3), (12, 1, 1)):
        deal, at, steps = Deal(600, batch, degree, True), JobPosition(), []
        for _ in range(20):
            step: list[Key] = []
            for _ in range(micro_batches):
                parts, at = read(deal, order, at)
                step += itertools.chain.from_iterable(parts)
            steps.append(tuple(step))
        found.add(tuple(steps))
    assert len(found) == 1


def made(size: int = 23, rank: int = 0, dp: int = 1, **options: Any) -> Any:
    return reft.data.loader(
        options.pop("dataset", None) or Named(size),
        options.pop("batch_size", 3),
        **{"shuffle": True, "seed": 7, "dp_rank": rank, "dp_size": dp, "collate_fn": list} | options,
    )


def numbers(batch: list[Any]) -> list[int]:
    return [sample[0] for sample in batch]


@settings(max_examples=25)
@given(st.integers(20, 60), lives(), st.booleans())
def test_every_loader_of_a_job_goes_on_where_the_version_was(
    size: int, lived: list[tuple[int, int, int, int]], drop_last: bool
) -> None:
    """The whole way: loaders of all ranks, states as they are in a version, prefetching aside."""
    state, seen = None, Counter[int]()
    total = 0
    for degree, batch_size, kept, lost in lived:
        options = {"batch_size": batch_size, "drop_last": drop_last}
        ranks = [made(size, rank, degree, name=f"rank {rank}", **options) for rank in range(degree)]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
        iterators = [RepeatingLoader(one) for one in ranks]
        survived, state = Counter(seen), ranks[0].state_dict()
        for number in range(kept + lost):
            parts = [numbers(next(one)) for one in iterators]
            assert all(parts), "a replica without a sample would leave a collective"
            sizes = sorted(map(len, parts))
            assert sizes[-1] <= min(batch_size, sizes[0] + 1)
            seen.update(itertools.chain.from_iterable(parts))
            assert len({str(one.state_dict()) for one in ranks}) == 1
            if number < kept:
                survived, state = Counter(seen), ranks[0].state_dict()
        seen = survived
        total = state["consumed"]
    if not drop_last:
        whole, rest = divmod(total, size)
        assert set(seen.values()) <= {whole, whole + 1}
        assert Counter(seen.values())[whole + 1] == rest


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
def test_p8_workers_give_the_same_bits_and_the_trainers_generators_are_untouched(persistent: bool) -> None:
    seed(4)
    here = capture_host_rng()
    found = []
    for workers in (0, 3):
        options = {"num_workers": workers, "collate_fn": noisy}
        one = made(persistent_workers=persistent and workers > 0, **options)
        found.append([batch for _ in range(2) for batch in one])
        assert same_host_rng(capture_host_rng(), here)
    assert found[0] == found[1]
    drawn = [sample[1:] for batch in found[0] for sample in batch]
    assert len(set(drawn)) == len(drawn), "every sample of every epoch has numbers of its own"
    values = [value for batch in found[0] for sample in batch for value in sample[1:4]]
    assert len(set(values)) == len(values), "no generator says what another one says"


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 3])
def test_p8_from_any_batch_on_it_is_the_undisturbed_pass_and_nothing_is_read_again(workers: int) -> None:
    one = made(num_workers=workers, collate_fn=noisy)
    wanted, states = [], []
    for batch in itertools.chain(one, one):
        wanted.append(batch)
        states.append(one.state_dict())
    for stop in range(0, len(wanted), 3 if workers else 1):
        # What workers have read ahead by then is not consumed.
        again = made(num_workers=workers, collate_fn=noisy)
        again.load_state_dict(states[stop])
        rest = [batch for _ in range(again.epoch, 2) for batch in again]
        assert rest == wanted[stop + 1 :]
        if not workers:
            assert len(again.dataset.read) == sum(len(b) - 1 for b in rest), "a sample was replayed"


def test_without_shuffling_it_is_torchs_own_loader() -> None:
    for drop_last in (False, True):
        ours = reft.data.loader(range(23), 4, drop_last=drop_last, sampler=None, generator=None)
        assert reft.resumable(ours) is ours
        theirs = DataLoader(range(23), 4, drop_last=drop_last)  # type: ignore[arg-type]
        assert [b.tolist() for b in ours] == [b.tolist() for b in theirs]
        assert len(ours) == len(theirs)


def test_a_position_of_other_data_is_refused() -> None:
    state = made(23).state_dict()
    for other, what in (
        (made(24), "samples 23"),
        (made(23, seed=8), "seed 7"),
        (made(shuffle=False), "shuffle"),
    ):
        with pytest.raises(reft.ConfigError, match=f"was taken with {what}"):
            other.load_state_dict(state)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: reft.data.loader(Endless(), 4), r"StreamingDataLoader"),
        (lambda: reft.data.loader(range(9), 4, sampler=range(9)), r"takes no sampler.*reft\.resumable"),
        (lambda: reft.data.loader(range(9), 4, generator=torch.Generator()), "give seed="),
        (lambda: reft.data.loader(range(9), 4, num_workers=2, in_order=False), "takes no in_order=False"),
        (lambda: reft.data.loader(range(9), 0), "batch_size 0"),
        (lambda: reft.data.loader(range(9), None), "batch_size None"),  # type: ignore[arg-type]
        (lambda: reft.data.loader(range(9), 4, dp_rank=1), "dp_rank 1 and dp_size None"),
        (lambda: len(reft.data.loader(range(9), 4, dp_rank=1, dp_size=10)), "9 samples for 10 replicas"),
        (
            lambda: len(reft.data.loader(range(9), 4, drop_last=True, dp_rank=1, dp_size=3)),
            "expected at least 12",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(make: Any, said: str) -> None:
    with pytest.raises(reft.ConfigError, match=said):
        make()


def test_a_seed_belongs_to_a_sample() -> None:
    with pytest.raises(RuntimeError, match="__getitem__"):
        reft.data.sample_seed()


def tensors(**options: Any) -> Any:
    return reft.data.loader(range(24), 4, shuffle=True, dp_rank=0, dp_size=1, name="engine", **options)


@pytest.mark.parametrize("stop", [1, 6, 8])
def test_p8_a_version_is_restored_before_the_script_makes_its_loader(begin: Any, stop: int) -> None:
    torch.manual_seed(1)
    life, one, saved = begin(), tensors(), None
    for batch in itertools.chain(one, one):
        life.train(batch)
        if len(life.seen) == stop:
            saved = life.data.state(), capture_rng()
    wanted = life.seen
    life.data.close()
    del one, life

    life = begin()
    life.data.restore(*saved)
    one = tensors()
    for _ in range(one.epoch, 2):
        for batch in one:
            life.train(batch)
    assert life.seen == wanted[stop:]


def test_p12_the_place_of_another_replica_is_told() -> None:
    data = DataPosition(Engine(), lambda: (1, 2))
    try:
        mine = tensors()
        next(iter(mine))
        assert "replica 0 of 1" in str(data.advice())
        mine = reft.data.loader(range(24), 4, name="engine")
        assert mine.replica == (1, 2)
        next(iter(mine))
        assert data.advice() is None
    finally:
        data.close()
    assert LOADERS.wrong() is None
