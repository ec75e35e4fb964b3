"""Loaders whose position is part of a version, by name.

A version may be loaded before or after the script creates the loader.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from torch.utils.data import DataLoader

from reft.data.accelerate import DISPATCHED, ITERATION, is_dispatcher, is_shard
from reft.data.passes import (
    LoaderIterator,
    PassReader,
    Position,
    find_order,
    finish_pass,
    get_inner_attribute,
    iterates_itself,
)
from reft.data.watch import WATCH
from reft.errors import ConfigError
from reft.state.codec import class_path

KINDS = ("resumable", "samples")
"""Keys of positions in a version, for loaders of :func:`resumable` and of ``reft.data.loader``."""

R = TypeVar("R", bound=PassReader)


class TrackedLoader(ABC, Generic[R]):
    """A loader whose position is part of a version, as plain values."""

    kind: ClassVar[str]  # Kind of the loader, one of KINDS
    call: ClassVar[str]  # Beginning of the call that makes such a loader, for messages

    def __init__(self, name: str) -> None:
        self.name = name
        # The pass that was begun last. It may not be the one used for training: a script may begin
        # a pass only to look at one batch.
        self._begun: R | None = None
        self._followed: R | None = None  # The pass over the loader that training used last

    @property
    def _pass(self) -> R | None:
        if not WATCH.is_watching:
            self._followed = None
        reader = self._begun if self._followed is None else self._followed
        if reader is not None and reader.unwatched and WATCH.is_watching:
            reader.counts = reader.unwatched = False
        return reader

    def _passes(self) -> list[R]:
        return [
            reader for reader in dict.fromkeys((self._followed, self._begun)) if reader is not None
        ]

    def reads(self, loader: Any) -> bool:
        """Return whether this loader's batches come from the given torch loader."""
        return False

    def wrong(self) -> str | None:
        """Return why samples would not be trained on exactly once, and what to write in the
        script; None if they are.
        """
        return None

    @abstractmethod
    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """Return facts that must be equal on all ranks that share the loader's samples.

        Args:
            replicas: number of replicas of the job.

        Returns:
            The facts; None if the samples are not divided among this number of replicas.
        """

    @abstractmethod
    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        """Return the position at which the next step reads; None if no pass was begun.

        Args:
            upcoming: the pass that the script is about to read, of this loader or another one;
                None if it is not about to read.
            begins: whether the script is about to begin another pass of this loader.
        """

    @abstractmethod
    def ended_epochs(self) -> int:
        """Return how many passes have ended at the position of :meth:`position`."""

    @abstractmethod
    def go_to(self, position: dict[str, Any]) -> None:
        """Continue at ``position``, even in a pass that is already being read."""

    def restart(self) -> None:
        """Start from the beginning, since a version from before the first pass was loaded."""


