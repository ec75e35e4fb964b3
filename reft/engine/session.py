"""One engine under reft's care: how its parts come together, and what happens at every step boundary."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reft import log
from reft.config import FaultPoint, ReftConfig, Variant
from reft.device import Vendor, vendor_of
from reft.engine.checks.device import check_device
from reft.engine.checks.start import check_start, warn
from reft.engine.copying import Copying, OptimizerFence
from reft.engine.engine import ClientState, EngineState, TrainingEngine
from reft.engine.identity import Identity, local_rank, name_job, note_session
from reft.engine.memory import CommitNotes, JobMemory, JobRecord, gather_topology, open_control
from reft.engine.protection import Protection, choose_protection
from reft.engine.rates import Rates
from reft.engine.stopping import Preemption, Stopping
from reft.faults import FaultPlan, kill_this_node
from reft.grid import Coordinate
from reft.log import EventLog
from reft.memory.arena import SlotFiles
from reft.naming import Label
from reft.node.client import DaemonClient
from reft.node.history import read_history, restarts_among
from reft.node.progress import DeviceUse, ProgressPage, open_page
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.complaints import Complaints
from reft.snapshot.scheduling.has import HasSchedule
from reft.snapshot.scheduling.trace import ChunkRecord, InstructionRecord, StepTrace
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Watchers, WorkerOptions

if TYPE_CHECKING:
    from reft.profile.profiler import Profiler


logger = logging.getLogger(__name__)

_STEPS = 10
"""Between two writes where ``steps_per_print`` says nothing: monitors open files, or talk to servers."""

Event = tuple[str, float, int]
"""Name, value, and the global samples that DeepSpeed's own events are counted by."""


class Monitoring:
    """Feeds DeepSpeed's monitor, if ``engine`` has one that is on."""

    def __init__(self, engine: Any, stats: SnapshotStats, job_dir: Path) -> None:
        self._engine = getattr(engine, "engine", None)
        self._stats = stats
        self._newest: int | None = None
        if not getattr(getattr(self._engine, "monitor", None), "enabled", False):
            self._engine = None
            return
        self._newest = int(self._engine.global_steps)  # type: ignore[union-attr]
        self._recoveries = len(restarts_among(read_history(job_dir)))
        """Restarts that followed a failure, before this start of the trainers."""

    def starts_at(self, step: int) -> None:
        """The engine has this step, which it did not make now."""
        self._newest = step

    def after_step(self, step: int, tolerance: int) -> None:
        """Write once for each step, if it is time to; ``step`` is the same again behind each of its
        micro-batches but the last. Never raises (P6)."""
        if self._engine is None or step == self._newest:
            return
        self._newest = step
        try:
            if step % (self._engine.steps_per_print() or _STEPS) == 0:
                samples = int(self._engine.global_samples)
                self._engine.monitor.write_events(list(self._events(step, samples, tolerance)))
        except Exception as error:
            self._engine = None
            logger.warning(
                "DeepSpeed's monitor does not accept reft's events (%s: %s); reft sends no more of them",
                type(error).__name__,
                error,
            )

    def _events(self, step: int, samples: int, tolerance: int) -> Iterable[Event]:
        stats = self._stats
        if stats.copy_secs.newest is not None:
            yield "Reft/snapshot_seconds", stats.copy_secs.newest, samples
        if stats.committed_step is not None:
            yield "Reft/committed_step", stats.committed_step, samples
            yield "Reft/commit_lag_steps", max(0, step - stats.committed_step), samples
        yield "Reft/tolerance_left", tolerance, samples
        yield "Reft/recoveries", self._recoveries, samples


