"""What scripts do with their ``DataLoader``\\ s, while an engine is under reft's care.

``DataLoader.__iter__`` returns a :class:`~reft.data.passes.LoaderIterator` then, which behaves
alike and counts. What a script draws in order to get back to where it was, before its first step
after a resumption, leaves no trace: passes are begun in the order of the one that the version was
in, and every batch is read under the random states of the version, so that the first batch that is
trained on, and all behind it, are the undisturbed run's (P8).
"""

from __future__ import annotations

import functools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from reft.data.passes import (
    ORIGINAL,
    LoaderIterator,
    PassReader,
    Position,
    capture_start,
    find_order,
    has_workers,
    is_within,
    iterates_itself,
    leave_behind,
    of_inner,
    raw_iterator,
    restore_items,
)
from reft.errors import ConfigError
from reft.state.blob import restore_host_rng, restore_rng
from reft.state.codec import class_path

# -- Accelerate's loaders read a batch ahead, to know the last one: what counts is what they handed
# out

ITERATION = "iteration"
"""Of a ``DataLoaderShard``: the number of its pass, which decides the order of some samplers."""
DISPATCHED = (
    "Accelerate's DataLoaderDispatcher, which reads on rank 0 for all ranks, so that its position "
    "is not "
    "restored. Have every rank read its own part: write"
    """
    config = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(dataloader_config=config, ...)
    loader = reft.resumable(accelerator.prepare(loader))"""
)


def shard_class() -> Any:
    """Accelerate's class, where the script has imported it and it is made as is known here."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderShard", None)
    return kind if hasattr(kind, "__iter__") else None


def is_shard(loader: Any) -> bool:
    """Whether Accelerate made it of a ``DataLoader`` that can be followed."""
    kind = shard_class()
    return (
        kind is not None
        and issubclass(type(loader), kind)
        and type(loader).__iter__ is kind.__iter__
        and hasattr(loader, "base_dataloader")
        and hasattr(loader, ITERATION)
    )


def is_dispatcher(loader: Any) -> bool:
    """Whether it is Accelerate's, and reads on rank 0 for all ranks."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", None)
    return kind is not None and issubclass(type(loader), kind)


