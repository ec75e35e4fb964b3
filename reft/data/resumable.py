"""A ``DataLoader`` that goes on where the version was taken, in a script that iterates over it itself.

    loader = reft.resumable(loader)             # before or after engine.load_checkpoint
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

Without reft attached it is the loader.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from reft.data.loading import Loader
from reft.data.passes import (
    DISPATCHED,
    ITERATION,
    Pass,
    Position,
    is_dispatcher,
    is_shard,
    iterates_itself,
    kind_of,
    leave_behind,
    of_inner,
    order_of,
)
from reft.data.watch import WATCH, Followed, Registry
from reft.errors import ConfigError

LOADERS: Registry[Position] = Registry("reft.resumable(loader")


class ResumableLoader(Followed[Pass, Position]):
    """Made by ``resumable``. Attributes that it does not have are the loader's."""

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__()
        self._loader = loader
        self._name = name
        self._restored = LOADERS.add(name, self)
        self._moved = False  # whether a version was loaded while a pass is being read that cannot move

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_loader", name)

    @property
    def epoch(self) -> int:
        """Number of the running pass, counted from 0; of the one to go on in, after a resumption."""
        at = self._to_go_on_at() or self._pass
        return 0 if at is None else at.number

    def __iter__(self) -> Iterator[Any]:
        LOADERS.require_named(self._name, self)
        return self._of_shard() if is_shard(self._loader) else _Kept(self, self._begin(self._loader))

    def _of_shard(self) -> Iterator[Any]:
        shard, again = self._loader, True
        while again:
            again = self._moved = False
            restored = self._to_go_on_at()
            if restored is not None:
                shard.iteration = restored.start[ITERATION] + (restored.evaluates and restored.complete)
            taken = 0
            for batch in WATCH.hand_out(shard, self._begin):
                taken += 1
                yield batch
                if again := self._moved:
                    break
            if restored is not None and restored.complete and not taken:
                shard.iteration += 1  # which it leaves where it was after a pass without batches

    def _begin(self, loader: Any) -> Pass:
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

    def _follow(self, one: Pass) -> None:
        self._followed = one

    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        return order_of(self._loader, replicas)

    def position(self) -> Position | None:
        restored = self._to_go_on_at()
        if restored is not None or self._pass is None:
            return restored
        found = self._pass.position()
        return replace(found, number=self._next_number()) if found.evaluates else found

    def _next_number(self) -> int:
        return 0 if self._pass is None else self._pass.number + self._pass.counts

    def _to_go_on_at(self) -> Position | None:
        """The restored position, until a step is trained from it: passes begun before begin there."""
        if self._pass is not None and (self._pass.era is None or self._pass.era is not WATCH.resuming):
            self._restored = None
        return self._restored

    def go_to(self, position: Position) -> None:
        self._restored = position
        if position.evaluates:
            self._begun = self._followed = None
        for one in self._passes():
            if one is self._pass:
                self._moved = one.reads_ahead
            if not one.reads_ahead:
                one.go_to(position)
            one.era = WATCH.resuming


class _Kept:
    """The iterator of a pass. It keeps the resumable loader, which :data:`LOADERS` alone would not: a script
    may iterate over one that it has no name for."""

    def __init__(self, owner: ResumableLoader, one: Pass) -> None:
        self._owner = owner
        self._one = one
        one.handle = weakref.ref(self)

    def __iter__(self) -> _Kept:
        return self

    def __next__(self) -> Any:
        return next(self._one)

    def __len__(self) -> int:
        return len(self._one)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_one", name)


def resumable(loader: Any, name: str = "data") -> Any:
    """Have the position of a ``DataLoader`` restored with the training state, to the batch and the bit.

    The loader's own order is kept. What ``reft.data.loader`` makes goes on at another data-parallel
    degree too, and is resumable already: it is returned as it is.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or what Accelerate's ``prepare`` made of one.
        name: where a script has several, one for each; the same after a restart.

    Raises:
        ConfigError: it is no ``DataLoader``, or of a subclass with an ``__iter__`` of its own.
    """
    if isinstance(loader, Loader):
        return loader
    if is_dispatcher(loader):
        raise ConfigError(f"found {DISPATCHED}")
    if not isinstance(loader, DataLoader) or (iterates_itself(loader) and not is_shard(loader)):
        own = ", which has an __iter__ of its own" if isinstance(loader, DataLoader) else ""
        raise ConfigError(
            f"found {kind_of(loader)}{own}; expected a torch.utils.data.DataLoader, whose order can be "
            f"resumed. Keep the position of other data in reft.attach(engine, client_state=...)"
        )
    return ResumableLoader(loader, name)
