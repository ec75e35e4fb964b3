"""``order="dynamic"``: replicas in one process, in the turns that a test gives them. Each sample is trained on once,
whatever is begun anew, rolled back or killed, and a slow replica takes fewer (P8)."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

import reft
from reft.checks.start import check_orders
from reft.data import loading
from reft.data import order as batches
from reft.data.order import JobPosition, SampleOrder
from reft.data.position import DataPosition
from reft.errors import ConfigError
from tests.data.life import Damaged, Engine, Pipeline

MICRO, STEP = 2, 24
SIZE = 101


class Job:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        # Replicas of one process have loaders of one name.
        monkeypatch.setattr(loading.LOADERS, "require_named", lambda loader: None)
        self.start(1)

    def start(self, replicas: int, store: Any = None) -> None:
        self.replicas = replicas
        self.store = HashStore() if store is None else store
        self._monkeypatch.setattr(batches, "job_store", lambda replicas: self.store)
        self._monkeypatch.setattr(batches, "readers", lambda replicas: replicas)
        self._monkeypatch.setattr(batches, "BEGUN", Counter())

    def loader(self, replica: int, size: int = SIZE, step: int = STEP, **options: Any) -> Any:
        options = {"dp_rank": replica, "dp_size": self.replicas, "name": "dynamic"} | options
        return reft.data.loader(range(size), MICRO, order="dynamic", step_samples=step, **options)

    def loaders(self, **options: Any) -> list[Any]:
        return [self.loader(replica, **options) for replica in range(self.replicas)]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    engine = DataPosition(Engine())
    yield Job(monkeypatch)
    engine.close()


def train(reading: Any) -> list[int]:
    found: list[int] = next(reading).tolist()
    reading._progress.train()
    return found


def rest_of_step(loader: Any, reading: Any) -> list[int]:
    found = train(reading)
    while not loader.ends_step:
        found += train(reading)
    return found


@pytest.mark.process
@pytest.mark.parametrize(("workers", "held"), [(0, 2), (1, 3), (2, 4)])
def test_a_slow_replica_takes_no_more_than_it_holds(job: Job, workers: int, held: int) -> None:
    """It trains on one micro-batch while the others train on all that they can have of the step; it holds one more
    that it has read, and one for each worker. A step has 8 for each replica."""
    job.start(3)
    loaders = job.loaders(size=20 * 48, step=48, num_workers=workers)
    slow, *quick = ((loader, iter(loader)) for loader in loaders)
    taken: list[int] = []
    for _ in range(6):
        mine = train(slow[1])
        waiting = list(quick)
        while waiting:
            waiting = [one for one in waiting if train(one[1]) and not one[0].ends_step]
        if not slow[0].ends_step:
            mine += rest_of_step(*slow)
        taken.append(len(mine) // MICRO)
    assert taken[1:] == [held] * 5, (
        "of the first step the workers' share may have been taken in turns"
    )
    assert taken[0] <= held


def test_p8_a_loader_that_is_made_anew_has_a_ledger_of_its_own(job: Job) -> None:
    """An evaluation makes its loader each time. One replica is at the second, another still at the first."""
    job.start(2)
    seen: dict[int, list[int]] = {1: [], 2: []}

    def evaluate(number: int, replica: int) -> Iterator[None]:
        for batch in job.loader(replica, size=96, name="evaluation"):
            seen[number].extend(batch.tolist())
            yield

    quick, slow = (
        itertools.chain(evaluate(1, replica), evaluate(2, replica)) for replica in range(2)
    )
    next(slow)
    for _ in itertools.chain(quick, slow):
        pass
    assert sorted(seen[1]) == sorted(seen[2]) == list(range(96))


class Failing:
    def __init__(self, after: int) -> None:
        self._store, self._left = HashStore(), after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, *args: Any) -> bytes:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("connection reset by peer")
        return self._store.compare_set(*args)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_p8_a_store_that_fails_is_no_error_of_the_data_set(
    job: Job, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that leaves out what cannot be read does not go on without micro-batches that can."""
    job.start(1, Failing(5))
    loader = job.loader(0, size=48, num_workers=workers)
    reading, seen = iter(loader), list[int]()

    def read_all() -> None:
        for batch in reading:
            seen.extend(batch.tolist())

    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            read_all()
    assert "data set" not in caplog.text
    assert seen == list(range(len(seen)))
    assert loader.state_dict()["consumed"] == 0, "the step is not whole"


