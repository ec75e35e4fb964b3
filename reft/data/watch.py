"""Observes what scripts do with their ``DataLoader``\\ s, while an engine has a session.

``DataLoader.__iter__`` then returns a :class:`~reft.data.passes.LoaderIterator`, which behaves the
same and counts. What a script draws before its first step after a resumption, in order to get back
to where it was, leaves no trace: passes are begun in the order of the version's pass, and every
batch is read under the version's random states. So the first batch that is trained on, and all
later ones, are those of the undisturbed run (P8).
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
    has_workers,
    is_within,
    leave_behind,
    of_inner,
    raw_iterator,
    restore_items,
)
from reft.state.blob import restore_host_rng, restore_rng


class StatefulReader(PassReader):
    """An iterator of torchdata's ``StatefulDataLoader``, whose position the script keeps. The state
    of a step is captured before each of its batches is read."""

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
        return of_inner(self, "_inner", name)


class ResumePhase:
    """The time between a resumption and the first training step.

    Args:
        position: where the version was in its data; None if that is not known.
        rng: its random states.
        is_training: returns whether the engine trains.
        begins: whether the script was about to begin a pass, with draws from ``rng``.
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
        self._placed: list[LoaderIterator] = []  # a batch of them was read
        self._rng = rng
        self._is_training = is_training
        self.begins: Callable[[], None] | None = None
        """Called before the first batch is read that training may use."""
        self._at_end = position is not None and (position.complete or position.evaluates)

    def _concerns(self, loader: Any) -> bool:
        """Whether training may read this loader: an evaluation draws its own numbers."""
        return self._is_training() if self._position is None else self._position.fits(loader)

    def begin(self, loader: Any, watch: LoaderHook) -> LoaderIterator:
        position = self._position
        if not self._concerns(loader):
            one = watch.begin(loader)
            one.natural = False
        elif position is None and not self._begins and is_within(loader) is not False:
            one = watch.begin(loader, draws=False)
            one.natural = False
        elif position is None or self._at_end:
            # The version was at the end of its pass: this one may be the next, and its draws count.
            if position is not None:
                leave_behind(loader, position)
            restore_rng(self._rng)
            one = watch.begin(loader)
        else:
            one = watch.begin_at(loader, position, skip=False)
        one.era = self
        return one

    def before_batch(self, one: PassReader, watch: LoaderHook) -> None:
        if self.begins is not None and self._is_training():
            self.begins()
        if not isinstance(one, LoaderIterator):
            # Loaders of reft.data.loader, and those whose state the script has loaded, are in
            # position.
            if self._is_training():
                restore_rng(self._rng)
            return
        if not self._concerns(one.loader):
            return
        if one.era is not self and one.taken == 0:
            # The pass was begun before the version was loaded.
            one.adopt(self.begin(one.loader, watch))
        if self._position is not None:
            restore_items(one.loader, self._position)
        # In a pass that reft has positioned, the first batch is trained on. In another one the
        # script may skip batches.
        placed = one.follow is not None and not one.reads_ahead and one in self._placed
        self._placed.append(one)
        if not (one.natural or placed):
            restore_rng(self._rng)

    def after_last(self, one: LoaderIterator) -> bool:
        """Whether the script is known to be where the version was: at the end of the pass that reft
        went back to. At the end of another pass of equal length it may be."""
        position = self._position
        if position is None or one.taken != position.taken or not self._concerns(one.loader):
            return False
        self._at_end = True
        restore_rng(self._rng)
        return one.follow is not None


class Listener(Protocol):
    """An engine that trains on what loaders hand out, as a :class:`LoaderHook` sees it."""

    why_equal: str | None
    """Why all replicas train on equally many micro-batches of a step; None if they need not."""

    def is_training(self) -> bool: ...
    def replica(self) -> tuple[int, int] | None: ...
    def step_samples(self) -> int | None: ...

    def begins_pass(self, loader: Any) -> None: ...
    def began_pass(self, one: PassReader) -> None: ...
    def before_batch(self, one: PassReader) -> None: ...
    def before_read(self, one: PassReader) -> None: ...
    def after_batch(self, one: PassReader) -> None: ...


class LoaderHook:
    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        """The engines that train on what is read."""
        # classes whose ``__iter__`` is replaced, with the original
        self._patched: list[tuple[Any, Any]] = []
        self.resuming: ResumePhase | None = None
        self.reopens = False
        """Whether the program begins its loaders behind what was taken of them: the random states
        that are loaded, its own or a version's, are behind the draws by which they were begun."""
        self.openings: dict[int, Callable[[Any], LoaderIterator]] = {}
        """By the identity of loaders that others are about to iterate over: what makes their
        pass."""

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
        """Remove a listener. Without any, ``DataLoader`` is as torch made it."""
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
            one = self.resuming.begin(loader, self)
        else:
            one = self.begin(loader, draws=not (self.reopens and is_within(loader)))
        for listener in self._listeners:
            listener.began_pass(one)
        return one

    def hand_out(self, shard: Any, begin: Callable[[Any], LoaderIterator]) -> Iterator[Any]:
        """One pass of a shard, counted batch by batch as it is handed out.

        Args:
            begin: makes the pass of the shard's own ``DataLoader``.
        """
        iterate = dict(self._patched).get(shard_class(), type(shard).__iter__)
        begun: list[LoaderIterator] = []

        def open_base(base: Any) -> LoaderIterator:
            one = begin(base)
            one.reads_ahead = True
            one.start = {**one.start, ITERATION: shard.iteration}
            begun.append(one)
            return one

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
        """Begin a pass under the present random states. If it ``draws`` nothing, they are
        put back."""
        start, renewed = capture_start(loader), has_workers(loader)
        inner = raw_iterator(loader)
        if not draws:
            restore_host_rng(start)
        return LoaderIterator(loader, inner, start, self, renewed=renewed)

    def begin_at(self, loader: Any, position: Position, *, skip: bool = True) -> LoaderIterator:
        """Begin the pass of a version, after what was taken of it, or at its beginning."""
        one = LoaderIterator(loader, iter(()), position.start, self)
        one.go_to(position, skip=skip)
        one.era = self.resuming
        return one

    @property
    def is_watching(self) -> bool:
        return bool(self._listeners)

    @property
    def is_evaluating(self) -> bool:
        """Whether there are engines, and none trains."""
        return self.is_watching and not any(listener.is_training() for listener in self._listeners)

    def before_batch(self, one: PassReader) -> None:
        if self.resuming is not None:
            self.resuming.before_batch(one, self)
        for listener in self._listeners:
            listener.before_batch(one)

    def before_read(self, one: PassReader) -> None:
        """A batch is about to be read, under the present random states."""
        for listener in self._listeners:
            listener.before_read(one)

    def after_batch(self, one: PassReader) -> None:
        for listener in self._listeners:
            listener.after_batch(one)

    def after_last(self, one: LoaderIterator) -> None:
        if self.resuming is not None and self.resuming.after_last(one):
            self.resuming = None

    def replica(self) -> tuple[int, int]:
        """This rank's replica and the number of replicas: the engine's; before there is one, the
        rank and world size of torch.distributed."""
        known = (listener.replica() for listener in reversed(self._listeners))
        return next((one for one in known if one is not None), process())

    def why_equal(self) -> str | None:
        return self._listeners[-1].why_equal if self._listeners else None

    def step_samples(self) -> int | None:
        return self._listeners[-1].step_samples() if self._listeners else None


def process() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


WATCH = LoaderHook()
