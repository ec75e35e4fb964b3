"""reft.data.loader: every sample exactly once per epoch, whatever interrupts and at every degree (P8)."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import RepeatingLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import reft
from reft.data.degrees import LEFT, move_data
from reft.data.order import EpochPartition, JobPosition, SampleOrder
from reft.data.passes import find_distribution
from reft.data.position import DataPosition
from reft.data.resumable import LOADERS
from reft.env import ENV_NODES
from reft.grid import Resize
from reft.state.blob import capture_host_rng, capture_rng, same_host_rng
from tests.data.life import Damaged, Engine, Life, Pipeline, seed

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


def read(
    deal: EpochPartition, order: SampleOrder, at: JobPosition
) -> tuple[list[list[Key]], JobPosition]:
    while not (count := deal.next(at)):
        at = deal.next_pass(at)
    parts = [order.part(at.consumed, count, deal.part(count, rank)) for rank in range(deal.dp_size)]
    return parts, deal.after(at)


def test_the_samples_of_a_step_are_those_of_every_degree() -> None:
    """Twelve samples a step: as 4 x 3, 3 x 4, 2 x 3 x 2 and so on."""
    order = SampleOrder(600, 1, shuffle=True)
    found = set()
    for degree, batch, micro_batches in ((4, 3, 1), (3, 4, 1), (2, 3, 2), (1, 4, 3), (12, 1, 1)):
        deal, at, steps = EpochPartition(600, batch, degree, True), JobPosition(), []
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
        **{"shuffle": True, "seed": 7, "dp_rank": rank, "dp_size": dp, "collate_fn": list}
        | options,
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
def test_p8_workers_give_the_same_bits_and_the_trainers_generators_are_untouched(
    persistent: bool,
) -> None:
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
def test_p8_from_any_batch_on_it_is_the_undisturbed_pass_and_nothing_is_read_again(
    workers: int,
) -> None:
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
        (
            lambda: reft.data.loader(range(9), 4, sampler=range(9)),
            r"takes no sampler.*reft\.resumable",
        ),
        (lambda: reft.data.loader(range(9), 4, generator=torch.Generator()), "give seed="),
        (
            lambda: reft.data.loader(range(9), 4, num_workers=2, in_order=False),
            "takes no in_order=False",
        ),
        (lambda: reft.data.loader(range(9), 0), "batch_size 0"),
        (lambda: reft.data.loader(range(9), None), "batch_size None"),  # type: ignore[arg-type]
        (lambda: reft.data.loader(range(9), 4, dp_rank=1), "dp_rank 1 and dp_size None"),
        (
            lambda: len(reft.data.loader(range(9), 4, dp_rank=1, dp_size=10)),
            "9 samples for 10 replicas",
        ),
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
    return reft.data.loader(
        range(24), 4, shuffle=True, dp_rank=0, dp_size=1, name="engine", **options
    )


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


def test_an_epoch_is_as_long_as_the_loader_that_training_reads() -> None:
    dataset = TensorDataset(torch.arange(24))
    for loader, batches in (
        (DataLoader(dataset, 4), 6),
        (reft.data.loader(range(24), 4, name="epoch"), 6),
        (DataLoader(Endless(), 2), 0),
    ):
        life = Life(Engine())
        assert life.data.epoch_batches() == 0, "nothing was read yet"
        iterator = iter(loader)
        next(iterator)
        life.data.forward(training=True)
        assert life.data.epoch_batches() == batches
        life.data.close()
    life = Life(Pipeline())
    repeating = iter(RepeatingLoader(DataLoader(dataset, 4)))
    life.data.begin_batch(repeating)
    next(repeating)
    life.data.end_batch()
    assert life.data.epoch_batches() == 6
    life.data.close()


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


SIZE, BATCH = 24, 2


class DamagedStream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        self._next = -1
        return self

    def __next__(self) -> int:
        self._next += 1
        if self._next >= SIZE:
            raise StopIteration
        return damaged()[self._next]


def damaged() -> Damaged:
    return Damaged(SIZE, 5, 14)


def static(workers: int, **options: Any) -> Any:
    return reft.data.loader(
        damaged(), BATCH, shuffle=True, num_workers=workers, name="damaged", **options
    )


def dynamic(workers: int) -> Any:
    return static(workers, order="dynamic", step_samples=BATCH)


def resumable(workers: int) -> Any:
    loader: Any = DataLoader(damaged(), BATCH, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    return reft.resumable(loader, name="damaged")


def read_again(workers: int) -> Any:
    return reft.resumable(DataLoader(DamagedStream(), 1, num_workers=workers), name="damaged")


def whole(loader: Any, life: Life, train: Callable[[Any], Any], *, stop: int | None = None) -> Any:
    reading, saved = iter(loader), None
    while True:
        try:
            train(reading)
        except ValueError:
            continue
        except StopIteration:
            return saved
        if len(life.seen) == stop:
            saved = life.data.state(), capture_rng()


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("made", [static, dynamic, resumable, read_again])
def test_p8_a_batch_that_could_not_be_read_is_left_out_after_a_failure_too(
    begin: Any, made: Any, workers: int
) -> None:
    if made is read_again and workers:
        workers = 1  # each would read the whole stream
    for stop in (3, 8) if workers else range(1, 10):
        torch.manual_seed(1)
        life, loader = begin(), made(workers)
        saved = whole(loader, life, lambda reading, life=life: life.train(next(reading)), stop=stop)
        wanted = life.seen
        life.data.close()

        life, loader = begin(), made(workers)
        life.data.restore(*saved)
        whole(loader, life, lambda reading, life=life: life.train(next(reading)))
        assert life.seen == wanted[stop:], f"behind batch {stop}"


class Late(Damaged):
    def __getitem__(self, index: int) -> int:
        if index == SIZE // 2:
            time.sleep(2.5)
        return index


@pytest.mark.integration
def test_p8_a_batch_that_is_late_is_not_left_out() -> None:
    one = reft.data.loader(Late(SIZE), BATCH, num_workers=1, timeout=1, name="late")
    reading, seen, late = iter(one), list[int](), 0
    while len(seen) < SIZE:
        try:
            seen += next(reading).tolist()
        except RuntimeError:
            late += 1
        assert one.state_dict()["consumed"] == len(seen)
    assert late
    assert seen == list(range(SIZE))


def test_p12_a_replica_that_leaves_a_batch_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    one = reft.data.loader(damaged(), BATCH, dp_rank=1, dp_size=2, name="of two")
    reading = iter(one)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            try:
                next(reading)
            except ValueError:
                continue
    said = [record.message for record in caplog.records if "raised an error" in record.message]
    assert len(said) == 1
    assert "replica 1 skips that micro-batch" in said[0]


SIZES = (12, 13, 24, 25, 26)
FLAGS = (False, True)


def loader(
    samples: int, replicas: int, rank: int, drop_last: bool, cuts: bool
) -> DataLoader[object]:
    data = TensorDataset(torch.arange(samples))
    sampler = DistributedSampler(data, replicas, rank, shuffle=True, seed=3, drop_last=cuts)
    return DataLoader(data, batch_size=2, sampler=sampler, drop_last=drop_last)


Kind = tuple[bool, bool]
"""Whether the loader drops a smaller last batch, and whether the sampler cuts what cannot be shared."""


def read_dealt(samples: int, replicas: int, kind: Kind, begin: int, end: int | None) -> list[int]:
    found = []
    for rank in range(replicas):
        for (batch,) in list(loader(samples, replicas, rank, *kind))[begin:end]:
            found += batch.tolist()
    return found


@pytest.mark.parametrize(("samples", "drop_last", "cuts"), list(product(SIZES, FLAGS, FLAGS)))
def test_p8_what_two_degrees_read_of_a_pass_is_every_sample_once(
    samples: int, drop_last: bool, cuts: bool
) -> None:
    """But for what torch's sampler repeats, and for what is dropped, at the end."""
    moved, kind = 0, (drop_last, cuts)
    for old, new in product((1, 2, 3, 4), repeat=2):
        dealt = find_distribution(loader(samples, old, 0, drop_last, cuts))
        assert dealt.batches == len(loader(samples, old, 0, drop_last, cuts))
        assert replace(dealt, replicas=new).batches == len(loader(samples, new, 0, drop_last, cuts))
        for taken in range(dealt.batches):
            at = dealt.taken_at(taken, new)
            if at is None:
                assert taken * old % new, "a batch of the new degree begins there"
                continue
            moved += 1
            before = read_dealt(samples, old, kind, 0, taken)
            after = read_dealt(samples, new, kind, at, None)
            assert len(before) == len(set(before))
            assert not set(before) & set(after) or len(after) > samples - len(before), (
                "trained on twice"
            )
            if not drop_last and not cuts:
                assert set(before) | set(after) == set(range(samples))
        assert dealt.taken_at(dealt.batches, new) == replace(dealt, replicas=new).batches
    assert moved > len(SIZES)


