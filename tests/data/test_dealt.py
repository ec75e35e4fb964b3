"""P8: a position in what torch's ``DistributedSampler`` deals out is one of the whole job, at every degree."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from reft.data.passes import dealt_by
from reft.engine.data import LEFT, move_data
from reft.recover.relayout import Resize

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
