"""A ``DataLoader`` whose position is part of the version, at every data-parallel degree.

    loader = reft.data.loader(dataset, batch_size=4, shuffle=True, seed=1, num_workers=3)
    for epoch in range(loader.epoch, epochs):
        for batch in loader: ...

torch's ``DataLoader`` does the reading, with its workers, prefetching, pinning and collation.
:mod:`reft.data.order` determines which samples are read. A position consists of two numbers
(epoch, and samples consumed). It counts batches that were handed out to the script, not batches
that were read ahead.

Random numbers of a sample depend on (seed, epoch, sample), never on the state of a worker. The
generators of Python, NumPy and torch (on the CPU) are seeded for each sample before it is read,
and for each batch, by its first sample, before it is collated. So a sample is the same to the
bit in every worker, in the training process (whose generators are restored afterwards), and when
it is read again after a failure.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from reft.data.order import (
    ConsumedSamples,
    EpochPartition,
    JobPosition,
    SampleOrder,
    SharedBatches,
    StaticBatches,
    decode,
    encode,
    mix,
)
from reft.data.passes import PassReader, count_received, is_left_out, raw_iterator
from reft.data.resumable import LOADERS, TrackedLoader
from reft.data.watch import WATCH
from reft.errors import ConfigError
from reft.state.blob import capture_host_rng, restore_host_rng
from reft.state.codec import class_path

logger = logging.getLogger(__name__)

_DECIDED = {
    "sampler": "the order follows from shuffle and seed",
    "batch_sampler": "the order follows from shuffle and seed",
    "generator": "give seed=",
}
"""Options of ``DataLoader`` that are refused because the job's position decides the order, each
with what to do instead."""


class Progress(PassReader):
    """The progress of one pass over a :class:`Loader`.

    The object outlives the iterator, and does not keep the loader alive.

    Args:
        loader: torch's loader.
        follow: called when a batch is trained on.
        began: position at which the pass begins.

    Attributes:
        began: position at which the pass began.
        at: position after the batches that were handed out.
        moves: how many times the position was moved by loading a version.
        ends_step: whether the last handed-out batch is the replica's last one in its step; None
            with the static order, where all replicas have the same number of batches in a step.
        is_trained: whether the last handed-out batch was trained on.
    """

    def __init__(self, loader: Any, follow: Callable[[Any], None], began: JobPosition) -> None:
        super().__init__(loader)
        self.follow = weakref.WeakMethod(follow)
        self.moves = 0
        self.go_to(began)

    def go_to(self, at: JobPosition) -> None:
        self.began = self.at = at
        self.taken = 0
        self.ends_step: bool | None = None
        self.counts = self.unwatched = self.evaluates = self.is_trained = False
        self.resume_phase = WATCH.resuming
        self.moves += 1


class Loader(TrackedLoader[Progress]):
    """A loader over torch's ``DataLoader`` (``inner``). Made by :func:`loader`."""

    kind, call = "samples", "reft.data.loader(dataset"

    def __init__(
        self,
        dataset: Any,
        batches: StaticBatches,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        replica: tuple[int, int] | None,
        name: str,
        options: dict[str, Any],
    ) -> None:
        super().__init__(name)
        self.dataset = dataset
        self.batch_size = batches.batch_size
        self.drop_last = batches.drop_last
        self._batches = batches
        self._order = batches.order
        self._given = replica
        self.inner: DataLoader[Any] = DataLoader(
            SeededDataset(dataset, self._order.seed),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=SeededCollation(collate_fn or default_collate),  # type: ignore[arg-type]
            # A separate generator, so that beginning a pass does not draw from training's
            # generator.
            generator=torch.Generator(),
            **{option: given for option, given in options.items() if option not in _DECIDED},
        )
        # Passes whose batches the script may still hold; the last item is the pass that was read
        # last
        self._handed_out: list[Progress] = []
        self._has_left_out = False
        # Whether training stopped in the middle of a step, before this replica had used all of the
        # step's micro-batches
        self._left_within_step = False
        saved = LOADERS.add(self)
        self._restored = None if saved is None else decode(saved, self._order, name)
        self._loads = int(saved is not None)  # Number of times that a version was loaded

    @property
    def replica(self) -> tuple[int, int]:
        return self._given or WATCH.replica()

    @property
    def partition(self) -> EpochPartition:
        return self._batches.partition(self.replica[1])

    def __len__(self) -> int:
        """Return the number of batches of a complete pass.

        Raises:
            TypeError: replicas take different numbers of batches.
        """
        if self._batches.step_samples is not None:
            raise TypeError(
                f"the loader {self.name!r} has no length: each replica takes micro-batches at its "
                "own speed"
            )
        return len(self.partition)

    @property
    def epoch(self) -> int:
        """Number of the current pass, counted from 0; after a restart, of the resumed pass."""
        restored, reader = self._resume_position(), self._pass
        if restored is not None:
            return restored.epoch
        return 0 if reader is None else reader.at.epoch

    def __iter__(self) -> ReadAhead:
        LOADERS.require_named(self)
        self._begun = Progress(self.inner, self._follow, self._beginning())
        return ReadAhead(self, self._begun)

    def _follow(self, progress: Progress) -> None:
        """Take the job's position from this pass over the loader from now on, since training uses a
        batch of it."""
        followed = self._followed
        if self._left_within_step and followed not in (None, progress) and self.replica[1] > 1:
            raise ConfigError(
                f"the loop over the loader {self.name!r} was left within a step: with "
                'order="dynamic" replicas have different numbers of micro-batches and would start '
                "the next pass at different steps. Leave the loop where loader.ends_step is true: "
                "count steps, not micro-batches"
            )
        own, engines = self._batches.step_samples, WATCH.step_samples()
        if own is not None and engines is not None and own != engines:
            raise ConfigError(
                f"the loader {self.name!r} has steps of {own} samples (step_samples), but the "
                f"engine has steps of {engines} (train_batch_size), by which its gradients would "
                "be weighted. Write reft.data.loader(..., step_samples=engine.train_batch_size())"
            )
        self._followed, self._left_within_step = progress, progress.ends_step is False
        progress.is_trained = True

    def hand_out(self, progress: Progress) -> None:
        """Record that the script gets the next batch of a pass."""
        others = [
            reader for reader in self._handed_out if reader is not progress and reader.is_held
        ]
        self._handed_out = [*others, progress]

    @property
    def ends_step(self) -> bool | None:
        """Whether the current batch is this replica's last one in the step.

        Between two batches, the next batch is the current one.

        None without ``order="dynamic"``. Reading this property has no side effect.
        """
        reader = self._followed
        if reader is not None and reader.is_held and not (reader.is_trained and reader.ends_step):
            return reader.ends_step
        held = [other for other in self._handed_out if other.is_held] or self._handed_out
        return held[-1].ends_step if held else None

    def _beginning(self) -> JobPosition:
        restored, reader = self._resume_position(), self._pass
        if reader is not None and reader.counts:
            return self.partition.next_pass(reader.at)
        return restored or (JobPosition() if reader is None else reader.began)

    def read_from(self, at: JobPosition) -> tuple[Iterator[Any], ConsumedSamples]:
        """Begin to read a pass from ``at``. Return torch's iterator, and the record of the samples
        that the iterator was given."""
        taken = self._batches.begin_at(at, self.replica, self._loads)
        return raw_iterator(self.inner), taken

    def left_out(self) -> None:
        """Warn that samples are left out because the data set has raised an error, which the
        script may catch."""
        rank, replicas = self.replica
        if replicas > 1 and not self._has_left_out:
            self._has_left_out = True
            logger.warning(
                "the data set of the loader %r raised an error: if the script continues, replica "
                "%d skips that micro-batch and the others do not, so their positions differ from "
                "now on and this replica's pass ends sooner. Catch errors within the data set, and "
                "give another sample",
                self.name,
                rank,
            )

    def _resume_position(self) -> JobPosition | None:
        """Return the restored position, at which every pass begins until training has continued
        from it.

        Return None after a step was trained from that position, or the pass was read to its end.
        """
        reader = self._pass
        if reader is not None and (
            reader.counts
            or reader.resume_phase is None
            or reader.resume_phase is not WATCH.resuming
        ):
            self._restored = None
        return self._restored

    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """Return the facts that determine the order; None if the script divides samples among a
        different number of replicas.

        :meth:`wrong` reports a different number of replicas.
        """
        if self.replica[1] != replicas:
            return None
        batches = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**self._order.facts(), **batches, "step_samples": self._batches.step_samples}

    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        at, reader = self._resume_position(), self._pass
        if isinstance(upcoming, Progress) and upcoming in self._passes():
            reader = upcoming
        if at is None and reader is not None:
            at = self._beginning() if reader.evaluates else reader.at
        return None if at is None else encode(at, self._order)

    def ended_epochs(self) -> int:
        position = self.position()
        at = JobPosition() if position is None else decode(position, self._order, self.name)
        return at.epoch + (self.partition.next(at) == 0)

    def go_to(self, position: dict[str, Any]) -> None:
        """Move to a position. Raises ConfigError if the position is one in other data or in
        another order."""
        self._restored = decode(position, self._order, self.name)
        self._loads, self._left_within_step = self._loads + 1, False
        self._handed_out.clear()
        for reader in self._passes():
            reader.go_to(self._restored)

    def restart(self) -> None:
        if self._pass is not None:
            self.go_to(encode(JobPosition(), self._order))
        else:
            self._loads += 1  # Keep the count equal to that of ranks that have read something

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for checkpoints of the script; reft does not need it."""
        return self.position() or encode(JobPosition(), self._order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position in a :meth:`state_dict`, which may be from another data-parallel
        degree."""
        self.go_to(state)

    def wrong(self) -> str | None:
        known = WATCH.replica()
        if self._given is None or self._given == known:
            return None
        return (
            f"the loader {self.name!r} reads samples for replica {self._given[0]} of "
            f"{self._given[1]}, but this rank trains replica {known[0]} of {known[1]}: some "
            "samples would be used twice and others never. Remove dp_rank and dp_size: reft takes "
            "them from the engine"
        )


