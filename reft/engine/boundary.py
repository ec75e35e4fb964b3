"""Finds the host state with which a step begins (P2).

A version is the state with which the next step begins. Tensors are copied as of the beginning of
the training forward pass (or ``train_batch``). For host state (generators, position in the data,
schedulers, client state) that is too late: by then the script has read its batch, and a resumed
script reads that batch again. So the host state is captured before the script reads from a loader,
as a *candidate*:

- a training forward pass selects the candidate of the pass that it trains on;
- the forward pass of an evaluation discards the candidate of the pass that it reads;
- further reads of the same pass change nothing: a script may read all micro-batches of a step at
  once.

If the script itself marks where a step begins (``reft.begin_step``), the state there is final.

A script without a loader has no candidate. Its host state is captured at the forward pass, except
for the random generators: numbers drawn since the optimizer step, or since the last evaluation,
most likely made the batch, so a resumed script has to draw them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reft.state.blob import capture_rng

logger = logging.getLogger(__name__)

Encoded = Callable[[], bytes | bytearray]
"""Returns the encoded host state. Called on the worker thread; state that training may change was
encoded before."""
Capture = Callable[[dict[str, Any] | None], Encoded]
"""Captures the current host state. The argument replaces its random states; None keeps the current
ones."""


@dataclass
class _Candidate:
    """Host state before a loader was read.

    Attributes:
        read: the pass over the loader; None while it is starting.
        encoded: the state; None if capturing failed.
    """

    read: object | None
    encoded: Encoded | None


class StepBoundary:
    """Keeps the candidates of one engine between two steps. Used by the training thread.

    Args:
        capture: captures the host state of the engine.
        repeats_draws: random numbers drawn before a step begins make its batch, if the script has
            no loader.
        random_states: returns the states of all generators that are part of the host state.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        repeats_draws: bool,
        random_states: Callable[[], dict[str, Any]] = capture_rng,
    ) -> None:
        self._capture, self._random_states, self._repeats_draws = (
            capture,
            random_states,
            repeats_draws,
        )
        # A step with a due version has ended, and the next has not begun
        self._open = False
        self._is_marked = False  # The script has marked where the next step begins
        self._candidates: list[_Candidate] = []
        self._evaluated: list[object] = []  # Passes of evaluations since the step
        self._rng: dict[str, Any] | None = None

    def step_ended(self, *, is_due: bool = True) -> None:
        """The optimizer step has ended.

        Args:
            is_due: a version is taken when the next step begins. If False, no candidates are
                captured until then.
        """
        self._open, self._is_marked = is_due, False
        self._candidates.clear()
        self._evaluated.clear()
        self._rng = self._random_states() if self._repeats_draws else None

    def mark(self) -> None:
        """The script marks the beginning of the next step."""
        if self._open and not self._is_marked:
            self._candidates = [_Candidate(None, self._encoded())]
            self._is_marked = True

    def begins_pass(self) -> None:
        """A pass over a loader is about to begin. It has drawn no random numbers yet."""
        if self._open and not self._is_marked:
            self._candidates.append(_Candidate(None, self._encoded()))

    def began_pass(self, read: object) -> None:
        """The pass has begun; ``read`` identifies it."""
        if self._candidates and self._candidates[-1].read is None:
            self._candidates[-1].read = read

    def before_read(self, read: object) -> None:
        """A batch is about to be read: capture the host state, once for each pass over a loader.

        Args:
            read: the pass over the loader.
        """
        # One capture for each evaluation, not for each of its batches.
        seen = [*(candidate.read for candidate in self._candidates), *self._evaluated]
        if self._open and not self._is_marked and all(one is not read for one in seen):
            self._candidates.append(_Candidate(read, self._encoded()))

    def evaluated(self, read: object | None) -> None:
        """A forward pass without training has used a batch.

        Args:
            read: the pass that the batch came from; None if it came from no loader.
        """
        if not self._open or self._is_marked:
            return
        if read is not None:
            if all(one is not read for one in self._evaluated):
                self._evaluated.append(read)
            self._candidates = [c for c in self._candidates if c.read is not read]
        self._rng = self._random_states() if self._repeats_draws else None

    def take(self, read: object | None) -> Encoded:
        """Return the host state with which the step begins. Called once for each version.

        Args:
            read: the pass whose batch is trained on, if known.

        Raises:
            ReftError: the state cannot be captured.
        """
        candidates, rng = self._candidates, self._rng
        self.skip()
        of_read = [c for c in candidates if c.read is read] or candidates
        if of_read and of_read[-1].encoded is not None:
            return of_read[-1].encoded
        return self._capture(None if of_read else rng)

    def skip(self) -> None:
        """The step begins, and no version is due."""
        self._open, self._candidates, self._rng = False, [], None

    def _encoded(self) -> Encoded | None:
        try:
            return self._capture(None)
        except Exception as error:
            # Reading data must not fail because of this (P6). The capture is repeated when the
            # step begins, and a failure is logged then.
            logger.debug("the host state cannot be taken aside: %s", error)
            return None
