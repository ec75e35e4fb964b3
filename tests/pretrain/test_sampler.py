"""The example's data position: every sample once per epoch, whatever interrupts, on whatever degrees."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.llama.samples import MicroBatchIterator
from reft.data.order import Permutation
from reft.errors import ConfigError


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_permutation_takes_every_value_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


def test_the_order_is_the_same_for_ever() -> None:
    # These numbers must never change: a resumed run would read other data.
    assert Permutation(10, 7, 0)(np.arange(10)).tolist() == [9, 2, 3, 5, 1, 6, 7, 4, 0, 8]
    assert Permutation(10**12, 1, 2)([0, 1, 10**12 - 1]).tolist() == [
        976703990461,
        495328091299,
        149176298113,
    ]
    large = Permutation(2**40, 5)(np.arange(1000))
    assert len(set(large.tolist())) == 1000
    assert 0.45 < np.mean(large) / 2**40 < 0.55
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.1


def reader(samples: int, seed: int, **options: int) -> Any:
    """Samples of two tokens, the first of which is its number."""
    dataset: Any = np.arange(samples).reshape(-1, 1) + np.array([[0, 1]])
    return MicroBatchIterator(dataset, samples + 1, seed=seed, **options)


def read(iterator: Any) -> list[int]:
    return next(iterator)[0].flatten().tolist()


@given(
    samples=st.integers(1, 60),
    runs=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_every_sample_once_per_epoch_under_any_interruptions(samples, runs, seed) -> None:
    """Each run has its own replicas and micro-batch and goes on where the last one was cut off."""
    order: list[int] = []
    state = None
    for dp_size, micro_batch, micro_batches in runs:
        ranks = [
            reader(samples, seed, micro_batch=micro_batch, dp_rank=r, dp_size=dp_size) for r in range(dp_size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(micro_batches):
            for rank in ranks:
                order += read(rank)
        states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
        assert ranks[0].consumed == len(order)
    undisturbed = reader(samples, seed, micro_batch=1)
    assert order == [read(undisturbed)[0] for _ in range(len(order))]
    for start in range(0, len(order) - samples + 1, samples):
        assert Counter(order[start : start + samples]) == Counter(range(samples))


def test_a_position_in_other_data_is_refused() -> None:
    for other in (reader(13, 5, micro_batch=2), reader(14, 4, micro_batch=2)):
        with pytest.raises(ConfigError, match="the samples would not be those that are left"):
            other.load_state_dict(reader(13, 4, micro_batch=2).state_dict())
