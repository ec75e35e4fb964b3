"""One engine under reft's care: how its parts come together; what happens where a step begins and
ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from importlib import import_module
from types import FrameType
from typing import Any

import torch

from reft import log
from reft.config import FaultPoint, ReftConfig, Variant
from reft.control.control import ControlGroup
from reft.device import find_vendor
from reft.engine.checks.choice import check_device, choose_protection
from reft.engine.checks.start import check_start, warn
from reft.engine.engine import (
    ClientState,
    CopySetup,
    EngineState,
    OptimizerFence,
    Protection,
    Tracer,
    TrainingEngine,
)
from reft.engine.identity import JobMemory, NodeIdentity, gather_topology, local_rank, name_job
from reft.engine.rates import IntervalRates
from reft.env import ENV_REHEARSE, ENV_REPLAY
from reft.errors import CorruptionError, CorruptJobError
from reft.faults import FaultPlan, kill_this_node
from reft.grid import VersionId
from reft.log import EventLog
from reft.memory.arena import SlotFiles
from reft.memory.job_secret import read_environment_secret
from reft.memory.protection_record import write_request
from reft.node.client import DaemonClient
from reft.node.history import read_history, restarts_among
from reft.node.progress import DeviceUse, ProgressPage, open_page
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.stats import PeerErrors, SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, WorkerCallbacks

logger = logging.getLogger(__name__)

_STEPS = 10
"""Between two writes where ``steps_per_print`` says nothing: monitors open files, or talk to
servers."""


class MonitorWriter:
    """Feeds DeepSpeed's monitor, on rank 0, if its engine has one that is on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._engine: Any = (
            getattr(session.engine, "engine", None) if session.is_rank_zero else None
        )
        self._newest: int | None = None
        if not getattr(getattr(self._engine, "monitor", None), "enabled", False):
            self._engine = None
            return
        self._newest = session.engine.global_steps
        self._recoveries = len(restarts_among(read_history(session.memory.job_dir.path)))
        """Restarts that followed a failure, before this start of the trainers."""

    def starts_at(self, step: int) -> None:
        """The engine has this step, which it did not make now."""
        self._newest = step

    def after_step(self, step: int) -> None:
        """Write once for each step, if it is time to; ``step`` is the same again behind each of its
        micro-batches but the last. Never raises (P6)."""
        if self._engine is None or step == self._newest:
            return
        self._newest = step
        try:
            if step % (self._engine.steps_per_print() or _STEPS) == 0:
                samples = int(self._engine.global_samples)
                self._engine.monitor.write_events([(*told, samples) for told in self._events(step)])
        except Exception as error:
            self._engine = None
            logger.warning(
                "DeepSpeed's monitor does not accept reft's events (%s: %s); reft sends no more "
                "of them",
                type(error).__name__,
                error,
            )

    def _events(self, step: int) -> Iterable[tuple[str, float]]:
        stats = self._session.stats
        if stats.copy_secs.newest is not None:
            yield "Reft/snapshot_seconds", stats.copy_secs.newest
        if stats.committed_step is not None:
            yield "Reft/committed_step", stats.committed_step
            yield "Reft/commit_lag_steps", max(0, step - stats.committed_step)
        yield "Reft/tolerance_left", self._session.tolerance
        yield "Reft/recoveries", self._recoveries


class DeviceMemory:
    def __init__(
        self, page: ProgressPage, device: torch.device, *, every_secs: float = 1.0
    ) -> None:
        self._page = page
        self._device = device
        self._vendor = find_vendor(device)
        self._every_secs = every_secs
        self._total = 0
        self._next = 0.0

    def after_step(self) -> None:
        """Note it, if it is time. It never raises."""
        now = time.monotonic()
        if self._vendor is None or now < self._next:
            return
        self._next = now + self._every_secs
        try:
            if stats := self._vendor.module.memory_stats_as_nested_dict(self._device):
                allocated, reserved = (
                    stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved")
                )
                if not self._total:
                    free, _ = self._vendor.module.mem_get_info(self._device)
                    self._total = free + reserved["current"]
                self._page.set_device(
                    DeviceUse(self._total, allocated["current"], allocated["peak"])
                )
        except (RuntimeError, KeyError, TypeError) as error:  # another allocator counts nothing
            logger.info("the memory of %s is not watched: %s", self._device, error)
            self._vendor = None


