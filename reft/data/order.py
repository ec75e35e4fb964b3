"""Which samples a step trains on: a pure function of the position, equal on every rank.

A position counts the samples that the whole job has consumed, not the batches of a replica. The order of an
epoch follows from (seed, epoch) alone. So a position means the same at every data-parallel degree, with any
number of workers, and the rest of an epoch can be dealt out anew at any sample (CheckFreq's resumable
iterator, completed for elastic data parallelism: keep the global sample index, re-shard the tail).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.data.permutation import Permutation
from reft.errors import ConfigError

Indices = npt.NDArray[np.int64]
_STATE_VERSION = 1


@dataclass(frozen=True)
class JobPosition:
    """Where the job is in its data.

    Attributes:
        epoch: number of the pass, counted from 0.
        consumed: samples that the whole job has consumed, or dropped, since the first pass began.
    """

    epoch: int = 0
    consumed: int = 0


class Order:
    """Samples of a data set, in their order or in one that is chosen by (seed, epoch).

    Args:
        size: samples of the data set.
        seed: chooses the order.
        shuffle: whether there is another order than the data set's.

    Attributes:
        size: samples of an epoch.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size = size
        self._seed = seed
        self._shuffle = shuffle

    def part(self, first: int, count: int, part: slice) -> list[tuple[int, int]]:
        """What one replica gets of a micro-batch.

        Args:
            first: position of the micro-batch's first sample, counted through all epochs.
            count: samples of the micro-batch, of all replicas.
            part: of them, this replica's.

        Returns:
            (epoch, sample) of each.
        """
        positions = np.arange(first, first + count, dtype=np.int64)[part]
        epochs, places = np.divmod(positions, self.size)
        return list(zip(epochs.tolist(), self._samples(epochs, places).tolist(), strict=True))

    def _samples(self, epochs: Indices, places: Indices) -> Indices:
        if not self._shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            found[mine] = Permutation(self.size, self._seed, int(epoch))(places[mine])
        return found

    def facts(self) -> dict[str, Any]:
        """Plain values that must be equal for a position to mean the same."""
        return {"samples": self.size, "seed": self._seed, "shuffle": self._shuffle}


@dataclass(frozen=True)
class Deal:
    """How the samples of an epoch are dealt out to replicas, micro-batch by micro-batch.

    A micro-batch takes ``batch_size * dp_size`` samples that follow each other. The last one of a pass is
    smaller, its samples spread as evenly as they can be. No replica is ever without a sample in a
    micro-batch, so that all replicas make equally many: the last but one gives samples to the last if needed.
    Where that cannot be (batches of one sample; a degree that has grown within the last micro-batch), the
    rest, fewer samples than replicas, is read with the first micro-batch of the next pass.

    Attributes:
        size: samples of an epoch.
        batch_size: samples of a replica in a micro-batch.
        dp_size: number of replicas.
        drop_last: leave out what does not fill a micro-batch.
    """

    size: int
    batch_size: int
    dp_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        least = self.full if self.drop_last else self.dp_size
        if self.size < least:
            what = "batch_size samples for each replica" if self.drop_last else "a sample for each replica"
            raise ConfigError(
                f"found {self.size} samples for {self.dp_size} replicas with batch_size {self.batch_size}; "
                f"expected at least {least}, {what}: give more data, or start fewer replicas"
            )

    @property
    def full(self) -> int:
        """Samples of a micro-batch that is not the last."""
        return self.batch_size * self.dp_size

    def left(self, at: JobPosition) -> int:
        """Samples that are left of the pass."""
        return (at.epoch + 1) * self.size - at.consumed

    def next(self, at: JobPosition) -> int:
        """Samples of the next micro-batch; 0: the pass is over."""
        left = self.left(at)
        if self.drop_last:
            return self.full if left >= self.full else 0
        if left == self.full or left >= self.full + self.dp_size:
            return self.full
        if left > self.full:  # would leave fewer samples than replicas
            return left - self.dp_size if self.batch_size > 1 else self.full
        return left if left >= self.dp_size else 0

    def behind(self, at: JobPosition) -> JobPosition:
        """The position when the next micro-batch was consumed."""
        return JobPosition(at.epoch, at.consumed + self.next(at))

    def next_pass(self, at: JobPosition) -> JobPosition:
        """Where the pass behind that of ``at`` begins. Of a pass that was left before its end, the rest is
        left out."""
        carried = not self.drop_last and self.next(at) == 0
        return JobPosition(at.epoch + 1, at.consumed if carried else (at.epoch + 1) * self.size)

    def part(self, count: int, dp_rank: int) -> slice:
        """A replica's of the ``count`` samples of a micro-batch: as many as others have, or one more."""
        return slice(count * dp_rank // self.dp_size, count * (dp_rank + 1) // self.dp_size)

    def __len__(self) -> int:
        """Micro-batches of a pass that begins at its first sample."""
        whole, rest = divmod(self.size, self.full)
        if self.drop_last or rest == 0 or (rest < self.dp_size and self.batch_size == 1):
            return whole
        return whole + 1


def encode(at: JobPosition, order: Order) -> dict[str, Any]:
    """Plain values; equal on every rank that read the same number of micro-batches."""
    return {"version": _STATE_VERSION, "epoch": at.epoch, "consumed": at.consumed, **order.facts()}


def decode(saved: Mapping[str, Any], order: Order, name: str) -> JobPosition:
    """
    Raises:
        ConfigError: the position belongs to other data or another order.
    """
    for key, have in {"version": _STATE_VERSION, **order.facts()}.items():
        if saved.get(key) != have:
            raise ConfigError(
                f"the position of the loader {name!r} was taken with {key} {saved.get(key)!r}, but this job "
                f"has {have!r}: the samples would not be those that are left. Make the loader as it was "
                f"made, or start a job with another job_id"
            )
    return JobPosition(int(saved["epoch"]), int(saved["consumed"]))
