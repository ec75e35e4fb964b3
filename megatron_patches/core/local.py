"""What Megatron calls its manager of local checkpoints, with ``--non-persistent-ckpt-type local``: here, of
reft's versions.

Its interface is that of ``nvidia_resiliency_ext``'s ``BaseCheckpointManager``, as far as
``megatron.training`` calls it. Megatron decides when a local checkpoint is due, and whether what is found in
memory or what is on disk is newer; a checkpoint is a version of the whole training state, in the memory of
its node, and protected against its loss.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

from megatron_patches.core.attach import MegatronProtection, Resumed
from reft.errors import ConfigError, UnrecoverableError

logger = logging.getLogger(__name__)

NONE = -1
"""How Megatron is told that there is no local checkpoint."""


class RestoredInPlaceError(Exception):
    """A version was restored into the live model and optimizer; nothing is left for Megatron's loading.

    Attributes:
        resumed: where the job goes on.
    """

    def __init__(self, resumed: Resumed) -> None:
        super().__init__(
            f"iteration {resumed.iteration} was restored in place, and load_checkpoint would load it once "
            f"more: call it as reft wraps it, under reft launch with a reft block"
        )
        self.resumed = resumed


class LocalCheckpoints:
    """The manager of one rank. All ranks call it alike."""

    def __init__(self) -> None:
        self._of: MegatronProtection | None = None
        self._found: int | None = None
        self._waited_for: dict[int, bool] = {}

    def attach(self, protection: MegatronProtection) -> None:
        """Have what is found and saved be those of this training."""
        self._of = protection

    @property
    def _protection(self) -> MegatronProtection:
        if self._of is None:
            raise ConfigError(
                "Megatron asked for a local checkpoint before its model and optimizer were under reft's "
                "care; expected setup_model_and_optimizer first: local checkpoints are versions of them"
            )
        return self._of

    @property
    def local_ckpt_dir(self) -> Path:
        """The job's memory on this node, as Megatron prints it."""
        return self._protection.session.memory.job_dir.path

    def find_latest(self) -> int:
        """The iteration of the newest version that all ranks recover, from whatever nodes are left; -1: there
        is none. Collective the first time; it changes nothing.

        Raises:
            FingerprintError: it is another job's, or this one's with other settings.
        """
        if self._found is None:
            newest = self._protection.newest()
            self._found = NONE if newest is None else newest
        return self._found

    def pass_over(self) -> None:
        """What was found turned out not to be recoverable: from here on there is none."""
        self._found = NONE

    def load(self) -> NoReturn:
        """Restore what was found into the live model, optimizer, schedule and random states. Collective.

        Raises:
            RestoredInPlaceError: always, when it is done; it carries where the job goes on.
            UnrecoverableError: there is nothing that all ranks could recover.
        """
        if self.find_latest() == NONE or (resumed := self._protection.load()) is None:
            raise UnrecoverableError(
                "Megatron loads a local checkpoint, but there is no version in memory that all ranks "
                "recover: find_latest() said -1; expected it to be asked first"
            )
        raise RestoredInPlaceError(resumed)

    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> None:
        """The iteration that was just made is to be a local checkpoint. Its version is taken as the iteration
        ends, and :meth:`settle` says what has become of it.

        Args:
            state_dict: what Megatron would save; not read, and may be None: the version holds all of it.
            iteration: the one that was just made.
            is_async: training goes on while the version is copied and committed.

        Raises:
            ConfigError: another iteration is named than the one whose state there is.
        """
        made = self._protection.iteration
        if iteration != made:
            raise ConfigError(
                f"Megatron saves a local checkpoint of iteration {iteration}, but the model and the "
                f"optimizer are those behind optimizer step {made}; expected the iteration that was just made"
            )
        self._waited_for[iteration] = not is_async

    def settle(self) -> None:
        """Behind the end of an iteration, and its version handed over: wait for those that were not to be
        saved asynchronously, and say of each that is over whether all ranks have it. Never raises (P6)."""
        if not self._waited_for:
            return
        session = self._protection.session
        if any(self._waited_for.values()) and session.worker is not None:
            session.worker.drain(session.config.commit_timeout_secs)
        stats = session.stats
        for iteration, waited in sorted(self._waited_for.items()):
            committed = stats.committed_step
            if committed is not None and committed >= iteration:
                if session.is_rank_zero and committed == iteration:
                    logger.warning(
                        "local checkpoint of iteration %d: committed in memory on all ranks", iteration
                    )
                elif session.is_rank_zero:
                    logger.warning(
                        "local checkpoint of iteration %d: a newer one, of iteration %d, is committed in "
                        "memory on all ranks",
                        *(iteration, committed),
                    )
            elif waited:
                logger.warning(
                    "local checkpoint of iteration %d: NOT saved: %s. Committed is step %s; training goes on",
                    *(iteration, stats.last_error or "it was not committed in time", committed),
                )
            else:
                continue
            del self._waited_for[iteration]
