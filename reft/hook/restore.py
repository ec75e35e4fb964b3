"""``load_checkpoint`` as reft gives it back.

Loading returns the newest state there is: this job's memory, else the newest checkpoint on disk. The
recovered version is whole and protected again on every node before the first step, and what recovery
reads is not overwritten until then (P3).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reft.config import Variant
from reft.errors import ConfigError, NotResumedError, UnrecoverableError
from reft.hook.calls import LoadCall, what_it_did, what_to_write
from reft.hook.completing import completing, is_still_protected
from reft.hook.coordinates import local_rank
from reft.hook.disk import DiskCheckpoint, DiskRung, Found, Resumed, Sound, nothing_sound
from reft.hook.job import noted_commit
from reft.hook.session import Session
from reft.hook.start_checks import conditional_loads, loops_that_begin_anew, warn
from reft.hook.target import Target
from reft.load.plan import NotRecoverable, RecoveryPlan
from reft.load.recover import Recovery, RecoveryOutcome
from reft.state.host import restore_data_free_state, restore_host_state
from reft.state.rng import restore_rng
from reft.store import history
from reft.store.arena_files import slots_with
from reft.store.label import Label

logger = logging.getLogger(__name__)

Load = Callable[..., tuple[Any, Any]]


class ClientStateView(dict[str, Any]):
    """The client state of a version in memory. A key that was never given to reft is an error that
    says so, not a ``KeyError`` that looks like a broken checkpoint."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"client_state[{key!r}] is not part of the snapshot in memory; it holds {sorted(self)}. A "
            f"snapshot is taken after every step, so reft must be able to ask for this value: pass "
            f"reft.attach(engine, client_state=lambda: {{{key!r}: ...}}), or derive it from "
            f"engine.global_steps"
        )


