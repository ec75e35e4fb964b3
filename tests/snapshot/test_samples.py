"""A sliding window of samples and its median."""

from __future__ import annotations

import statistics
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from reft.snapshot.stats import Samples


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 9))
def test_the_median_is_that_of_the_newest_samples(values: list[float], most: int) -> None:
    samples, kept = Samples(most), deque[float](maxlen=most)
    for value in values:
        samples.append(value)
        kept.append(value)
        assert list(samples) == list(kept)
        assert samples.median == statistics.median(kept)
    assert len(samples) == len(kept)


def test_what_becomes_known_later_is_added_to_the_newest_sample() -> None:
    samples = Samples(2)
    samples.add_to_newest(5.0)
    assert (samples.median, samples.newest) == (None, None)
    for value in (3.0, 1.0, 2.0):
        samples.append(value)
    samples.add_to_newest(4.0)
    assert list(samples) == [1.0, 6.0]
    assert (samples.median, samples.newest) == (3.5, 6.0)


def test_p6_a_median_is_asked_for_while_the_newest_sample_is_away() -> None:
    """The worker asks; the training thread takes the newest sample out, to put it back with more."""

    class Raced(list[float]):
        def __len__(self) -> int:
            length = super().__len__()
            self.clear()
            return length

    samples = Samples()
    samples.append(3.0)
    samples.by_size = Raced(samples.by_size)
    assert samples.median in (3.0, None)
