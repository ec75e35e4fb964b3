"""Observes how scripts use their ``DataLoader``\\ s while an engine has a session.

``DataLoader.__iter__`` then returns a :class:`~reft.data.passes.LoaderIterator`, which behaves
like torch's iterator and counts batches. After a restart, a script may draw random numbers while
it skips to its position before the first step. These draws have no effect: a pass is begun with
the order of the version's pass, and every batch is read under the version's random states. So
the first batch that is trained on, and all later batches, are those of an uninterrupted run
(P8).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from reft.data.accelerate import ITERATION, is_shard, shard_class
from reft.data.passes import (
    ORIGINAL,
    LoaderIterator,
    PassReader,
    Position,
    capture_start,
    finish_pass,
    get_inner_attribute,
    has_workers,
    is_within,
    raw_iterator,
    restore_items,
)
from reft.state.blob import restore_host_rng, restore_rng


class StatefulReader(PassReader):
    """An iterator of torchdata's ``StatefulDataLoader``, whose position the script saves and
    restores itself.

    Every read is reported before it happens, so that the engine can capture the host state before
    the first batch of a step is read.
    """

    def __init__(self, loader: Any, inner: Iterator[Any], watch: LoaderHook) -> None:
        super().__init__(loader)
        self._inner, self._watch = inner, watch

    def __iter__(self) -> StatefulReader:
        return self

    def __next__(self) -> Any:
        self._watch.before_batch(self)
        self._watch.before_read(self)
        batch = next(self._inner)
        self.taken += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return get_inner_attribute(self, "_inner", name)


class ResumePhase:
    """The time between a restart and the first training step.

    Args:
        position: position of the version in its data; None if unknown.
        rng: random states of the version.
        is_training: returns whether the engine trains.
        begins: whether the script, when the version was taken, was about to begin a pass with
            draws from ``rng``.

    Attributes:
        begins: function to call before the first batch is read that training may use; None for
            none.
    """

    def __init__(
        self,
        position: Position | None,
        rng: dict[str, Any],
        is_training: Callable[[], bool],
        *,
        begins: bool = False,
    ) -> None:
        self._begins = begins
        self._position = position
        # Passes over loaders from which a batch was read in this phase
        self._placed: list[LoaderIterator] = []
        self._rng = rng
        self._is_training = is_training
        self.begins: Callable[[], None] | None = None
        self._at_end = position is not None and (position.complete or position.evaluates)

    def _concerns(self, loader: Any) -> bool:
        """Return whether training may read this loader. An evaluation's loader may draw random
        numbers of its own."""
        return self._is_training() if self._position is None else self._position.fits(loader)

    def begin(self, loader: Any, watch: LoaderHook) -> LoaderIterator:
        position = self._position
        if not self._concerns(loader):
            reader = watch.begin(loader)
            reader.uses_training_rng = False
        elif position is None and not self._begins and is_within(loader) is not False:
            reader = watch.begin(loader, draws=False)
            reader.uses_training_rng = False
        elif position is None or self._at_end:
            # The version was at the end of its pass. This may be the next pass, whose draws are
            # part of training.
            if position is not None:
                finish_pass(loader, position)
            restore_rng(self._rng)
            reader = watch.begin(loader)
        else:
            reader = watch.begin_at(loader, position, skip=False)
        reader.resume_phase = self
        return reader

    def before_batch(self, reader: PassReader, watch: LoaderHook) -> None:
        if self.begins is not None and self._is_training():
            self.begins()
        if not isinstance(reader, LoaderIterator):
            # Loaders of reft.data.loader, and loaders whose state the script has loaded, are
            # already at their position.
            if self._is_training():
                restore_rng(self._rng)
            return
        if not self._concerns(reader.loader):
            return
        if reader.resume_phase is not self and reader.taken == 0:
            # The script began this pass before the version was loaded: continue as the version's
            # pass.
            reader.adopt(self.begin(reader.loader, watch))
        if self._position is not None:
            restore_items(reader.loader, self._position)
        # In a pass that reft has positioned, the first batch is trained on. In another pass the
        # script may skip batches, each of which is read under the version's random states.
        placed = reader.follow is not None and not reader.reads_ahead and reader in self._placed
        self._placed.append(reader)
        if not (reader.uses_training_rng or placed):
            restore_rng(self._rng)

    def after_last(self, reader: LoaderIterator) -> bool:
        """Return whether the end of this pass shows that the script has reached the version's
        position.

        Return True for a pass that reft has positioned. The end of another pass of equal length
        may be a coincidence.
        """
        position = self._position
        if position is None or reader.taken != position.taken or not self._concerns(reader.loader):
            return False
        self._at_end = True
        restore_rng(self._rng)
        return reader.follow is not None


class Listener(Protocol):
    """An engine that trains on batches of loaders, for the :class:`LoaderHook`.

    Attributes:
        why_equal: reason why all replicas must train on the same number of micro-batches in a
            step; None if they need not.
    """

    why_equal: str | None

    def is_training(self) -> bool: ...
    def replica(self) -> tuple[int, int] | None: ...
    def step_samples(self) -> int | None: ...

    def begins_pass(self, loader: Any) -> None: ...
    def began_pass(self, reader: PassReader) -> None: ...
    def before_batch(self, reader: PassReader) -> None: ...
    def before_read(self, reader: PassReader) -> None: ...
    def after_batch(self, reader: PassReader) -> None: ...


class LoaderHook:
    """Replaces ``__iter__`` of torch's loaders as long as an engine is registered as a listener.

    Attributes:
        resuming: the phase between a restart and its first step; None otherwise.
        reopens: whether the training program itself restarts its loaders after the samples that
            were taken. The random states that it or reft has loaded then already include the
            draws that began the pass.
        openings: functions that make the next pass of a loader, by the loader's ``id()``.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []  # Engines that train on the loaders' batches
        # Classes whose ``__iter__`` is replaced, each with the original method
        self._patched: list[tuple[Any, Any]] = []
        self.resuming: ResumePhase | None = None
        self.reopens = False
        self.openings: dict[int, Callable[[Any], LoaderIterator]] = {}

    def join(self, listener: Listener) -> None:
        self._listeners.append(listener)
        if self._patched:
            return
        self._patch(
            DataLoader,
            lambda original, loader: (
                self.open(loader) if get_worker_info() is None else original(loader)
            ),
        )
        if (kind := shard_class()) is not None:

            def iterate(original: Any, shard: Any) -> Iterator[Any]:
                if not is_shard(shard):
                    return original(shard)  # type: ignore[no-any-return]
                return self.hand_out(shard, self.open)

            self._patch(kind, iterate)

        stateful = getattr(
            sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None
        )
        if stateful is not None:
            self._patch(stateful, self._open_stateful)

    def _open_stateful(self, original: Any, loader: Any) -> Any:
        if get_worker_info() is not None:
            return original(loader)
        return StatefulReader(loader, original(loader), self)

    def _patch(self, kind: Any, iterate: Callable[[Any, Any], Any]) -> None:
        original = kind.__iter__
        self._patched.append((kind, original))
        kind.__iter__ = functools.wraps(original)(lambda loader: iterate(original, loader))
        setattr(kind.__iter__, ORIGINAL, original)

    def leave(self, listener: Listener) -> None:
        """Remove a listener. When none is left, restore torch's own ``__iter__``."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            for kind, original in self._patched:
                kind.__iter__ = original
            self._patched.clear()
            self.resuming, self.reopens = None, False

    def open(self, loader: Any) -> LoaderIterator:
        if (begin := self.openings.pop(id(loader), None)) is not None:
            return begin(loader)
        for listener in self._listeners:
            listener.begins_pass(loader)
        if self.resuming is not None:
            reader = self.resuming.begin(loader, self)
        else:
            reader = self.begin(loader, draws=not (self.reopens and is_within(loader)))
        for listener in self._listeners:
            listener.began_pass(reader)
        return reader

    def hand_out(self, shard: Any, begin: Callable[[Any], LoaderIterator]) -> Iterator[Any]:
        """Iterate over one pass of a shard, counting batches when they are handed out.

        Args:
            shard: Accelerate's loader.
            begin: begins the pass over the shard's own ``DataLoader``.
        """
        iterate = dict(self._patched).get(shard_class(), type(shard).__iter__)
        begun: list[LoaderIterator] = []

        def open_base(base: Any) -> LoaderIterator:
            reader = begin(base)
            reader.reads_ahead = True
            reader.start = {**reader.start, ITERATION: shard.iteration}
            begun.append(reader)
            return reader

        self.openings[id(shard.base_dataloader)] = open_base
        try:
            for batch in iterate(shard):
                if begun:
                    begun[0].hand_out()
                yield batch
            if begun:
                begun[0].end()
        finally:
            self.openings.pop(id(shard.base_dataloader), None)

    def begin(self, loader: Any, *, draws: bool = True) -> LoaderIterator:
        """Begin a pass under the current random states.

        Args:
            loader: torch's loader.
            draws: True if the random draws at the beginning of the pass are part of training;
                False to undo them.
        """
        start, renewed = capture_start(loader), has_workers(loader)
        inner = raw_iterator(loader)
        if not draws:
            restore_host_rng(start)
        return LoaderIterator(loader, inner, start, self, renewed=renewed)

    def begin_at(self, loader: Any, position: Position, *, skip: bool = True) -> LoaderIterator:
        """Begin the pass of a version's position, after the batches that were taken or at the
        beginning."""
        reader = LoaderIterator(loader, iter(()), position.start, self)
        reader.go_to(position, skip=skip)
        reader.resume_phase = self.resuming
        return reader

    @property
    def is_watching(self) -> bool:
        return bool(self._listeners)

    @property
    def is_evaluating(self) -> bool:
        """Whether there are engines, and none of them is in training mode."""
        return self.is_watching and not any(listener.is_training() for listener in self._listeners)

    def before_batch(self, reader: PassReader) -> None:
        if self.resuming is not None:
            self.resuming.before_batch(reader, self)
        for listener in self._listeners:
            listener.before_batch(reader)

    def before_read(self, reader: PassReader) -> None:
        """Notify the engines that a batch is about to be read, under the current random states."""
        for listener in self._listeners:
            listener.before_read(reader)

    def after_batch(self, reader: PassReader) -> None:
        for listener in self._listeners:
            listener.after_batch(reader)

    def after_last(self, reader: LoaderIterator) -> None:
        if self.resuming is not None and self.resuming.after_last(reader):
            self.resuming = None

    def replica(self) -> tuple[int, int]:
        """Return the replica of this rank and the number of replicas.

        Both numbers come from the engine. Before there is an engine, they are the rank and world
        size of torch.distributed.
        """
        known = (listener.replica() for listener in reversed(self._listeners))
        return next((reader for reader in known if reader is not None), process())

    def why_equal(self) -> str | None:
        return self._listeners[-1].why_equal if self._listeners else None

    def step_samples(self) -> int | None:
        return self._listeners[-1].step_samples() if self._listeners else None


def process() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


WATCH = LoaderHook()
