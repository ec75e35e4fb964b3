"""``load_checkpoint`` as reft gives it back: the newest state there is, of this job's memory and of
the checkpoints on storage.

The recovered version is complete and protected again on every node before the first step, and what
recovery reads is not overwritten until then (P3).
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
    """What a job was resumed from in this process.

    Attributes:
        path: as the script has received it.
        client_state: likewise.
        source: the checkpoint, or the version in memory; None if reft knows nothing of it.
    """

    path: Any
    client_state: Any
    source: DiskCheckpoint | VersionId | None

    @property
    def is_the_jobs_own(self) -> bool:
        """Whether this job wrote it: a directory of the script may hold another training to start
        from."""
        if isinstance(self.source, DiskCheckpoint):
            return self.source.label is not None
        return self.source is not None


class Restorer:
    """Answers ``engine.load_checkpoint``.

    What a call restores, by what was loaded before it and by what it asks for:

    ================  =========================  ===========================  ====================
    before the call   the newest state           a checkpoint by its tag      base weights
    ================  =========================  ===========================  ====================
    nothing           the newest of memory and   that one; versions are       DeepSpeed's load
                      storage; if there is       taken from the first step
                      none, DeepSpeed's load     on
    a state; the job  what is newer than it, or  that one: the job goes back  none over the job's
    does not train                                                            own state
    the job trains    the newest on storage:     that one: the job goes back  DeepSpeed's load
                      the job goes back
    ================  =========================  ===========================  ====================

    Args:
        context: of the job.
        session: whose state is restored.
        memory: restores it from the job's memory.
        checkpoints: restores it from storage.
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
        self._trains = False  # whether this process has begun to train
        self._resumed: ResumePoint | None = None
        self._bases: list[LoadCall] = []  # loads of base weights before the first step
        self._tagged: LoadCall | None = None
        """A load by tag before the first step, after which the session is not started yet."""

    @property
    def has_resumed(self) -> bool:
        """Whether a complete training state was loaded in this process."""
        return self._resumed is not None

    def begin_step(self) -> None:
        """A training step begins: whatever was loaded until now is what the job starts from."""
        if not self._trains and not self._session.started:
            self._start_at_first_step()
        self._trains = True
        if self._checkpoints.unprotected:
            self._checkpoints.unprotected = False
            self._memory.protect()

    def load(self, call: LoadCall) -> tuple[Any, Any]:
        """Load what the call asks for. Collective.

        Returns:
            DeepSpeed's ``(path, client_state)``; ``(None, None)`` if there is nothing at all.

        Raises:
            UnrecoverableError: the job made progress, but no complete version of it is left.
            PersistError: the checkpoint that was asked for by its tag is damaged.
        """
        if call.base_only:
            return self._load_base(call)
        if not self._session.started:
            return self._load_newest(call) if call.tag is None else self._load_before_start(call)
        if call.tag is None and self._resumed is not None and not self._trains:
            return self._load_newer(call, self._resumed)
        if call.load_dir is None:  # reft.resume, which a job that has started does not need
            return None, None
        return self._go_back(call)

    # -- before the job trains ---------------------------------------------------------------------

    def _load_newest(self, call: LoadCall) -> tuple[Any, Any]:
        """The newest state of memory and storage, and the start of the session."""
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
                # Nothing has been written. The next plan is of the own layout, and older.
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
        """What memory holds of this job's layout, after a version of another one could not be
        converted."""
        why = f"{plan.label} of {plan.written}: {error}"
        if self._context.is_rank_zero:
            logger.warning("the memory of job %s is not used: %s", self._context.job_id, why)
        recovery, own = self._memory.survey(any_layout=False)
        if isinstance(own, NotRecoverable):
            own = replace(own, reasons=(why,))
        return recovery, own

    def _load_before_start(self, call: LoadCall) -> tuple[Any, Any]:
        """A checkpoint by its tag. Versions are taken from the first step on: until then the script
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
        """A second load of a complete state: only what is newer than memory, or another checkpoint
        than the one from storage, replaces the first."""
        source = resumed.source
        for checkpoint in self._checkpoints.disk.find(call.directory).checkpoints:
            if checkpoint == source:
                break
            if isinstance(source, VersionId) and not checkpoint.newer_than(source):
                break
            if (result := self._load_first_sound(call, [checkpoint])) is not None:
                return result
        if self._context.is_rank_zero:
            logger.info("%s found nothing newer: the job has been resumed already", call)
        return resumed.path, resumed.client_state

    # -- while the job trains ----------------------------------------------------------------------

    def _go_back(self, call: LoadCall) -> tuple[Any, Any]:
        """A load in a running job, for example back to before a loss spike."""
        if call.tag is None:
            found = self._checkpoints.disk.find(call.directory)
            if (resumed := self._load_first_sound(call, found.checkpoints)) is not None:
                return resumed
            if refused := self._checkpoints.disk.refused(found):
                raise UnrecoverableError(nothing_sound(refused))
        checkpoint, result = self._checkpoints.load_named(call)
        return self._note_resumed(*result, checkpoint)

    # -- base weights ------------------------------------------------------------------------------

    def _load_base(self, call: LoadCall) -> tuple[Any, Any]:
        """Weights without an optimizer: what a job starts from, never what it resumes (P3).

        They are not loaded over what this job itself had trained: its script did so at its first
        start.
        """
        resumed = self._resumed
        if resumed is not None and not self._trains and resumed.is_the_jobs_own:
            if self._context.is_rank_zero:
                logger.warning(
                    "%s is not loaded: the job was resumed at step %d, and base weights would "
                    "overwrite what it has learnt",
                    *(call, self._context.engine.global_steps),
                )
            return resumed.path, resumed.client_state
        self._session.hold()  # P2: nothing is copied while weights are written
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

    # -- all of them -------------------------------------------------------------------------------

    def _load_first_sound(
        self, call: LoadCall, checkpoints: Iterable[DiskCheckpoint]
    ) -> tuple[Any, Any] | None:
        """Load the first of these that is not damaged; damaged ones are reported."""
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
        """The script trains, and has not resumed anything. It is reported in time what that means
        (P12)."""
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