class Reports:
    """What is told of versions. Called by the worker thread. ``record``: in the rendezvous store, on one
    rank; ``unprotected``: whether the loss of a node, survived before, is not any more."""

    def __init__(
        self,
        *,
        stats: SnapshotStats,
        events: EventLog,
        daemon: DaemonClient,
        record: JobRecord | None,
        at: Coordinate,
        unprotected: Callable[[], bool],
        rates: Rates,
        complaints: Complaints,
    ) -> None:
        self._stats = stats
        self._events = events
        self._daemon = daemon
        self._notes = None if record is None else CommitNotes(record, complaints)
        self._at = at
        self._unprotected = unprotected
        self._rates = rates
        self._complaints = complaints

    def committed(self, label: Label) -> None:
        """All ranks have the version. Whatever cannot be told costs nobody else the news. Other threads wait
        for the answers of the daemon and of the rendezvous store: the next vote must not."""
        stats = self._stats.to_json()
        due, told_of_rates = False, dict[str, Any]()
        try:
            due, told_of_rates = self._rates.committed(label)
        except Exception as error:
            self._complaints.tell("the rates of versions cannot be computed", error)
        self._complaints.attempt(
            "the daemon cannot be informed of a commit",
            lambda: self._daemon.notify_commit(
                label, self._at, stats | told_of_rates, unprotected=self._unprotected(), due=due
            ),
        )
        # With the counters: a rank that is killed leaves no "closed" event.
        told = {key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")}
        self._events.write("commit", step=label.step, copy_secs=self._stats.copy_secs.newest, **told)
        if self._notes is not None:
            self._notes.committed(label)

    def skipped(self, step: int, cause: str) -> None:
        self._daemon.notify_skip(step, cause, self._stats.to_json())
        self._events.write("skip", step=step, cause=cause)

    def close(self) -> None:
        """Have the last commit noted, for two seconds at most."""
        if self._notes is not None:
            self._notes.close()


class DeviceMemory:
    def __init__(self, page: ProgressPage, device: torch.device, *, every_secs: float = 1.0) -> None:
        self._page = page
        self._device = device
        self._vendor = vendor_of(device)
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
            use = self._look(self._vendor)
        except (RuntimeError, KeyError, TypeError) as error:  # another allocator counts nothing
            logger.info("the memory of %s is not watched: %s", self._device, error)
            self._vendor = None
            return
        if use is not None:
            self._page.set_device(use)

    def _look(self, vendor: Vendor) -> DeviceUse | None:
        stats = vendor.module.memory_stats_as_nested_dict(self._device)
        if not stats:
            return None
        allocated, reserved = (stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
        if not self._total:
            free, _ = vendor.module.mem_get_info(self._device)
            self._total = free + reserved["current"]
        return DeviceUse(total=self._total, allocated=allocated["current"], peak_allocated=allocated["peak"])


class Woven:
    """What executes the instructions of a pipeline, as a tracer sees it."""

    def __init__(self) -> None:
        self.mark: Callable[[], Any] | None = None
        """Set to have the device's time marked before and after every traced instruction, too."""
        self._records: list[InstructionRecord] = []
        self._marks: list[tuple[Any, Any]] = []
        self._computing: dict[str, list[tuple[Any, Any]]] = {"ForwardPass": [], "BackwardPass": []}
        self._began = 0.0

    def take_records(self) -> tuple[tuple[InstructionRecord, ...], float]:
        """Instructions timed since the last call, and when the last schedule began."""
        records, self._records = self._records, []
        return tuple(records), self._began

    def take_marks(self) -> list[tuple[Any, Any]]:
        """What :attr:`mark` returned before and after each instruction since the last call."""
        marks, self._marks = self._marks, []
        return marks


class Tracer:
    """Collects the traces of one rank. Used by the training thread."""

    def __init__(self) -> None:
        self.traces: deque[StepTrace] | None = None  # set to a bounded deque to have every step traced
        self.profiler: Profiler | None = None
        self.weaver: Woven | None = None

    @property
    def active(self) -> bool:
        return self.traces is not None or (self.profiler is not None and self.profiler.measuring)

    def profile(self, session: Session) -> None:
        """Begin a profile, if the session's block wants one. Collective."""
        config = session.config.profile
        if not config.steps:
            return
        if self.weaver is None:
            name = session.engine.name
            logger.warning("%s cannot be profiled; only a pipeline engine can", name)
            return
        from reft.profile.clock import DeviceClock
        from reft.profile.profiler import Profiler

        # On a device calls return before their work is done; its own clock is read, without waiting.
        vendor = vendor_of(session.engine.device)
        clock = None if vendor is None else DeviceClock(vendor)
        self.weaver.mark = None if clock is None else clock.mark
        self.profiler = Profiler(
            config,
            clock,
            job_id=session.job_id,
            at=session.coordinate,
            degrees=session.topology.degrees,
            secret=session.memory.job_dir.secret,
            snapshot_bytes=lambda: session.stats.bytes_per_snapshot,
        )

    def add(self, step: int, rank: int, stage_id: int, chunks: deque[ChunkRecord], fence_secs: float) -> None:
        """A step has ended. ``chunks``: what was copied since the step before; emptied. ``fence_secs``: what
        training waited for copies."""
        instructions: tuple[InstructionRecord, ...] = ()
        began, marks = 0.0, []
        if self.weaver is not None:
            (instructions, began), marks = self.weaver.take_records(), self.weaver.take_marks()
        copied = []
        while chunks:  # the thread that copies adds more
            copied.append(chunks.popleft())
        trace = StepTrace(
            step=step,
            rank=rank,
            stage_id=stage_id,
            begin_secs=began,
            end_secs=time.perf_counter(),
            instructions=instructions,
            chunks=tuple(copied),
            fence_secs=fence_secs,
        )
        if self.traces is not None:
            self.traces.append(trace)
        if self.profiler is not None:
            self.profiler.add(trace, marks)
            if self.weaver is not None and not self.profiler.measuring:
                self.weaver.mark = None


class Session:
    """Snapshots of one training engine. Made by :func:`reft.attach` and its like, collectively on all ranks.

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

    def __init__(self, engine: TrainingEngine, config: ReftConfig, client_state: ClientState | None) -> None:
        self.engine = engine
        self.coordinate, degrees = engine.place()
        self.control = open_control(config)
        self.config = config = name_job(config, self.control)
        log.set_place(self.job_id, str(self.coordinate), engine.global_steps)
        self.topology, self.places = gather_topology(self.control, self.coordinate, degrees)
        identity = Identity.of_engine(
            engine, config, at=self.coordinate, degrees=degrees, control=self.control
        )
        # Whoever goes on with another engine, should this one be refused, may have the memory.
        with ExitStack() as undo:
            undo.callback(self.control.leave)
            if engine.data is not None:
                undo.callback(engine.data.close)
            self.memory = JobMemory(
                config, identity, node=self.node, writes=self.is_first_on_node, control=self.control
            )
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
            undo.callback(self.daemon.close)
            undo.callback(self.state.close)
            check_start(self)
            undo.pop_all()
        note_session(config.memory_dir / self.job_id, self)

    def _put_together(self, client_state: ClientState | None) -> None:
        """Everything that needs the job's memory. Collective."""
        self.worker: SnapshotWorker | None = None
        self._reports: Reports | None = None
        self.faults = FaultPlan(
            self.config.faults,
            self.coordinate,
            self.memory.incarnation,
            kill_node=lambda: kill_this_node(self.memory.job_dir.path),
        )
        self.stats = SnapshotStats()
        self.events = EventLog(self.control.rank)
        self.control.on_silence = lambda missing, secs: self.events.write("silent", ranks=missing, secs=secs)
        self.copying = Copying(
            self.config,
            self.engine.device,
            stage_id=self.coordinate.pp,
            stages=self.topology.degrees.pp,
            micro_batches=self.engine.micro_batches,
            ranks_here=self.ranks_here,
        )
        self.device_memory = DeviceMemory(self.progress, self.engine.device)
        if not self.copying.engine.asynchronous:  # else calls return before their work is done
            self.progress.set_place((self.coordinate.pp, self.coordinate.dp, self.coordinate.tp))
        self.device_findings = check_device(self)
        if chosen := self.config.chooses:
            self.config = choose_protection(self)
        self.protection = Protection(self, chosen=chosen)
        self.fence = OptimizerFence(lambda: self.worker, self.copying, self.stats)
        self.state = EngineState(self, client_state)
        memory = self.memory
        self.daemon = DaemonClient(memory.job_dir.path, memory.job_dir.secret, memory.incarnation)
        watched = self.engine if self.is_rank_zero else None
        self.monitoring = Monitoring(watched, self.stats, memory.job_dir.path)
        self.stopping = Stopping(self.config.grace_secs, Preemption())
        self.tracer = Tracer()
        self._last_step = self.engine.global_steps
        self.progress.set_step(self._last_step)
        self._boundary_secs = time.perf_counter()
        self._closed = False
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
    def schedule(self) -> HasSchedule | None:
        """The plan by which bytes are copied now; None before one was made."""
        return self.copying.pacer.plan

    @property
    def tolerance(self) -> int:
        """Node losses that every sharding group survives, from the real placement (P4)."""
        return self.protection.record.tolerance

    @property
    def closed(self) -> bool:
        return self._closed

    # -- what the script may change ------------------------------------------------------------------

    def use(self, variant: Variant | str) -> None:
        """Change when bytes are copied, from the next version on. Call it between steps, on all ranks."""
        self.copying.variant = Variant(variant)

    def protect(self, scheme: str) -> None:
        """Switch the protection of the versions to come, at one version boundary on all ranks. One rank that
        asks is enough; ``reft protect`` does the same from outside. Raises ConfigError: there is no such
        scheme."""
        self.protection.order(scheme)

    # -- start and end -----------------------------------------------------------------------------

    def start(self, frozen: Mapping[int, Label]) -> None:
        """Begin to take snapshots. ``frozen`` slots hold the version that was just recovered."""
        self.memory.record_identity()
        self.rates = Rates(self, from_memory=bool(frozen))
        self.control.end_pairs()  # of the load, with all of the sharding group
        control = self.control.for_worker(self.memory.job_dir.secret)
        self.worker = SnapshotWorker(
            control=control,
            topology=self.topology,
            arenas=self._arenas(frozen),
            options=WorkerOptions(
                block_bytes=self.config.block_bytes,
                host_bytes=self.config.host_state_bytes,
                recompute=self.state.recomputing.recipe,
                verify=self.config.verify,
            ),
            switch=self.protection.switch(control),
            copier=self.copying.copier(),
            pacer=self.copying.pacer,
            watchers=self._watchers(),
        )
        self.daemon.configure(self.config)
        self.tracer.profile(self)
        # Without versions there are no votes to stop by.
        if self.copying.takes_versions and (lacks := self.stopping.preemption.install()):
            warn(self, lacks)

    def _arenas(self, frozen: Mapping[int, Label]) -> ArenaSet:
        job_dir, limit = self.memory.job_dir, self.config.memory_limit_bytes
        ranks = self.ranks_here
        return ArenaSet(
            SlotFiles(job_dir.path, local_rank(), self.config.arena_count, job_dir.secret, ranks),
            ArenaIdentity(self.job_id, self.node, self.topology.degrees, self.coordinate),
            frozen=frozen,
            limit_bytes=limit // ranks if limit is not None else None,
            engine=self.copying.engine,
            remake=self._remake_memory,
        )

    def _watchers(self) -> Watchers:
        record = self.memory.record if self.is_rank_zero else None
        complaints = Complaints()
        self._reports = reports = Reports(
            stats=self.stats,
            events=self.events,
            daemon=self.daemon,
            record=record,
            at=self.coordinate,
            unprotected=lambda: self.protection.lost,
            rates=self.rates,
            complaints=complaints,
        )
        watchers = Watchers(self.stats, self.faults, reports.committed, reports.skipped, complaints)
        if self.rates.memory is not None:
            watchers.wanted_interval = self.rates.memory.wanted_interval
        if self.rates.storage is not None:
            watchers.wanted_persist_interval = self.rates.storage.wanted_interval
        return watchers

    def _remake_memory(self) -> None:
        self.memory.remake()
        self.protection.note()

    def close(self, timeout_secs: float | None = None) -> None:
        """Finish what is under way, within the grace unless another time is given, and release everything.
        The memory stays."""
        if self._closed:
            return
        self._closed = True
        self.progress.close()
        self.stopping.preemption.uninstall()
        if self.worker is not None:
            self.worker.close(self.config.grace_secs if timeout_secs is None else timeout_secs)
        self.state.close()
        self.daemon.close()
        if self._reports is not None:
            self._reports.close()
        self.memory.close()
        self.control.leave()
        self.events.write("closed", **self.stats.to_json())

    # -- every step --------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        self.faults.reach(FaultPoint.DURING_STEP, self._last_step)
        self.fence.before_optimizer_step()

    def boundary(self) -> None:
        """The state after an optimizer step is final: take a snapshot if one is due. A state that cannot be
        captured is not raised here: its version is voted down (P6). Called behind the optimizer step where
        the schedule was woven, else behind the whole step; the second call for the same step does nothing."""
        step = self.engine.global_steps
        if step == self._last_step or self.worker is None or self._closed:
            return
        now = time.perf_counter()
        step_secs, self._boundary_secs = now - self._boundary_secs, now
        self._last_step = step
        log.set_step(step)
        if self.tracer.weaver is None:
            self.copying.pacer.end_step("step", ())
        self.rates.step(step, step_secs)
        if not self.copying.takes_versions or self.stopping.is_due(self.worker, step, step_secs):
            return
        due = self.rates.takes_version(step)
        if not due:
            self.worker.submit(SnapshotRequest(Label(self.memory.incarnation, step), None, b"", idle=True))
        else:
            self.rates.begun(self.submit(must=False))

    def after_step(self) -> None:
        """A step has returned; exits where the job stops here, as it was told to."""
        self.boundary()
        self.progress.end_step(self._last_step)
        self.device_memory.after_step()
        self.monitoring.after_step(self._last_step, self.tolerance)
        waited_secs = self.fence.take_waited_secs()
        if self.tracer.active and self.worker is not None:
            self.tracer.add(
                *(self._last_step, self.control.rank, self.coordinate.pp),
                chunks=self.worker.copier.records,
                fence_secs=waited_secs,
            )
        self.stopping.stop_if_due(self, self._last_step)

    def submit(self, *, must: bool) -> SnapshotRequest:
        """Capture the host state and hand the version to the worker."""
        assert self.worker is not None
        began = time.perf_counter()
        label = Label(self.memory.incarnation, self.engine.global_steps)
        request = self.state.capture(label, must=must, variant=self.copying.variant)
        self.worker.submit(request)
        self.first_request = self.first_request or request
        if request.variant is Variant.BLOCKING:
            request.copied.wait(self.config.commit_timeout_secs)  # the fence says so if it has not ended
        self.stats.stalls_secs.append(time.perf_counter() - began)
        return request

    def restored(self) -> None:
        """The engine's state was replaced: the images may be other tensors, the step another one."""
        self.state.replaced()
        if self.worker is not None and self._last_step != self.engine.global_steps:
            self.rates.went_to(self.engine.global_steps)
        self._last_step = self.engine.global_steps
        self.monitoring.starts_at(self._last_step)
        self.progress.set_step(self._last_step)
        log.set_step(self._last_step)
