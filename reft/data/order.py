"""Determines which samples a step trains on, and which of them a replica reads.

Given the position, which is the same on every rank, each rank can compute the samples of a step and
which of them each replica reads. A position counts the samples that the whole job has consumed, not
the batches of a replica. The order of an epoch depends on (seed, epoch) only. So a position has the
same meaning at every data-parallel degree and with any number of workers, and the rest of an epoch
can be divided again among replicas at any sample. (This is CheckFreq's resumable iterator, extended
to elastic data parallelism: keep the global sample index, re-shard the tail.)
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reft.data.watch import WATCH, process
from reft.env import ENV_LAUNCHER_PID
from reft.errors import ConfigError

Indices = npt.NDArray[np.int64]
_STATE_VERSION = 1
_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix(value: Any) -> Any:
    """Return SplitMix64's finalizer of an integer, or of each element of an array of unsigned
    integers."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix(*keys: int) -> int:
    """Return a 64-bit hash of ``keys`` (any integers), which depends on their order."""
    mixed = 0
    for key in keys:
        mixed = _mix(mixed ^ (key & _MASK64))
    return mixed


class Permutation:
    """A bijection of ``0..n-1`` chosen by ``keys``.

    The bijection needs no memory, and is the same with every version of every library. It is a
    Feistel network over the smallest even number of bits that holds ``n`` values; for each input
    it is repeated until the value is below ``n``.
    """

    def __init__(self, n: int, *keys: int) -> None:
        if not 0 < n < 1 << 62:
            raise ValueError(f"a permutation of {n} values; expected between 1 and 2^62")
        self._n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        key = mix(*keys)
        self._round_keys = [np.uint64(_mix(key + index)) for index in range(_ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """Return the permuted values of ``positions`` (integers in ``0..n-1``, any shape), as
        int64 of the same shape.
        """
        values = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        # The network's domain has fewer than 4n values, so a few repetitions suffice.
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
    """The job's position in its data.

    Attributes:
        epoch: number of the pass, counted from 0.
        consumed: number of samples that the whole job has consumed or dropped since the first
            pass began.
    """

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples of a data set.

    Attributes:
        size: number of samples of the data set.
        seed: seed of the order.
        shuffle: True for an order chosen by (``seed``, epoch); False for the data set's own
            order.
    """

    size: int
    seed: int
    shuffle: bool

    def part(self, first: int, count: int, part: slice) -> list[tuple[int, int]]:
        """Return (epoch, sample) of each sample that one replica reads in a micro-batch.

        Args:
            first: position of the micro-batch's first sample, counted through all epochs.
            count: number of samples in the micro-batch.
            part: the replica's part of the micro-batch, as a slice of ``0..count-1``.
        """
        positions = np.arange(first, first + count, dtype=np.int64)[part]
        epochs = positions // self.size
        return list(zip(epochs.tolist(), self.samples(positions).tolist(), strict=True))

    def samples(self, positions: Indices) -> Indices:
        """Return the sample index at each position; positions are counted through all epochs."""
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            found[in_epoch] = Permutation(self.size, self.seed, int(epoch))(places[in_epoch])
        return found

    def facts(self) -> dict[str, Any]:
        """Return plain values that determine the order: if they are equal, a position has the
        same meaning."""
        return {"samples": self.size, "seed": self.seed, "shuffle": self.shuffle}


@dataclass(frozen=True)
class EpochPartition:
    """Divides the ``size`` samples of an epoch among ``dp_size`` replicas.

    A micro-batch takes ``batch_size * dp_size`` consecutive samples. The last micro-batch of a pass
    is smaller, with its samples spread as evenly as possible, or is dropped if ``drop_last``. Every
    replica has a sample in every micro-batch, so all replicas have the same number of
    micro-batches. If the last micro-batch has fewer samples than there are replicas, the
    micro-batch before it gives up some of its samples. If that is impossible (batches of one
    sample, or a degree that has grown within the last micro-batch), the remaining samples are read
    with the first micro-batch of the next pass.
    """

    size: int
    batch_size: int
    dp_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        least = self.full if self.drop_last else self.dp_size
        if self.size < least:
            what = (
                "batch_size samples for each replica"
                if self.drop_last
                else "a sample for each replica"
            )
            raise ConfigError(
                f"found {self.size} samples for {self.dp_size} replicas with batch_size "
                f"{self.batch_size}; "
                f"expected at least {least}, {what}: give more data, or start fewer replicas"
            )

    @property
    def full(self) -> int:
        """Number of samples in a micro-batch that is not the last one."""
        return self.batch_size * self.dp_size

    def left(self, at: JobPosition) -> int:
        return (at.epoch + 1) * self.size - at.consumed

    def next(self, at: JobPosition) -> int:
        """Return the number of samples of the next micro-batch; 0 at the end of the pass."""
        left = self.left(at)
        if self.drop_last:
            return self.full if left >= self.full else 0
        if left == self.full or left >= self.full + self.dp_size:
            return self.full
        if left > self.full:  # A full micro-batch leaves enough samples for every replica
            return left - self.dp_size if self.batch_size > 1 else self.full
        return left if left >= self.dp_size else 0

    def after(self, at: JobPosition) -> JobPosition:
        """Return the position after the next micro-batch."""
        return JobPosition(at.epoch, at.consumed + self.next(at))

    def next_pass(self, at: JobPosition) -> JobPosition:
        """Return the position at which the next pass begins, after the pass that contains ``at``.

        If the script has left a pass before its end, the rest of that pass is dropped.
        """
        carried = not self.drop_last and self.next(at) == 0
        return JobPosition(at.epoch + 1, at.consumed if carried else (at.epoch + 1) * self.size)

    def part(self, count: int, dp_rank: int) -> slice:
        """Return a replica's part of a micro-batch of ``count`` samples, as a slice; the
        replicas' sizes differ by at most one.
        """
        return slice(count * dp_rank // self.dp_size, count * (dp_rank + 1) // self.dp_size)

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass that begins at its first sample."""
        whole, rest = divmod(self.size, self.full)
        if self.drop_last or rest == 0 or (rest < self.dp_size and self.batch_size == 1):
            return whole
        return whole + 1


def encode(at: JobPosition, order: SampleOrder) -> dict[str, Any]:
    """Return the position as plain values, which are equal on every rank that has read the same
    number of micro-batches."""
    return {"version": _STATE_VERSION, "epoch": at.epoch, "consumed": at.consumed, **order.facts()}


def decode(saved: Mapping[str, Any], order: SampleOrder, name: str) -> JobPosition:
    """Decode the output of :func:`encode`.

    Raises:
        ConfigError: the position is one in other data, or in another order.
    """
    for key, have in {"version": _STATE_VERSION, **order.facts()}.items():
        if saved.get(key) != have:
            raise ConfigError(
                f"the position of the loader {name!r} was taken with {key} {saved.get(key)!r}, but "
                f"this job has {have!r}: the remaining samples would be wrong. Make the loader "
                "with the same settings, or start a job with another job_id"
            )
    return JobPosition(int(saved["epoch"]), int(saved["consumed"]))


# -- batch samplers for torch's ``DataLoader``: the samples that a replica reads -------------------

Keys = list[tuple[int, int]]
"""(epoch, sample) of each sample of a micro-batch."""
_alone = HashStore()


def shares_store() -> bool:
    """Return whether torch.distributed's store is shared with earlier starts of the job.

    torchrun's store is shared; the store of ``reft launch`` is not.
    """
    return (
        ENV_LAUNCHER_PID not in os.environ
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def job_store(replicas: int) -> Any:
    """Return the store of torch.distributed, which the ranks of this start of the job share.

    Raises:
        ConfigError: there are several replicas but no store, or earlier starts share the store.
    """
    if dist.is_available() and dist.is_initialized():
        if shares_store():
            raise ConfigError(
                "found torchrun's store, which holds the samples that earlier starts took; "
                "expected a new store for each start: start the script with `reft launch`, or set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        return dist.distributed_c10d._get_default_store()
    if replicas > 1:
        raise ConfigError(
            f"found {replicas} replicas and no torch.distributed; expected its store, through "
            "which they share out the data: call deepspeed.init_distributed() first, or leave "
            'order="dynamic" out'
        )
    return _alone


def readers(replicas: int) -> int:
    """Return how many processes read the samples that this number of replicas shares: the world
    size of torch.distributed.
    """
    return max(replicas, process()[1])


def explain_refusal(loader: str, why_equal: str | None) -> str | None:
    """If replicas need the same number of micro-batches, return why ``order="dynamic"`` is refused;
    otherwise None."""
    return why_equal and (
        f'{loader} has order="dynamic", in which replicas train on unequal numbers of '
        f'micro-batches, but {why_equal}. Leave order="dynamic" and step_samples out'
    )


class SharedLedger:
    """A log in the job's store of which replica has taken which micro-batch of a step.

    This is DLRover's dynamic sharding, within a step. Every take of a micro-batch is one entry
    in ``store``, which its writer appends by compare-and-set after the last entry that it has
    read. So all processes read the same entries in the same order, a micro-batch is handed out
    once, and there is no coordinator that can die.

    Args:
        store: store of the job.
        prefix: prefix of the keys.
        todo: indices of the micro-batches to take, the same in every process; the lowest is
            taken first.
    """

    def __init__(self, store: Any, prefix: str, todo: Iterable[int]) -> None:
        self._store = store
        self._prefix = prefix
        self._todo = sorted(todo)
        # For each entry read so far: the replica, and the number of its take. The n-th entry
        # takes the n-th micro-batch of ``todo``.
        self._takers: list[tuple[int, int]] = []

    def take(self, replica: int, number: int) -> int | None:
        """Take a micro-batch.

        Args:
            replica: the replica that takes.
            number: number of the replica's take, from 0. All ranks of a replica get the same
                micro-batch for the same number.

        Returns:
            The index of the micro-batch; None if none is left.
        """
        taker = (replica, number)
        while self._store.check([self._next_key]):
            self._read(self._store.get(self._next_key))
        while taker not in self._takers and len(self._takers) < len(self._todo):
            # If another process has written this entry meanwhile, compare_set returns that
            # entry.
            self._read(self._store.compare_set(self._next_key, "", f"{replica} {number}"))
        return self._todo[self._takers.index(taker)] if taker in self._takers else None

    def leave(self, readers: int) -> None:
        """Record that this process is done reading the entries, because no micro-batch is left.

        The last reader to leave deletes the entries, so that none disappears before everyone has
        read it.
        """
        if self._store.add(f"{self._prefix}/left", 1) == readers:
            for name in (*range(len(self._takers)), "left"):
                self._store.delete_key(f"{self._prefix}/{name}")

    def _read(self, line: bytes) -> None:
        replica, number = line.split()
        self._takers.append((int(replica), int(number)))

    @property
    def _next_key(self) -> str:
        return f"{self._prefix}/{len(self._takers)}"


@dataclass
class ConsumedSamples:
    """Micro-batches that a batch sampler has given to torch's loader and that were not handed
    out to the script yet.

    Attributes:
        ahead: a pair of positions for each micro-batch. With the static order: the position
            after the micro-batch, and None. With the dynamic order: the start and the end of its
            step, because only the step's last micro-batch advances the job.
        ledgers: for each step whose micro-batches are all taken, the position at its end and its
            ledger (:class:`SharedLedger`).
        failed: the error because of which no more samples can be taken (not one of the data
            set); None if there was none.
    """

    ahead: deque[tuple[JobPosition, JobPosition | None]] = field(default_factory=deque)
    ledgers: deque[tuple[JobPosition, SharedLedger]] = field(default_factory=deque)
    failed: Exception | None = None

    def leave(self, at: JobPosition, replicas: int) -> None:
        """Leave the ledgers (logs of taken micro-batches) of steps before ``at``: only loading a
        version could return to these steps, and a load starts new ledgers."""
        while self.ledgers and self.ledgers[0][0].consumed <= at.consumed:
            self.ledgers.popleft()[1].leave(readers(replicas))


class StaticBatches:
    """A batch sampler with the static order, in which every replica has a part of every
    micro-batch.

    Attributes:
        step_samples: number of samples in a step of all replicas; None if the order does not
            depend on steps.
    """

    step_samples: int | None = None

    def __init__(self, order: SampleOrder, batch_size: int, *, drop_last: bool) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._pass: Iterator[Keys] = iter(())

    def partition(self, replicas: int) -> EpochPartition:
        return EpochPartition(self.order.size, self.batch_size, replicas, self.drop_last)

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> ConsumedSamples:
        """Make the next iteration over this sampler begin at ``at``, which may be within a pass.

        Args:
            at: position of the job.
            replica: index of this replica, and the number of replicas.
            loads: how many times this process has loaded a version; the same on every rank.
        """
        taken = ConsumedSamples()
        self._pass = self._noted(self._rest(at, replica, loads, taken), taken)
        return taken

    def __iter__(self) -> Iterator[Keys]:
        return self._pass

    @staticmethod
    def _noted(batches: Iterator[Keys], taken: ConsumedSamples) -> Iterator[Keys]:
        try:
            yield from batches
        except Exception as error:
            taken.failed = error
            raise

    def _rest(
        self, at: JobPosition, replica: tuple[int, int], loads: int, taken: ConsumedSamples
    ) -> Iterator[Keys]:
        rank, replicas = replica
        partition = self.partition(replicas)
        while count := partition.next(at):
            keys = self.order.part(at.consumed, count, partition.part(count, rank))
            at = partition.after(at)
            taken.ahead.append((at, None))
            yield keys


BEGUN: Counter[tuple[str, int, int]] = Counter()
"""Number of loaders that this process has begun to read, by (name, replica, number of replicas)."""


class SharedBatches(StaticBatches):
    """A batch sampler with the dynamic order, in which replicas take micro-batches at their own
    speed.

    A step trains on the samples that follow the position, as in the static order. A ledger in
    the job's store records which replica trains on which micro-batch of the step. So a position
    has the same meaning as in the static order, and after a version is loaded, everything that
    was taken after it is taken again.

    The first micro-batches of a step are reserved, one for each replica, so that every replica
    has at least one. The other micro-batches are taken when they are read. A reader that begins
    a pass a second time without having trained gets the same micro-batches as the first time.
    """

    step_samples: int

    def __init__(
        self, order: SampleOrder, batch_size: int, step_samples: int, *, drop_last: bool, name: str
    ) -> None:
        if step_samples < 1 or step_samples % batch_size:
            raise ConfigError(
                f"found step_samples {step_samples} with batch_size {batch_size}; expected whole "
                f"micro-batches: DeepSpeed's train_batch_size"
            )
        if order.size < step_samples:
            raise ConfigError(
                f"found {order.size} samples with step_samples {step_samples}; expected at least a "
                f"whole step: give more data, or a smaller train_batch_size"
            )
        super().__init__(order, batch_size, drop_last=drop_last)
        self.step_samples = step_samples
        self._name = name
        # Sequence number among the loaders with this name in this process
        self._number: int | None = None

    def partition(self, replicas: int) -> EpochPartition:
        # Divide a step by single samples, so that a rest that does not fill a step is left for
        # the next pass.
        return EpochPartition(self.order.size, 1, self.step_samples, self.drop_last)

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> ConsumedSamples:
        if refused := explain_refusal(f"the loader {self._name!r}", WATCH.why_equal()):
            raise ConfigError(refused)
        if (micro_batches := self.step_samples // self.batch_size) < replica[1]:
            raise ConfigError(
                f"found {micro_batches} micro-batches in a step of {self.step_samples} samples for "
                f"{replica[1]} replicas; expected one or more for each: give a larger "
                "step_samples, or a smaller batch_size"
            )
        if self._number is None:
            self._number = BEGUN[self._name, *replica]
            BEGUN[self._name, *replica] += 1
        return super().begin_at(at, replica, loads)

    def _rest(
        self, at: JobPosition, replica: tuple[int, int], loads: int, taken: ConsumedSamples
    ) -> Iterator[Keys]:
        rank, replicas = replica
        partition = self.partition(replicas)
        rest = range(replicas, self.step_samples // self.batch_size)
        while partition.next(at):
            after = partition.after(at)
            # The key includes the epoch, because the same number of consumed samples may recur
            # in the next pass.
            key = (
                f"reft.data/{self._name}/{replicas}/{self._number}/{loads}/{at.epoch}/{at.consumed}"
            )
            ledger = SharedLedger(job_store(replicas), key, rest)
            piece: int | None = rank
            number = 0
            while piece is not None:
                taken.ahead.append((at, after))
                first = at.consumed + piece * self.batch_size
                yield self.order.part(first, self.batch_size, slice(None))
                piece, number = ledger.take(rank, number) if rest else None, number + 1
            if rest:
                taken.ledgers.append((after, ledger))
            at = after
