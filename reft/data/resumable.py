"""Loaders whose position is part of a version, by name.

The version may have been loaded before or after the script made the loader.
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
    iterates_itself,
    leave_behind,
    of_inner,
)
from reft.data.watch import WATCH
from reft.errors import ConfigError
from reft.state.codec import class_path

KINDS = ("resumable", "samples")
"""Where positions stand in a version: those of :func:`resumable`, and of ``reft.data.loader``."""

R = TypeVar("R", bound=PassReader)


class TrackedLoader(ABC, Generic[R]):
    """A loader whose position, in plain values, is part of a version."""

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
        """Why not every sample would be trained on exactly once, and what to write; None if it
        would."""
        return None

    @abstractmethod
    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """Facts that must be equal on all ranks, if it is shared by this number of replicas; else
        None."""

    @abstractmethod
    def position(
        self, upcoming: PassReader | None = None, *, begins: bool = False
    ) -> dict[str, Any] | None:
        """Where the next step reads; None if no pass was begun.

        Args:
            upcoming: the pass that the script is about to read, of this loader or another one.
            begins: whether the script is about to begin another pass of this loader.
        """

    @abstractmethod
    def go_to(self, position: dict[str, Any]) -> None:
        """Continue after ``position``, also in a pass that is being read."""

    def begin_anew(self) -> None:
        """A version was loaded that was taken before the first pass began."""


class Registry:
    """The loaders of this process, by kind and name."""

    def __init__(self) -> None:
        self._named = weakref.WeakValueDictionary[tuple[str, str], TrackedLoader[Any]]()
        self._waiting = dict[tuple[str, str], dict[str, Any]]()

    def add(self, loader: TrackedLoader[Any]) -> dict[str, Any] | None:
        """Returns the position of a version that was loaded before the script made this loader."""
        self._named[loader.kind, loader.name] = loader
        return self._waiting.pop((loader.kind, loader.name), None)

    def require_named(self, loader: TrackedLoader[Any]) -> None:
        """Raises ConfigError: another loader has the name."""
        if self._named.get((loader.kind, loader.name)) is not loader:
            raise ConfigError(
                f"found two loaders that are resumable under the name {loader.name!r}; expected "
                f"one name each: write {loader.call}, name='...')"
            )

    def wrong(self) -> str | None:
        """The first problem with one of the loaders; None if there is none."""
        return next(filter(None, (loader.wrong() for loader in self._named.values())), None)

    def orders(self, replicas: int) -> dict[str, dict[str, Any]]:
        """What the loaders read, by name, if all ranks must read the same."""
        found = {
            name: loader.order_facts(replicas) for (_, name), loader in sorted(self._named.items())
        }
        return {f"the loader {name!r}": facts for name, facts in found.items() if facts is not None}

    def positions(self, upcoming: PassReader | None = None, begins: Any = None) -> dict[str, Any]:
        """Positions by kind and name.

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
        """Restore the positions of all loaders, also of those that the script makes later."""
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
    ``engine.load_checkpoint``. Other attributes are the loader's; without a session it behaves as
    the loader."""

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
        """Number of the present pass, counted from 0; after a resumption, of the pass to
        continue."""
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
    """The iterator of a pass. It keeps the resumable loader alive, which :data:`LOADERS` does not:
    a script may iterate over one that it has no variable for."""

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

    The loader's own order is kept. What ``reft.data.loader`` makes continues at another
    data-parallel degree, too, and is resumable already: it is returned unchanged.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or what Accelerate's ``prepare`` made of one.
        name: a different one for each loader of a script; the same after a restart.

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
