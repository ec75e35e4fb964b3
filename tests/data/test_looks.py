"""A look at a loader's batch is no training: the position is that of the pass that trains (P8)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader

import reft
from reft.state.blob import capture_rng, restore_rng
from tests.data.life import BATCH, BATCHES, SAMPLES, Engine, Life, Pipeline

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
        number = 4  # of two iterators that are kept and new, which one trains shows in the next step
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