def test_an_order_that_is_not_known_to_be_the_jobs_is_not_moved() -> None:
    data = TensorDataset(torch.arange(8))
    assert find_distribution(DataLoader(data, batch_size=2, shuffle=True)) is None
    assert (
        find_distribution(
            DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
        )
        is None
    )


def test_p12_what_does_not_go_to_another_degree_is_named_and_the_rest_goes() -> None:
    common = {"start": {}, "first": None, "length": 6, "evaluates": False}
    dealt = {"samples": 24, "replicas": 2, "batch_size": 2, "drop_last": False, "cuts": False}
    good = {**common, "taken": 2, "source": "a.Good of 24", "dealt": dealt}
    odd = {**common, "taken": 1, "source": "a.Odd of 24", "dealt": dealt}
    unknown = {**common, "taken": 2, "source": "a.Unknown of 24"}
    moved = move_data(
        {"pass": good, "resumable": {"x": odd, "y": unknown, "z": good}, "samples": {"s": 1}},
        Resize(2, 4),
    )
    assert (moved["pass"]["taken"], moved["pass"]["length"]) == (1, 3)
    assert list(moved["resumable"]) == ["z"]
    assert moved["samples"] == {"s": 1}
    assert "a.Odd of 24, a.Unknown of 24" in moved[LEFT]
    assert "DP2 to DP4" in moved[LEFT]
    assert "loader = reft.data.loader(dataset, batch_size)" in moved[LEFT]


