"""A script that catches its data set's errors and goes on: what it was given is what the position says (P8)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import reft
from reft.state.blob import capture_rng
from tests.data.life import Damaged, Life

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
    return reft.data.loader(damaged(), BATCH, shuffle=True, num_workers=workers, name="damaged", **options)


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
