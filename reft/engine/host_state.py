"""State of the training script that a version holds in addition to the engine's state.

A *follower* captures and restores one kind of such state: learning-rate schedulers, flags of the
engine, objects given to ``reft.attach(engine, state={...})``. Features register followers; a
session has one registry of them.

A version is the state with which a step begins. So this state is restored twice: by the load, so
that the script can read it, and again when the first step begins. The second time undoes changes
that the script made in between, for example by drawing random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from reft import integrations
from reft.engine.context import JobContext
from reft.errors import ConfigError, ReftError
from reft.state import objects
from reft.state.codec import class_path, encode

logger = logging.getLogger(__name__)


DRAWN = "drawn"
"""Key of the generator states at the end of the previous step, in versions whose step began
without a loader. Numbers drawn between that end and the beginning of the version's step most
likely made the batch. So a load restores these states, and a resumed script draws the same
numbers again. When the first step begins, the generators get their states as of the version's
step, even if the resumed script has drawn other numbers in between."""


class HostState(Protocol):
    """Captures and restores one kind of state.

    Attributes:
        name: key of the state in a version.
    """

    name: str

    @property
    def is_reapplied(self) -> bool:
        """Whether the state is restored again when the first step begins."""
        return True

    def capture(self) -> Any:
        """Return the current state in encodable values. The values may alias live objects, since
        they are encoded before training continues."""

    def restore(self, saved: Any) -> None:
        """Restore in place the state that :meth:`capture` returned. Objects that do not exist
        yet are restored when they are created."""

    def findings(self) -> Iterable[str]:
        """Describe state of this kind that a restart would not restore, each with the line of
        code to write. Called once, after the first step."""
        return ()

    def end_step(self) -> str | None:
        """Called after every step. Return a warning, or None."""
        return None

    def close(self) -> None:
        """Remove all hooks that this follower has set in other classes and objects."""
        return


class GivenState(HostState):
    """Follower of one object that the script has passed as ``state={name: object}``."""

    def __init__(self, name: str, given: Any) -> None:
        if not objects.is_known(given):
            raise ConfigError(
                f"state[{name!r}] is of class {class_path(given)}; expected one of: "
                f"{objects.KINDS}. Give the object whose state changes, or keep plain values in "
                "client_state=lambda: {...}"
            )
        self.name = given_name(name)
        self.given = given
        try:
            encode(self.capture())
        except ReftError as error:
            raise ConfigError(
                f"state[{name!r}] ({class_path(given)}) cannot be stored: {error}. Give an object "
                "whose state_dict holds such values alone"
            ) from error

    @property
    def is_reapplied(self) -> bool:
        # Restore only generators a second time: a loader has begun its pass by then, and copying
        # a large model again would be slow.
        return objects.is_generator(self.given)

    def capture(self) -> Any:
        return objects.capture(self.given)

    def restore(self, saved: Any) -> None:
        try:
            objects.restore(self.given, saved)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.name} of the version does not fit the object that the script gives "
                f"({class_path(self.given)}): {error}. Give the object that was given when the "
                "version was taken"
            ) from error


def given_name(name: str) -> str:
    """Return the key of an object from ``state={...}``, in versions and in ``accept_changes``."""
    return f"state.{name}"


class HostStates:
    """The followers of one session, by name.

    Args:
        followers: initial followers.
        accepted: names of objects from ``state={...}`` that may be missing in a version or in
            the script (``accept_changes`` of the ``reft`` block).
    """

    def __init__(self, followers: Iterable[HostState] = (), accepted: Collection[str] = ()) -> None:
        self._followers = {follower.name: follower for follower in followers}
        self._accepted = frozenset(accepted)
        self._saved: dict[str, Any] | None = None
        """Host state of the last restore. Captures return it unchanged until training continues;
        then None."""
        self._is_due = False
        """True from a load until its state has been restored the second time, at the first step."""

    def __contains__(self, name: str) -> bool:
        return name in self._followers

    def given(self) -> list[Any]:
        """Return the objects that the training script passed to reft as ``state={...}``."""
        return [f.given for f in self._followers.values() if isinstance(f, GivenState)]

    def give(self, state: Mapping[str, Any]) -> None:
        """Follow the objects that the training script passed to reft as ``state={...}``.

        Raises:
            ConfigError: an object has an unsupported type, or the loaded version does not hold it.
        """
        for name, given in state.items():
            self.add(GivenState(name, given))

    def add(self, follower: HostState) -> None:
        """Add a follower. If a version was loaded before, restore the follower's state from it
        at once."""
        self._followers[follower.name] = follower
        if self._saved is not None:
            self._restore(follower, self._saved)

    def capture(self) -> dict[str, Any]:
        saved = self._saved or {}
        captured = {n: f.capture() for n, f in self._followers.items() if n not in saved}
        return captured | saved

    def recapture(self) -> None:
        """Capture again what the script has changed on purpose since a load, so that versions hold
        the changes. Random generators keep the state of the load until training continues."""
        if self._saved is not None:
            generators = self.generators()
            self._saved |= {
                n: f.capture() for n, f in self._followers.items() if n not in generators
            }

    def generators(self) -> dict[str, Any]:
        """Return the states of the random generators in the script's ``state={...}``, by name."""
        given = (f for f in self._followers.values() if isinstance(f, GivenState))
        return {f.name: f.capture() for f in given if objects.is_generator(f.given)}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the host state of a version.

        Args:
            saved: the host state by follower; None if the version is from a release without
                followers.

        Raises:
            ConfigError: the version lacks an object that the script passed as ``state={...}``.
        """
        if saved is None:
            given = [name for name in self._followers if name.startswith(given_name(""))]
            if given:
                logger.warning(
                    "the version is of an older reft and does not hold %s", ", ".join(given)
                )
            self._saved = None
            return
        self._saved, self._is_due = dict(saved), True
        for follower in self._followers.values():
            self._restore(follower, self._saved)

    def _restore(self, follower: HostState, saved: Mapping[str, Any]) -> None:
        name = follower.name
        if name in saved:
            follower.restore(saved.get(DRAWN, {}).get(name, saved[name]))
        elif name.startswith(given_name("")) and not self._accepts(name):
            held = [n for n in saved if n.startswith(given_name(""))]
            raise ConfigError(
                f"the version that was loaded does not hold {name}; it holds "
                f"{', '.join(held) or 'no such object'}. Give reft.attach the objects that were "
                f"given when it was taken, or, to continue with {name} as the script makes it, "
                f'write "accept_changes": ["{name}"] into the reft block'
            )

    def reapply(self) -> None:
        """Restore the state a second time, when the first step after a load begins and before it
        draws random numbers. Later calls do nothing."""
        if self._is_due and self._saved is not None:
            self._is_due = False
            for name, follower in self._followers.items():
                if follower.is_reapplied and name in self._saved:
                    follower.restore(self._saved[name])

    def begin_step(self, *, is_first: bool) -> None:
        """Restore the state again in the process's first step, and check that nothing is missing.

        Args:
            is_first: True for the first step of this process. Only then is state restored again: a
                running job that loads a checkpoint may change the restored state on purpose.

        Raises:
            ConfigError: the version holds an object that the script has not passed as
                ``state={...}``.
        """
        if self._saved is None:
            return
        missing = sorted(
            n for n in self._saved if n not in self._followers and n.startswith(given_name(""))
        )
        if missing := [name for name in missing if not self._accepts(name)]:
            names = ", ".join(f'"{name.removeprefix(given_name(""))}": ...' for name in missing)
            accepted = ", ".join(f'"{name}"' for name in missing)
            raise ConfigError(
                f"the version that was loaded holds {', '.join(missing)}, which the script has not "
                f"given. Write reft.attach(engine, state={{{names}}}) before training, or, to "
                f'leave it out, "accept_changes": [{accepted}] into the reft block'
            )
        if is_first:
            self.reapply()
        self._saved = None

    def _accepts(self, name: str) -> bool:
        return name in self._accepted or "state" in self._accepted

    def findings(self) -> list[str]:
        """Describe state of all kinds that a restart would not restore, each with the line of
        code to write."""
        return [text for follower in self._followers.values() for text in follower.findings()]

    def end_step(self) -> list[str]:
        """Called after every step. Return the warnings of all followers."""
        return [
            text
            for follower in self._followers.values()
            if (text := follower.end_step()) is not None
        ]

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()


def host_states(context: JobContext) -> HostStates:
    """Create the registry of a session with the followers of all features."""
    states = HostStates(accepted=context.config.accept_changes)
    for _, function in integrations.entries("FOLLOWERS"):
        for follower in integrations.load(function)(context, states.given):
            states.add(follower)
    return states
