"""What an engine is told of the loaders that a script reads (P8), and when it says that it does not know (P12)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader, RandomSampler

import reft
from reft.data.passes import SkippingSampler
from reft.state.blob import capture_rng, restore_rng
from tests.data.life import BATCH, BATCHES, SAMPLES, Engine, Life, Pipeline
from tests.megatron.samplers import Sampler

# -- loaders with an ``__iter__`` of their own -----------------------------------------------------------


class HandsOn(DataLoader):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from super().__iter__()


class ReadsOneIterator(DataLoader):  # type: ignore[type-arg]
    """As loaders do that keep their workers: one iterator, begun at once and read for all epochs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Endless:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


@pytest.mark.parametrize("kind", [HandsOn, ReadsOneIterator])
def test_p10_p12_a_loader_with_its_own_iter_gives_what_it_gives_and_its_position_is_not_claimed(
    begin: Any, kind: Any
) -> None:
    def two_epochs(life: Life | None = None) -> list[list[int]]:
        torch.manual_seed(3)
        loader = kind(range(SAMPLES), BATCH, shuffle=True)
        found = []
        for _ in range(2):
            for batch in loader:
                found.append(batch.tolist())
                if life is not None:
                    life.data.forward(training=True)
                    life.data.trains()
        return found

    wanted, life = two_epochs(), begin()
    assert two_epochs(life) == wanted
    assert life.data.state() == {}
    assert "is not known" in life.data.advice()


def test_a_loader_with_its_own_iter_is_refused_where_it_shall_be_resumable() -> None:
    samples: Any = range(SAMPLES)
    with pytest.raises(reft.ConfigError, match=r"HandsOn.*__iter__ of its own.*client_state"):
        reft.resumable(HandsOn(samples, BATCH))


class Nested:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return type(iter(DataLoader(range(1)))).__module__.startswith("torch.")  # type: ignore[arg-type]


@pytest.mark.process
def test_p10_what_a_worker_process_reads_is_not_watched(begin: Any) -> None:
    begin()
    assert [batch.tolist() for batch in DataLoader(Nested(), num_workers=1)] == [[True]]  # type: ignore[arg-type]


# -- a pipeline's loader that was begun before the engine was made ----------------------------------------


@pytest.mark.parametrize("own", ["loader", "sampler", "none"])
@pytest.mark.parametrize("stop", [2, BATCHES, BATCHES + 3])
def test_p8_a_loader_that_was_begun_before_the_engine_comes_back(
    begin: Any, own: str, stop: int
) -> None:
    def made() -> RepeatingLoader:
        torch.manual_seed(4)
        g = torch.Generator().manual_seed(9)
        samples: Any = range(SAMPLES)
        if own == "loader":
            return RepeatingLoader(DataLoader(samples, BATCH, shuffle=True, generator=g))
        sampler = RandomSampler(samples, generator=g if own == "sampler" else None)
        return RepeatingLoader(DataLoader(samples, BATCH, sampler=sampler))

    data = made()
    wanted = [(next(data).tolist(), float(torch.rand(()))) for _ in range(3 * BATCHES)]

    data, life = made(), begin(Pipeline())
    for _ in range(stop):
        life.train_batch(data)
    assert life.data.advice() is None
    state, rng = life.data.state(), capture_rng()
    life.data.close()

    data, life = made(), begin(Pipeline())
    life.data.restore(state, rng)
    for at in range(stop, 3 * BATCHES):
        life.train_batch(data, rng if at == stop else None)
    assert life.seen == wanted[stop:]


# -- loaders of Megatron's, which its program begins behind what was taken of them -------------------------


