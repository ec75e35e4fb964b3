"""A pass over a loader, come back to at any batch: the order and every random number are the same (P8)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import reft
from reft.data import watch as watching
from reft.data.passes import Pass, Position
from reft.data.watch import Resuming, Watch
from reft.state.blob import capture_rng, restore_host_rng
from reft.state.codec import decode, encode
from tests.data.life import seed

SAMPLES, BATCH = 22, 4


class Noisy(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        self.loaded.append(index)
        if torch.utils.data.get_worker_info() is not None:
            return [float(index)]
        return [float(index), float(torch.rand(())), random.random(), float(np.random.rand())]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[float]:
        for index in range(SAMPLES):
            yield index + float(torch.rand(()))


class Shuffled(Sampler[int]):
    """Draws its order from Python's and NumPy's generators."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from (order[i] for i in np.random.permutation(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in_order": lambda: DataLoader(Noisy(), BATCH),
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "last_dropped": lambda: DataLoader(Noisy(), BATCH, shuffle=True, drop_last=True),
    "own_generator": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=generator(5)),
    "samplers_generator": lambda: DataLoader(
        Noisy(), BATCH, sampler=RandomSampler(Noisy(), generator=generator(6))
    ),
    "with_replacement": lambda: DataLoader(Noisy(), BATCH, sampler=RandomSampler(Noisy(), True, 70)),
    "weighted": lambda: DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, 30)),
    "subset": lambda: DataLoader(Noisy(), BATCH, sampler=SubsetRandomSampler(range(3, 20))),
    "distributed": lambda: DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), 2, 1)),
    "python_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=Shuffled()),
    "batch_sampler": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(Shuffled(), BATCH, False)),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "workers": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "persistent_workers": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator(7)
    ),
}
SLOW = ("workers", "persistent_workers")


def train() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


def passes(watch: Watch, loader: DataLoader[Any], first: Pass | None = None) -> Iterator[tuple[Pass, Any]]:
    while True:
        one = watch.open(loader) if first is None else first
        first = None
        for batch in one:
            yield one, batch


def numbers(batch: Any) -> list[float]:
    parts = batch if isinstance(batch, list) else [batch]
    return [float(x) for part in parts for x in np.ravel(np.asarray(part, dtype=np.float64))]


def undisturbed(name: str, batches: int) -> list[tuple[list[float], bytes, dict[str, Any]]]:
    watch, loader = Watch(), LOADERS[name]()
    seed(1)
    found = []
    for one, batch in itertools.islice(passes(watch, loader), batches):
        found.append(([*numbers(batch), train()], encode(dict(vars(one.position()))), capture_rng()))
    return found


@pytest.mark.integration
@pytest.mark.parametrize("name", LOADERS)
def test_p8_from_any_batch_on_the_pass_and_the_next_are_the_same(name: str) -> None:
    found = undisturbed(name, 24)
    for stop in (0, 3, 9, 16) if name in SLOW else range(20):
        _, position, rng = found[stop]
        seed(99)
        watch, loader = Watch(), LOADERS[name]()
        torch.rand(3)  # the script draws what it likes before it is where it was
        first = watch.begin_at(loader, Position(**decode(position)))
        restore_host_rng(rng)
        again = [
            [*numbers(batch), train()]
            for _, batch in itertools.islice(passes(watch, loader, first), 23 - stop)
        ]
        assert again == [numbers for numbers, _, _ in found[stop + 1 :]], f"behind batch {stop}"


@pytest.mark.parametrize("name", [n for n in LOADERS if n not in SLOW])
def test_p8_a_script_that_skips_by_itself_leaves_no_trace(name: str) -> None:
    """It begins where the pass began, or at the very beginning; both lead to the same numbers."""
    found = undisturbed(name, 24)
    for stop in (*range(0, 20, 2), 5, 11):
        _, encoded, rng = found[stop]
        position = Position(**decode(encoded))
        if position.length is None:
            continue  # a stream cannot tell that its pass is over
        # At the end of a pass the script may also begin the next one at once.
        at_once = {0} if position.complete else set()
        for skip in {position.taken, stop + 1} | at_once:
            seed(1)
            watch, loader = Watch(), LOADERS[name]()
            watch.resuming = Resuming(position, rng, lambda: True)
            data = (batch for _, batch in passes(watch, loader))
            for _ in range(skip):
                next(data)
            again = []
            for batch in itertools.islice(data, 23 - stop):
                watch.resuming = None  # the first training step
                again.append([*numbers(batch), train()])
            assert again == [n for n, _, _ in found[stop + 1 :]], f"behind batch {stop}, {skip} skipped"


def test_p10_a_resumable_loader_without_reft_is_the_loader() -> None:
    seed(2)
    wanted = [numbers(batch) for batch in LOADERS["shuffled"]()]
    seed(2)
    loader = reft.resumable(LOADERS["shuffled"]())
    assert [numbers(batch) for batch in loader] == wanted
    assert (len(loader), loader.batch_size, loader.epoch) == (6, BATCH, 0)


def test_two_loaders_under_one_name_are_refused() -> None:
    first, second = (reft.resumable(LOADERS["in_order"](), name="twice") for _ in range(2))
    next(iter(second))
    with pytest.raises(reft.ConfigError, match=r"name='\.\.\.'"):
        iter(first)


def test_p8_a_resumable_loader_that_the_script_does_not_keep_lives_as_long_as_its_iterator() -> None:
    seed(4)
    wanted = [numbers(batch) for batch in LOADERS["shuffled"]()]
    seed(4)
    found, saved = [], None
    for batch in reft.resumable(LOADERS["shuffled"](), name="not kept"):
        found.append(numbers(batch))
        if len(found) == 2:
            saved = watching.LOADERS.positions().get("resumable", {}).get("not kept")
            assert saved is not None, "its position is in no version"
    assert found == wanted
    assert "not kept" not in watching.LOADERS.positions().get("resumable", {}), "it goes with its iterator"
    watching.LOADERS.restore({"resumable": {"not kept": saved}})
    again = [x[0].tolist() for x in reft.resumable(LOADERS["shuffled"](), name="not kept")]
    assert again == [one[: len(one) // 4] for one in wanted[2:]], "goes on behind it"


def test_p8_a_loader_of_reft_that_the_script_does_not_keep_lives_as_long_as_its_iterator() -> None:
    consumed = []
    for _ in reft.data.loader(range(6), 2, name="not kept"):
        consumed.append(watching.LOADERS.positions()["samples"]["not kept"]["consumed"])
    assert consumed == [2, 4, 6]
