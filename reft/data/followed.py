"""Loaders by name, and their positions in a version that was loaded before or after the script made them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from reft.data.passes import Read
from reft.data.watch import WATCH
from reft.errors import ConfigError

R = TypeVar("R", bound=Read)
P = TypeVar("P")


class Followed(ABC, Generic[R, P]):
    """A loader whose position is part of the version."""

    def __init__(self) -> None:
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

    def wrong(self) -> str | None:
        """Why not every sample would be trained on once, and what to write; None: it would."""
        return None

    @abstractmethod
    def order_facts(self, replicas: int) -> dict[str, Any] | None:
        """What has to be equal on all ranks, where it deals out to so many replicas; else None."""

    @abstractmethod
    def position(self) -> P | None:
        """None where nothing was begun."""

    @abstractmethod
    def go_to(self, position: P) -> None:
        """Go on behind ``position``, in a pass that is being read too."""

    def begin_anew(self) -> None:
        """A version was loaded that was taken before the first pass was begun."""


class Registry(Generic[P]):
    """The loaders of one kind in this process. ``call``: what the script writes to make one, for messages."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._named: weakref.WeakValueDictionary[str, Followed[Any, P]] = weakref.WeakValueDictionary()
        self._waiting: dict[str, P] = {}

    def add(self, name: str, loader: Followed[Any, P]) -> P | None:
        """Returns the position of a version that was loaded before the script has made its loader."""
        self._named[name] = loader
        return self._waiting.pop(name, None)

    def require_named(self, name: str, loader: Followed[Any, P]) -> None:
        """A ConfigError where another loader has the name."""
        if self._named.get(name) is not loader:
            raise ConfigError(
                f"found two loaders that are resumable under the name {name!r}; expected one name "
                f"each: write {self._call}, name='...')"
            )

    def wrong(self) -> str | None:
        """The first that is wrong with one of them."""
        return next(filter(None, (loader.wrong() for loader in self._named.values())), None)

    def orders(self, replicas: int) -> dict[str, dict[str, Any]]:
        """What they read, by name, where all ranks have to read the same."""
        found = {name: loader.order_facts(replicas) for name, loader in sorted(self._named.items())}
        return {f"the loader {name!r}": facts for name, facts in found.items() if facts is not None}

    def positions(self) -> dict[str, P]:
        found = {name: loader.position() for name, loader in sorted(self._named.items())}
        return {name: position for name, position in found.items() if position is not None}

    def restore(self, saved: dict[str, P]) -> None:
        """Bring the loaders back, those too that the script makes later."""
        loaders = dict(self._named)
        self._waiting = {name: position for name, position in saved.items() if name not in loaders}
        for name, loader in loaders.items():
            if name in saved:
                loader.go_to(saved[name])
            else:
                loader.begin_anew()
