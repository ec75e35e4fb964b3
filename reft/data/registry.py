"""Loaders by name, and their positions in a version that was loaded before or after the script made them."""

from __future__ import annotations

import weakref
from typing import Generic, Protocol, TypeVar

from reft.data.orders import Facts, Orders
from reft.errors import ConfigError

P = TypeVar("P")


class Followed(Protocol[P]):
    """A loader whose position is part of the version."""

    def wrong(self) -> str | None:
        """Why not every sample would be trained on once, and what to write; None: it would."""

    def order_facts(self, replicas: int) -> Facts | None:
        """What has to be equal on all ranks, where it deals out to so many replicas; else None."""

    def position(self) -> P | None:
        """None where nothing was begun."""

    def go_to(self, position: P) -> None:
        """Go on behind ``position``, in a pass that is being read too."""

    def begin_anew(self) -> None:
        """A version was loaded that was taken before the first pass was begun."""


class Registry(Generic[P]):
    """The loaders of one kind in this process.

    Args:
        call: what the script writes to make one, for messages.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._named: weakref.WeakValueDictionary[str, Followed[P]] = weakref.WeakValueDictionary()
        self._waiting: dict[str, P] = {}

    def add(self, name: str, loader: Followed[P]) -> None:
        self._named[name] = loader

    def take_waiting(self, name: str) -> P | None:
        """The position of a version that was loaded before the script has made its loader."""
        return self._waiting.pop(name, None)

    def require_named(self, name: str, loader: Followed[P]) -> None:
        """
        Raises:
            ConfigError: another loader has the name.
        """
        if self._named.get(name) is not loader:
            raise ConfigError(
                f"found two loaders that are resumable under the name {name!r}; expected one name "
                f"each: write {self._call}, name='...')"
            )

    def wrong(self) -> str | None:
        """The first that is wrong with one of them."""
        return next(filter(None, (loader.wrong() for loader in self._named.values())), None)

    def orders(self, replicas: int) -> Orders:
        """What they read, by name, where all ranks have to read the same."""
        found = {name: loader.order_facts(replicas) for name, loader in sorted(self._named.items())}
        return {f"the loader {name!r}": facts for name, facts in found.items() if facts is not None}

    def positions(self) -> dict[str, P]:
        """Where the loaders are that were begun, by name."""
        found = {name: loader.position() for name, loader in sorted(self._named.items())}
        return {name: position for name, position in found.items() if position is not None}

    def restore(self, saved: dict[str, P]) -> None:
        """Bring the loaders back, those too that the script makes later."""
        self._waiting.clear()
        for name, loader in list(self._named.items()):
            if name not in saved:
                loader.begin_anew()
        for name, position in saved.items():
            if name in self._named:
                self._named[name].go_to(position)
            else:
                self._waiting[name] = position
