"""Random numbers of a sample: they follow from (seed, epoch, sample), never from a worker's state.

Before a sample is read, the generators of Python, NumPy and torch (on the CPU) are seeded for it; so they are
for the collation of a batch, by its first sample. A sample is therefore the same to the bit in every worker,
in the process that trains, and when it is read again after a failure; its generators are put back behind it
in the process that trains, whose numbers are as if nothing had been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from reft.data.order import mix
from reft.state.rng import capture_host_rng, restore_host_rng

_COLLATION = 0x636F6C6C
_current: list[int] = []


def sample_seed() -> int:
    """The seed of the sample that is being read, or of the batch that is being collated: 64 bits that follow
    from (seed, epoch, sample) alone. For generators of one's own, such as a device's; those of Python, NumPy
    and torch are seeded already.

    Raises:
        RuntimeError: no loader of ``reft.data`` is reading.
    """
    if not _current:
        raise RuntimeError(
            "reft.data.sample_seed() was called where no sample is read; call it in the data set's "
            "__getitem__ or in collate_fn of reft.data.loader"
        )
    return _current[-1]


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Whatever is drawn within leaves no trace in the process that trains. Workers' generators are seeded
    before they are used."""
    here = capture_host_rng() if get_worker_info() is None else None
    try:
        yield
    finally:
        _current.clear()
        if here is not None:
            restore_host_rng(here)


def _seed_generators(seed: int) -> None:
    _current[:] = [seed]
    # Python's and NumPy's generators are of one kind: of one seed they would say the same.
    random.seed(mix(seed, 1))
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed, which seeds devices too.
    torch.default_generator.manual_seed(mix(seed, 2))


@dataclass(frozen=True)
class _Fetched:
    """Samples on their way to the collation, with the seed of the first."""

    samples: list[Any]
    seed: int


class SeededDataset:
    """A data set of keys (epoch, sample), read under the seeds of its samples."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> _Fetched:
        samples = []
        with _generators_kept():
            for epoch, sample in keys:
                _seed_generators(mix(self._seed, epoch, sample))
                samples.append(self.dataset[sample])
        return _Fetched(samples, mix(self._seed, *keys[0]))


class SeededCollation:
    """A collation under the seed of the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: _Fetched) -> Any:
        with _generators_kept():
            _seed_generators(mix(fetched.seed, _COLLATION))
            return self._collate(fetched.samples)
