"""reft.data.share_out: real processes read a data set together, each sample once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import reft
from reft.data import place
from reft.data.sharing import SharedShards
from reft.hook.data import DataPosition
from tests.data.test_watch import Engine

SAMPLES, SHARD = 205, 10
FAST, SLOW, DOOMED = range(3)


def work(rank: int, port: int, out: str) -> None:
    """Read shards; what counts is written down. One is slow, one dies with a shard in hand."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    shards = reft.data.share_out(SAMPLES, SHARD, timeout_secs=3.0, rank=rank, store=store)
    store.add("here", 1)
    while store.add("here", 0) < 3:
        time.sleep(0.01)
    for number, shard in enumerate(shards):
        if rank == DOOMED and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 if rank == SLOW else 0.05)
        if shards.finish():
            with Path(out, str(rank)).open("a") as file:
                file.write("".join(f"{index}\n" for index in shard))


@pytest.mark.integration
def test_each_sample_counts_once_with_a_slow_process_and_one_that_is_killed(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, store.port, str(tmp_path))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL]
    read = {rank: [int(line) for line in (tmp_path / str(rank)).read_text().split()] for rank in range(3)}
    assert sorted(index for mine in read.values() for index in mine) == list(range(SAMPLES))
    assert len(read[DOOMED]) in (SHARD, SAMPLES % SHARD)
    assert len(read[SLOW]) < len(read[FAST])


def made(store: HashStore, rank: int = 0) -> SharedShards:
    return reft.data.share_out(SAMPLES, SHARD, rank=rank, store=store)


def test_a_state_gives_back_what_was_read_behind_it() -> None:
    store = HashStore()
    one, two = made(store), made(store, 1)
    first, second = [next(one), next(two), next(one)], [next(two), next(one)]
    state = two.state_dict()
    assert state["done"] == [[0, 3]]
    assert first == [range(0, 10), range(10, 20), range(20, 30)]
    for process in (one, two):
        process.load_state_dict(state)
    again = [next(one), next(two)]
    assert again == sorted(second, key=lambda shard: shard.start)
    assert one.finish()
    assert two.state_dict()["done"] == [[0, 4]], "what is in hand is not read"
    assert two.finish()
    assert [*one][-1] == range(200, 205)
    assert two.state_dict()["done"] == [[0, 21]]


def test_a_shard_that_took_too_long_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    late = reft.data.share_out(SAMPLES, SHARD, timeout_secs=0.01, rank=0, store=store)
    other = reft.data.share_out(SAMPLES, SHARD, timeout_secs=0.01, rank=1, store=store)
    assert next(late) == range(10)
    time.sleep(0.02)
    next(other)  # hears of it
    time.sleep(0.02)
    other.finish()
    assert next(other) == range(10)
    next(late)
    assert "was handed to another process" in caplog.text


def test_wrong_use_is_refused() -> None:
    with pytest.raises(reft.ConfigError, match="more than 0"):
        reft.data.share_out(SAMPLES, 0)
    one = made(HashStore())
    with pytest.raises(reft.ConfigError, match="no shard of 'shards' in hand"):
        one.finish()
    with pytest.raises(reft.ConfigError, match="shard_samples 11"):
        one.load_state_dict({**one.state_dict(), "shard_samples": 11})


def test_a_name_whose_data_this_process_has_read_is_refused_rather_than_give_nothing() -> None:
    store = HashStore()
    assert sum(map(len, made(store))) == SAMPLES
    with pytest.raises(reft.ConfigError, match=r"name 'shards'.*share_out\(\.\.\., name="):
        made(store)
    assert [*made(store, 1)] == [], "another one has read all"
    again = reft.data.share_out(SAMPLES, SHARD, name="again", rank=0, store=store)
    next(again)
    del again  # an error of its own; what it had in hand comes back
    assert next(reft.data.share_out(SAMPLES, SHARD, name="again", rank=0, store=store)) == range(10, 20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "dynamic"}, "order 'dynamic' with step_samples None"),
        ({"step_samples": 12}, "order 'static' with step_samples 12"),
        ({"order": "sorted"}, "order 'sorted'"),
        ({"order": "dynamic", "step_samples": 10}, "step_samples 10 with batch_size 4"),
        ({"order": "dynamic", "step_samples": 100}, "99 samples with step_samples 100"),
    ],
)
def test_orders_that_cannot_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(reft.ConfigError, match=said):
        reft.data.loader(range(99), 4, **options)  # type: ignore[arg-type]


def test_a_dynamic_loader_says_what_it_lacks() -> None:
    one = reft.data.loader(range(99), 4, order="dynamic", step_samples=8, dp_rank=0, dp_size=3, name="few")
    with pytest.raises(TypeError, match="has no length"):
        len(one)
    with pytest.raises(reft.ConfigError, match="2 micro-batches in a step of 8 samples for 3 replicas"):
        next(iter(one))
    two = reft.data.loader(range(99), 4, order="dynamic", step_samples=8, dp_rank=0, dp_size=2, name="two")
    with pytest.raises(reft.ConfigError, match=r"2 replicas and no torch\.distributed"):
        next(iter(two))


class Pipeline(Engine):
    grid = None


class Zero(Engine):
    def __init__(self, stage: int) -> None:
        self.zero_optimization_stage = lambda: stage


@pytest.mark.parametrize(
    ("engine", "said"), [(Pipeline(), "stages of a pipeline"), (Zero(2), "ZeRO-2"), (Zero(3), "ZeRO-3")]
)
def test_engines_whose_replicas_have_to_keep_step_are_refused_the_dynamic_order(
    engine: Engine, said: str
) -> None:
    one = reft.data.loader(range(99), 4, order="dynamic", step_samples=8, name="refused")
    data = DataPosition(engine, lambda: (0, 1))
    try:
        with pytest.raises(reft.ConfigError, match=said):
            next(iter(one))
    finally:
        data.close()
    assert next(iter(one)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", [0, 1])
def test_other_engines_are_not(stage: int) -> None:
    one = reft.data.loader(range(99), 4, order="dynamic", step_samples=8, name="taken")
    data = DataPosition(Zero(stage), lambda: (0, 1))
    try:
        assert next(iter(one)).tolist() == [0, 1, 2, 3]
    finally:
        data.close()


def test_a_store_that_all_starts_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's: what earlier starts have taken is still in it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.delenv("REFT_LAUNCHER_PID", raising=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with pytest.raises(reft.ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
            place.store(1)
        monkeypatch.setenv("REFT_LAUNCHER_PID", "1")  # `reft launch` opens one for each start
        place.store(1)
    finally:
        dist.destroy_process_group()
