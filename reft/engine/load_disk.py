"""Loads one checkpoint on storage into an engine: reft's arenas (files as in the job's memory), or
DeepSpeed's own files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from reft.data.position import DataPosition
from reft.engine.context import JobContext
from reft.engine.fingerprint import BY_LAYOUT
from reft.engine.job_memory import JobMemory
from reft.engine.load_call import LoadCall
from reft.engine.load_memory import (
    MemoryRestorer,
    RestorableSession,
    may_differ,
    stored_participant,
)
from reft.engine.protocol import TrainingEngine
from reft.errors import LayoutError
from reft.grid import Degrees, only_replicas_differ
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.recover import RecoveryOutcome
from reft.relayout.layouts import LayoutChange
from reft.relayout.restore import other_layout, read_replica_host_state, restore_checkpoint
from reft.storage.load import DamagedError, DiskCheckpoint, DiskRestorer, damaged


class CheckpointEngine(TrainingEngine, Protocol):
    """A training engine whose program can load its own checkpoints, as DeepSpeed can."""

    @property
    def data(self) -> DataPosition: ...

    @property
    def resizing(self) -> LayoutChange: ...

    def restore_beside_checkpoint(self, state: dict[str, Any], *, scheduler: bool) -> None:
        """Restore the state that the program's checkpoint lacks. Called after that checkpoint
        was loaded."""


class LoadedSession(RestorableSession, Protocol):
    """The part of a session's interface that is used to load checkpoints."""

    def hold(self) -> None: ...

    def go_back(self) -> None: ...


