"""Captures the host state with which a step begins (P2).

A version is the state with which the next step begins. Tensors are copied as of the beginning of
the training forward pass (or ``train_batch``). For host state (random generators, position in
the data, schedulers, client state) this is too late: the script has read the step's batch by
then, and a resumed script has to read the same batch again. So the host state is captured before
the script reads from a loader, and kept as a *candidate*:

- a training forward pass selects the candidate of the pass over the loader that its batch came
  from;
- the forward pass of an evaluation discards the candidate of the pass over the loader that its
  batch came from;
- further reads in the same pass over a loader add no candidate: a script may read all
  micro-batches of a step at once.

If the script itself marks where a step begins (``reft.begin_step``), the host state at that call
is used.

A script without a loader has no candidate. Its host state is captured at the forward pass,
except for the random generators: numbers drawn since the optimizer step, or since the last
evaluation, most likely made the batch, so the version keeps the generators' states before these
draws and a resumed script draws them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reft.state.blob import capture_rng

logger = logging.getLogger(__name__)

Encoded = Callable[[], bytes | bytearray]
"""Function that returns the encoded host state. It is called on the worker thread; the parts
that training may change were encoded before."""
Capture = Callable[[dict[str, Any] | None], Encoded]
"""Captures the current host state. The argument replaces the random states in it; None keeps the
current ones."""


@dataclass
class _Candidate:
    """Host state as it was before a pass over a loader was read from.

    Attributes:
        read: the pass over the loader; None while the pass is starting.
        encoded: the encoded host state; None if capturing it failed.
    """

    read: object | None
    encoded: Encoded | None


class StepBoundary:
    """Keeps the candidates of one engine between two steps. Used by the training thread.

    Args:
        capture: captures the host state of the engine.
        repeats_draws: True if a script without a loader makes its batch from random numbers that
            it draws before the step begins.
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
        # True between two steps if a version is due when the next one begins
        self._open = False
        self._is_marked = False  # Whether the script has marked where the next step begins
        self._candidates: list[_Candidate] = []
        # Passes over loaders that evaluations have read since the last step
        self._evaluated: list[object] = []
        self._rng: dict[str, Any] | None = None

    def step_ended(self, *, is_due: bool = True) -> None:
        """Begin to collect candidates, since the optimizer step has ended.

        Args:
            is_due: True if a version is taken when the next step begins. If False, no candidates
                are captured until then.
        """
        self._open, self._is_marked = is_due, False
        self._candidates.clear()
        self._evaluated.clear()
        self._rng = self._random_states() if self._repeats_draws else None

    def mark(self) -> None:
        """Capture the final host state, since the script marks the beginning of the next step."""
        if self._open and not self._is_marked:
            self._candidates = [_Candidate(None, self._encoded())]
            self._is_marked = True

    def begins_pass(self) -> None:
        """Capture a candidate before a pass over a loader begins and draws its first random
        numbers."""
        if self._open and not self._is_marked:
            self._candidates.append(_Candidate(None, self._encoded()))

    def began_pass(self, read: object) -> None:
        """Store ``read``, which identifies the pass that has begun, in the pass's candidate."""
        if self._candidates and self._candidates[-1].read is None:
            self._candidates[-1].read = read

    def before_read(self, read: object) -> None:
        """Capture a candidate before a batch is read, once for each pass over a loader.

        Args:
            read: the pass over the loader that the batch is read in.
        """
        # An evaluation costs one capture, not one for each of its batches.
        seen = [*(candidate.read for candidate in self._candidates), *self._evaluated]
        if self._open and not self._is_marked and all(one is not read for one in seen):
            self._candidates.append(_Candidate(read, self._encoded()))

    def evaluated(self, read: object | None) -> None:
        """Discard the candidate whose batch was used by a forward pass without training.

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
        """Return the host state for the version of the step that begins. Called once for each
        version.

        Args:
            read: the pass over the loader whose batch is trained on; None if unknown.

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
        """Discard all candidates, since the step begins and no version is due."""
        self._open, self._candidates, self._rng = False, [], None

    def _encoded(self) -> Encoded | None:
        try:
            return self._capture(None)
        except Exception as error:
            # Reading data must not fail because of this (P6). The capture is repeated when the
            # step begins, and a failure is logged then.
            logger.debug("the host state cannot be taken aside: %s", error)
            return None
