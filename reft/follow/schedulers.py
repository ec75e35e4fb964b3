"""Follows torch's learning-rate schedulers over the engine's optimizer, wherever the script
constructs them.

Schedulers that were constructed before the session are found once among all objects of the process.
For later ones, the constructors are wrapped while a session exists. Saved states are matched to
schedulers by class and in the order of construction, because the script constructs the same
schedulers at every start.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import lr_scheduler

from reft.engine.host_state import HostState
from reft.errors import UnsupportedStateError
from reft.state.codec import class_path, encode

_WATCHED = (
    lr_scheduler.LRScheduler,
    # The constructors of these classes do not call the constructor of the base class, so each is
    # wrapped.
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
    lr_scheduler.ReduceLROnPlateau,
)
_MOST_WRAPPERS = 5
_LATE_STEPS = 2


class Schedulers(HostState):
    """Follows all schedulers except the engine's own, which ``deepspeed.initialize`` received.

    Args:
        engine: DeepSpeed's engine.
        given: returns the objects that the script has given in ``state={...}``, which are captured
            elsewhere.

    Attributes:
        made_after_load: whether the script constructed a scheduler after its state was restored.
    """

    name = "schedulers"

    def __init__(self, engine: Any, given: Callable[[], list[Any]] = list) -> None:
        self._engine = engine
        self._given = given
        self._waiting: list[dict[str, Any]] = []  # States of schedulers not yet constructed
        self._steps_waited = 0
        self.made_after_load = False
        CONSTRUCTED.join(self)
        if _may_have_schedulers(engine):
            CONSTRUCTED.add_existing()

    def close(self) -> None:
        CONSTRUCTED.leave(self)

    def own(self) -> Any:
        """Return the engine's own scheduler, which is captured with the engine; None if there is
        none."""
        return vars(self._engine).get("lr_scheduler")

    def live(self) -> list[Any]:
        """Return the live schedulers that reft tracks and that drive the engine's optimizer, oldest
        first."""
        own = {id(optimizer) for optimizer in _wrapped(self._engine.optimizer)}
        found = []
        for scheduler in CONSTRUCTED.live():
            if any(id(optimizer) in own for optimizer in _wrapped(scheduler.optimizer)):
                found.append(scheduler)
        left_out = {id(part) for s in (*found, self.own()) for part in _parts(s)}
        left_out |= {id(s) for s in (self.own(), *self._given())}
        return [s for s in found if id(s) not in left_out]

    def capture(self) -> list[dict[str, Any]]:
        live = [{"class": class_path(s), "state": _encodable(s.state_dict())} for s in self.live()]
        return live + self._waiting

    def restore(self, saved: list[dict[str, Any]]) -> None:
        self._waiting, self._steps_waited = list(saved), 0
        for scheduler in self.live():
            self._restore_one(scheduler)

    def _restore_one(self, scheduler: Any) -> bool:
        path = class_path(scheduler)
        state = next((s for s in self._waiting if s["class"] == path), None)
        if state is None:
            return False
        self._waiting.remove(state)
        scheduler.load_state_dict({**scheduler.state_dict(), **copy.deepcopy(state["state"])})
        return True

    def constructed(self, scheduler: Any) -> None:
        """Restore the state of a scheduler that was just constructed, since its constructor has set
        the learning rate of step 0."""
        if self._waiting and scheduler in self.live() and self._restore_one(scheduler):
            self.made_after_load = True
            for group, rate in zip(
                scheduler.optimizer.param_groups, scheduler._last_lr, strict=False
            ):
                group["lr"] = rate

    def end_step(self) -> str | None:
        # Report a missing scheduler only after some steps, since a script may construct it after
        # the first step.
        self._steps_waited += bool(self._waiting)
        if not self._waiting or self._steps_waited != _LATE_STEPS:
            return None
        kinds = ", ".join(state["class"] for state in self._waiting)
        return (
            f"the version holds the state of learning-rate schedulers ({kinds}) that the script "
            "has not made in this start: the learning rate stays what it was. Make them at every "
            "start, before training"
        )

    def findings(self) -> Iterator[str]:
        given = {id(one) for one in self._given()}
        own = {id(optimizer) for optimizer in _wrapped(self._engine.optimizer)}
        for scheduler in CONSTRUCTED.live():
            if id(scheduler) not in given and not own & {
                id(o) for o in _wrapped(scheduler.optimizer)
            }:
                kind = type(scheduler).__name__
                yield (
                    f"a learning-rate scheduler ({kind}) steps an optimizer "
                    f"({type(scheduler.optimizer).__name__}) that "
                    "is not the engine's: after a failure both start from scratch. Write "
                    'reft.attach(engine, state={"optimizer": ..., "scheduler": ...})'
                )


def _may_have_schedulers(engine: Any) -> bool:
    """Return whether the script may have constructed a scheduler over its own optimizer before the
    session."""
    groups = getattr(engine.optimizer, "param_groups", ())
    return vars(engine).get("client_optimizer") is not None or any(
        "initial_lr" in group for group in groups
    )


def _wrapped(optimizer: Any) -> list[Any]:
    """Return an optimizer and the optimizers that it wraps."""
    found: list[Any] = []
    while optimizer is not None and len(found) < _MOST_WRAPPERS:
        found.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    return found


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield the schedulers of which a scheduler consists, recursively. Their states are part of its
    state."""
    for part in getattr(scheduler, "_schedulers", ()):
        yield part
        yield from _parts(part)


