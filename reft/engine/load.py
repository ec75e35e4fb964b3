"""``load_checkpoint`` as reft gives it back.

Loading returns the newest state there is: this job's memory, else the newest checkpoint on disk.
The recovered version is whole and protected again on every node before the first step, and what
recovery reads is not overwritten until then (P3).
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reft.checks.start import (
    check_orders,
    conditional_loads,
    describe_fresh_state,
    report_findings,
    require_first_version,
    warn,
)
from reft.config import Variant
from reft.engine.fingerprint import BY_LAYOUT
from reft.engine.load_memory import MemoryRestorer, may_differ, stored_participant
from reft.engine.session import Session
from reft.errors import LayoutError, PersistError, UnrecoverableError
from reft.grid import Degrees, VersionId, only_replicas_differ
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.recover import Recovery, RecoveryOutcome
from reft.relayout.restore import other_layout, read_replica_host_state, restore_checkpoint
from reft.storage.load import (
    DamagedError,
    DiskCheckpoint,
    DiskRestorer,
    ResumePoint,
    damaged,
    nothing_sound,
)

if TYPE_CHECKING:
    from reft.engine.deepspeed import DeepSpeedEngine

logger = logging.getLogger(__name__)


_BASE_ONLY = (("load_module_only", True), ("load_optimizer_states", False))
"""Options by which DeepSpeed loads less than a training state: the start of a job, never its
resumption."""


def bind(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, defaults left out."""
    signature = inspect.signature(original)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


