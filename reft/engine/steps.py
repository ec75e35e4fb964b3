"""Tracks the position in the data and the state of the script when a step of a DeepSpeed engine
begins and ends, and reports state that would not be restored (P12).
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from reft.checks.start import check_orders, describe_fresh_state, merge_findings
from reft.data.position import DataPosition
from reft.engine.capture import EngineState
from reft.engine.context import JobContext
from reft.engine.load import Restorer
from reft.engine.load_memory import MemoryRestorer

logger = logging.getLogger(__name__)


class SteppedSession(Protocol):
    """The part of a session's interface that :class:`StepHooks` uses."""

    @property
    def stepped(self) -> bool: ...

    @property
    def takes_versions(self) -> bool: ...

    def require_first_version(self) -> None: ...


class StepHooks:
    """Called by the wrappers around one engine's methods, on the training thread.

    Args:
        context: the job.
        session: the session, which takes the versions.
        state: captures the content of versions.
        restorer: handles the script's loads.
        memory: restores from memory; holds the random states of the restored version.
        data: the position in the data of the engine.
    """

    def __init__(  # noqa: PLR0917 -- the parts of a session
        self,
        context: JobContext,
        session: SteppedSession,
        state: EngineState,
        restorer: Restorer,
        memory: MemoryRestorer,
        data: DataPosition,
    ) -> None:
        self._context, self._session, self._state = context, session, state
        self._restorer, self._memory, self._data = restorer, memory, data
        self._trains = False  # Whether this process has begun its first step
        # Number of completed steps when this process began to train
        self._first_step = context.engine.global_steps
        self._made_first_step = False

    # -- before a step -----------------------------------------------------------------------------

    def before_batch(self, data_iter: Any) -> None:
        """Called when ``train_batch`` begins, which reads its batches itself. In the first step,
        undo the random draws that the script has made since the load."""
        self.before_step(data_iter)
        self._data.begin_batch(data_iter)
        self._memory.restore_rng()

    def after_batch(self) -> None:
        self._data.end_batch()

    def begin_by_script(self) -> None:
        """Called when the script marks the beginning of a step (``reft.begin_step``)."""
        if self._trains:
            self._data.mark()
        else:
            self._memory.restore_rng(marked=True)

    def before_forward(self, *, training: bool) -> None:
        """Called when a plain engine begins a forward pass, on a batch that the script has read."""
        if training:
            self.before_step()
        moved = self._data.forward(training=training)
        if moved is not None:
            self._context.warn(moved)

    def before_step(self, data_iter: Any = None) -> None:
        """Called when a step begins. With the first step of this process, the job's starting
        state is final.

        Args:
            data_iter: argument of ``train_batch``; None for a plain engine.

        Raises:
            ConfigError: the ranks read different data.
            NotResumedError: the job has a version in memory that the script has not resumed.
            UnrecoverableError: the job made progress, and no complete version of it is left.
        """
        if not self._trains:
            orders = self._data.orders(data_iter)
            check_orders(self._context.control, orders, self._data.why_equal)
            self._first_step = self._context.engine.global_steps
            if (left := self._data.left_behind()) is not None:
                self._context.warn(left)
        self._restorer.begin_step()
        self._state.followed.begin_step(is_first=not self._trains)
        self._trains = True
        self._state.restored_client = None
        self._data.trains()

    # -- after a step ------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Called after a step. After the first one, report findings on how the script reads its
        data."""
        for text in self._state.followed.end_step():
            self._context.warn(text)
        if self._session.stepped and (found := self._data.found_on_the_way()) is not None:
            self._context.warn(found)
        if not self._made_first_step and self._context.engine.global_steps != self._first_step:
            self._made_first_step = True
            self._after_first_step()

    def _after_first_step(self) -> None:
        self._memory.made_first_step()
        advice = self._data.advice()
        if not self._session.takes_versions:
            return
        if self._context.config.persist.keep_epochs:
            self._require_epochs()
        if not self._restorer.has_resumed:
            self._session.require_first_version()
        # If reft does not track the position in the data, a script with a client state is
        # expected to restore the position from it.
        has_client_state = self._state.client_state is not None
        if advice is not None and has_client_state and not self._data.comes_back():
            if self._context.is_rank_zero:
                logger.info("the attached client state restores the position in the data")
            advice = None
        findings = [*self._state.followed.findings(), *describe_fresh_state()]
        if advice is not None:
            findings.insert(0, advice)
        if (text := merge_findings(findings)) is not None:
            self._context.warn(text)

    def _require_epochs(self) -> None:
        """Warn if no rank knows when an epoch ends, so that no checkpoint is kept for it.
        Collective."""
        if self._context.control.any_of(self._data.epochs() is not None) == [False]:
            self._context.warn(
                "persist.keep_epochs has no effect: the script trains from no loader that reft "
                "follows, so it is not known where an epoch ends. Write loader = "
                "reft.resumable(loader), or use reft.data.loader"
            )