def _encodable(state: Any) -> Any:
    """Return a scheduler's state without values that cannot be encoded, such as functions.

    The script constructs such values in the same way at every start.
    """
    if isinstance(state, dict):
        entries = {key: _encodable(value) for key, value in state.items() if _is_kept(value)}
        return type(state)(entries) if type(state) is dict else dict(entries)
    if isinstance(state, list):
        return [_encodable(value) for value in state]
    return state


def _is_kept(value: Any) -> bool:
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(v, dict) for v in value)
    ):
        return True
    try:
        encode(value)
    except UnsupportedStateError:
        return False
    return True


class Constructed:
    """Records the schedulers of this process in the order of construction, while a session
    exists."""

    def __init__(self) -> None:
        self._watchers: list[Schedulers] = []
        self._found: list[weakref.ref[Any]] = []
        self._originals: dict[type, Any] = {}

    def join(self, watcher: Schedulers) -> None:
        self._watchers.append(watcher)
        if self._originals:
            return
        for kind in _WATCHED:
            if (original := vars(kind).get("__init__")) is not None:
                self._originals[kind] = original
                kind.__init__ = _noting(original, self)  # type: ignore[method-assign]

    def leave(self, watcher: Schedulers) -> None:
        """Remove a watcher; after the last one, torch's constructors are restored."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers:
            for kind, original in self._originals.items():
                kind.__init__ = original  # type: ignore[misc]
            self._originals.clear()
            self._found.clear()

    def add(self, scheduler: Any) -> None:
        if all(ref() is not scheduler for ref in self._found):
            self._found.append(weakref.ref(scheduler))

    def report(self, scheduler: Any) -> None:
        for watcher in self._watchers:
            watcher.constructed(scheduler)

    def add_existing(self) -> None:
        """Add the schedulers that were constructed before the constructors were wrapped.

        Within a generation, the garbage collector lists objects in the order of construction.
        Generation 2 holds the oldest objects, so it is read first.
        """
        base = lr_scheduler.LRScheduler
        for generation in (2, 1, 0):
            for one in gc.get_objects(generation):
                if issubclass(type(one), base) and hasattr(one, "optimizer"):
                    self.add(one)

    def live(self) -> list[Any]:
        found = [(ref, ref()) for ref in self._found]
        self._found = [ref for ref, one in found if one is not None]
        return [one for _, one in found if hasattr(one, "optimizer")]


def _noting(original: Any, constructed: Constructed) -> Any:
    @functools.wraps(original)
    def construct(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        constructed.add(scheduler)
        original(scheduler, *args, **kwargs)
        constructed.report(scheduler)

    return construct


CONSTRUCTED = Constructed()
