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

from reft.errors import ConfigError

Indices = npt.NDArray[np.int64]
_STATE_VERSION = 1
_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix(value: Any) -> Any:
    """SplitMix64's finaliser, of an integer or of an array of unsigned ones."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix(*keys: int) -> int:
    """64 bits that follow from all ``keys``, any integers, in their order."""
    mixed = 0
    for key in keys:
        mixed = _mix(mixed ^ (key & _MASK64))
    return mixed


class Permutation:
    """A bijection of ``0..n-1`` chosen by ``keys``, which needs no memory and never changes with a library's
    version: a Feistel network over the smallest even number of bits that holds ``n`` values, walked until the
    value falls below ``n``."""

    def __init__(self, n: int, *keys: int) -> None:
        if not 0 < n < 1 << 62:
            raise ValueError(f"a permutation of {n} values; expected between 1 and 2^62")
        self._n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        key = mix(*keys)
        self._round_keys = [np.uint64(_mix(key + index)) for index in range(_ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """Values at ``positions`` (integers in ``0..n-1``, any shape)."""
        values = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        # The domain holds fewer than 4n values, so a few turns are enough.
        while outside.any():
            values[outside] = self._turn(values[outside])
            outside = values >= np.uint64(self._n)
        return values.astype(np.int64).reshape(np.shape(positions))

    def _turn(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


@dataclass(frozen=True)
class JobPosition:
    """Where the job is in its data: in the pass ``epoch``, counted from 0, after ``consumed`` samples that
    the whole job has consumed, or dropped, since the first pass began."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Order:
    """The samples of a data set of ``size``, in their order or, if ``shuffle``, in one chosen by (``seed``,
    epoch)."""

    size: int
    seed: int
    shuffle: bool

    def part(self, first: int, count: int, part: slice) -> list[tuple[int, int]]:
        """(epoch, sample) of each of one replica's ``part`` of the ``count`` samples of a micro-batch, the
        first of which is at position ``first``, counted through all epochs."""
        positions = np.arange(first, first + count, dtype=np.int64)[part]
        epochs = positions // self.size
        return list(zip(epochs.tolist(), self.samples(positions).tolist(), strict=True))

    def samples(self, positions: Indices) -> Indices:
        """The sample at each position, counted through all epochs."""
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            found[mine] = Permutation(self.size, self.seed, int(epoch))(places[mine])
        return found

    def facts(self) -> dict[str, Any]:
        """Plain values that must be equal for a position to mean the same."""
        return {"samples": self.size, "seed": self.seed, "shuffle": self.shuffle}


@dataclass(frozen=True)
class Deal:
    """How the ``size`` samples of an epoch are dealt out to ``dp_size`` replicas.

    A micro-batch takes ``batch_size * dp_size`` samples that follow each other. The last one of a pass is
    smaller, its samples spread as evenly as they can be, or left out if ``drop_last``. No replica is ever
    without a sample in a micro-batch, so that all replicas make equally many: the last but one gives samples
    to the last if needed. Where that cannot be (batches of one sample; a degree that has grown within the
    last micro-batch), the rest, fewer samples than replicas, is read with the first micro-batch of the next
    pass.
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
    """The inverse of :func:`encode`; a ConfigError where the position belongs to other data or another
    order."""
    for key, have in {"version": _STATE_VERSION, **order.facts()}.items():
        if saved.get(key) != have:
            raise ConfigError(
                f"the position of the loader {name!r} was taken with {key} {saved.get(key)!r}, but this "
                f"job has {have!r}: the remaining samples would be wrong. Make the loader with the same "
                "settings, or start a job with another job_id"
            )
    return JobPosition(int(saved["epoch"]), int(saved["consumed"]))