@pytest.mark.parametrize("engine", [Pipeline, Engine])
@pytest.mark.parametrize("source", ["version", "checkpoint"])
@pytest.mark.parametrize("stop", range(1, 15))
def test_p8_a_loader_that_is_begun_within_its_pass_draws_nothing(
    begin: Any, engine: Any, source: str, stop: int
) -> None:
    """It is begun when its first batch is asked for, when reft has restored the random states, or the program that
    has loaded a checkpoint of its own."""

    def made(steps: int) -> list[Iterator[Any]]:
        torch.manual_seed(4)
        samples, evaluated = steps * BATCH, steps // 4 * 2 * BATCH
        return [cyclic_iter(SAMPLES + 2, samples), cyclic_iter(2 * SAMPLES, evaluated)]

    def evaluate(step: int, held_out: Iterator[Any]) -> None:
        if step % 4 == 0:
            for _ in range(2):
                next(held_out)

    def train(life: Life, data: Iterator[Any], rng: dict[str, Any] | None) -> None:
        if engine is Pipeline:
            return life.train_batch(data, rng)
        life.train(next(data))

    wanted, (data, held_out) = [], made(0)
    for step in range(1, 16):
        wanted.append((next(data).tolist(), float(torch.rand(()))))
        evaluate(step, held_out)

    life, (data, held_out) = begin(engine()), made(0)
    life.data.leave_to_program()
    for step in range(1, stop + 1):
        train(life, data, None)
        evaluate(step, held_out)
    state, rng = life.data.state(), capture_rng()
    life.data.close()
    assert life.seen == wanted[:stop]

    life = begin(engine())
    life.data.leave_to_program()
    data, held_out = made(stop)
    if source == "version":
        life.data.restore(state, rng)
    else:
        restore_rng(rng)
    for step in range(stop + 1, 16):
        train(life, data, rng if step == stop + 1 and source == "version" else None)
        evaluate(step, held_out)
    assert life.seen == wanted[stop:]


def cyclic_iter(samples: int, consumed: int) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(
        range(samples),  # type: ignore[arg-type]
        batch_sampler=Sampler("cyclic", samples, consumed, BATCH, 0, 1, kept=False),  # type: ignore[arg-type]
    )
    while True:
        yield from loader


# -- what is no training data, read between a resumption and the first step -------------------------------


def loader_of(samples: Any, seed: int = 9, size: int = BATCH) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(seed)
    return DataLoader(samples, size, shuffle=True, generator=g)


def noise(loader: DataLoader[Any]) -> list[float]:
    return [float(torch.rand(())) for _ in loader]


