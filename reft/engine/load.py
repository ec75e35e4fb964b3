"""Implements ``load_checkpoint``: restores the newest state from the job's memory or from
checkpoints on storage.

Before the first step, the recovered version is complete and protected again on every node. Until
then the arenas that it is read from are not overwritten (P3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from reft.checks.start import conditional_loads
from reft.engine.context import JobContext
from reft.engine.load_call import LoadCall, describe_restore, describe_resume_lines
from reft.engine.load_disk import CheckpointLoader, LoadedSession
from reft.engine.load_memory import MemoryRestorer
from reft.errors import LayoutError, PersistError, UnrecoverableError
from reft.grid import VersionId
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.recover import Recovery, RecoveryOutcome
from reft.storage.load import DamagedError, DiskCheckpoint, damaged, nothing_sound

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """The state from which the job was resumed in this process.

    Attributes:
        path: path that was returned to the script.
        client_state: client state that was returned to the script.
        source: the checkpoint, or the version in memory; None for a checkpoint that only
            DeepSpeed found.
    """

    path: Any
    client_state: Any
    source: DiskCheckpoint | VersionId | None

    @property
    def is_the_jobs_own(self) -> bool:
        """Whether this job wrote the state; the script's directory may hold another job's
        checkpoint."""
        if isinstance(self.source, DiskCheckpoint):
            return self.source.label is not None
        return self.source is not None


class Restorer:
    """Handles ``engine.load_checkpoint``.

    What a call restores depends on what was loaded before and on what it requests:

    ================  =========================  ===========================  ====================
    before the call   the newest state           a checkpoint by its tag      base weights
    ================  =========================  ===========================  ====================
    nothing           the newest of memory and   that checkpoint; versions    DeepSpeed's load
                      storage; if there is       are taken from the first
                      none, DeepSpeed's load     step on
    a state; the job  a newer checkpoint; if     that checkpoint: the job     DeepSpeed's load,
    does not train    there is none, no change   goes back                    but never over the
                                                                              job's own state
    the job trains    the newest in the given    that checkpoint: the job     DeepSpeed's load
                      directory, or else on      goes back
                      storage: the job goes
                      back
    ================  =========================  ===========================  ====================

    Args:
        context: the job.
        session: the session whose engine is restored.
        memory: restores the session from the job's memory.
        checkpoints: restores the session from storage.
    """

    def __init__(
        self,
        context: JobContext,
        session: LoadedSession,
        memory: MemoryRestorer,
        checkpoints: CheckpointLoader,
    ) -> None:
        self._context, self._session = context, session
        self._memory, self._checkpoints = memory, checkpoints
        self._trains = False  # Whether this process has begun a step, or has none left to train
        self._resumed: ResumePoint | None = None
        self._bases: list[LoadCall] = []  # Loads of base weights before the first step
        self._tagged: LoadCall | None = None
        """Load of a checkpoint by its tag before the first step; None if there was none. The
        session does not start before that step."""

    @property
    def has_resumed(self) -> bool:
        """Whether a complete training state was loaded in this process."""
        return self._resumed is not None

    def begin_step(self) -> None:
        """Called when a training step begins. At the first step, settle which state the job starts
        from: whatever has been loaded by then."""
        if not self._trains and not self._session.started:
            self._start_at_first_step()
        self._trains = True
        if self._checkpoints.unprotected:
            self._checkpoints.unprotected = False
            self._memory.protect()

    def finish_training(self) -> None:
        """Called when no step is left to train: from here on, loads are those of a job that
        trains."""
        self._trains = True

    def load(self, call: LoadCall) -> tuple[Any, Any]:
        """Load the requested state. Collective.

        Returns:
            DeepSpeed's ``(path, client_state)``; ``(None, None)`` if there is no state to load.

        Raises:
            UnrecoverableError: the job made progress, but no complete version of it is left.
            PersistError: the checkpoint requested by its tag is damaged.
        """
        if call.base_only:
            return self._load_base(call)
        if not self._session.started:
            return self._load_newest(call) if call.tag is None else self._load_before_start(call)
        if call.tag is None and self._resumed is not None and not self._trains:
            return self._load_newer(call, self._resumed)
        # A call of reft.resume, which has no effect once the job has started
        if call.load_dir is None:
            return None, None
        return self._go_back(call)

    # -- before the job trains ---------------------------------------------------------------------

    def _load_newest(self, call: LoadCall) -> tuple[Any, Any]:
        """Load the newest state of memory and storage, and start the session."""
        recovery, plan = self._memory.survey()
        self._tagged = None
        found = self._checkpoints.disk.find(call.directory)
        self._checkpoints.count_beyond(*found.checkpoints)
        rest = list(found.checkpoints)
        half_written = None
        while isinstance(plan, RecoveryPlan):
            label = plan.label
            newer = [c for c in rest if c.newer_than(label)]
            rest = [c for c in rest if not c.newer_than(label)]
            if (resumed := self._load_first_sound(call, newer)) is not None:
                return resumed
            self._memory.check_identity(plan)
            try:
                outcome = self._memory.restore(recovery)
            except LayoutError as error:
                if not plan.other_layout:
                    raise
                # No tensor has been written yet, so try an older version that has this job's own
                # layout.
                recovery, plan = self._survey_own_layout(plan, error)
                continue
            if isinstance(outcome, RecoveryOutcome):
                path = f"memory:{self._context.job_id}/{outcome.label.step}"
                return self._note_resumed(path, self._memory.client_state, outcome.label)
            plan = half_written = outcome
        if rest and self._context.is_rank_zero and not plan.empty:
            logger.warning("resuming from disk (%s): %s", rest[0], plan)
        if (resumed := self._load_first_sound(call, rest)) is not None:
            return resumed
        refused = self._checkpoints.disk.refused(found)
        self._memory.refuse_silent_restart(plan, nothing_sound(refused) if refused else "")
        if half_written is not None:
            self._memory.refuse_half_written(half_written)
        result: tuple[Any, Any] = (None, None)
        if call.load_dir is not None:
            result = call.by_deepspeed()
        self._session.start({})
        return result

    def _survey_own_layout(
        self, plan: RecoveryPlan, error: LayoutError
    ) -> tuple[Recovery, RecoveryPlan | NotRecoverable]:
        """Search memory for versions in this job's own layout, after a version in another layout
        could not be converted."""
        why = f"{plan.label} of {plan.written}: {error}"
        if self._context.is_rank_zero:
            logger.warning("the memory of job %s is not used: %s", self._context.job_id, why)
        recovery, own = self._memory.survey(any_layout=False)
        if isinstance(own, NotRecoverable):
            own = replace(own, reasons=(why,))
        return recovery, own

    def _load_before_start(self, call: LoadCall) -> tuple[Any, Any]:
        """Load a checkpoint by its tag. The session starts at the first step: until then the script
        may still load the newest state."""
        _, plan = self._memory.survey()
        _, result = self._checkpoints.load_named(call, start=False)
        if result[0] is None:
            return result
        self._tagged = call
        if isinstance(plan, RecoveryPlan) and self._context.is_rank_zero:
            logger.warning(
                "the memory of job %s holds %s, but the script asks for tag %r. The job goes back "
                "to that tag, unless the script calls engine.load_checkpoint(save_dir) without a "
                "tag before it trains",
                *(self._context.job_id, plan.label, call.tag),
            )
        return result

    def _load_newer(self, call: LoadCall, resumed: ResumePoint) -> tuple[Any, Any]:
        """Handle a second load of a complete state. Only a checkpoint that is newer than the
        loaded version, or that differs from the loaded checkpoint, replaces the first state."""
        source = resumed.source
        for checkpoint in self._checkpoints.disk.find(call.directory).checkpoints:
            if checkpoint == source:
                break
            if isinstance(source, VersionId) and not checkpoint.newer_than(source):
                break
            if (result := self._load_first_sound(call, [checkpoint])) is not None:
                return result
        if self._context.is_rank_zero:
            logger.info(
                "%s found nothing newer than the resumed state, which is kept; name a tag to go "
                "back to an older checkpoint",
                call,
            )
        return resumed.path, resumed.client_state

    # -- while the job trains ----------------------------------------------------------------------

    def _go_back(self, call: LoadCall) -> tuple[Any, Any]:
        """Load an older state into a running job, for example one from before a loss spike."""
        if call.tag is None:
            found = self._checkpoints.disk.find(call.directory)
            # If a running job names a directory, it wants a checkpoint from there, such as a
            # Trainer's best one, even if storage has a newer version.
            named = [c for c in found.checkpoints if c.directory == call.directory]
            if (resumed := self._load_first_sound(call, named or found.checkpoints)) is not None:
                return resumed
            if refused := self._checkpoints.disk.refused(found):
                raise UnrecoverableError(nothing_sound(refused))
        checkpoint, result = self._checkpoints.load_named(call)
        return self._note_resumed(*result, checkpoint)

    # -- base weights ------------------------------------------------------------------------------

    def _load_base(self, call: LoadCall) -> tuple[Any, Any]:
        """Load weights without an optimizer. A job may start from these weights, but never
        resumes from them (P3).

        The weights are ignored if this job has resumed its own state: the script loads them at
        every start, but only the first start needs them.
        """
        resumed = self._resumed
        if resumed is not None and not self._trains and resumed.is_the_jobs_own:
            if self._context.is_rank_zero:
                logger.warning(
                    "%s is not loaded: the job was resumed at step %d, and base weights would "
                    "overwrite its trained state",
                    *(call, self._context.engine.global_steps),
                )
            return resumed.path, resumed.client_state
        self._session.hold()  # P2: no version may be copied while weights are written
        self._check_base(call)
        if not self._trains:
            self._bases.append(call)
        result = call.by_deepspeed()
        self._session.restored()
        return result

    def _check_base(self, call: LoadCall) -> None:
        disk = self._checkpoints.disk
        found = disk.find_named(call.directory, call.tag)
        if found is None:
            return
        if found.arenas is not None:
            raise PersistError(
                f"{call}: {found} is in reft's own form, and DeepSpeed loads weights alone from "
                f"its files: write them with 'reft persist --from {found.directory} --out DIR'"
            )
        try:
            disk.check(found, whole=False)
        except DamagedError as error:
            raise damaged(found, [str(error)]) from error

    # -- all loads ---------------------------------------------------------------------------------

    def _load_first_sound(
        self, call: LoadCall, checkpoints: Iterable[DiskCheckpoint]
    ) -> tuple[Any, Any] | None:
        """Load the first checkpoint that is not damaged, and report damaged ones. Returns None
        if no sound one is found."""
        for checkpoint in checkpoints:
            try:
                return self._note_resumed(*self._checkpoints.load(checkpoint, call), checkpoint)
            except DamagedError as error:
                self._checkpoints.disk.refuse(checkpoint, error)
        return None

    def _note_resumed(
        self, path: Any, client_state: Any, source: DiskCheckpoint | VersionId | None
    ) -> tuple[Any, Any]:
        if path is not None:
            self._resumed = ResumePoint(path, client_state, source)
        return path, client_state

    def _start_at_first_step(self) -> None:
        """Start the session in a script that trains without having resumed, and warn of the
        consequences before the first step (P12)."""
        left_out = () if self._bases else conditional_loads()
        did = describe_restore(self._bases, self._tagged, left_out)
        to_write = describe_resume_lines(self._bases, self._tagged)
        if self._tagged is not None:
            consequence = "After every failure the job would go back to that checkpoint."
        else:
            consequence = (
                "After a failure the job would not be resumed: it would stop with an error."
            )
            _, plan = self._memory.survey()
            if isinstance(plan, RecoveryPlan):
                self._memory.refuse_to_overwrite(plan, did, to_write, persistable=True)
            self._memory.refuse_silent_restart(plan)
        self._context.warn(f"{did}. {consequence} {to_write}")
        self._session.start({})