def is_dispatched() -> bool:
    """Whether the innermost of Accelerate's loaders that the script is reading is such a one."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and is_dispatcher(getattr(state(), "active_dataloader", None))


class StatefulReader(PassReader):
    """An iterator of torchdata's ``StatefulDataLoader``, whose position the script keeps. The state
    of a step is taken aside before each of its batches is read."""

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
        position: where the version was in its data, if that is known.
        rng: its random states.
        is_training: whether the engine trains.
        begins: whether the script was about to begin a pass, and its draws follow ``rng``.
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
        self._placed: list[LoaderIterator] = []  # of which a batch was read
        self._rng = rng
        self._is_training = is_training
        self.begins: Callable[[], None] | None = None
        """Called before the first batch is read that training may use."""
        self._at_end = position is not None and (position.complete or position.evaluates)

    def _concerns(self, loader: Any) -> bool:
        """Whether it may be the one that training reads: an evaluation draws its own numbers."""
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
            # The version was at the end of its pass: this one may be the next, with draws that
            # count.
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
            # Of reft.data.loader, or of a loader whose state the script has loaded: both are in
            # position.
            if self._is_training():
                restore_rng(self._rng)
            return
        if not self._concerns(one.loader):
            return
        if one.era is not self and one.taken == 0:
            # Begun before the version was loaded.
            one.adopt(self.begin(one.loader, watch))
        if self._position is not None:
            restore_items(one.loader, self._position)
        # Of a placed pass the first batch is trained on; of another pass the script may skip
        # batches.
        placed = one.follow is not None and not one.reads_ahead and one in self._placed
        self._placed.append(one)
        if not (one.natural or placed):
            restore_rng(self._rng)

    def after_last(self, one: LoaderIterator) -> bool:
        """Whether the script is known to be where the version was: at the end of the pass that reft
        went back to. At the end of another as long as that it may be there."""
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
        """Of the engines that train on what is read."""
        # classes whose ``__iter__`` is watched, each with its own
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
        """With the last one gone, ``DataLoader`` is as torch made it."""
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
        """One pass of a shard, counted batch by batch as it is handed out. ``begin``: makes the
        pass of the shard's own ``DataLoader``."""
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
                if begun:  # else nobody watches
                    begun[0].hand_out()
                yield batch
            if begun:
                begun[0].end()
        finally:
            self.openings.pop(id(shard.base_dataloader), None)

    def begin(self, loader: Any, *, draws: bool = True) -> LoaderIterator:
        """A pass under the random states that are there, which stay as they are if it ``draws``
        nothing."""
        start, renewed = capture_start(loader), has_workers(loader)
        inner = raw_iterator(loader)
        if not draws:
            restore_host_rng(start)
        return LoaderIterator(loader, inner, start, self, renewed=renewed)

    def begin_at(self, loader: Any, position: Position, *, skip: bool = True) -> LoaderIterator:
        """The pass of a version, behind what was taken of it, or from its beginning."""
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
        """A batch is about to be read, under the random states that are there."""
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
        rank and world of torch.distributed."""
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


# -- loaders by name, and their positions in a version that was loaded before or after the script
# made them

KINDS = ("resumable", "samples")
"""Where positions stand in a version: those of :func:`resumable`, and of ``reft.data.loader``."""
R = TypeVar("R", bound=PassReader)


class TrackedLoader(ABC, Generic[R]):
    """A loader whose position, plain values, is part of the version."""

    kind: ClassVar[str]  # one of KINDS
    call: ClassVar[str]  # what the script writes to make one, for messages

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: R | None = None
        """The pass that was begun last: perhaps a look, while another one is trained on."""
        self._followed: R | None = None  # the pass that was trained on last

    @property
    def _pass(self) -> R | None:
        if not WATCH.is_watching:
            self._followed = None
        one = self._begun if self._followed is None else self._followed
        if one is not None and one.unwatched and WATCH.is_watching:
            one.counts = one.unwatched = False
        return one

    def _passes(self) -> list[R]:
        return [one for one in dict.fromkeys((self._followed, self._begun)) if one is not None]

    def reads(self, loader: Any) -> bool:
        """Whether its batches come from this loader of torch."""
        return False

    def wrong(self) -> str | None:
        """Why not every sample would be trained on once, and what to write; None: it would."""
        return None

    @abstractmethod
    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """What has to be equal on all ranks, where it deals out to so many replicas; else None."""

    @abstractmethod
    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        """Where the next step reads; None where nothing was begun.

        Args:
            upcoming: the pass that the script is about to read, of this loader or another one.
            begins: whether the script is about to begin another pass of this loader.
        """

    @abstractmethod
    def go_to(self, position: dict[str, Any]) -> None:
        """Go on behind ``position``, in a pass that is being read too."""

    def begin_anew(self) -> None:
        """A version was loaded that was taken before the first pass was begun."""


class Registry:
    """The loaders of this process, by kind and name."""

    def __init__(self) -> None:
        self._named = weakref.WeakValueDictionary[tuple[str, str], TrackedLoader[Any]]()
        self._waiting = dict[tuple[str, str], dict[str, Any]]()

    def add(self, loader: TrackedLoader[Any]) -> dict[str, Any] | None:
        """Returns the position of a version that was loaded before the script has made its
        loader."""
        self._named[loader.kind, loader.name] = loader
        return self._waiting.pop((loader.kind, loader.name), None)

    def require_named(self, loader: TrackedLoader[Any]) -> None:
        """A ConfigError where another loader has the name."""
        if self._named.get((loader.kind, loader.name)) is not loader:
            raise ConfigError(
                f"found two loaders that are resumable under the name {loader.name!r}; expected "
                f"one name each: write {loader.call}, name='...')"
            )

    def wrong(self) -> str | None:
        """The first that is wrong with one of them."""
        return next(filter(None, (loader.wrong() for loader in self._named.values())), None)

    def orders(self, replicas: int) -> dict[str, dict[str, Any]]:
        """What they read, by name, where all ranks have to read the same."""
        found = {
            name: loader.order_facts(replicas) for (_, name), loader in sorted(self._named.items())
        }
        return {f"the loader {name!r}": facts for name, facts in found.items() if facts is not None}

    def positions(self, upcoming: PassReader | None = None, begins: Any = None) -> dict[str, Any]:
        """By kind and name. ``upcoming``: the pass that is about to be read; ``begins``: the torch
        loader of which a pass is about to begin."""
        found = dict[str, Any]()
        for (kind, name), loader in sorted(self._named.items()):
            position = loader.position(upcoming, begins=begins is not None and loader.reads(begins))
            if position is not None:
                found.setdefault(kind, {})[name] = position
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Bring the loaders back, those too that the script makes later."""
        positions = {(kind, name): at for kind in KINDS for name, at in saved.get(kind, {}).items()}
        loaders = dict(self._named)
        self._waiting = {key: at for key, at in positions.items() if key not in loaders}
        for key, loader in loaders.items():
            if key in positions:
                loader.go_to(positions[key])
            else:
                loader.begin_anew()


LOADERS = Registry()