def _fails() -> bool:
    """Whether the script ends by an exception: its state after the last step may be half
    changed."""
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return raised is not None and not isinstance(raised, SystemExit)


class Session:
    """Snapshots of one training engine. Made by :func:`reft.attach` and its like, collectively on
    all ranks.

    Raises:
        UnsupportedStateError: the engine holds state reft does not know.
        LayoutError: the ranks do not form a pp x dp x tp grid.
        ConfigError: another engine of this process has the job's memory.

    Attributes:
        control: agrees with the other ranks, on the training thread.
        topology: where all ranks are; ``places`` says what that is known from.
        memory: what the job has on this node.
        fence: training waits there (P2).
        progress: what this rank is at, for its node's daemon.
        tracer: of steps, for tests, pictures and the profiler.
        worker: takes versions; None before :meth:`start`.
        rates: how often, and how often they go to storage; from :meth:`start` on.
    """

    def __init__(
        self, engine: TrainingEngine, config: ReftConfig, client_state: ClientState | None
    ) -> None:
        self.engine = engine
        self.coordinate, degrees = engine.place()
        self.control = ControlGroup(
            config.commit_timeout_secs,
            node=NodeIdentity.here().node,
            secret=read_environment_secret(),
            transport=config.transport,
        )
        self.config = config = name_job(config, self.control)
        log.set_place(self.job_id, str(self.coordinate), engine.global_steps)
        self.topology, self.places = gather_topology(self.control, self.coordinate, degrees)
        # Whoever goes on with another engine, should this one be refused, may have the memory.
        with ExitStack() as undo:
            undo.callback(self.control.leave)
            if engine.data is not None:
                undo.callback(engine.data.close)
            self.memory = JobMemory(self)
            undo.callback(self.memory.close)
            self.progress = open_page(
                self.memory.job_dir.path,
                local_rank(),
                self.control.rank,
                config.hang_factor,
                config.hang_timeout_secs,
            )
            undo.callback(self.progress.close)
            self._put_together(client_state)
            undo.callback(self.state.close)
            check_start(self)
            undo.pop_all()

    def _put_together(self, client_state: ClientState | None) -> None:
        """Everything that needs the job's memory. Collective."""
        self.worker: SnapshotWorker | None = None
        self.faults = FaultPlan(
            self.config.faults,
            self.coordinate,
            self.memory.incarnation,
            kill_node=lambda: kill_this_node(self.memory.job_dir.path),
        )
        self.stats, self.peer_errors = SnapshotStats(), PeerErrors()
        self.events = EventLog(self.control.rank)
        self.control.on_silence = lambda missing, secs: self.events.write(
            "silent", ranks=missing, secs=secs
        )
        self.copying = CopySetup(self)
        self.device_memory = DeviceMemory(self.progress, self.engine.device)
        if not self.copying.engine.asynchronous:  # else calls return before their work is done
            self.progress.set_place((self.coordinate.pp, self.coordinate.dp, self.coordinate.tp))
        self.device_findings = check_device(self)
        if chosen := self.config.chooses:
            self.config = choose_protection(self)
        self.protection = Protection(self, chosen=chosen)
        self.fence = OptimizerFence(self)
        self.state = EngineState(self, client_state)
        memory = self.memory
        self.daemon = DaemonClient(
            memory.job_dir.path, memory.job_dir.secret, self.progress, memory.incarnation
        )
        self.monitoring = MonitorWriter(self)
        self.stopping = StopController(self.config.grace_secs)
        self.tracer = Tracer()
        self._last_step = self.engine.global_steps
        self._stepped = False  # whether a step was made and the next one has not begun
        self._is_due = False  # whether that step's version is to be taken
        self.progress.set_step(self._last_step)
        self._boundary_secs = time.perf_counter()
        self.closed = False
        self.first_request: SnapshotRequest | None = None
        """Of this life; what has become of it is noted there."""

    # -- facts -----------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        assert self.config.job_id is not None  # name_job() has seen to it
        return self.config.job_id

    @property
    def node(self) -> str:
        return self.topology.nodes[self.control.rank]

    @property
    def ranks_here(self) -> int:
        """Ranks on this node, from the placement: not every launcher says LOCAL_WORLD_SIZE."""
        return len(self.topology.local_ranks(self.node))

    @property
    def is_rank_zero(self) -> bool:
        return self.control.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """One rank per node reads and writes what the node has once."""
        return self.topology.local_ranks(self.node)[0] == self.control.rank

    @property
    def stepped(self) -> bool:
        """Whether a step was made and the next one has not begun: the script evaluates, saves or
        reads."""
        return self._stepped

    @property
    def tolerance(self) -> int:
        """Node losses that every sharding group survives, from the real placement (P4)."""
        return self.protection.record.tolerance

    # -- what the script may change ----------------------------------------------------------------

    def use(self, variant: Variant | str) -> None:
        """Change when bytes are copied, from the next version on. Call it between steps, on all
        ranks."""
        self.copying.variant = Variant(variant)

    def protect(self, scheme: str) -> None:
        """Switch the protection of the versions to come, at one version boundary on all ranks. One
        rank that asks is enough; ``reft protect`` does the same from outside. Raises ConfigError:
        there is no such scheme."""
        write_request([self.memory.job_dir.path], scheme)

    # -- start and end -----------------------------------------------------------------------------

    def start(self, frozen: Mapping[int, VersionId]) -> None:
        """Begin to take snapshots. ``frozen`` slots hold the version that was just recovered."""
        self.memory.record_identity()
        self.rates = IntervalRates(self, from_memory=bool(frozen))
        self.control.end_pairs()  # of the load, with all of the sharding group
        job_dir, limit, ranks = self.memory.job_dir, self.config.memory_limit_bytes, self.ranks_here
        control = self.control.for_worker(job_dir.secret)
        arenas = ArenaSet(
            SlotFiles(job_dir.path, local_rank(), self.config.arena_count, job_dir.secret, ranks),
            *(self.job_id, self.topology, self.control.rank),
            frozen=frozen,
            limit_bytes=limit // ranks if limit is not None else None,
            engine=self.copying.engine,
            remake=self._remake_memory,
        )
        self.worker = SnapshotWorker(
            control=control,
            topology=self.topology,
            arenas=arenas,
            block_bytes=self.config.block_bytes,
            host_bytes=self.config.host_state_bytes,
            recompute=None if self.state.gradients is None else self.state.gradients.recipe,
            verify=self.config.verify,
            switch=self.protection.switch(control, arenas),
            copier=self.copying.copier(),
            pacer=self.copying.pacer,
            watchers=WorkerCallbacks(
                self.stats,
                self.faults,
                self._committed,
                self._skipped,
                self.peer_errors,
                self.rates.wanted_persist_interval,
                self.rates.wanted_interval,
            ),
        )
        self.daemon.configure(self.config)
        self.tracer.profile(self)
        # Without versions there are no votes to stop by.
        if self.copying.takes_versions and (lacks := self.stopping.install(self)):
            warn(self, lacks)

    def _remake_memory(self) -> None:
        self.memory.remake()
        self.protection.note()

    def flush(self, timeout_secs: float) -> bool:
        """Take a version of the last step now, instead of where the next one begins, and wait until
        every version is committed or given up. Collective. Returns whether none is under way any
        more."""
        self._take_last_step()
        return self.worker is not None and self.worker.drain(timeout_secs)

    def _take_last_step(self) -> None:
        if self._stepped and self.worker is not None and self.copying.takes_versions:
            self._stepped = False
            self.submit(required=True)

    def close(self, timeout_secs: float | None = None) -> None:
        """Take a version of the last step if the script ends well, finish what is under way, within
        the grace unless another time is given, and release everything. The memory stays."""
        if self.closed:
            return
        if not _fails():
            self._take_last_step()
        self.closed = True
        self.progress.close()
        self.stopping.uninstall()
        if self.worker is not None:
            self.worker.close(self.config.grace_secs if timeout_secs is None else timeout_secs)
        self.state.close()
        self.memory.record.close()
        self.memory.close()
        self.control.leave()
        self.events.write("closed", **self.stats.to_json())

    # -- what is told of versions, by the worker thread --------------------------------------------

    def _committed(self, label: VersionId) -> None:
        """All ranks have the version. Whatever cannot be told costs nobody else the news. Other
        threads wait for the answers of the daemon and of the rendezvous store: the next vote must
        not."""
        stats = self.stats.to_json()
        due, told_of_rates = False, dict[str, Any]()
        try:
            due, told_of_rates = self.rates.committed(label)
        except Exception as error:
            self.peer_errors.record("the rates of versions cannot be computed", error)
        self.peer_errors.run_guarded(
            "the daemon cannot be informed of a commit",
            lambda: self.daemon.report_commit(
                label,
                stats | told_of_rates,
                unprotected=self.protection.lost,
                due=due,
            ),
        )
        # With the counters: a rank that is killed leaves no "closed" event.
        told = {
            key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")
        }
        self.events.write("commit", step=label.step, copy_secs=self.stats.copy_secs.newest, **told)
        if self.is_rank_zero:
            self.memory.record.committed(label, self.peer_errors)

    def _skipped(self, step: int, cause: str) -> None:
        self.daemon.report_skip(cause, self.stats.to_json())
        self.events.write("skip", step=step, cause=cause)

    # -- every step --------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        self.faults.reach(FaultPoint.DURING_STEP, self._last_step)
        self.fence.before_optimizer_step()

    def begin_step(self) -> None:
        """The next step begins: take a version of the state that it begins with, if one is due
        (P2).

        Called where a training forward pass or ``train_batch`` begins; later calls for the same
        step do nothing. A state that cannot be captured is not raised here: its version is voted
        down (P6). Exits where the job stops here, as it was told to."""
        if not self._stepped or self.worker is None or self.closed:
            return
        self._stepped = False
        step = self._last_step
        now = time.perf_counter()
        step_secs, self._boundary_secs = now - self._boundary_secs, now
        self.rates.step(step, step_secs)
        if not self.copying.takes_versions:
            return
        self.stopping.stop_if_due(self, step, step_secs)
        if self._is_due:
            self.rates.begun(self.submit(required=False))
        else:
            self.state.boundary.skip()
            self.worker.submit(
                SnapshotRequest(VersionId(self.memory.incarnation, step), None, b"", vote_only=True)
            )

    def check_tensors(self) -> None:
        """Called on the training thread between two passes of a step; see
        :meth:`~reft.snapshot.worker.SnapshotWorker.check_between_passes`."""
        if self.worker is not None:
            self.worker.check_between_passes()

    def after_step(self) -> None:
        """A call that may have made an optimizer step has returned. What the script changes from
        here on, until the next step begins, belongs to the version of this step."""
        step = self.engine.global_steps
        if step != self._last_step and not self.closed:
            self._last_step, self._stepped = step, True
            log.set_step(step)
            self._is_due = self.worker is not None and self.rates.takes_version(step)
            self.state.boundary.step_ended(is_due=self._is_due)
            if not self.tracer.woven:
                self.copying.pacer.end_step("step", ())
        self.progress.end_step(self._last_step)
        self.device_memory.after_step()
        self.monitoring.after_step(self._last_step)
        waited_secs = self.fence.take_waited_secs()
        if self.tracer.active and self.worker is not None:
            self.tracer.add(self, self._last_step, self.worker.copier.records, waited_secs)

    def submit(self, *, required: bool) -> SnapshotRequest:
        """Capture the host state and hand the version to the worker."""
        assert self.worker is not None
        began = time.perf_counter()
        label = VersionId(self.memory.incarnation, self.engine.global_steps)
        request = self.state.capture(label, required=required, variant=self.copying.variant)
        self.worker.submit(request)
        self.first_request = self.first_request or request
        if request.variant is Variant.BLOCKING:
            # the fence says so if it has not ended
            request.copied.wait(self.config.commit_timeout_secs)
        self.stats.stalls_secs.append(time.perf_counter() - began)
        return request

    def restored(self) -> None:
        """The engine's state was replaced: the images may be other tensors, the step another
        one."""
        self.state.replaced()
        if self.worker is not None and self._last_step != self.engine.global_steps:
            self.rates.went_to(self.engine.global_steps)
        self._last_step, self._stepped = self.engine.global_steps, False
        self.monitoring.starts_at(self._last_step)
        self.progress.set_step(self._last_step)
        log.set_step(self._last_step)