def test_p8_a_version_that_is_older_than_a_loaders_first_pass_takes_it_to_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = DataPosition(Engine())
    try:
        for order in ({}, {"order": "dynamic", "step_samples": 4}):
            loader = reft.data.loader(range(12), 2, name="younger", **order)  # type: ignore[arg-type]
            assert "younger" not in data.state().get("samples", {})
            before: dict[str, Any] = {}
            reading = iter(loader)
            assert [train(reading) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
            data.restore(before, None)
            assert [batch.tolist() for batch in reading] == [[at, at + 1] for at in range(0, 12, 2)]
            data.restore(before, None)
            assert next(iter(loader)).tolist() == [0, 1]
    finally:
        data.close()


def test_p8_a_loop_that_is_left_after_so_many_micro_batches_is_refused(job: Job) -> None:
    """The replicas would be at different steps there, and go on in different passes."""
    job.start(2)
    one, other = job.loaders(size=96)
    assert [train(reading) for reading in [iter(one)] for _ in range(3)]
    following = iter(one)
    batch = next(following)
    with pytest.raises(ConfigError, match=r"left within a step.*loader\.ends_step"):
        following._progress.train()
    assert batch.tolist()
    rest_of_step(other, iter(other))
    assert train(iter(other))
    for _ in itertools.islice(iter(job.loader(0, name="evaluation")), 3):
        pass  # no engine trains on them


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("looked_at", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_p8_a_look_within_a_step_costs_nothing(
    job: Job, keeps: bool, workers: int, looked_at: int
) -> None:
    job.start(2)
    loaders, kept = job.loaders(size=96, num_workers=workers), []

    def look(loader: Any) -> None:
        kept.append(iter(loader))
        for _ in range(looked_at):
            next(kept[-1])
        if not keeps:
            kept.clear()

    readings, steps, trained = [iter(loader) for loader in loaders], [], set()
    for _ in range(96 // STEP):
        samples: list[int] = []
        for loader, reading in zip(loaders, readings, strict=True):
            ends = False
            while not ends:
                batch = next(reading)
                ends = loader.ends_step
                if (
                    not keeps or loader in trained
                ):  # which of two trains shows with the first batch only
                    look(loader)
                assert loader.ends_step is ends
                trained.add(loader)
                reading._progress.train()
                look(loader)
                assert keeps or loader.ends_step is ends
                samples += batch.tolist()
        steps.append(sorted(samples))
    assert steps == [list(range(first, first + STEP)) for first in range(0, 96, STEP)]


def test_p12_steps_that_are_not_the_engines_are_refused_before_one_is_trained(job: Job) -> None:
    job.start(2)
    engine = Engine()
    engine.train_batch_size = lambda: 2 * STEP  # type: ignore[attr-defined]
    data = DataPosition(engine, lambda: (0, 2))
    try:
        following = iter(job.loader(0, size=96))
        next(following)
        with pytest.raises(
            ConfigError, match=r"24 samples \(step_samples\).*48 \(train_batch_size\).*Write"
        ):
            following._progress.train()
        train(iter(job.loader(1, size=96, step=2 * STEP, name="right")))
    finally:
        data.close()


@pytest.mark.parametrize(
    ("kind", "known", "why"),
    [
        (Engine, {}, ""),
        (Pipeline, {"is_first_stage": True}, "the stages of a pipeline run a fixed"),
        (Engine, {"zero_optimization_stage": 2}, "ZeRO-2"),
    ],
)
def test_p12_an_engine_that_takes_equally_many_refuses_it_on_all_ranks(
    kind: type[Engine], known: dict[str, int], why: str
) -> None:
    """Before the first step, so that no stage that reads nothing waits for the others; and whenever it is read."""
    engine = kind()
    for name, value in known.items():
        setattr(engine, name, lambda value=value: value)
    data = DataPosition(engine)
    try:
        loader = reft.data.loader(
            range(2 * STEP), MICRO, order="dynamic", step_samples=STEP, name="equal"
        )
        ranks = [json.dumps(orders).encode() for orders in (data.orders(None), {})]
        control: Any = SimpleNamespace(gather_bytes=lambda mine: ranks)
        for act in (lambda: check_orders(control, {}, data.why_equal), lambda: next(iter(loader))):
            with (
                pytest.raises(ConfigError, match=f"dynamic.*{why}.*Leave") if why else nullcontext()
            ):
                act()
    finally:
        data.close()


class Replica:
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.reading = iter(loader)
        self.step: list[int] = []
        self.waits = False  # For the others, at the end of its step
        self.looks = True  # Nothing was trained since its start or a roll-back


class Attacked:
    def __init__(self, job: Job, rng: random.Random, workers: int) -> None:
        self._job, self._rng, self._workers = job, rng, workers
        self.history: list[list[int]] = []  # Samples of each step
        self._versions: list[dict[str, Any]] = []  # Behind each step, with that of the beginning
        self.happened: Counter[str] = Counter()
        self._begin(None)

    def _begin(self, version: dict[str, Any] | None) -> None:
        self._job.start(self._rng.randint(1, 4))
        loaders = self._job.loaders(shuffle=True, seed=5, num_workers=self._workers)
        if version is not None:
            for loader in loaders:
                loader.load_state_dict(version)
        self._replicas = [Replica(loader) for loader in loaders]
        self._versions = self._versions or [loaders[0].state_dict()]

    def act(self) -> None:
        drawn = self._rng.random()
        if drawn < 0.02:
            self.happened["kill"] += 1
            self._begin(self._versions[-1])
        elif drawn < 0.03:
            self._roll_back()
        else:
            self._one(self._rng.choice(self._replicas))

    def _roll_back(self) -> None:
        """Every process loads an older version, some within a pass that they are reading."""
        self.happened["roll back"] += 1
        steps = self._rng.randint(max(0, len(self.history) - 3), len(self.history))
        del self.history[steps:]
        del self._versions[steps + 1 :]
        for one in self._replicas:
            one.loader.load_state_dict(self._versions[-1])
            one.step, one.waits, one.looks = [], False, True
            if self._rng.random() < 0.5:
                one.reading = iter(one.loader)

    def _one(self, one: Replica) -> None:
        if one.waits:
            return
        if one.looks and self._rng.random() < 0.3:
            self.happened["look"] += 1
            one.reading = iter(one.loader)
            for _ in range(self._rng.randint(0, 15)):
                at = one.loader.state_dict()
                if (at["epoch"] + 1) * SIZE - at["consumed"] < 2 * STEP:
                    break  # a pass that is read to its end counts
                if next(one.reading, None) is None:
                    break  # beside a pass that is trained on; the position is that one's
            if one.loader.state_dict()["consumed"] != self._versions[-1]["consumed"]:
                self.happened["look over a step"] += 1
            one.reading = iter(one.loader)
        try:
            one.step += train(one.reading)
        except StopIteration:
            self.happened["pass"] += 1
            one.reading = iter(one.loader)
            return
        one.looks = False
        one.waits = bool(one.loader.ends_step)
        if all(other.waits for other in self._replicas):
            self._end_step()

    def _end_step(self) -> None:
        positions = [one.loader.state_dict() for one in self._replicas]
        assert positions == [positions[0]] * len(positions)
        self.history.append(sorted(sample for one in self._replicas for sample in one.step))
        self._versions.append(positions[0])
        for one in self._replicas:
            one.step, one.waits = [], False


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(16))
def test_p8_every_step_trains_on_its_samples_whatever_happens_in_whatever_turns(
    job: Job, seed: int
) -> None:
    workers = int(seed == 0)  # which are slow to begin
    attacked = Attacked(job, random.Random(seed), workers)
    for _ in range(300 if workers else 600):
        attacked.act()
    order = SampleOrder(SIZE, 5, shuffle=True)
    for number, samples in enumerate(attacked.history):
        wanted = [sample for _, sample in order.part(number * STEP, STEP, slice(None))]
        assert samples == sorted(wanted), f"step {number}"
    assert len(attacked.history) > 3
    assert {"kill", "look"} <= set(attacked.happened)


EACH, WHOLE, STEPS = 2, 8, 3
STEP_0, STEP_1, STEP_2 = (
    [*range(first, first + WHOLE)] for first in range(0, WHOLE * STEPS, WHOLE)
)


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
    options: dict[str, Any] = {"order": "dynamic", "step_samples": WHOLE, "num_workers": workers}
    one = reft.data.loader(Damaged(WHOLE * STEPS, *bad), EACH, name="left out", **options)
    reading, found, step = iter(one), list[list[int]](), list[int]()
    while True:
        try:
            step += next(reading).tolist()
        except ValueError:
            continue
        except StopIteration:
            break
        # The step is whole where its last micro-batch is trained on: a version of it goes on behind.
        whole_steps = (max(step) // WHOLE + 1) * WHOLE
        assert one.state_dict()["consumed"] == (
            whole_steps if one.ends_step else whole_steps - WHOLE
        )
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
    options: dict[str, Any] = {"order": "dynamic", "step_samples": 2 * EACH, "dp_size": 2}
    one = reft.data.loader(
        Damaged(WHOLE * STEPS, EACH), EACH, name="none left", dp_rank=1, **options
    )
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
    order = SampleOrder(WHOLE * STEPS, 0, shuffle=False)
    made = [batches.SharedBatches(order, EACH, WHOLE, drop_last=False, name="read") for _ in turns]
    taken = [one.begin_at(JobPosition(), (replica, 3), 0) for replica, one in enumerate(made)]
    seen = [sample for replica in turns for keys in made[replica] for _, sample in keys]
    for one in taken:
        one.leave(JobPosition(0, WHOLE * STEPS), 3)
    assert sorted(seen) == list(range(WHOLE * STEPS))
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