def version_of(
    life: Life, loader: DataLoader[Any], steps: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    for _, batch in zip(range(steps), loader, strict=False):
        life.train(batch)
    return life.data.state(), capture_rng()


@pytest.mark.parametrize("known", [True, False])
def test_an_evaluation_before_the_first_step_draws_its_own_numbers(begin: Any, known: bool) -> None:
    state, rng = version_of(begin(), loader_of(range(SAMPLES)), 3)
    engine = Engine()
    life = begin(engine)
    life.data.restore(state if known else {}, rng)
    engine.training = False
    drawn = noise(loader_of(range(2 * SAMPLES)))
    assert len(set(drawn)) == len(drawn)
    engine.training = True
    batch = next(iter(loader_of(range(SAMPLES))))
    restore_rng(rng)
    expected = float(torch.rand(()))
    restore_rng(rng)
    life.train(batch)
    assert life.seen[-1][1] == expected


def test_p8_another_loader_of_the_same_length_keeps_its_order(begin: Any) -> None:
    wanted = [batch.tolist() for batch in loader_of(range(2 * SAMPLES), 7, 2 * BATCH)]
    state, rng = version_of(begin(), loader_of(range(SAMPLES)), 3)
    life = begin()
    life.data.restore(state, rng)
    assert [batch.tolist() for batch in loader_of(range(2 * SAMPLES), 7, 2 * BATCH)] == wanted


def test_p8_the_first_step_of_any_engine_ends_the_resumption(begin: Any) -> None:
    state, rng = version_of(begin(), loader_of(range(SAMPLES)), 3)
    first, second = begin(), begin()
    first.data.restore(state, rng)
    second.data.restore(state, rng)
    for batch in loader_of(range(SAMPLES)):
        first.train(batch)
    drawn = [number for _, number in first.seen]
    assert len(set(drawn)) == len(drawn)


# -- resumable loaders -------------------------------------------------------------------------------------


def test_what_is_copied_or_pickled_lacks_nothing_but_attributes(begin: Any) -> None:
    begin()
    loader = reft.resumable(loader_of(range(SAMPLES)), name="copied")
    for made in (loader, iter(loader)):
        assert not hasattr(object.__new__(type(made)), "no_such_thing")
    skipping = copy.copy(SkippingSampler(loader.sampler, 1))
    assert not hasattr(skipping, "no_such_thing")
    assert list(copy.copy(loader).batch_sampler.sampler) != []


@pytest.mark.process
@pytest.mark.parametrize("most", [2, None])
@pytest.mark.parametrize("order", ["plain", "shuffled", "own generator", "reft"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_p8_an_evaluation_that_was_read_is_no_position_of_training(
    begin: Any, workers: int, order: str, most: int | None
) -> None:
    def trained(
        life: Life, engine: Engine, loaded: Any = None
    ) -> tuple[Any, list[list[list[int]]]]:
        loader = reft.resumable(DataLoader(range(SAMPLES), BATCH, shuffle=True))  # type: ignore[arg-type]
        samples: Any = range(SAMPLES, SAMPLES + 3 * BATCH)
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        if order == "reft":
            held_out: Any = reft.data.loader(
                samples, BATCH, shuffle=True, name="held out", **options
            )
        else:
            own = torch.Generator() if order == "own generator" else None
            made: Any = DataLoader(
                samples, BATCH, shuffle=order != "plain", generator=own, **options
            )
            held_out = reft.resumable(made, name="held out")
        if loaded is not None:
            life.data.restore(*loaded)
        evaluations, saved = [], None
        for _ in range(loader.epoch, 2):
            for batch in loader:
                life.train(batch)
                if len(life.seen) == 2:
                    saved = life.data.state(), capture_rng()
                if len(life.seen) in (1, 4, 8):
                    engine.training = False
                    evaluations.append(
                        [batch.tolist() for batch in itertools.islice(held_out, most)]
                    )
                    engine.training = True
        return saved, evaluations

    torch.manual_seed(1)
    engine = Engine()
    life = begin(engine)
    saved, wanted = trained(life, engine)
    assert [len(one) for one in wanted] == [most or 3] * 3
    life.data.close()

    engine = Engine()
    again = begin(engine)
    again.seen = life.seen[:2]
    assert trained(again, engine, saved)[1] == wanted[1:]
    assert again.seen == life.seen


KINDS = ["loader", "resumable"]
STEPS = 2 * BATCHES


def made(kind: str) -> Any:
    samples: Any = range(SAMPLES)
    if kind == "loader":
        return reft.data.loader(samples, BATCH, shuffle=True, seed=3, name="looked")
    own = torch.Generator().manual_seed(9)
    return reft.resumable(DataLoader(samples, BATCH, shuffle=True, generator=own), name="looked")


def numbers(life: Life) -> list[int]:
    return sorted(sample for samples, _ in life.seen for sample in samples)


def taken_in(life: Life, kind: str) -> int:
    state = life.data.state()
    if kind == "loader":
        return int(state["samples"]["looked"]["consumed"] % SAMPLES // BATCH)
    return int(state["resumable"]["looked"]["taken"])


Look = Any


def look(loader: Any, engine: Engine) -> None:
    next(iter(loader))


def look_in_evaluation(loader: Any, engine: Engine) -> None:
    engine.training = False
    next(iter(loader))
    engine.training = True


KEPT: list[Any] = []


def look_and_keep(loader: Any, engine: Engine) -> None:
    KEPT.append(iter(loader))
    next(KEPT[-1])


LOOKS = [look, look_in_evaluation, look_and_keep]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_p8_a_look_costs_no_batch_of_the_pass_that_trains(
    begin: Any, kind: str, looks: Look, where: str, number: int
) -> None:
    """Each sample once in each of two epochs, without a failure and with one after any step."""
    if looks is look_and_keep and (where, number) == ("before", 1):
        number = (
            4  # of two iterators that are kept and new, which one trains shows in the next step
        )
    KEPT.clear()
    torch.manual_seed(1)
    engine, saved, epochs = Engine(), [], []
    life, loader = begin(engine), made(kind)
    for _ in range(loader.epoch, 2):
        for batch in loader:
            at = len(life.seen) + 1
            if where == "before" and at == number:
                looks(loader, engine)
            assert life.train(batch) is None
            saved.append((life.data.state(), capture_rng(), len(life.seen)))
            if where == "behind" and at == number:
                looks(loader, engine)
        epochs.append(loader.epoch)
    assert epochs == [0, 1]
    assert numbers(life) == sorted(2 * list(range(SAMPLES)))
    assert life.data.advice() is None, "a look is not reading ahead"
    life.data.close()
    first = life.seen
    for state, rng, steps in saved:
        KEPT.clear()
        del loader
        life, loader = begin(), made(kind)
        life.data.restore(state, rng)
        if steps % BATCHES:  # a pass that is over has nothing to look at
            next(iter(loader))
        assert life.data.state() == state
        life.seen = first[:steps]
        for _ in range(loader.epoch, 2):
            for batch in loader:
                life.train(batch)
        assert numbers(life) == sorted(2 * list(range(SAMPLES))), f"gone on behind step {steps}"
        life.data.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 2])
def test_p8_a_look_costs_a_pipeline_nothing(begin: Any, kind: str, number: int) -> None:
    torch.manual_seed(1)
    loader, saved = made(kind), []
    data = iter(RepeatingLoader(loader))
    life = begin(Pipeline())
    for step in range(STEPS):
        if step == number:
            next(iter(loader))
        life.train_batch(data)
        saved.append((life.data.state(), capture_rng(), step + 1))
    assert numbers(life) == sorted(2 * list(range(SAMPLES)))
    life.data.close()
    first = life.seen
    for state, rng, steps in saved:
        del data, loader
        loader = made(kind)
        data, life = iter(RepeatingLoader(loader)), begin(Pipeline())
        life.data.restore(state, rng)
        restore_rng(rng)
        life.seen = first[:steps]
        for _ in range(steps, STEPS):
            life.train_batch(data)
        assert numbers(life) == sorted(2 * list(range(SAMPLES))), f"gone on behind step {steps}"
        life.data.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, None])
