"""Which host state a step begins with (P2).

A version is the state with which the next step begins. For tensors that is the moment at which the
training forward pass (or ``train_batch``) begins. For host state (generators, position in the data,
schedulers, client state) that is too late: the script has read its batch by then, and a resumed
script reads it once more. So the host state is taken aside before the script reads from a loader.
That is only a candidate:

- a training forward pass makes the candidate of the pass that it trains on final;
- an evaluation's forward pass discards the candidate of the pass that it reads;
- further reads of the same pass change nothing: a script may read all micro-batches of a step at
  once.

Where the script itself says that a step begins (``reft.begin_step``), the state there is final.

A script that reads from no loader has no candidate. Its host state is the one at the forward pass,
but for the random generators: what was drawn since the optimizer step, or since the last
evaluation, most likely made the batch, and is drawn again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reft.data.passes import PassReader
from reft.state.blob import capture_rng

logger = logging.getLogger(__name__)

Encoded = Callable[[], bytes | bytearray]
"""Returns the encoded host state. Whatever may change is encoded before; called on the worker
thread."""
Capture = Callable[[dict[str, Any] | None], Encoded]
"""Captures the host state as it is now, with the given random states (as ``random_states`` of
:class:`StepBoundary` returned them), or with the present ones if none are given."""


@dataclass
class _Candidate:
    """Host state before a loader was asked for a batch. ``read``: the pass; None while it is being
    begun."""

    read: PassReader | None
    encoded: Encoded | None  # None: it could not be captured


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
        # whether a step was made whose version is due, and the next one has not begun
        self._open = False
        self._is_marked = False  # whether the script has said where the next step begins
        self._candidates: list[_Candidate] = []
        self._evaluated: list[PassReader] = []  # passes whose batches were evaluated since the step
        self._rng: dict[str, Any] | None = None

    def step_ended(self, *, is_due: bool = True) -> None:
        """The optimizer step was made. ``is_due``: whether its version is taken where the next one
        begins; if not, nothing is captured in between."""
        self._open, self._is_marked = is_due, False
        self._candidates.clear()
        self._evaluated.clear()
        self._rng = self._random_states() if self._repeats_draws else None

    def mark(self) -> None:
        """The script says that the next step begins here."""
        if self._open and not self._is_marked:
            self._candidates = [_Candidate(None, self._encoded())]
            self._is_marked = True

    def begins_pass(self) -> None:
        """A pass is about to begin, before it draws anything."""
        if self._open and not self._is_marked:
            self._candidates.append(_Candidate(None, self._encoded()))

    def began_pass(self, read: PassReader) -> None:
        """``read`` is the pass that was about to begin."""
        if self._candidates and self._candidates[-1].read is None:
            self._candidates[-1].read = read

    def before_read(self, read: PassReader) -> None:
        """A batch of ``read`` is about to be read."""
        # One capture for each evaluation, not for each of its batches.
        seen = [*(candidate.read for candidate in self._candidates), *self._evaluated]
        if self._open and not self._is_marked and all(one is not read for one in seen):
            self._candidates.append(_Candidate(read, self._encoded()))

    def evaluated(self, read: PassReader | None) -> None:
        """A forward pass that does not train has used a batch, of ``read`` if it came from a
        loader."""
        if not self._open or self._is_marked:
            return
        if read is not None:
            if all(one is not read for one in self._evaluated):
                self._evaluated.append(read)
            self._candidates = [c for c in self._candidates if c.read is not read]
        self._rng = self._random_states() if self._repeats_draws else None

    def take(self, read: PassReader | None) -> Encoded:
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
            # Reading data must not fail for it (P6). It is tried again, and said, where the step
            # begins.
            logger.debug("the host state cannot be taken aside: %s", error)
            return None