class ResumableLoader(TrackedLoader[LoaderIterator]):
    """Made by :func:`resumable`, for a script that iterates over it itself, before or after
    ``engine.load_checkpoint``. Attributes that it does not have are the loader's; without reft
    attached it is the loader."""

    kind, call = "resumable", "reft.resumable(loader"

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(name)
        self._loader = loader
        saved = LOADERS.add(self)
        self._restored = None if saved is None else Position(**saved)
        # whether a version was loaded while a pass is being read that cannot move
        self._moved = False

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_loader", name)

    @property
    def epoch(self) -> int:
        """Number of the running pass, counted from 0; of the one to go on in, after a
        resumption."""
        at = self._to_go_on_at() or self._pass
        return 0 if at is None else at.number

    def __iter__(self) -> Iterator[Any]:
        LOADERS.require_named(self)
        return (
            self._of_shard()
            if is_shard(self._loader)
            else _RetainedIterator(self, self._begin(self._loader))
        )

    def _of_shard(self) -> Iterator[Any]:
        shard, again = self._loader, True
        while again:
            again = self._moved = False
            restored = self._to_go_on_at()
            if restored is not None:
                shard.iteration = restored.start[ITERATION] + (
                    restored.evaluates and restored.complete
                )
            taken = 0
            for batch in WATCH.hand_out(shard, self._begin):
                taken += 1
                yield batch
                if again := self._moved:
                    break
            if restored is not None and restored.complete and not taken:
                shard.iteration += 1  # which it leaves where it was after a pass without batches

    def _begin(self, loader: Any) -> LoaderIterator:
        restored = self._to_go_on_at()
        if restored is not None and not restored.evaluates:
            one = WATCH.begin_at(loader, restored)
        else:
            if restored is not None:
                leave_behind(loader, restored)
            one = WATCH.open(loader)
            one.number = self._next_number() if restored is None else restored.number
        one.follow = weakref.WeakMethod(self._follow)
        self._begun = one
        return one

    def _follow(self, one: LoaderIterator) -> None:
        self._followed = one

    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        return find_order(self._loader, replicas)

    def reads(self, loader: Any) -> bool:
        return loader in (self._loader, getattr(self._loader, "base_dataloader", None))

    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        found = self._to_go_on_at()
        one = (
            upcoming
            if isinstance(upcoming, LoaderIterator) and upcoming in self._passes()
            else self._pass
        )
        if found is None and one is not None:
            found = one.position()
            if begins or found.evaluates:
                found = replace(found, evaluates=True, number=self._next_number())
        return None if found is None else dict(vars(found))

    def _next_number(self) -> int:
        return 0 if self._pass is None else self._pass.number + self._pass.counts

    def _to_go_on_at(self) -> Position | None:
        """The restored position, until a step is trained from it: passes begun before begin
        there."""
        if self._pass is not None and (
            self._pass.era is None or self._pass.era is not WATCH.resuming
        ):
            self._restored = None
        return self._restored

    def go_to(self, position: dict[str, Any]) -> None:
        self._restored = at = Position(**position)
        if at.evaluates:
            self._begun = self._followed = None
        for one in self._passes():
            if one is self._pass:
                self._moved = one.reads_ahead
            if not one.reads_ahead:
                one.go_to(at)
            one.era = WATCH.resuming


class _RetainedIterator:
    """The iterator of a pass. It keeps the resumable loader, which :data:`LOADERS` does not: a
    script may iterate over one that it has no name for."""

    def __init__(self, owner: ResumableLoader, one: LoaderIterator) -> None:
        self._owner = owner
        self._one = one
        one.handle = weakref.ref(self)

    def __iter__(self) -> _RetainedIterator:
        return self

    def __next__(self) -> Any:
        return next(self._one)

    def __len__(self) -> int:
        return len(self._one)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_one", name)


def resumable(loader: Any, name: str = "data") -> Any:
    """Have the position of a ``DataLoader`` restored with the training state, to the batch and the
    bit.

    The loader's own order is kept. What ``reft.data.loader`` makes goes on at another data-parallel
    degree too, and is resumable already: it is returned as it is.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or what Accelerate's ``prepare`` made of one.
        name: where a script has several, one for each; the same after a restart.

    Raises:
        ConfigError: it is no ``DataLoader``, or of a subclass with an ``__iter__`` of its own.
    """
    if isinstance(loader, TrackedLoader):
        return loader
    if is_dispatcher(loader):
        raise ConfigError(f"found {DISPATCHED}")
    if not isinstance(loader, DataLoader) or (iterates_itself(loader) and not is_shard(loader)):
        own = ", which has an __iter__ of its own" if isinstance(loader, DataLoader) else ""
        raise ConfigError(
            f"found {class_path(loader)}{own}; expected a torch.utils.data.DataLoader, whose "
            "order can be "
            f"resumed. Keep the position of other data in reft.attach(engine, client_state=...)"
        )
    return ResumableLoader(loader, name)
