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

from reft.data.ahead import DISPATCHED, ITERATION, is_dispatcher, is_shard
from reft.data.loading import Loader
from reft.data.orders import Facts, order_of
from reft.data.passes import Pass, Position, is_loader, iterates_itself, leave_behind, of_inner
from reft.data.registry import Registry
from reft.data.watch import WATCH
from reft.errors import ConfigError

LOADERS: Registry[Position] = Registry("reft.resumable(loader")


class ResumableLoader:
    """Made by :func:`resumable`. Attributes that it does not have are the loader's."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name
        self._begun: Pass | None = None
        """The pass that was begun last: perhaps a look, while another one is trained on."""
        self._followed: Pass | None = None
        """The pass that was trained on last."""
        self._restored: Position | None = LOADERS.take_waiting(name)
        self._moved = False
        """Whether a version was loaded while a pass is being read that cannot move."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_loader", name)

    @property
    def epoch(self) -> int:
        """Number of the running pass, counted from 0; of the one to go on in, after a resumption."""
        restored = self._to_go_on_at()
        if restored is not None:
            return restored.number
        return 0 if self._pass is None else self._pass.number

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
        one.resumable = True
        one.follow = weakref.WeakMethod(self._follow)
        self._begun = one
        return one

    def _follow(self, one: Pass) -> None:
        self._followed = one

    @property
    def _pass(self) -> Pass | None:
        """The pass that the position is of."""
        if not WATCH.is_watching:
            self._followed = None
        one = self._begun if self._followed is None else self._followed
        if one is not None and one.unwatched and WATCH.is_watching:
            one.counts = one.unwatched = False
        return one

    def wrong(self) -> None:
        """Its samples are dealt out by the script."""

    def order_facts(self, replicas: int) -> Facts | None:
        return order_of(self._loader, replicas)

    def position(self) -> Position | None:
        """None where no pass was begun."""
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
        """Go on behind ``position``, in a pass that is being read too."""
        self._restored = position
        if position.evaluates:
            self._begun = self._followed = None
        for one in dict.fromkeys((self._followed, self._begun)):
            if one is None:
                continue
            if one is self._pass:
                self._moved = one.reads_ahead
            if not one.reads_ahead:
                one.go_to(position)
            one.era = WATCH.resuming

    def begin_anew(self) -> None:
        """The pass that is being read goes on: its order is the script's, and no version has it."""


class _Kept:
    """The iterator of a pass. It keeps the resumable loader, which :data:`LOADERS` alone would not: a script
    may iterate over one that it has no name for.

    Args:
        owner: of the pass.
        one: the pass, which is not to know its owner: of a circle, none would go when the script lets go.
    """

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

    The loader's own order is kept. What :func:`reft.data.loader` makes goes on at another data-parallel
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
    if not is_loader(loader):
        raise ConfigError(
            f"found {type(loader).__module__}.{type(loader).__qualname__}; expected a torch.utils.data."
            f"DataLoader. Keep the position of other data in reft.attach(engine, client_state=...)"
        )
    if iterates_itself(loader) and not is_shard(loader):
        raise ConfigError(
            f"found {type(loader).__module__}.{type(loader).__qualname__}, which has an __iter__ of its own; "
            f"expected torch.utils.data.DataLoader's, whose order can be resumed. Keep the position of other "
            f"data in reft.attach(engine, client_state=...)"
        )
    made = ResumableLoader(loader, name)
    LOADERS.add(name, made)
    return made
