"""A pass over a loader, come back to at any batch: the order and every random number are the same (P8)."""

from __future__ import annotations

import collections
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import reft
from reft.data import watch as watching
from reft.data.comparison import difference
from reft.data.passes import LoaderIterator, Position
from reft.data.watch import LoaderHook, ResumePhase
from reft.engine.attach import find_session
from reft.state.blob import capture_rng, restore_host_rng
from reft.state.codec import decode, encode
from tests.data.life import seed
from tests.engine.ranks import be_a_rank, block_of, mse, run_ranks

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


class Own(Sampler[int]):
    """Goes on from pass to pass with generators, a counter and a queue of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.python, self.numpy, self.legacy = (
            random.Random(1),
            np.random.default_rng(2),
            np.random.RandomState(3),
        )
        self.torch = torch.Generator().manual_seed(4)
        self.rounds = 0
        self.queue = collections.deque([3, 1, 2])

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        if self.kind == "python":
            self.python.shuffle(order)
        elif self.kind == "numpy":
            order = [int(i) for i in self.numpy.permutation(self.legacy.permutation(SAMPLES))]
        elif self.kind == "torch":
            order = torch.randperm(SAMPLES, generator=self.torch).tolist()
        elif self.kind == "counter":
            self.rounds += 1
            order = order[self.rounds :] + order[: self.rounds]
        elif self.kind == "queue":
            self.queue.rotate(1)
            order = order[:: self.queue[0]] * 3
        if self.kind == "lazy":  # draws while the pass is read
            yield from (int(self.python.random() * SAMPLES) for _ in order)
        else:
            yield from order[:SAMPLES]


class OwnState(Own):
    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds = state["rounds"]


class OwnBatches(BatchSampler):
    """Batches of lengths that it draws."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), BATCH, False)
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)]
        self.rng.shuffle(batches)
        yield from batches


class Remembering(Noisy):
    """A data set whose items depend on how many were read, and which says so."""

    def __getitem__(self, index: int) -> list[float]:
        return [*super().__getitem__(index), float(len(self.loaded))]

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": list(self.loaded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = list(state["loaded"])


class RememberingStream(Stream):
    read = 0

    def __iter__(self) -> Iterator[float]:
        for item in super().__iter__():
            self.read += 1
            yield item + 100 * self.read

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


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
    "with_replacement": lambda: DataLoader(
        Noisy(), BATCH, sampler=RandomSampler(Noisy(), True, 70)
    ),
    "weighted": lambda: DataLoader(
        Noisy(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, 30)
    ),
    "subset": lambda: DataLoader(Noisy(), BATCH, sampler=SubsetRandomSampler(range(3, 20))),
    "distributed": lambda: DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), 2, 1)),
    "python_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=Shuffled()),
    "batch_sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(Shuffled(), BATCH, False)
    ),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    **{
        f"own_{kind}": (lambda kind=kind: DataLoader(Noisy(), BATCH, sampler=Own(kind)))  # type: ignore[misc]
        for kind in ("python", "numpy", "torch", "counter", "queue", "lazy")
    },
    "own_state_dict": lambda: DataLoader(Noisy(), BATCH, sampler=OwnState("counter")),
    "own_in_batches": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(Own("python"), BATCH, False)
    ),
    "own_batches": lambda: DataLoader(Noisy(), batch_sampler=OwnBatches()),
    "remembering": lambda: DataLoader(Remembering(), BATCH, shuffle=True),
    "remembering_stream": lambda: DataLoader(RememberingStream(), BATCH),
    "workers": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "persistent_workers": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator(7)
    ),
}
SLOW = ("workers", "persistent_workers")


def train() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


def passes(
    watch: LoaderHook, loader: DataLoader[Any], first: LoaderIterator | None = None
) -> Iterator[tuple[LoaderIterator, Any]]:
    while True:
        one = watch.open(loader) if first is None else first
        first = None
        for batch in one:
            yield one, batch


def numbers(batch: Any) -> list[float]:
    parts = batch if isinstance(batch, list) else [batch]
    return [float(x) for part in parts for x in np.ravel(np.asarray(part, dtype=np.float64))]


def undisturbed(name: str, batches: int) -> list[tuple[list[float], bytes, dict[str, Any]]]:
    watch, loader = LoaderHook(), LOADERS[name]()
    seed(1)
    found = []
    for one, batch in itertools.islice(passes(watch, loader), batches):
        found.append(
            ([*numbers(batch), train()], encode(dict(vars(one.position()))), capture_rng())
        )
    return found


@pytest.mark.integration
@pytest.mark.parametrize("name", LOADERS)
def test_p8_from_any_batch_on_the_pass_and_the_next_are_the_same(name: str) -> None:
    found = undisturbed(name, 24)
    for stop in (0, 3, 9, 16) if name in SLOW else range(20):
        _, position, rng = found[stop]
        seed(99)
        watch, loader = LoaderHook(), LOADERS[name]()
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
            watch, loader = LoaderHook(), LOADERS[name]()
            watch.resuming = ResumePhase(position, rng, lambda: True)
            data = (batch for _, batch in passes(watch, loader))
            for _ in range(skip):
                next(data)
            again = []
            for batch in itertools.islice(data, 23 - stop):
                watch.resuming = None  # the first training step
                again.append([*numbers(batch), train()])
            assert again == [n for n, _, _ in found[stop + 1 :]], (
                f"behind batch {stop}, {skip} skipped"
            )


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