@dataclass(frozen=True)
class _Batch:
    """A micro-batch that was read, or the error that the data set raised instead.

    ``at`` and ``step_end`` are the positions in :class:`~reft.data.order.ConsumedSamples`.
    """

    batch: Any
    error: Exception | None
    at: JobPosition
    step_end: JobPosition | None


class ReadAhead:
    """The iterator of one pass over a :class:`Loader`."""

    def __init__(self, owner: Loader, progress: Progress) -> None:
        self._owner = owner
        self._progress = progress
        progress.handle = weakref.ref(self)
        self._inner: Iterator[Any] = iter(())
        self._taken = ConsumedSamples()
        self._moves = 0
        # Batches that were read but not handed out yet. With the dynamic order, batches are read
        # ahead to find out which one is the step's last.
        self._ahead: deque[_Batch] = deque()
        # Position at the end of the last step whose batches were all handed out; None before the
        # first
        self._ended_at: JobPosition | None = None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        WATCH.before_batch(self._progress)
        progress, replicas = self._progress, self._owner.replica[1]
        if self._moves != progress.moves:
            # A version was loaded: drop the batches that were read ahead from the old position.
            self._moves = progress.moves
            self._inner, self._taken = self._owner.read_from(progress.at)
            self._ended_at = None
            self._ahead.clear()
        if progress.counts:
            self._taken.leave(progress.at, replicas)
        WATCH.before_read(progress)
        try:
            if not self._ahead:
                self._ahead.append(self._read())
        except StopIteration:
            progress.counts, progress.unwatched = True, not WATCH.is_watching
            self._taken.leave(progress.at, replicas)
            raise
        step_end = self._ahead[0].step_end
        ends = None if step_end is None else not self._is_followed(step_end)
        read = self._ahead.popleft()
        # After the last batch of a step the position is the step's end, so a resumed job also
        # skips batches that were left out after an error.
        progress.at = step_end if ends and step_end is not None else read.at
        if read.error is not None:
            self._leave_out(progress.at, read.error, no_other=bool(ends) and replicas > 1)
        progress.ends_step, progress.is_trained = ends, False
        self._owner.hand_out(progress)
        if ends:
            self._ended_at = progress.at
        progress.taken += 1
        if not WATCH.is_watching:
            progress.counts = progress.unwatched = True
        WATCH.after_batch(progress)
        progress.evaluates = not progress.counts and WATCH.is_evaluating
        return read.batch

    def _is_followed(self, step_end: JobPosition) -> bool:
        """Return whether another readable micro-batch of the same step follows.

        If none follows, the batch that is handed out next is the replica's last one in its step.
        The replica must know this, or it would miss the end of the step and the others would
        wait for it.
        """
        number = 1
        while True:
            if len(self._ahead) == number:
                try:
                    self._ahead.append(self._read())
                except StopIteration:
                    return False
            following = self._ahead[number]
            if following.step_end != step_end or following.error is None:
                return following.step_end == step_end
            number += 1

    def _read(self) -> _Batch:
        """Read a micro-batch. If the data set raises an error, the result contains that error.

        Raises:
            StopIteration: the pass has ended.
            Exception: a worker has died or timed out, or this replica could not take a
                micro-batch.
        """
        if self._taken.failed is not None:
            raise self._taken.failed
        received = count_received(self._inner)
        batch, found = None, None
        try:
            batch = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:
            if self._taken.failed is not None or not is_left_out(self._inner, received):
                raise
            found = error
        return _Batch(batch, found, *self._taken.ahead.popleft())

    def _leave_out(self, at: JobPosition, error: Exception, *, no_other: bool) -> NoReturn:
        self._owner.left_out()
        if no_other and self._ended_at != at:
            raise ConfigError(
                "this replica has no micro-batch of the step that can be read, and the others wait "
                f"for it ({type(error).__name__}: {error}); expected one or more: catch errors "
                "within the data set, and give another sample"
            ) from error
        raise error


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    order: str = "static",
    step_samples: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    name: str = "data",
    **options: Any,
) -> Loader:
    """Make a loader that replaces torch's ``DataLoader`` and divides samples among replicas.

    The loader's position is part of the version: even after a failure, or at another
    data-parallel degree, every sample of an epoch is trained on exactly once.

    Args:
        dataset: a data set with a length, which returns a sample for an index.
        batch_size: number of samples in a micro-batch of one replica.
        shuffle: True to read in an order that depends on (seed, epoch).
        seed: seed of the order, and of the samples' random numbers.
        drop_last: True to leave out samples that do not fill a micro-batch; otherwise the last
            micro-batch of a pass is smaller, with its samples spread evenly over the replicas.
        order: ``"static"``: every replica has the same number of micro-batches in a step.
            ``"dynamic"``: replicas take micro-batches at their own speed, so a slow one takes
            fewer; docs/data.md shows the training loop that this needs. Only with the static
            order is a resumed run equal to the bit.
        step_samples: for ``"dynamic"``, number of samples in a step of all replicas, which is
            DeepSpeed's ``train_batch_size``.
        collate_fn: makes a batch from a list of samples; None: torch's function.
        dp_rank: index of this rank's replica; None takes it from the engine or, before an engine
            exists, the rank of torch.distributed.
        dp_size: number of replicas; None takes it from the same place.
        name: a different name for each loader of a script, the same after a restart.
        options: options of ``DataLoader``: ``num_workers``, ``prefetch_factor``, ``pin_memory``,
            ``persistent_workers``, ``worker_init_fn``, ``timeout``, ``multiprocessing_context``.
            With ``order="dynamic"`` the default of ``prefetch_factor`` is 1.

    Raises:
        ConfigError: the data set cannot be read by index, or an option would change the order.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"found {class_path(dataset)}; expected a data set with a length and indices. Streams "
            "are read by a loader that knows its position, such as torchdata's StatefulDataLoader "
            "or mosaicml-streaming's StreamingDataLoader (docs/data.md)"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"found batch_size {batch_size}; expected 1 or more samples")
    if order not in ("static", "dynamic") or (order == "dynamic") != (step_samples is not None):
        raise ConfigError(
            f"found order {order!r} with step_samples {step_samples}; expected 'static' without, "
            "or 'dynamic' with the samples of a step of all replicas: DeepSpeed's train_batch_size"
        )
    if not options.get("in_order", True):
        raise ConfigError(
            "reft.data.loader takes no in_order=False: a position counts batches in their order, "
            "and those that were overtaken would be trained on twice, or not at all. Leave it out"
        )
    for option, instead in _DECIDED.items():
        if options.get(option) is not None:
            raise ConfigError(
                f"reft.data.loader takes no {option}: {instead}. For an order of your own write "
                f"loader = reft.resumable(DataLoader(...))"
            )
    samples = SampleOrder(len(dataset), seed, shuffle)
    if step_samples is None:
        batches = StaticBatches(samples, batch_size, drop_last=drop_last)
    else:
        batches = SharedBatches(samples, batch_size, step_samples, drop_last=drop_last, name=name)
        if options.get("num_workers") and options.get("prefetch_factor") is None:
            # Read only one batch ahead: samples that a worker has read are taken, so no other
            # replica can train on them.
            options["prefetch_factor"] = 1
    return Loader(
        dataset,
        batches,
        collate_fn=collate_fn,
        replica=_replica(dp_rank, dp_size),
        name=name,
        options=options,
    )


def _replica(dp_rank: int | None, dp_size: int | None) -> tuple[int, int] | None:
    if dp_rank is None and dp_size is None:
        return None
    if dp_rank is None or dp_size is None or not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"found dp_rank {dp_rank} and dp_size {dp_size}; expected 0 <= dp_rank < dp_size, or "
            "none"
        )
    return dp_rank, dp_size


_COLLATION = 0x636F6C6C
_current: list[int] = []


def sample_seed() -> int:
    """Return the seed of the sample that is being read, or of the batch that is being collated.

    The seed has 64 bits and depends on (seed, epoch, sample) only. Use it for other generators,
    such as a device's; the generators of Python, NumPy and torch on the CPU are already seeded.

    Raises:
        RuntimeError: called while no loader of ``reft.data`` is reading.
    """
    if not _current:
        raise RuntimeError(
            "reft.data.sample_seed() was called where no sample is read; call it in the data set's "
            "__getitem__ or in collate_fn of reft.data.loader"
        )
    return _current[-1]


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the training process's generators after the ``with`` block.

    Generators in workers are not restored, because they are seeded before each use.
    """
    here = capture_host_rng() if get_worker_info() is None else None
    try:
        yield
    finally:
        _current.clear()
        if here is not None:
            restore_host_rng(here)


def _seed_generators(seed: int) -> None:
    _current[:] = [seed]
    # Use different seeds: Python and NumPy use the same kind of generator, which would give
    # equal numbers.
    random.seed(mix(seed, 1))
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed, which would also seed the devices.
    torch.default_generator.manual_seed(mix(seed, 2))


@dataclass(frozen=True)
class _Fetched:
    """Samples to be collated, with the seed of the first one."""

    samples: list[Any]
    seed: int


class SeededDataset:
    """A data set whose keys are (epoch, sample); it seeds the random generators before it reads
    each sample."""

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
    """A collate function that seeds the random generators before it collates each batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: _Fetched) -> Any:
        with _generators_kept():
            _seed_generators(mix(fetched.seed, _COLLATION))
            return self._collate(fetched.samples)