def record(session: Session) -> None:
    """Have every step recorded where `reft rehearse` asks for it, by a feature that the core does
    not import otherwise. Called when the engine's methods are wrapped: the recorder's wrappers go
    around them."""
    if os.environ.get(ENV_REHEARSE):
        import_module("reft.rehearse.record").attach(session)


_REPEAT_SECS = 2.0
_STOP_NEXT_SECS = 1.0
"""After a step at least this long the job stops after the next one; after shorter ones it does one
more."""
_LONG_STEP_SECS = 0.5
"""From here on every boundary waits for the vote before it. Well below _STOP_NEXT_SECS: the ranks
do not measure exactly the same, and all of them must have heard the vote before they decide whether
to stop."""
_VOTE_SECS = 5.0
_VOTE_SHARE = 0.1  # of a step: most that it waits for a vote that does not come
_CLOSE_SECS = 1.0
_ALONE_SHARE = 0.5
"""Of the grace: after that the votes are not waited for, which would tell when all ranks stop."""
_BOUNDARY_SECS = 1.0
"""Where a step begins within so much more, the rank stops there by itself: its state is newer."""


class StopController:
    """Notes the request to stop, and decides after which step one rank does. The next votes carry
    the request to all ranks, so that all stop after the same step.

    Batch systems signal every process of a job and the launcher passes its own on, so repeats
    within two seconds mean the same; a later one acts at once, as if reft were not there.

    The job ends where the next step would begin: what the script does after its last step, such as
    saving, is done. Where no step begins within half of the grace, as in a long evaluation, the
    newest committed version is persisted instead and the process exits."""

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self.requested = False
        self._session: Session | None = None
        self._signal = signal.SIGTERM
        self._since_secs = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self.together = False  # whether the job is being stopped, and all ranks after the same step
        self._at_boundary = False  # whether the job is being stopped where a step begins
        self.replayed_step = int(os.environ.get(ENV_REPLAY) or 0)

    # -- the request -------------------------------------------------------------------------------

    def install(self, session: Session) -> str | None:
        """Take over SIGTERM and SIGINT; only the main thread can. Returns what to say where it
        cannot."""
        self._session = session
        if threading.current_thread() is not threading.main_thread():
            return (
                "reft was attached outside the main thread: SIGTERM will not flush a snapshot. "
                "Call "
                "deepspeed.initialize in the main thread"
            )
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as nohup and background jobs of a shell have it
            self._previous[number] = signal.signal(number, self._handle)
        return None

    def uninstall(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self._since_secs, self.requested = time.monotonic(), True
            self._signal = signal.Signals(number)
            # A thread: the main one may be in a call that does not return for minutes.
            watch = threading.Timer(
                _ALONE_SHARE * self._grace_secs + _BOUNDARY_SECS, self._stop_between_steps
            )
            watch.daemon = True
            watch.start()
        elif self.waited_secs >= _REPEAT_SECS:
            self.uninstall()
            signal.raise_signal(number)

    @property
    def waited_secs(self) -> float:
        """Time since the request; 0 if there was none."""
        return time.monotonic() - self._since_secs if self.requested else 0.0

    # -- the end -----------------------------------------------------------------------------------

    def stop_if_due(self, session: Session, step: int, step_secs: float) -> None:
        """Stop the job after ``step``, which took ``step_secs``, if the ranks have agreed on it or
        this rank can wait no longer. Exits then."""
        worker = session.worker
        assert worker is not None
        votes = worker.votes
        if 0 < self.replayed_step <= step:
            self._at_boundary = True
            stop_replay(session, step)
        if self.requested or votes.halt is not None:
            # The vote that carries this is over when training gets there: all ranks know by then.
            votes.stop_proposal = step + (1 if step_secs > _STOP_NEXT_SECS else 2)
        if step_secs > _LONG_STEP_SECS:
            worker.await_vote(step - 1, min(_VOTE_SECS, _VOTE_SHARE * step_secs))
        if votes.stop_step is not None and step >= votes.stop_step:
            self._at_boundary = True
            self.together = votes.halt is None
            if self.together:
                stop_together(session, step)
            else:
                stop_for_corruption(session, step)
        # P6: this rank was told to stop, and no vote will say in time after which step all do.
        elif (
            votes.stop_step is None
            and self.requested
            and (self.waited_secs > _ALONE_SHARE * self._grace_secs or worker.broken is not None)
        ):
            self._at_boundary = True
            stop_alone(session, step)

    def _stop_between_steps(self) -> None:
        """No step has begun in time since the request: persist the newest committed version and
        exit. What was trained since is made again after the restart. Runs on a thread of its
        own."""
        session = self._session
        if session is None or session.closed or self._at_boundary or not session.stepped:
            return
        step = session.stats.committed_step
        persisted = None
        left = self._grace_secs - self.waited_secs - _CLOSE_SECS
        if step is not None and session.config.persist.dir is not None:
            persisted = session.daemon.persist_now(
                VersionId(session.memory.incarnation, step), max(0.0, left)
            )
        logger.warning(
            "stopping on request between two steps, %.0f s after it: no step has begun. Last "
            "committed: step "
            "%s%s",
            self.waited_secs,
            step,
            "" if persisted is None else f", persisted: {persisted}",
        )
        session.events.write("stopped", step=step, committed=False, persisted=bool(persisted))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + int(self._signal))  # the main thread cannot be asked to

    def end(self, session: Session, *timeout_secs: float) -> None:
        session.close(*timeout_secs)
        raise SystemExit(128 + int(self._signal))  # as a shell reports it