HERE = f"{__name__}.Counted"


class Counted:
    """As torchdata's: it counts what its replica has read."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> int:
        self.taken += 1
        return self.taken

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class OfJob(Counted):
    position_of_job = True


@pytest.fixture
def begun(begin: Any) -> Any:
    return lambda: begin(Pipeline()).data


def trained(data: DataPosition, iterator: Any) -> dict[str, Any]:
    data.begin_batch(iterator)
    next(iterator)
    data.end_batch()
    return data.state()


def test_p12_an_iterator_of_a_replica_goes_on_at_its_degree_and_is_told_where_that_changes(
    begun: Any,
) -> None:
    state = trained(begun(), Counted())
    for moved, said in (
        (state, ()),
        (move_data(state, Resize(3, 4)), (HERE, "DP3 to DP4", "position_of_job = True")),
    ):
        data, again = begun(), Counted()
        data.restore(moved, None)
        left = data.left_behind()
        assert all(word in str(left) for word in said)
        assert left is None or said
        trained(data, again)
        assert again.taken == 2


def test_an_iterator_of_the_job_goes_on_without_a_word(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_NODES, "1:4")
    iterator = OfJob()
    data = begun()
    state = trained(data, iterator)
    assert data.advice() is None
    data = begun()
    data.restore(move_data(state, Resize(3, 4)), None)
    assert data.left_behind() is None
    again = OfJob()
    trained(data, again)
    next(iterator)
    assert again.state_dict() == iterator.state_dict()


@pytest.mark.parametrize(("nodes", "said"), [("2:4", True), ("4", False), ("4:4", False)])
def test_p12_an_iterator_of_a_replica_is_told_at_step_1_where_the_number_of_nodes_may_change(
    begun: Any, monkeypatch: pytest.MonkeyPatch, nodes: str, said: bool
) -> None:
    monkeypatch.setenv(ENV_NODES, nodes)
    data = begun()
    trained(data, Counted())
    found = str(data.advice())
    assert ("--nnodes 2:4" in found and HERE in found and "position_of_job = True" in found) is said