@dataclass(frozen=True)
class LoadCall:
    load_dir: Any
    tag: Any  # the checkpoint that is asked for; None: the newest
    options: dict[str, Any]  # everything else, by name

    @classmethod
    def of(
        cls, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LoadCall:
        named = bind(original, args, kwargs)
        return cls(named.pop("load_dir"), named.pop("tag", None), named)

    @property
    def directory(self) -> Path | None:
        return Path(self.load_dir) if self.load_dir else None

    @property
    def base_only(self) -> str | None:
        """The option by which this loads weights without the optimizer, as written; None: a whole
        state."""
        for name, value in _BASE_ONLY:
            if name in self.options and bool(self.options[name]) is value:
                return f"{name}={value}"
        return None

    def __str__(self) -> str:
        shown = [repr(str(self.load_dir))]
        if self.tag is not None:
            shown.append(f"tag={self.tag!r}")
        if self.base_only is not None:
            shown.append(self.base_only)
        return f"load_checkpoint({', '.join(shown)})"


def describe_restore(
    bases: Sequence[LoadCall], tagged: LoadCall | None, left_out: Sequence[str] = ()
) -> str:
    """What a script did before its first step that resumes nothing, as errors and warnings say it.
    ``left_out``: its loads that a condition has left out, in words."""
    if tagged is not None:
        return f"the script names the checkpoint that it resumes: {tagged}"
    if bases:
        calls = ", ".join(str(base) for base in bases)
        return f"the script has loaded base weights only ({calls}) and trains"
    why = f": {'; '.join(left_out)}" if left_out else ""
    return f"the script trains without calling engine.load_checkpoint(...){why}"


def describe_resume_lines(bases: Sequence[LoadCall], tagged: LoadCall | None) -> str:
    """The line by which it resumes the newest state."""
    if "transformers.trainer" in sys.modules:
        return "Write trainer = reft.hf.resumable(trainer) before trainer.train()"
    calls = [tagged] if tagged is not None else bases
    behind = str(calls[-1]) if calls else "deepspeed.initialize"
    return (
        f"Write engine.load_checkpoint(save_dir), or reft.resume(engine), after {behind}, also at "
        "the first "
        f"start, and let the loop begin at engine.global_steps"
    )


Load = Callable[..., tuple[Any, Any]]


class Restorer:
    def __init__(self, session: Session, engine: DeepSpeedEngine) -> None:
        self._session = session
        self._engine = engine
        self._memory = MemoryRestorer(session)
        self._trains = False  # whether this process has begun to train
        self._resumed: ResumePoint | None = None
        self._bases: list[LoadCall] = []  # loads of base weights before the first step
        self._tagged: LoadCall | None = None
        """A load by tag before the first step, after which snapshots have not been started yet."""
        self._unprotected = False
        """Whether a checkpoint without reft's state was loaded: its program has yet to read its
        counters and random states from it."""
        self._disk = DiskRestorer(
            session.control, session.coordinate, session.job_id, session.config.persist.dir
        )
        self._first_step, self._advised = session.engine.global_steps, False

    # -- hooks ------------------------------------------------------------------------------------

    def before_batch(self, data_iter: Any) -> None:
        """``train_batch`` begins, which takes its batches itself. The random states of the version
        hold from here on: whatever the script has drawn since it loaded is undone."""
        self.before_first_step(data_iter)
        self._engine.data.begin_batch(data_iter)
        self._memory.restore_rng()

    def begin_by_script(self) -> None:
        """The script says that a step begins here."""
        if self._trains:
            self._engine.data.mark()
        else:
            self._memory.restore_rng(marked=True)

    def after_batch(self) -> None:
        self._engine.data.end_batch()

    def before_forward(self, *, training: bool) -> None:
        """A plain engine computes on a batch that the script has read."""
        session = self._session
        if training:
            self.before_first_step()
        moved = self._engine.data.forward(training=training)
        if moved is not None:
            warn(session, moved)

    def before_first_step(self, data_iter: Any = None) -> None:
        """Called before every step; does its work once."""
        if not self._trains:
            data = self._engine.data
            check_orders(self._session, data.orders(data_iter), data.why_equal)
            self._first_step = self._session.engine.global_steps
            if (left := self._engine.data.left_behind()) is not None:
                warn(self._session, left)
            if self._session.worker is None:
                self._start_at_first_step()
        if self._unprotected:
            self._unprotected = False
            self._memory.protect()
        self._session.state.followed.begin_step(is_first=not self._trains)
        self._trains = True
        self._session.state.restored_client = None
        self._engine.data.trains()

    def after_step(self) -> None:
        """A step has returned: after the first one it is known how the script reads its data."""
        session = self._session
        for said in session.state.followed.end_step():
            warn(session, said)
        if session.stepped and (found := self._engine.data.found_on_the_way()) is not None:
            warn(session, found)
        if self._advised or session.engine.global_steps == self._first_step:
            return
        self._advised = True
        self._memory.made_first_step()
        text = self._engine.data.advice()
        if session.copying.variant is Variant.NONE:
            return
        if self._resumed is None:
            require_first_version(session)
        # By its client state the script restores the position in data that reft does not follow,
        # and nothing else.
        is_clients = session.state.client_state is not None and not self._engine.data.comes_back()
        if text is not None and is_clients:
            if session.is_rank_zero:
                logger.info("the attached client state restores the position in the data")
            text = None
        findings = filter(None, (text, *session.state.followed.findings(), *describe_fresh_state()))
        report_findings(session, list(findings))

    def load(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """``engine.load_checkpoint``: the newest state of memory and disk.

        A script may load several times before it trains: base weights without an optimizer, and its
        own state. The newest state is resumed once (P3); loads of base weights are DeepSpeed's
        alone. An explicit tag, or a load of a whole state in a job that trains, means that
        checkpoint and no other.

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
        recovery, plan = self._memory.survey()
        if call.tag is not None:
            return self._load_by_tag(original, call, plan)
        self._tagged = None
        found = self._disk.find(call.directory)
        self._count_beyond(*found.checkpoints)
        rest = list(found.checkpoints)
        resumed, plan, outcome = self._load_from_memory(original, call, recovery, plan, rest)
        if resumed is None:
            if (
                rest
                and session.is_rank_zero
                and isinstance(plan, NotRecoverable)
                and not plan.empty
            ):
                logger.warning("resuming from disk (%s): %s", rest[0], plan)
            resumed = self._load_newest(original, call, rest)
        if resumed is not None:
            return resumed
        refused = self._disk.refused(found)
        self._memory.refuse_silent_restart(plan, nothing_sound(refused) if refused else "")
        if outcome is not None:
            self._memory.refuse_half_written(outcome)
        result: tuple[Any, Any] = (None, None)
        if call.load_dir is not None:
            result = original(call.load_dir, tag=call.tag, **call.options)
        session.start({})
        return result

    def _load_from_memory(
        self,
        original: Load,
        call: LoadCall,
        recovery: Recovery,
        plan: RecoveryPlan | NotRecoverable,
        checkpoints: list[DiskCheckpoint],
    ) -> tuple[tuple[Any, Any] | None, RecoveryPlan | NotRecoverable, NotRecoverable | None]:
        """The newest of memory, and those ``checkpoints`` that are newer, which leave the list.
        Returns what the call returns, if there was one; what is in memory; and why what was begun
        with could not be finished."""
        if not isinstance(plan, RecoveryPlan):
            return None, plan, None
        newer = [c for c in checkpoints if c.newer_than(plan.label)]
        checkpoints[:] = [c for c in checkpoints if not c.newer_than(plan.label)]
        if (resumed := self._load_newest(original, call, newer)) is not None:
            return resumed, plan, None
        self._memory.check_identity(plan)
        try:
            outcome = self._memory.restore(recovery)
        except LayoutError as error:
            if not plan.other_layout:
                raise
            # Nothing has been written. What is left is of the own layout, and older.
            why = f"{plan.label} of {plan.written}: {error}"
            if self._session.is_rank_zero:
                logger.warning("the memory of job %s is not used: %s", self._session.job_id, why)
            recovery, own = self._memory.survey(any_layout=False)
            if isinstance(own, NotRecoverable):
                return None, replace(own, reasons=(why,)), None
            return self._load_from_memory(original, call, recovery, own, checkpoints)
        if isinstance(outcome, NotRecoverable):
            return None, outcome, outcome
        return self._has_resumed_from_memory(outcome.label), plan, None

    def _has_resumed(
        self, path: Any, client_state: Any, source: DiskCheckpoint | VersionId | None
    ) -> tuple[Any, Any]:
        if path is not None:
            self._resumed = ResumePoint(path, client_state, source)
        return path, client_state

    def _has_resumed_from_memory(self, label: VersionId) -> tuple[Any, Any]:
        path = f"memory:{self._session.job_id}/{label.step}"
        return self._has_resumed(path, self._memory.client_state, label)

    # -- disk -------------------------------------------------------------------------------------

    def _load_newest(
        self, original: Load, call: LoadCall, checkpoints: Iterable[DiskCheckpoint]
    ) -> tuple[Any, Any] | None:
        """The first of these that is sound; those that are not are said."""
        for checkpoint in checkpoints:
            try:
                return self._has_resumed(*self._load_one(original, call, checkpoint), checkpoint)
            except DamagedError as error:
                self._disk.refuse(checkpoint, error)
        return None

    def _load_one(
        self, original: Load, call: LoadCall, disk: DiskCheckpoint, *, start: bool = True
    ) -> tuple[Any, Any]:
        """Load this one. Collective. Raises DamagedError on all ranks alike; where the job has a
        state that it could go on with, nothing has been written then."""
        if disk.arenas is None or self._resumed is not None or self._session.worker is not None:
            state = self._disk.check(disk)
        if self._session.worker is not None:
            self._leave_this_future()
        self._check_identity(disk)
        self._count_beyond(disk)
        if disk.arenas is not None:
            return self._load_arenas(disk, start=start)
        return self._load_from_disk(
            original, disk.directory, disk.tag, call.options, state, start=start
        )

    def _load_named(
        self, original: Load, call: LoadCall, *, start: bool = True
    ) -> tuple[DiskCheckpoint | None, tuple[Any, Any]]:
        """The checkpoint that the call asks for by its tag; DeepSpeed says what it thinks of
        none."""
        found = self._disk.find_named(call.directory, call.tag)
        if found is None:
            if self._session.worker is not None:
                self._leave_this_future()
            args = original, call.directory, call.tag, call.options, None
            return None, self._load_from_disk(*args, start=start)
        try:
            return found, self._load_one(original, call, found, start=start)
        except DamagedError as error:
            raise damaged(found, [str(error)]) from error

    def _load_arenas(self, disk: DiskCheckpoint, *, start: bool) -> tuple[Any, Any]:
        """A version on storage is recovered as one in memory, its blocks verified as they come
        (P5)."""
        session, began = self._session, time.perf_counter()
        recovery, plan = self._memory.survey(
            stored_participant(session, disk.path, str(disk.job_id))
        )
        outcome: RecoveryOutcome | NotRecoverable | RecoveryPlan = plan
        if isinstance(plan, RecoveryPlan):
            outcome, state = self._memory.take_up(recovery, str(disk))
        if isinstance(outcome, NotRecoverable):
            kind = LayoutError if outcome.layout_mismatch else DamagedError
            raise kind(f"{disk}: {'; '.join(outcome.reasons)}")
        self._memory.after_restore(state)
        if session.worker is None and start:
            session.start({})
        self._was_loaded(disk.path, began)
        return str(disk.path), self._memory.client_state

    def _was_loaded(self, path: Any, began: float) -> None:
        session = self._session
        session.events.write(
            "restored",
            source="disk",
            version=session.engine.global_steps,
            bytes_from={"disk": sum(image.nbytes for image in session.state.adapter.images())},
            secs=time.perf_counter() - began,
        )
        if session.worker is not None and not self._unprotected:
            self._memory.protect()
        self._memory.report(f"disk, {path}", began)

    def _count_beyond(self, *checkpoints: DiskCheckpoint) -> None:
        """The versions to come are newer than these (P3): a directory of the script's may know
        incarnations that memory, which was lost, does not. Equal on all ranks, as what was found
        is."""
        seen = (c.label.incarnation for c in checkpoints if c.label is not None)
        self._session.memory.count_on(1 + max(seen, default=0))

    def _check_identity(self, disk: DiskCheckpoint) -> None:
        session, now = self._session, self._session.topology.degrees
        was = disk.arenas or self._other_layout(disk.path) or now
        but = may_differ(was, now)
        if disk.arenas is None and but and not self._every_replica_has_all(was):
            but = BY_LAYOUT
        own = disk.job_id == session.job_id
        session.memory.identity.check_checkpoint(
            disk.fingerprint, f"the checkpoint {disk}", own=own, but=but
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
        checkpoint = None if directory is None or tag is None else directory / str(tag)
        was = None if checkpoint is None else self._other_layout(checkpoint)
        relaid: dict[str, Any] | None = None
        if checkpoint is not None and was is not None:
            change = self._engine.resizing
            where = session.control, session.topology, change, checkpoint, was
            if self._every_replica_has_all(was):
                state = read_replica_host_state(*where)
            else:
                # DeepSpeed does not load it.
                relaid = restore_checkpoint(*where, restore=self._engine.restore)
        if relaid is None:
            path, client_state = original(str(directory), tag=tag, **options)
        else:
            path, client_state = str(checkpoint), read_client_state(relaid)
        if session.worker is None and start:
            session.start({})
        if path is None:
            return path, client_state
        if relaid is not None:
            self._memory.after_restore(relaid)
        elif state is not None:
            scheduler = bool(options.get("load_lr_scheduler_states", True))
            self._engine.restore_beside_checkpoint(state, scheduler=scheduler)
            self._memory.after_restore(state)
            client_state = {**(client_state or {}), **read_client_state(state)}
        session.restored()
        foreign = relaid is None and state is None
        self._unprotected = start and foreign and self._engine.data.left_to_program
        self._was_loaded(path, began)
        return path, client_state

    def _other_layout(self, checkpoint: Path) -> Degrees | None:
        """The layout that the checkpoint was written in, if it is not this job's. Collective."""
        return other_layout(self._session.control, self._session.topology, checkpoint)

    def _every_replica_has_all(self, was: Degrees) -> bool:
        """Whether this job differs from ``was`` in the number of replicas alone, and no part of
        the state is partitioned over them."""
        return (
            only_replicas_differ(was, self._session.topology.degrees)
            and not self._session.state.adapter.images()[1].specs
        )

    def _leave_this_future(self) -> None:
        """What is in memory is the abandoned future: the versions to come belong to a new
        incarnation."""
        session = self._session
        assert session.worker is not None
        session.worker.drain(session.config.commit_timeout_secs)
        session.worker.fence()
        session.memory.count_on(session.memory.incarnation + 1)

    def _load_again(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """A load in a running job, for example back to before a loss spike."""
        if call.tag is None:
            found = self._disk.find(call.directory)
            if (resumed := self._load_newest(original, call, found.checkpoints)) is not None:
                return resumed
            if refused := self._disk.refused(found):
                raise UnrecoverableError(nothing_sound(refused))
        named, result = self._load_named(original, call)
        return self._has_resumed(*result, named)

    # -- several loads before the first step -------------------------------------------------------

    def _load_base(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """Weights without an optimizer: what a job starts from, never what it resumes (P3).

        Over what this job itself had trained they are not loaded: its script did so at its first
        start."""
        session = self._session
        resumed = self._resumed
        if resumed is not None and not self._trains and resumed.is_the_jobs_own:
            if session.is_rank_zero:
                logger.warning(
                    "%s is not loaded: the job was resumed at step %d, and base weights would "
                    "overwrite "
                    "what it has learnt",
                    *(call, session.engine.global_steps),
                )
            return resumed.path, resumed.client_state
        if session.worker is not None:
            session.worker.fence()  # P2: nothing is copied while weights are written
        self._check_base(call)
        if not self._trains:
            self._bases.append(call)
        result = original(call.load_dir, tag=call.tag, **call.options)
        session.restored()
        return result

    def _check_base(self, call: LoadCall) -> None:
        found = self._disk.find_named(call.directory, call.tag)
        if found is None:
            return
        if found.arenas is not None:
            raise PersistError(
                f"{call}: {found} is in reft's own form, and DeepSpeed loads weights alone from "
                "its files: "
                f"write them with 'reft persist --from {found.directory} --out DIR'"
            )
        try:
            self._disk.check(found, whole=False)
        except DamagedError as error:
            raise damaged(found, [str(error)]) from error

    def _load_once_more(self, original: Load, call: LoadCall) -> tuple[Any, Any]:
        """A second load of a whole state before the first step: only what is newer than memory, or
        another checkpoint than the one from disk, takes its place."""
        assert self._resumed is not None
        source = self._resumed.source
        for checkpoint in self._disk.find(call.directory).checkpoints:
            if checkpoint == source or (
                isinstance(source, VersionId) and not checkpoint.newer_than(source)
            ):
                break
            if (resumed := self._load_newest(original, call, [checkpoint])) is not None:
                return resumed
        if self._session.is_rank_zero:
            logger.info("%s found nothing newer: the job has been resumed already", call)
        return self._resumed.path, self._resumed.client_state

    def _load_by_tag(
        self, original: Load, call: LoadCall, plan: RecoveryPlan | NotRecoverable
    ) -> tuple[Any, Any]:
        """A checkpoint by name. Snapshots start with the first step: the newest state may be loaded
        yet."""
        _, result = self._load_named(original, call, start=False)
        if result[0] is None:
            return result
        self._tagged = call
        if isinstance(plan, RecoveryPlan) and self._session.is_rank_zero:
            logger.warning(
                "the memory of job %s holds %s, but the script asks for tag %r. The job goes back "
                "to that "
                "tag, unless the script calls engine.load_checkpoint(save_dir) without a tag "
                "before it "
                "trains",
                *(self._session.job_id, plan.label, call.tag),
            )
        return result

    # -- refusals ---------------------------------------------------------------------------------

    def _start_at_first_step(self) -> None:
        """The script trains, and has not resumed anything. In time it is said what that means
        (P12)."""
        session = self._session
        did = describe_restore(
            self._bases, self._tagged, () if self._bases else conditional_loads()
        )
        to_write = describe_resume_lines(self._bases, self._tagged)
        if self._tagged is None:
            _, plan = self._memory.survey()
            if isinstance(plan, RecoveryPlan):
                self._memory.refuse_to_overwrite(plan, did, to_write, persistable=True)
            self._memory.refuse_silent_restart(plan)
            consequence = (
                "After a failure the job would not be resumed: it would stop with an error."
            )
        else:
            consequence = "After every failure the job would go back to that checkpoint."
        warn(session, f"{did}. {consequence} {to_write}")
        session.start({})


def read_client_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return dict(state.get("client") or {})
