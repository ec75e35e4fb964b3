"""The data position: which samples the training has consumed (P8, trap 7).

Two kinds of iterators are followed without a word from the user: one that offers ``state_dict`` and
``load_state_dict`` (torchdata's stateful protocol, reft's own sampler), and the loader that DeepSpeed
builds from ``training_data``, whose position is the number of micro-batches taken from it. Everything
else belongs into the client state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


class _Counting:
    """Iterator that counts what was taken from the engine's own loader."""

    def __init__(self, inner: Iterator[Any], taken: int) -> None:
        self._inner = inner
        self.taken = taken

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        item = next(self._inner)
        self.taken += 1
        return item


def _is_stateful(iterator: Any) -> bool:
    return callable(getattr(iterator, "state_dict", None)) and callable(
        getattr(iterator, "load_state_dict", None)
    )


class DataPosition:
    """Follows the iterator that feeds an engine.

    Args:
        engine: the engine; its own loader, if it has one, is counted from now on.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stateful: Any = None
        self._pending: Any = None
        self._own: _Counting | None = None
        iterator = getattr(engine, "data_iterator", None)
        if iterator is not None and getattr(engine, "training_data", None) is not None:
            self._own = _Counting(iterator, 0)
            engine.data_iterator = self._own

    def saw(self, iterator: Any) -> None:
        """``train_batch`` was called with this iterator; a restored position is applied to it now."""
        if iterator is None or not _is_stateful(iterator):
            return
        self._stateful = iterator
        if self._pending is not None:
            iterator.load_state_dict(self._pending)
            self._pending = None

    def state(self) -> dict[str, Any]:
        """Encodable position after the step that just ended."""
        if self._stateful is not None:
            return {"iterator": self._stateful.state_dict()}
        if self._own is not None:
            return {"taken": self._own.taken}
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a captured position, now or as soon as the iterator is seen."""
        if "iterator" in state:
            self._pending = state["iterator"]
            if self._stateful is not None:
                self.saw(self._stateful)
        elif "taken" in state and self._own is not None:
            for _ in range(int(state["taken"]) - self._own.taken):
                next(self._own)
