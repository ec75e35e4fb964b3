"""The compiled copy past the caches is a copy, whatever the sizes and wherever the ranges begin."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.store.stream import copier

PAGE = 4096
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 20 * PAGE), st.sampled_from([4 * PAGE, 8 * PAGE]))


@given(nbytes=SIZES, source_at=st.integers(0, 70), target_at=st.integers(0, 70), seed=st.integers(0, 2**32))
def test_a_copy_is_exact_and_touches_nothing_else(
    nbytes: int, source_at: int, target_at: int, seed: int
) -> None:
    source = np.random.default_rng(seed).integers(0, 256, nbytes + source_at, dtype=np.uint8)
    target = np.full(nbytes + target_at + 100, 0xEE, np.uint8)
    copier()(target.ctypes.data + target_at, source.ctypes.data + source_at, nbytes)
    np.testing.assert_array_equal(target[target_at : target_at + nbytes], source[source_at:])
    assert (target[:target_at] == 0xEE).all()
    assert (target[target_at + nbytes :] == 0xEE).all()


def test_without_the_compiled_loop_memmove_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reft.native.find_spec", lambda name: None)
    copier.cache_clear()
    try:
        assert copier() is ctypes.memmove
    finally:
        copier.cache_clear()
