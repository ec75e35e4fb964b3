"""How long calls inside other people's code take. Used in a rank."""

from __future__ import annotations

import time
from typing import Any


class Stopwatch:
    """Wall and CPU seconds of named calls, by wrapping attributes of objects, classes or
    modules."""

    def __init__(self) -> None:
        self._wall: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Count every later call of ``owner.attribute`` under ``name``."""
        original = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._wall[name] = self._wall.get(name, 0.0) + time.perf_counter() - wall
                self._cpu[name] = self._cpu.get(name, 0.0) + time.thread_time() - cpu

        setattr(owner, attribute, timed)

    def take(self) -> dict[str, tuple[float, float]]:
        """``(wall, cpu)`` seconds per name since the last call."""
        taken = {name: (self._wall[name], self._cpu[name]) for name in list(self._wall)}
        self._wall.clear()
        self._cpu.clear()
        return taken