def stop_together(session: Session, step: int) -> None:
    """Told to stop, and all ranks know: one last version, committed and on disk. Exits."""
    committed, persisted = _take_last_version(session, step, session.config.grace_secs)
    logger.warning(
        "stopping on request: step %d is %s%s",
        *(step, "committed in memory" if committed else "NOT committed", persisted),
    )
    session.stopping.end(session)


def stop_replay(session: Session, step: int) -> None:
    """The step that was asked for is made: its version is there to be compared. Exits."""
    _take_last_version(session, step, session.config.commit_timeout_secs)
    session.close()
    raise SystemExit(0)


def stop_for_corruption(session: Session, step: int) -> None:
    """Nothing of what was trained since the newest version is kept. Raises CorruptionError, or
    CorruptJobError."""
    assert session.worker is not None
    halt = session.worker.votes.halt
    assert halt is not None
    session.events.write("halted", step=step, why=halt.why, restarts=halt.restarts)
    session.close(_CLOSE_SECS)
    if halt.restarts:
        raise CorruptionError(
            f"{halt.why}; the job goes back to step {session.stats.committed_step}"
        )
    raise CorruptJobError(
        f"{halt.why}, and this start has committed nothing: another one would end alike. Look for "
        "the cause "
        f"(data, learning rate, a device), then start from an earlier checkpoint"
    )