class Registry:
    """The loaders of this process, by kind and name."""

    def __init__(self) -> None:
        self._named = weakref.WeakValueDictionary[tuple[str, str], TrackedLoader[Any]]()
        self._waiting = dict[tuple[str, str], dict[str, Any]]()

    def add(self, loader: TrackedLoader[Any]) -> dict[str, Any] | None:
        """Register a loader.

        Returns:
            The loader's position, if a version was loaded before the loader existed; None
            otherwise.
        """
        self._named[loader.kind, loader.name] = loader
        return self._waiting.pop((loader.kind, loader.name), None)

    def require_named(self, loader: TrackedLoader[Any]) -> None:
        """Raise ConfigError if another loader has the same name."""
        if self._named.get((loader.kind, loader.name)) is not loader:
            raise ConfigError(
                f"found two loaders that are resumable under the name {loader.name!r}; expected "
                f"one name each: write {loader.call}, name='...')"
            )

    def wrong(self) -> str | None:
        """Return the first problem with one of the loaders; None if there is none."""
        return next(filter(None, (loader.wrong() for loader in self._named.values())), None)

    def orders(self, replicas: int) -> dict[str, dict[str, Any]]:
        """Return the orders in which loaders read, by loader name. They must be equal on all
        ranks."""
        found = {
            name: loader.order_facts(replicas) for (_, name), loader in sorted(self._named.items())
        }
        return {f"the loader {name!r}": facts for name, facts in found.items() if facts is not None}

    def positions(self, upcoming: PassReader | None = None, begins: Any = None) -> dict[str, Any]:
        """Return positions by kind and name.

        Args:
            upcoming: the pass that is about to be read.
            begins: the torch loader of which a pass is about to begin.
        """
        found = dict[str, Any]()
        for (kind, name), loader in sorted(self._named.items()):
            position = loader.position(upcoming, begins=begins is not None and loader.reads(begins))
            if position is not None:
                found.setdefault(kind, {})[name] = position
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the positions of all loaders, including those that the script creates later."""
        positions = {(kind, name): at for kind in KINDS for name, at in saved.get(kind, {}).items()}
        loaders = dict(self._named)
        self._waiting = {key: at for key, at in positions.items() if key not in loaders}
        for key, loader in loaders.items():
            if key in positions:
                loader.go_to(positions[key])
            else:
                loader.restart()


LOADERS = Registry()


class ResumableLoader(TrackedLoader[LoaderIterator]):
    """Wraps a loader for a script that iterates over it itself. Made by :func:`resumable`.

    The iteration may start before or after ``engine.load_checkpoint``. All other attributes are
    those of the wrapped loader; without a session the wrapper behaves like that loader.
    """

    kind, call = "resumable", "reft.resumable(loader"

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(name)
        self._loader = loader
        saved = LOADERS.add(self)
        self._restored = None if saved is None else Position(**saved)
        # Whether a version was loaded in the middle of a pass whose read position cannot be changed
        self._moved = False

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return get_inner_attribute(self, "_loader", name)

    @property
    def epoch(self) -> int:
        """Number of the current pass, counted from 0; after a restart, of the resumed pass."""
        at = self._resume_position() or self._pass
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
            restored = self._resume_position()
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
                shard.iteration += 1  # Accelerate does not increment it in a pass without batches

    def _begin(self, loader: Any) -> LoaderIterator:
        restored = self._resume_position()
        if restored is not None and not restored.evaluates:
            reader = WATCH.begin_at(loader, restored)
        else:
            if restored is not None:
                finish_pass(loader, restored)
            reader = WATCH.open(loader)
            reader.number = self._next_number() if restored is None else restored.number
        reader.follow = weakref.WeakMethod(self._follow)
        self._begun = reader
        return reader

    def _follow(self, reader: LoaderIterator) -> None:
        self._followed = reader

    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        return find_order(self._loader, replicas)

    def reads(self, loader: Any) -> bool:
        return loader in (self._loader, getattr(self._loader, "base_dataloader", None))

    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        found = self._resume_position()
        reader = (
            upcoming
            if isinstance(upcoming, LoaderIterator) and upcoming in self._passes()
            else self._pass
        )
        if found is None and reader is not None:
            found = reader.position()
            if begins or found.evaluates:
                found = replace(found, evaluates=True, number=self._next_number())
        return None if found is None else dict(vars(found))

    def ended_epochs(self) -> int:
        position = self.position()
        if position is None:
            return 0
        at = Position(**position)
        # If training continues with a new pass, the number is already that pass's.
        return at.number + (at.complete and not at.evaluates)

    def _next_number(self) -> int:
        return 0 if self._pass is None else self._pass.number + self._pass.counts

    def _resume_position(self) -> Position | None:
        """Return the restored position, at which every pass begins until training has continued
        from it."""
        if self._pass is not None and (
            self._pass.resume_phase is None or self._pass.resume_phase is not WATCH.resuming
        ):
            self._restored = None
        return self._restored

    def go_to(self, position: dict[str, Any]) -> None:
        self._restored = at = Position(**position)
        if at.evaluates:
            self._begun = self._followed = None
        for reader in self._passes():
            if reader is self._pass:
                self._moved = reader.reads_ahead
            if not reader.reads_ahead:
                reader.go_to(at)
            reader.resume_phase = WATCH.resuming


class _RetainedIterator:
    """The iterator of a pass, which keeps the resumable loader alive; :data:`LOADERS` does not.

    A script may iterate over a resumable loader that no variable refers to.
    """

    def __init__(self, owner: ResumableLoader, reader: LoaderIterator) -> None:
        self._owner = owner
        self._one = reader
        reader.handle = weakref.ref(self)

    def __iter__(self) -> _RetainedIterator:
        return self

    def __next__(self) -> Any:
        return next(self._one)

    def __len__(self) -> int:
        return len(self._one)

    def __getattr__(self, name: str) -> Any:
        return get_inner_attribute(self, "_one", name)


def resumable(loader: Any, name: str = "data") -> Any:
    """Make the position of a ``DataLoader`` part of the version, so that a restart continues at
    the exact batch.

    The loader keeps its own order. A loader of ``reft.data.loader`` also continues at another
    data-parallel degree. It is resumable already, so this function returns it unchanged.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or the result of Accelerate's ``prepare`` for
            one.
        name: a different name for each loader of a script, the same after a restart.

    Raises:
        ConfigError: ``loader`` is not a ``DataLoader``, or its class has its own ``__iter__``.
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
