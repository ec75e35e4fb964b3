"""A sliding window of samples and its median."""

from __future__ import annotations

import statistics
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from reft.snapshot.stats import Samples


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 9), st.floats(0, 10))
def test_the_median_is_that_of_the_newest_samples_and_what_became_known_of_them_later(
    values: list[float], most: int, more: float
) -> None:
    samples, kept = Samples(most), deque[float](maxlen=most)
    samples.add_to_newest(5.0)
    assert (samples.median, samples.newest) == (None, None)
    for value in values:
        samples.append(value)
        samples.add_to_newest(more)
        kept.append(value + more)
        assert list(samples) == list(kept)
        assert samples.median == statistics.median(kept)
        assert samples.newest == kept[-1]