def test_p8_what_is_read_before_there_is_an_engine_is_no_pass_of_the_job(
    begin: Any, kind: str, most: int | None
) -> None:
    """``x, _ = next(iter(loader))`` for the model's shape, or a pass for the data's mean."""
    loader = made(kind)
    for _ in itertools.islice(loader, most):
        pass
    life, epochs = begin(), []
    for _ in range(loader.epoch, 2):
        for batch in loader:
            life.train(batch)
        epochs.append(loader.epoch)
    assert epochs == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_p8_a_batch_that_a_loop_leaves_with_belongs_to_no_step(begin: Any, kind: str) -> None:
    """``break`` behind a batch that was not trained on: the next pass is followed from its first batch on."""
    life, loader, found = begin(), made(kind), []
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number == 2:
                break
            life.train(batch)
            found.append((loader.epoch, number + 1))
            assert taken_in(life, kind) == number + 1
    assert found == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert life.data.advice() is None


@pytest.mark.parametrize("kind", KINDS)
def test_p8_an_evaluation_within_a_step_does_not_take_its_batch(begin: Any, kind: str) -> None:
    engine = Engine()
    life, loader = begin(engine), made(kind)
    batch = next(running := iter(loader))
    engine.training = False
    for _ in loader:
        life.data.forward(training=False)
    engine.training = True
    life.train(batch)
    assert taken_in(life, kind) == 1
    assert len(list(running)) == BATCHES - 1
