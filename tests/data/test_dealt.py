"""At another degree (P8): what ``DistributedSampler`` deals out is a position of the job; an iterator of a replica is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from reft.data.passes import dealt_by
from reft.engine.data import LEFT, DataPosition, move_data
from reft.env import ENV_NODES
from reft.recover.relayout import Resize
from tests.data.life import Pipeline

SIZES = (12, 13, 24, 25, 26)
FLAGS = (False, True)


def loader(samples: int, replicas: int, rank: int, drop_last: bool, cuts: bool) -> DataLoader[object]:
    data = TensorDataset(torch.arange(samples))
    sampler = DistributedSampler(data, replicas, rank, shuffle=True, seed=3, drop_last=cuts)
    return DataLoader(data, batch_size=2, sampler=sampler, drop_last=drop_last)


Kind = tuple[bool, bool]
"""Whether the loader drops a smaller last batch, and whether the sampler cuts what cannot be shared."""


def read(samples: int, replicas: int, kind: Kind, begin: int, end: int | None) -> list[int]:
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
        dealt = dealt_by(loader(samples, old, 0, drop_last, cuts))
        assert dealt.batches == len(loader(samples, old, 0, drop_last, cuts))
        assert replace(dealt, replicas=new).batches == len(loader(samples, new, 0, drop_last, cuts))
        for taken in range(dealt.batches):
            at = dealt.taken_at(taken, new)
            if at is None:
                assert taken * old % new, "a batch of the new degree begins there"
                continue
            moved += 1
            before = read(samples, old, kind, 0, taken)
            after = read(samples, new, kind, at, None)
            assert len(before) == len(set(before))
            assert not set(before) & set(after) or len(after) > samples - len(before), "trained on twice"
            if not drop_last and not cuts:
                assert set(before) | set(after) == set(range(samples))
        assert dealt.taken_at(dealt.batches, new) == replace(dealt, replicas=new).batches
    assert moved > len(SIZES)


def test_an_order_that_is_not_known_to_be_the_jobs_is_not_moved() -> None:
    data = TensorDataset(torch.arange(8))
    assert dealt_by(DataLoader(data, batch_size=2, shuffle=True)) is None
    assert dealt_by(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))) is None


def test_p12_what_does_not_go_to_another_degree_is_named_and_the_rest_goes() -> None:
    common = {"start": {}, "first": None, "length": 6, "evaluates": False}
    dealt = {"samples": 24, "replicas": 2, "batch_size": 2, "drop_last": False, "cuts": False}
    good = {**common, "taken": 2, "source": "a.Good of 24", "dealt": dealt}
    odd = {**common, "taken": 1, "source": "a.Odd of 24", "dealt": dealt}
    unknown = {**common, "taken": 2, "source": "a.Unknown of 24"}
    moved = move_data(
        {"pass": good, "resumable": {"x": odd, "y": unknown, "z": good}, "samples": {"s": 1}}, Resize(2, 4)
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
def begin(begin: Any) -> Any:
    return lambda: begin(Pipeline()).data


def trained(data: DataPosition, iterator: Any) -> dict[str, Any]:
    data.begin_batch(iterator)
    next(iterator)
    data.end_batch()
    return data.state()


def test_p12_an_iterator_of_a_replica_goes_on_at_its_degree_and_is_told_where_that_changes(
    begin: Any,
) -> None:
    state = trained(begin(), Counted())
    for moved, said in (
        (state, ()),
        (move_data(state, Resize(3, 4)), (HERE, "DP3 to DP4", "position_of_job = True")),
    ):
        data, again = begin(), Counted()
        data.restore(moved, None)
        left = data.left_behind()
        assert all(word in str(left) for word in said)
        assert left is None or said
        trained(data, again)
        assert again.taken == 2


def test_an_iterator_of_the_job_goes_on_without_a_word(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NODES, "1:4")
    iterator = OfJob()
    data = begin()
    state = trained(data, iterator)
    assert data.advice() is None
    data = begin()
    data.restore(move_data(state, Resize(3, 4)), None)
    assert data.left_behind() is None
    again = OfJob()
    trained(data, again)
    next(iterator)
    assert again.state_dict() == iterator.state_dict()


@pytest.mark.parametrize(("nodes", "said"), [("2:4", True), ("4", False), ("4:4", False)])
def test_p12_an_iterator_of_a_replica_is_told_at_step_1_where_the_number_of_nodes_may_change(
    begin: Any, monkeypatch: pytest.MonkeyPatch, nodes: str, said: bool
) -> None:
    monkeypatch.setenv(ENV_NODES, nodes)
    data = begin()
    trained(data, Counted())
    found = str(data.advice())
    assert ("--nnodes 2:4" in found and HERE in found and "position_of_job = True" in found) is said
