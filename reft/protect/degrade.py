"""What is given up when host memory runs short, in which order, and when it comes back. Pure.

Every rank of a job builds the same ladder from the wanted scheme, so that to agree on a rung is to agree
on one number. A rung down always costs less memory, whatever a stage's sections weigh: first versions are
given up, then copies that a cheaper code replaces, then tolerance. Below the last rung nothing is left to
give up: a version that finds no memory is skipped and counted, and training goes on (P6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reft.backoff import Backoff
from reft.protect.codes import Scheme

LEAST_ARENAS = 2
"""The committed version, and the one that is being written (P3)."""

CALM_SECS = 10.0
_MOST_CALMS = 64
_ROOM_AFTER_RISE = 1.5
"""A rung up must leave so many margins free, so that it is not given up at once."""


@dataclass(frozen=True)
class Rung:
    """One way to keep versions.

    Attributes:
        scheme: redundancy.
        arenas: versions held per rank.
    """

    scheme: Scheme
    arenas: int

    def __str__(self) -> str:
        return f"{self.scheme} with {self.arenas} versions"


def ladder(scheme: Scheme, arenas: int, members: int) -> tuple[Rung, ...]:
    """From what is wanted down to the least.

    Args:
        scheme: wanted redundancy.
        arenas: wanted versions per rank.
        members: data-parallel members of a group.
    """
    rungs = [Rung(scheme, count) for count in range(arenas, LEAST_ARENAS, -1)]
    least = min(arenas, LEAST_ARENAS)
    return (*rungs, *(Rung(s, least) for s in (scheme, *_cheaper(scheme, members))))


def _cheaper(scheme: Scheme, members: int) -> Iterator[Scheme]:
    """Schemes that keep less of the replicated section and no more copies of owned state, each less than the
    one before: those that survive most first, of equal ones the smallest step."""
    losses = scheme.copies + scheme.parities
    while True:
        known = [Scheme(a, t - a) for t in range(losses + 1) for a in range(t + 1)]
        fitting = (s for s in known if s.why_no_room(members) is None)
        less = [s for s in fitting if s.share(members) < scheme.share(members)]
        if not less:
            return
        scheme = max(less, key=lambda s: (s.copies + s.parities, s.share(members), s.copies))
        losses = scheme.copies + scheme.parities
        yield scheme


class MemoryWatch:
    """Which rung one rank wishes for, from how much memory its node has left.

    Down at once when less than the margin is free, a rung at a time. Up when the next rung would leave half
    as much again as the margin, and has for a while; that while doubles whenever what came back had to be
    given up again.

    Args:
        margin_bytes: memory of the node that versions must leave free.
        calm_secs: how long there must have been room before something comes back.
    """

    def __init__(self, margin_bytes: int, calm_secs: float = CALM_SECS) -> None:
        self.margin_bytes = margin_bytes
        self._calm = Backoff(calm_secs, _MOST_CALMS * calm_secs)
        self._calm_since: float | None = None
        self._rose_at: float | None = None

    def wish(self, rung: int, rungs: int, free_bytes: int, growth: Callable[[], int], now: float) -> int:
        """The rung to be on.

        Args:
            rung: the one in force; 0 is what is wanted.
            rungs: of the ladder.
            free_bytes: memory of the node that nobody has taken.
            growth: bytes that the node would take for the next rung up.
            now: seconds of a monotonic clock.
        """
        if free_bytes < self.margin_bytes:
            self._calm_since = None
            return min(rung + 1, rungs - 1)
        if rung == 0 or free_bytes - growth() < _ROOM_AFTER_RISE * self.margin_bytes:
            self._calm_since = None
            return rung
        if self._calm_since is None:
            self._calm_since = now
        return rung - 1 if now - self._calm_since >= self._calm.pause else rung

    def moved(self, before: int, after: int, now: float) -> None:
        """All ranks are on another rung."""
        self._calm_since = None
        if after < before:
            self._rose_at = now
        elif self._rose_at is not None:
            flapped = now - self._rose_at < 2 * self._calm.pause
            if flapped:
                self._calm.failed()
            else:
                self._calm.reset()
            self._rose_at = None
