"""Which host state a step begins with (P2).

A version is the state with which the next step begins. For tensors that is the moment at which the
training forward pass (or ``train_batch``) begins. For host state (generators, position in the data,
schedulers, client state) that is too late: by then the script has read its batch, and a resumed
script reads that batch again. So the host state is captured before the script reads from a loader,
as a *candidate*:

- a training forward pass selects the candidate of the pass that it trains on;
- the forward pass of an evaluation discards the candidate of the pass that it reads;
- further reads of the same pass change nothing: a script may read all micro-batches of a step at
  once.

If the script itself marks where a step begins (``reft.begin_step``), the state there is final.

A script that reads from no loader has no candidate. Its host state is the one at the forward pass,
except for the random generators: what was drawn since the optimizer step, or since the last
evaluation, most likely made the batch, and is drawn again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reft.state.blob import capture_rng

logger = logging.getLogger(__name__)

Encoded = Callable[[], bytes | bytearray]
"""Returns the encoded host state. Called on the worker thread; what training may change has been
encoded before."""
Capture = Callable[[dict[str, Any] | None], Encoded]
"""Captures the present host state. The argument replaces its random states; None keeps the present
ones."""


@dataclass
class _Candidate:
    """Host state before a loader was read.

    Attributes:
        read: the pass; None while it is being begun.
        encoded: the state; None if it could not be captured.
    """

    read: object | None
    encoded: Encoded | None


class StepBoundary:
    """Keeps the candidates of one engine between two steps. Used by the training thread.

    Args:
        capture: captures the host state of the engine.
        repeats_draws: whether what the script draws without a loader, before a step begins, makes
            its batch.
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
        # a step was made whose version is due, and the next has not begun
        self._open = False
        self._is_marked = False  # the script has marked where the next step begins
        self._candidates: list[_Candidate] = []
        self._evaluated: list[object] = []  # passes of evaluations since the step
        self._rng: dict[str, Any] | None = None

    def step_ended(self, *, is_due: bool = True) -> None:
        """The optimizer step was made.

        Args:
            is_due: whether a version is taken where the next step begins. If not, nothing is
                captured in between.
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
        """A pass is about to begin. It has drawn no random numbers yet."""
        if self._open and not self._is_marked:
            self._candidates.append(_Candidate(None, self._encoded()))

    def began_pass(self, read: object) -> None:
        """``read`` is the pass that was about to begin."""
        if self._candidates and self._candidates[-1].read is None:
            self._candidates[-1].read = read

    def before_read(self, read: object) -> None:
        """A batch of ``read`` is about to be read."""
        # One capture for each evaluation, not for each of its batches.
        seen = [*(candidate.read for candidate in self._candidates), *self._evaluated]
        if self._open and not self._is_marked and all(one is not read for one in seen):
            self._candidates.append(_Candidate(read, self._encoded()))

    def evaluated(self, read: object | None) -> None:
        """A forward pass without training has used a batch.

        Args:
            read: the pass that the batch is from; None if it is from no loader.
        """
        if not self._open or self._is_marked:
            return
        if read is not None:
            if all(one is not read for one in self._evaluated):
                self._evaluated.append(read)
            self._candidates = [c for c in self._candidates if c.read is not read]
        self._rng = self._random_states() if self._repeats_draws else None

    def take(self, read: object | None) -> Encoded:
        """The host state with which the step begins. Called once for each version.

        Args:
            read: the pass whose batch is trained on, if that is known.

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
            # Reading data must not fail because of this (P6). The capture is repeated where the
            # step begins, and a failure is logged there.
            logger.debug("the host state cannot be taken aside: %s", error)
            return None
