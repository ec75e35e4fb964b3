"""A ``DataLoader`` whose position is part of the version, at every data-parallel degree.

    loader = reft.data.loader(dataset, batch_size=4, shuffle=True, seed=1, num_workers=3)
    for epoch in range(loader.epoch, epochs):
        for batch in loader: ...

torch's ``DataLoader`` reads: workers, prefetch, pinning and collation are its own. What it reads
follows from :mod:`reft.data.order`. The position counts what was handed out, not what was read
ahead; to return to a position, two numbers are set.

Random numbers of a sample follow from (seed, epoch, sample), never from the state of a worker.
Before a sample is read, the generators of Python, NumPy and torch (on the CPU) are seeded for it;
before a batch is collated, by its first sample. So a sample is the same to the bit in every worker,
in the training process, whose generators are put back afterwards, and when it is read again after a
failure.
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
"""What ``DataLoader`` takes and a position of the whole job does not allow."""


class Progress(PassReader):
    """Where one pass over a :class:`Loader` is. It outlives the iterator, and does not keep the
    loader alive."""

    def __init__(self, loader: Any, follow: Callable[[Any], None], began: JobPosition) -> None:
        super().__init__(loader)
        self.follow = weakref.WeakMethod(follow)
        self.moves = 0  # how often a version has taken it elsewhere
        self.go_to(began)

    def go_to(self, at: JobPosition) -> None:
        self.began = self.at = at
        self.taken = 0
        self.ends_step: bool | None = None
        """Whether the batch that was handed out last is the replica's last of its step; None: all
        replicas have equally many."""
        self.counts = self.unwatched = self.evaluates = self.is_trained = False
        self.era = WATCH.resuming
        self.moves += 1


class Loader(TrackedLoader[Progress]):
    """Made by :func:`loader`, over torch's ``DataLoader``, ``inner``."""

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
            # Beginning a pass draws nothing from the generator that training uses.
            generator=torch.Generator(),
            **{option: given for option, given in options.items() if option not in _DECIDED},
        )
        self._handed_out: list[Progress] = []
        """Of the passes whose batches the script has, the one that was read last at the end."""
        self._has_left_out = False
        self._left_within_step = False
        """Whether the batch that was trained on last is not the replica's last one of its step."""
        saved = LOADERS.add(self)
        self._restored = None if saved is None else decode(saved, self._order, name)
        self._loads = int(saved is not None)  # how often a version was loaded

    @property
    def replica(self) -> tuple[int, int]:
        return self._given or WATCH.replica()

    @property
    def deal(self) -> EpochPartition:
        return self._batches.deal(self.replica[1])

    def __len__(self) -> int:
        """Batches of a complete pass.

        Raises:
            TypeError: replicas take as many as they reach.
        """
        if self._batches.step_samples is not None:
            raise TypeError(
                f"the loader {self.name!r} has no length: each replica takes micro-batches at its "
                "own speed"
            )
        return len(self.deal)

    @property
    def epoch(self) -> int:
        """Number of the present pass, counted from 0; after a resumption, of the pass to
        continue."""
        restored, one = self._to_go_on_at(), self._pass
        return restored.epoch if restored is not None else 0 if one is None else one.at.epoch

    def __iter__(self) -> ReadAhead:
        LOADERS.require_named(self)
        self._begun = Progress(self.inner, self._follow, self._beginning())
        return ReadAhead(self, self._begun)

    def _follow(self, progress: Progress) -> None:
        """A batch of its pass is trained on: its position is now the job's."""
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
        """The script gets the next batch of a pass."""
        others = [one for one in self._handed_out if one is not progress and one.is_held]
        self._handed_out = [*others, progress]

    @property
    def ends_step(self) -> bool | None:
        """With ``order="dynamic"``, whether the batch that training takes next, or has just taken,
        is the replica's last one of its step; else None. A look changes nothing."""
        one = self._followed
        if one is not None and one.is_held and not (one.is_trained and one.ends_step):
            return one.ends_step
        held = [other for other in self._handed_out if other.is_held] or self._handed_out
        return held[-1].ends_step if held else None

    def _beginning(self) -> JobPosition:
        restored, one = self._to_go_on_at(), self._pass
        if one is not None and one.counts:
            return self.deal.next_pass(one.at)
        return restored or (JobPosition() if one is None else one.began)

    def read_from(self, at: JobPosition) -> tuple[Iterator[Any], ConsumedSamples]:
        """torch's iterator over the rest of a pass, and what it is given to read."""
        taken = self._batches.begin_at(at, self.replica, self._loads)
        return raw_iterator(self.inner), taken

    def left_out(self) -> None:
        """The data set has raised an error, which the script may catch."""
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

    def _to_go_on_at(self) -> JobPosition | None:
        """The restored position, until a step is trained from it, or its pass read to the end:
        passes begun before begin there."""
        one = self._pass
        if one is not None and (one.counts or one.era is None or one.era is not WATCH.resuming):
            self._restored = None
        return self._restored

    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """None if the script divides samples among others than the replicas, which :meth:`wrong`
        reports."""
        if self.replica[1] != replicas:
            return None
        batches = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**self._order.facts(), **batches, "step_samples": self._batches.step_samples}

    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        at, one = self._to_go_on_at(), self._pass
        if isinstance(upcoming, Progress) and upcoming in self._passes():
            one = upcoming
        if at is None and one is not None:
            at = self._beginning() if one.evaluates else one.at
        return None if at is None else encode(at, self._order)

    def go_to(self, position: dict[str, Any]) -> None:
        """A position of other data or another order is a ConfigError."""
        self._restored = decode(position, self._order, self.name)
        self._loads, self._left_within_step = self._loads + 1, False
        self._handed_out.clear()
        for one in self._passes():
            one.go_to(self._restored)

    def begin_anew(self) -> None:
        if self._pass is not None:
            self.go_to(encode(JobPosition(), self._order))
        else:
            self._loads += 1  # as on ranks that have read something

    def state_dict(self) -> dict[str, Any]:
        """The position, for checkpoints of the script. reft does not need it."""
        return self.position() or encode(JobPosition(), self._order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a :meth:`state_dict`, taken at any data-parallel degree."""
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
    """A micro-batch that was read, or the data set's ``error`` in its place. ``at`` and
    ``step_end``: see :class:`~reft.data.order.ConsumedSamples`."""

    batch: Any
    error: Exception | None
    at: JobPosition
    step_end: JobPosition | None


class ReadAhead:
    def __init__(self, owner: Loader, progress: Progress) -> None:
        self._owner = owner
        self._progress = progress
        progress.handle = weakref.ref(self)
        self._inner: Iterator[Any] = iter(())
        self._taken = ConsumedSamples()
        self._moves = 0
        self._ahead: deque[_Batch] = deque()
        """Where replicas take unequally many: read to know which is the last of a step, not handed
        out."""
        self._ended_at: JobPosition | None = None  # behind the last step whose end was handed out

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        WATCH.before_batch(self._progress)
        progress, replicas = self._progress, self._owner.replica[1]
        if self._moves != progress.moves:
            # What was read ahead from elsewhere is dropped.
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
        # Of a step that ends here the whole is consumed: a version goes on behind what was left
        # out.
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
        """Whether another one of the same step that can be read comes next. Else the next one is
        the last of its step: the replica would not see the step's end, and the others would wait
        for it."""
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
        """Raises what does not leave a micro-batch out: the end, workers that died or are late, or
        a failure to take one."""
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
    """A loader in the place of torch's ``DataLoader``, which deals samples out to data-parallel
    replicas. Its position is part of the version: after a failure, and at another data-parallel
    degree, every sample of an epoch is trained on exactly once.

    Args:
        dataset: has a length, and gives a sample for an index.
        batch_size: samples of a replica in a micro-batch.
        shuffle: read in an order that follows from (seed, epoch).
        seed: of the order, and of the samples' random numbers.
        drop_last: leave out what does not fill a micro-batch; else the last one of a pass is
            smaller, its samples spread evenly over the replicas.
        order: ``"static"``, in which every replica has equally many micro-batches of a step; or
            ``"dynamic"``, in which replicas take them as they come to them, and a slow one takes
            fewer: see docs/data.md for the loop that this needs. A resumed run is equal to the bit
            with the static order only.
        step_samples: of ``"dynamic"``, samples of a step of all replicas: DeepSpeed's
            ``train_batch_size``.
        collate_fn: makes a batch of a list of samples; None: torch's.
        dp_rank: this rank's replica; None: the engine's, before there is one that of
            torch.distributed.
        dp_size: number of replicas; None: likewise.
        name: where a script has several, one for each; the same after a restart.
        options: of ``DataLoader``: ``num_workers``, ``prefetch_factor``, ``pin_memory``,
            ``persistent_workers``, ``worker_init_fn``, ``timeout``, ``multiprocessing_context``.
            With ``order="dynamic"`` the prefetch factor is 1 where none is given.

    Raises:
        ConfigError: the data set has no indices, or an option would decide the order.
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
            # What a worker reads ahead is taken, and no other replica can train on it.
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
    """The seed of the sample that is being read, or of the batch that is being collated: 64 bits
    that follow from (seed, epoch, sample) alone. For generators of one's own, such as a device's;
    those of Python, NumPy and torch are seeded already.

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
    """Whatever is drawn within leaves no trace in the process that trains. Workers' generators are
    seeded before they are used."""
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