def stop_alone(session: Session, step: int) -> None:
    """Exit after the step that has just ended. It is taken in what is left of the grace: where
    steps are longer than half of it, no vote could name one to stop after, but all ranks that were
    told get here alike."""
    left = session.config.grace_secs - session.stopping.waited_secs - _CLOSE_SECS
    committed, persisted = _take_last_version(session, step, max(0.0, left))
    why = (
        "grace_secs is too short for another step" if committed else "the other ranks do not answer"
    )
    outcome = f"Committed in memory{persisted}"
    if not committed:
        outcome = f"Last committed: step {session.stats.committed_step}"
    logger.warning("stopping on request after step %d, without a vote: %s. %s", step, why, outcome)
    session.stopping.end(session, _CLOSE_SECS)


def _take_last_version(session: Session, step: int, secs: float) -> tuple[bool, str]:
    """Whether the state after the last step was committed within the time; where it was persisted,
    in words."""
    deadline = time.monotonic() + secs
    request = session.submit(required=True)
    assert session.worker is not None
    session.worker.drain(max(0.0, deadline - time.monotonic()))
    persisted = None
    if request.committed and session.config.persist.dir is not None:
        persisted = session.daemon.persist_now(request.label, max(0.0, deadline - time.monotonic()))
    session.events.write(
        "stopped", step=step, committed=request.committed, persisted=bool(persisted)
    )
    return request.committed, "" if persisted is None else f", persisted: {persisted}"