class Restorer:
    """Loads for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rng: dict[str, Any] | None = None
        self._trains = False
        """Whether this process has begun to train."""
        self._resumed: Resumed | None = None
        self._bases: list[LoadCall] = []
        """Loads of base weights before the first step."""
        self._tagged: LoadCall | None = None
        """A load by tag before the first step, after which snapshots have not been started yet."""
        self._disk = DiskRung(session.control, session.coordinate, session.job_id, session.config.persist.dir)
        self._first_step, self._advised = int(session.engine.global_steps), False

    # -- hooks ------------------------------------------------------------------------------------

    def before_batch(self, data_iter: Any) -> None:
        """``train_batch`` begins, which takes its batches itself. The random states of the version hold from
        here on: whatever the script has drawn since it loaded is undone."""
        self.before_first_step()
        self._session.state.data.begin_batch(data_iter)
        if self._rng is not None:
            restore_rng(self._rng)
        self._rng = None

    def before_forward(self, *, training: bool) -> None:
        """A plain engine computes on a batch that the script has read."""
        session = self._session
        if training:
            self.before_first_step()
        moved = session.state.data.forward(training=training)
        if moved is not None:
            warn(session, moved)

    def before_first_step(self) -> None:
        """Called before every step; does its work once after every load."""
        if not self._trains and self._session.worker is None:
            self._start_at_first_step()
        self._trains = True
        self._session.state.restored_client = None
        self._session.state.data.trains()

    def after_step(self) -> None:
        """A step has returned: after the first one it is known how the script reads its data."""
        session = self._session
        if self._advised or int(session.engine.global_steps) == self._first_step:
            return
        self._advised = True
        self._note(history.STEPPED)
        text = session.state.data.advice()
        if session.copying.variant is Variant.NONE:
            return
        if session.state.client_state is None:
            for said in filter(None, (text, *loops_that_begin_anew())):
                warn(session, said)
        elif text is not None and session.is_rank_zero:
            logger.info("the position in the data is left to the client state that is attached")

    def load(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """``engine.load_checkpoint``: the newest state of memory and disk.

        A script may load several times before it trains: base weights without an optimizer, and its own
        state. The newest state is resumed once (P3); loads of base weights are DeepSpeed's alone. An explicit
        tag, or a load of a whole state in a job that trains, means that checkpoint and no other.

        Returns:
            DeepSpeed's ``(path, client_state)``; ``(None, None)`` where there is nothing at all.

        Raises:
            UnrecoverableError: the job made progress, but no whole version of it is left.
            PersistError: the checkpoint that was asked for by its tag is damaged.
        """
        if call.base_only:
            return self._load_base(original, call)
        if self._resumed is not None and not self._trains and call.tag is None:
            return self._load_once_more(original, call)
        if self._session.worker is not None:
            # Without a directory it is reft.resume, which a job that trains does not need.
            return (None, None) if call.load_dir is None else self._load_again(original, call)
        return self._resume(original, call)

    def _resume(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """The first load of a whole state in this process."""
        session = self._session
        recovery, plan = self._survey()
        if call.tag is not None:
            return self._load_by_tag(original, call, plan)
        self._tagged = None
        found = self._disk.find(call.directory)
        self._outnumber(*found.checkpoints)
        sound = outcome = None
        if isinstance(plan, RecoveryPlan):
            sound = self._disk.newest_sound(found, beyond=plan.label)
            if sound is None:
                session.memory.identity.check_memory(
                    session.memory.job_dir.path, plan.label, reads=session.is_first_on_node
                )
                outcome = self._restore_from_memory(recovery)
                if isinstance(outcome, RecoveryOutcome):
                    label = outcome.plan.label
                    return self._has_resumed(
                        f"memory:{session.job_id}/{label.step}", self._client_state, label
                    )
                plan = outcome
        sound = sound or self._disk.newest_sound(found)
        if sound is not None:
            self._explain_disk(plan, sound.checkpoint)
            return self._load_sound(original, call, sound)
        self._refuse_silent_restart(plan, found)
        if isinstance(outcome, NotRecoverable):
            raise UnrecoverableError(
                f"the memory of job {session.job_id} turned out corrupt while it was restored, some of the "
                f"state is written, and no checkpoint is on disk.\n{outcome}\n{self._to_start_anew()}"
            )
        result: tuple[Any, Any] = (None, None)
        if call.load_dir is not None:
            result = original(call.load_dir, tag=call.tag, **call.options)
        session.start({})
        return result

    def _has_resumed(
        self, path: Any, client_state: Any, source: DiskCheckpoint | Label | None
    ) -> tuple[Any, Any]:
        if path is not None:
            self._resumed = Resumed(path, client_state, source)
        return path, client_state

    # -- memory -----------------------------------------------------------------------------------

    def _survey(self) -> tuple[Recovery, RecoveryPlan | NotRecoverable]:
        """What is in the memory of all nodes, and what would be restored from it. Collective."""
        session = self._session
        recovery = Recovery(
            session.topology,
            session.control,
            job_id=session.job_id,
            job_dir=session.memory.job_dir.path,
            secret=session.memory.job_dir.secret,
            faults=session.faults,
            completing=completing(session),
        )
        return recovery, recovery.survey()

    def _restore_from_memory(self, recovery: Recovery) -> RecoveryOutcome | NotRecoverable:
        session = self._session
        began = time.perf_counter()
        target = Target(session)
        outcome = recovery.restore(target.prepare, target.write)
        if isinstance(outcome, NotRecoverable):
            return outcome
        self._finish(target.blob.state)
        session.events.write(
            "restored",
            source="memory",
            version=outcome.plan.label.step,
            incarnation=outcome.plan.label.incarnation,
            bytes_from=outcome.stats.bytes_from,
            repaired=[str(r) for r in outcome.repaired],
            secs=time.perf_counter() - began,
        )
        for repair in outcome.repaired:
            logger.warning("corrupt memory was repaired from another source: %s", repair)
        # What holds the version just recovered is kept until it is protected anew.
        job_dir, label = session.memory.job_dir, outcome.label
        held = slots_with(job_dir.path, job_dir.secret, local_rank(), label)
        session.start(dict.fromkeys(held, label))
        if not is_still_protected(session, held.values(), outcome):
            self._protect()
        self._report(f"memory, {outcome.plan.label}", began)
        return outcome

    def _finish(self, state: dict[str, Any]) -> None:
        session = self._session
        restore_host_state(session.engine, session.state.adapter, state)
        self._after_restore(state)

    def _after_restore(self, state: dict[str, Any]) -> None:
        session = self._session
        session.state.data.restore(state.get("data") or {}, state.get("rng"))
        session.state.restored_client = dict(state.get("client") or {})
        self._client_state = ClientStateView(session.state.restored_client)
        self._rng = state.get("rng")
        self._first_step = int(session.engine.global_steps)
        session.restored()

    def _protect(self) -> None:
        """Take the restored state as the first version of this incarnation and wait for its commit:
        from then on the old version is no longer needed, and the new node is protected too."""
        session = self._session
        request = session.submit(must=True)
        request.done.wait(session.config.commit_timeout_secs)
        if not request.committed:
            logger.warning(
                "the restored state of step %d could not be protected again: %s. Training goes on",
                request.label.step,
                session.stats.last_error,
            )

    # -- disk -------------------------------------------------------------------------------------

    def _load_sound(self, original: Load, call: LoadCall, sound: Sound) -> tuple[Any, Any]:
        disk = sound.checkpoint
        self._check_identity(disk)
        self._outnumber(disk)
        path, client_state = self._load_from_disk(
            original, disk.directory, disk.tag, call.options, sound.host_state
        )
        return self._has_resumed(path, client_state, disk)

    def _outnumber(self, *checkpoints: DiskCheckpoint) -> None:
        """The versions to come are newer than these (P3): a directory of the script's may know incarnations
        that memory, which was lost, does not. Equal on all ranks, as what was found is."""
        seen = (c.label.incarnation for c in checkpoints if c.label is not None)
        self._session.memory.incarnation = max(self._session.memory.incarnation, 1 + max(seen, default=0))

    def _check_identity(self, disk: DiskCheckpoint) -> None:
        session = self._session
        session.memory.identity.check_checkpoint(
            disk.fingerprint, f"the checkpoint {disk}", own=disk.job_id == session.job_id
        )

    def _load_from_disk(
        self,
        original: Load,
        directory: Path | None,
        tag: Any,
        options: dict[str, Any],
        state: dict[str, Any] | None,
        *,
        start: bool = True,
    ) -> tuple[Any, Any]:
        """Load what was checked (P5). ``state``: this rank's host state from there."""
        session = self._session
        began = time.perf_counter()
        path, client_state = original(str(directory), tag=tag, **options)
        if session.worker is None and start:
            session.start({})
        if path is None:
            return path, client_state
        if state is not None:
            scheduler = bool(options.get("load_lr_scheduler_states", True))
            restore_data_free_state(session.engine, state, scheduler=scheduler)
            self._after_restore(state)
            client_state = {**(client_state or {}), **client_state_of(state)}
        session.restored()
        session.events.write(
            "restored",
            source="disk",
            version=int(session.engine.global_steps),
            bytes_from={"disk": sum(image.nbytes for image in session.state.adapter.images())},
            secs=time.perf_counter() - began,
        )
        if session.worker is not None:
            self._protect()
        self._report(f"disk, {path}", began)
        return path, client_state

    def _leave_this_future(self) -> None:
        """What is in memory is the abandoned future: the versions to come belong to a new incarnation."""
        session = self._session
        assert session.worker is not None
        session.worker.drain(session.config.commit_timeout_secs)
        session.worker.fence()
        session.memory.incarnation += 1

    def _load_again(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """A load in a running job, for example back to before a loss spike."""
        self._leave_this_future()
        if call.tag is not None:
            sound = self._disk.check_named(call.directory, call.tag)
        else:
            found = self._disk.find(call.directory)
            sound = self._disk.newest_sound(found)
            if sound is None and (refused := self._disk.refused(found)):
                raise UnrecoverableError(nothing_sound(refused))
        if sound is not None:
            return self._load_sound(original, call, sound)
        path, client_state = self._load_from_disk(original, call.directory, call.tag, call.options, None)
        return self._has_resumed(path, client_state, None)

    # -- several loads before the first step ---------------------------------------------------------

    def _load_base(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """Weights without an optimizer: what a job starts from, never what it resumes (P3).

        Over what this job itself had trained they are not loaded: its script did so at its first start.
        """
        session = self._session
        resumed = self._resumed
        if resumed is not None and not self._trains and resumed.is_the_jobs_own:
            if session.is_rank_zero:
                logger.warning(
                    "%s is left out: the job was resumed at step %d, and base weights would replace "
                    "what it has learnt since it started from them",
                    *(call, session.engine.global_steps),
                )
            return resumed.path, resumed.client_state
        if session.worker is not None:
            session.worker.fence()  # P2: nothing is copied while weights are written
        self._disk.check_named(call.directory, call.tag, whole=False)
        if not self._trains:
            self._bases.append(call)
        result = original(call.load_dir, tag=call.tag, **call.options)
        session.restored()
        return result

    def _load_once_more(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """A second load of a whole state before the first step: only what is newer than memory, or another
        checkpoint than the one from disk, takes its place."""
        assert self._resumed is not None
        source = self._resumed.source
        sound = self._disk.newest_sound(
            self._disk.find(call.directory), beyond=source if isinstance(source, Label) else None
        )
        if sound is not None and sound.checkpoint != source:
            self._leave_this_future()
            return self._load_sound(original, call, sound)
        if self._session.is_rank_zero:
            logger.info("%s found nothing newer: the job has been resumed already", call)
        return self._resumed.path, self._resumed.client_state

    def _load_by_tag(
        self, original: Load, call: LoadCall, plan: RecoveryPlan | NotRecoverable
    ) -> tuple[Any, Any]:
        """A checkpoint by name. Snapshots start with the first step: the newest state may be loaded yet."""
        sound = self._disk.check_named(call.directory, call.tag)
        state = None if sound is None else sound.host_state
        if sound is not None:
            self._check_identity(sound.checkpoint)
            self._outnumber(sound.checkpoint)
        result = self._load_from_disk(original, call.directory, call.tag, call.options, state, start=False)
        if result[0] is None:
            return result
        self._tagged = call
        if isinstance(plan, RecoveryPlan) and self._session.is_rank_zero:
            logger.warning(
                "the memory of job %s holds %s, but the script asks for tag %r. It goes back there, "
                "unless it calls engine.load_checkpoint(save_dir) without a tag before it trains",
                *(self._session.job_id, plan.label, call.tag),
            )
        return result

    # -- refusals ---------------------------------------------------------------------------------

    def _refuse_silent_restart(self, plan: RecoveryPlan | NotRecoverable, found: Found | None = None) -> None:
        """Nothing to resume from: right for a new job, an error for one that had made progress."""
        session = self._session
        assert isinstance(plan, NotRecoverable)
        note = noted_commit(session.memory.record, session.control, session.job_id)
        refused = self._disk.refused(found) if found is not None else ()
        if plan.newest_committed is None and not plan.layout_mismatch and not note:
            if refused:
                raise UnrecoverableError(nothing_sound(refused))
            return
        where = session.config.persist.dir or "not configured (persist.dir)"
        progress = note or plan.newest_committed or "versions of another layout"
        raise UnrecoverableError(
            f"job {session.job_id} had committed {progress}, but it cannot be recovered and no checkpoint "
            f"is on disk (persist directory: {where}).\n{plan}\n"
            f"{nothing_sound(refused) + chr(10) if refused else ''}"
            f"{self._to_start_anew()}"
        )

    def _to_start_anew(self) -> str:
        job = self._session.job_id
        return (
            f"To start from scratch on purpose, run 'reft clean --job {job} --force' on every node, or give "
            f"the job another id."
        )

    def _start_at_first_step(self) -> None:
        """The script trains, and has not resumed anything. In time it is said what that means (P12)."""
        session = self._session
        did = what_it_did(self._bases, self._tagged, () if self._bases else conditional_loads())
        to_write = what_to_write(self._bases, self._tagged)
        if self._tagged is None:
            _, plan = self._survey()
            if isinstance(plan, RecoveryPlan):
                raise NotResumedError(
                    f"the memory of job {session.job_id} holds {plan.label}, but {did}: it would start from "
                    f"scratch and overwrite it. The memory is kept. {to_write}; then start the job again. "
                    f"'reft persist --job {session.job_id} --out DIR' writes a checkpoint to "
                    f"DIR/{session.job_id}; 'reft clean --job {session.job_id} --force' removes the memory"
                )
            self._refuse_silent_restart(plan)
            consequence = "After a failure the job would not be resumed: it would stop with an error."
        else:
            consequence = "After every failure it would go back there."
        warn(session, f"{did}. {consequence} {to_write}")
        session.start({})

    def _explain_disk(self, plan: RecoveryPlan | NotRecoverable, disk: DiskCheckpoint) -> None:
        if self._session.is_rank_zero and isinstance(plan, NotRecoverable) and not plan.empty:
            logger.warning("resuming from disk (%s): %s", disk, plan)

    def _report(self, source: str, began: float) -> None:
        secs = time.perf_counter() - began
        self._note(history.RESUMED, source=source, step=int(self._session.engine.global_steps), secs=secs)
        if self._session.is_rank_zero:
            logger.warning(
                "resumed at step %d from %s in %.2f s",
                self._session.engine.global_steps,
                source,
                secs,
            )

    def _note(self, event: str, **facts: Any) -> None:
        if local_rank() == 0:
            history.note(self._session.memory.job_dir.path, event, **facts)


def client_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The user's part of a captured host state."""
    return dict(state.get("client") or {})