def test_p8_a_resumable_loader_that_the_script_does_not_keep_lives_as_long_as_its_iterator() -> (
    None
):
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
    assert "not kept" not in watching.LOADERS.positions().get("resumable", {}), (
        "it goes with its iterator"
    )
    watching.LOADERS.restore({"resumable": {"not kept": saved}})
    again = [x[0].tolist() for x in reft.resumable(LOADERS["shuffled"](), name="not kept")]
    assert again == [one[: len(one) // 4] for one in wanted[2:]], "goes on behind it"


def test_p8_a_loader_of_reft_that_the_script_does_not_keep_lives_as_long_as_its_iterator() -> None:
    consumed = []
    for _ in reft.data.loader(range(6), 2, name="not kept"):
        consumed.append(watching.LOADERS.positions()["samples"]["not kept"]["consumed"])
    assert consumed == [2, 4, 6]


RANK = int(os.environ.get("RANK", "0"))
MICRO, WIDTH = 2, 4
REPLICAS = {"train_batch_size": 2 * MICRO, "train_micro_batch_size_per_gpu": MICRO}
STAGES = {"train_batch_size": MICRO, "train_micro_batch_size_per_gpu": MICRO}
Loader = Callable[[Path], Any]


def samples(count: int = 16) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def loader(count: int = 16, **options: Any) -> Any:
    return reft.data.loader(samples(count), MICRO, drop_last=True, **options)


def dealt(count: int = 16, replicas: int = 2, **options: Any) -> Any:
    data = samples(count)
    return DataLoader(
        data, MICRO, sampler=DistributedSampler(data, replicas, RANK % replicas, **options)
    )


CASES: dict[str, tuple[Loader, dict[str, Any]]] = {
    "alike": (lambda root: loader(shuffle=True, seed=3), REPLICAS),
    "alike_stages": (lambda root: loader(shuffle=True, seed=3), STAGES),
    "one_rank_reads": (lambda root: loader(name=f"of rank {RANK}"), REPLICAS),
    "parts_of_nodes": (lambda root: dealt(16 + 2 * RANK, 1), REPLICAS),
    "seed": (lambda root: loader(shuffle=True, seed=RANK), REPLICAS),
    "length": (lambda root: loader(16 + RANK), REPLICAS),
    "batch_size": (
        lambda root: reft.data.loader(samples(), MICRO + RANK, drop_last=True),
        REPLICAS,
    ),
    "seed_of_stages": (lambda root: loader(shuffle=True, seed=RANK), STAGES),
    "resumable_length": (lambda root: reft.resumable(dealt(16 + 2 * RANK)), REPLICAS),
    "loop_seed": (lambda root: dealt(seed=RANK), REPLICAS),
    "training_data_of_stages": (lambda root: dealt(16 + 2 * RANK, 1), STAGES),
}

ORDER = sorted(CASES, key=lambda case: CASES[case][1] is STAGES)
"""DeepSpeed makes no plain engine behind a pipeline's."""


def step(root: Path, case: str) -> str:
    """What the first step is refused with; "" where it is made."""
    make, sizes = CASES[case]
    config = {
        **sizes,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "steps_per_print": None,
    }
    staged = sizes is STAGES
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = PipelineModule(layers, num_stages=2, loss_fn=mse) if staged else nn.Sequential(*layers)
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]
    reft.attach(engine, config=block_of(root, case, tolerance=0))
    engine.load_checkpoint(str(root / "none"))
    try:
        reads = make(root)
        if staged:
            engine.train_batch(iter(RepeatingLoader(reads)))
        else:
            x, y = next(iter(reads))
            engine.backward(mse(engine(x), y))
            engine.step()
    except reft.ConfigError as error:
        return f"{engine.global_steps} {error}"
    finally:
        find_session(engine).close()
    return "" if engine.global_steps == 1 else "no step"


MADE = ["alike", "alike_stages", "one_rank_reads", "parts_of_nodes"]
FOUND = {
    "seed": "the loader 'data'.*seed 0 on rank 0; seed 1 on rank 1.*give every rank the same seed",
    "length": "samples 16 on rank 0; samples 17 on rank 1.*the same data set",
    "batch_size": "batch_size 2 on rank 0; batch_size 3 on rank 1.*the same batch_size",
    "seed_of_stages": "seed 0 on rank 0; seed 1 on rank 1",
    "resumable_length": "the loader 'data'.*samples 16 on rank 0; samples 18 on rank 1",
    "loop_seed": "the DataLoader of the training.*seed 0 on rank 0; seed 1 on rank 1",
    "training_data_of_stages": "the DataLoader of the training.*samples 16 on rank 0; samples 18 on rank 1",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("orders"))


def test_every_case_is_looked_at() -> None:
    assert {*MADE, *FOUND} == CASES.keys()


@pytest.mark.integration
@pytest.mark.parametrize("case", MADE)
def test_ranks_that_read_alike_or_different_things_make_their_step(
    results: list[dict[str, Any]], case: str
) -> None:
    assert [result[case] for result in results] == ["", ""]


@pytest.mark.integration
@pytest.mark.parametrize("case", FOUND)
def test_p12_every_rank_refuses_its_first_step_where_the_orders_differ(
    results: list[dict[str, Any]], case: str
) -> None:
    said = {result[case] for result in results}
    assert len(said) == 1, "all ranks alike"
    assert said.pop().startswith("0 "), "no step was made"
    for result in results:
        assert re.search(FOUND[case], result[case])


def test_the_ranks_that_differ_are_named_and_those_without_a_loader_say_nothing() -> None:
    usual = {"the loader 'data'": {"samples": 8, "seed": 1}}
    other = {"the loader 'data'": {"samples": 9, "seed": 1}}
    assert difference([usual, {}, usual, {}]) is None
    said = str(difference([usual, {}, other, usual]))
    assert "samples 8 on ranks 0, 3; samples 9 on rank 2" in said
    assert "seed" not in said
    many = str(difference([usual] * 10 + [other]))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" in many


if __name__ == "__main__":
    be_a_rank(lambda root: {case: step(root, case) for case in ORDER})