class CheckpointLoader:
    """Loads checkpoints. All methods are collective.

    Args:
        context: the job.
        engine: the context's engine, which loads checkpoints of its own.
        session: the session whose engine is restored.
        memory: restores arenas.
        job_memory: identity and incarnation of the job.

    Attributes:
        disk: finds and checks checkpoints.
        unprotected: True if a checkpoint without reft's state was loaded. The training program
            still has to read counters and random states from it, so no version can be taken yet.
    """

    def __init__(
        self,
        context: JobContext,
        engine: CheckpointEngine,
        session: LoadedSession,
        memory: MemoryRestorer,
        job_memory: JobMemory,
    ) -> None:
        self._context, self._engine, self._session = context, engine, session
        self._memory, self._job_memory = memory, job_memory
        self.unprotected = False
        self.disk = DiskRestorer(
            context.control,
            context.coordinate,
            context.job_id,
            context.config.persist,
            is_reader=context.is_first_on_node,
        )

    def load(
        self, checkpoint: DiskCheckpoint, call: LoadCall, *, start: bool = True
    ) -> tuple[Any, Any]:
        """Load a checkpoint. If the session is started, the job goes back to it.

        Args:
            checkpoint: the checkpoint.
            call: the script's call, for DeepSpeed.
            start: True to start the session if it is not started.

        Returns:
            The path and the client state for the script.

        Raises:
            DamagedError: the checkpoint is damaged. Raised by all ranks; in a running job before
                any tensor is written.
        """
        state = None
        # Arenas are verified block by block while they are loaded (P5). A running job would lose
        # its state if one were damaged, so its arenas are checked before the load as well.
        if checkpoint.arenas is None or self._session.started:
            state = self.disk.check(checkpoint)
        if self._session.started:
            self._session.go_back()
        self._check_identity(checkpoint)
        self.count_beyond(checkpoint)
        if checkpoint.arenas is not None:
            return self._load_arenas(checkpoint, start=start)
        return self._load_files(call, checkpoint, state, start=start)

    def load_named(
        self, call: LoadCall, *, start: bool = True
    ) -> tuple[DiskCheckpoint | None, tuple[Any, Any]]:
        """Load the checkpoint named by the call, or by the file ``latest``.

        Returns:
            The checkpoint, and the path and client state for the script. If reft finds no
            checkpoint, the first result is None and DeepSpeed has handled the call.

        Raises:
            PersistError: the checkpoint is damaged.
        """
        found = self.disk.find_named(call.directory, call.tag)
        if found is None:
            if self._session.started:
                self._session.go_back()
            return None, self._load_files(call, None, None, start=start)
        try:
            return found, self.load(found, call, start=start)
        except DamagedError as error:
            raise damaged(found, [str(error)]) from error

    def count_beyond(self, *checkpoints: DiskCheckpoint) -> None:
        """Continue with an incarnation above those of the checkpoints (P3).

        If this node's memory was lost, the checkpoints may be of later incarnations than this
        node knows. All ranks pass the same checkpoints.
        """
        seen = (c.label.incarnation for c in checkpoints if c.label is not None)
        self._job_memory.count_on(1 + max(seen, default=0))

    def _check_identity(self, checkpoint: DiskCheckpoint) -> None:
        """Refuse a checkpoint that this job wrote with other settings (P7)."""
        now = self._context.topology.degrees
        was = checkpoint.arenas or self._other_layout(checkpoint) or now
        but = may_differ(was, now)
        if checkpoint.arenas is None and but and not self._every_replica_has_all(was):
            but = BY_LAYOUT
        own = checkpoint.job_id == self._context.job_id
        self._job_memory.identity.check_checkpoint(
            checkpoint.fingerprint, f"the checkpoint {checkpoint}", own=own, but=but
        )

    # -- arenas ------------------------------------------------------------------------------------

    def _load_arenas(self, checkpoint: DiskCheckpoint, *, start: bool) -> tuple[Any, Any]:
        """Recover a version on storage in the same way as one in memory. Its blocks are verified
        while they are read (P5)."""
        began = time.perf_counter()
        recovery, plan = self._memory.survey(stored_participant(self._context, checkpoint))
        outcome: RecoveryOutcome | NotRecoverable
        if isinstance(plan, RecoveryPlan):
            outcome, state = self._memory.take_up(recovery, str(checkpoint))
        else:
            outcome = plan
        if isinstance(outcome, NotRecoverable):
            kind = LayoutError if outcome.layout_mismatch else DamagedError
            raise kind(f"{checkpoint}: {'; '.join(outcome.reasons)}")
        self._memory.after_restore(state)
        self._memory.report_resize(outcome.plan.written)
        if not self._session.started and start:
            self._session.start({})
        self._report(checkpoint.path, began)
        return str(checkpoint.path), self._memory.client_state

    # -- DeepSpeed's files -------------------------------------------------------------------------

    def _load_files(
        self,
        call: LoadCall,
        checkpoint: DiskCheckpoint | None,
        state: dict[str, Any] | None,
        *,
        start: bool,
    ) -> tuple[Any, Any]:
        """Load DeepSpeed's checkpoint files. The caller must already have verified them (P5).

        Args:
            call: the script's call of ``load_checkpoint``, with its arguments.
            checkpoint: the checkpoint; None if reft has found none.
            state: this rank's host state, from the file next to DeepSpeed's; None if any rank
                has no such file.
            start: start the session if it is not started.
        """
        session, context = self._session, self._context
        began = time.perf_counter()
        was = None if checkpoint is None else self._other_layout(checkpoint)
        converted: dict[str, Any] | None = None
        path: Any
        client_state: Any
        if checkpoint is not None and was is not None:
            change = self._engine.resizing
            where = context.control, context.topology, change, checkpoint.path, was
            if self._every_replica_has_all(was):
                state = read_replica_host_state(*where)
            else:  # DeepSpeed cannot load a checkpoint of another layout
                converted = restore_checkpoint(*where, restore=self._engine.restore)
        if converted is not None and checkpoint is not None:
            path, client_state = str(checkpoint.path), read_client_state(converted)
        elif checkpoint is not None:
            directory, tag = str(checkpoint.directory), checkpoint.tag
            path, client_state = call.original(directory, tag=tag, **call.options)
        else:
            path, client_state = call.by_deepspeed()
        if not session.started and start:
            session.start({})
        if path is None:
            return path, client_state
        if converted is not None:
            self._memory.after_restore(converted)
        elif state is not None:
            scheduler = bool(call.options.get("load_lr_scheduler_states", True))
            self._engine.restore_beside_checkpoint(state, scheduler=scheduler)
            self._memory.after_restore(state)
            client_state = {**(client_state or {}), **read_client_state(state)}
        if was is not None:
            self._memory.report_resize(was)
        session.restored()
        foreign = converted is None and state is None
        self.unprotected = start and foreign and self._engine.data.left_to_program
        self._report(path, began)
        return path, client_state

    def _other_layout(self, checkpoint: DiskCheckpoint) -> Degrees | None:
        """Return the checkpoint's layout if it differs from this job's; otherwise None."""
        return other_layout(self._context.control, self._context.topology, checkpoint.path)

    def _every_replica_has_all(self, was: Degrees) -> bool:
        """Return whether this job differs from ``was`` only in the number of replicas, and no state
        is partitioned among them.
        """
        return (
            only_replicas_differ(was, self._context.topology.degrees)
            and not self._engine.adapter.images()[1].specs
        )

    def _report(self, path: Any, began: float) -> None:
        self._context.events.write(
            "restored",
            source="disk",
            version=self._engine.global_steps,
            bytes_from={"disk": sum(image.nbytes for image in self._engine.adapter.images())},
            secs=time.perf_counter() - began,
        )
        if self._session.started and not self.unprotected:
            self._memory.protect()
        self._memory.report(f"disk, {path}", began)


def read_client_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return dict(state.get("client") or {})
