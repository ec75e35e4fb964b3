"""On which cores a rank trains and saves. Used in a rank."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cores:
    """Which cores training threads and helper threads (those that save) may use."""

    name: str
    training: tuple[int, ...]
    helpers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        shared = sorted(set(self.training) & set(self.helpers))
        return {
            "training_cores": len(self.training),
            "helper_cores": len(self.helpers),
            "shared_cores": len(shared),
        }


def situations(world: int) -> list[Cores]:
    """Without a spare core, and with exactly one for the helpers of all ranks.

    With as many cores as ranks, a spare core exists only if the ranks' training threads share the
    others: their steps take longer, the helpers have one core for themselves.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    busy = cores[: min(world, len(cores))]
    made = [Cores("no_spare_core", busy, busy)]
    if len(cores) > 1:
        training = cores[: min(world, len(cores) - 1)]
        made.append(Cores("spare_core", training, cores[len(training) : len(training) + 1]))
    return made


@dataclass
class ThreadPlacement:
    """Puts the threads of this process where a situation wants them.

    Threads that existed when this was made belong to training; later ones were started by savers.
    """

    _training: frozenset[int] = field(default_factory=lambda: frozenset(_threads()))
    _placed: set[int] = field(default_factory=set)
    _cores: Cores | None = None

    def apply(self, cores: Cores) -> None:
        """Place every thread."""
        self._cores = cores
        self._placed.clear()
        for thread in self._training:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores.training)
        self.place_new()

    def place_new(self) -> None:
        """Place the threads that savers have started since the last call."""
        assert self._cores is not None
        for thread in _threads() - self._training - self._placed:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, self._cores.helpers)
            self._placed.add(thread)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
