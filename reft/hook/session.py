"""One engine under reft's care: what happens at every step boundary, at the fence and at the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from reft import log
from reft.config import FaultPoint, ReftConfig, Variant
from reft.env import ENV_STORE
from reft.errors import ReftError
from reft.events import EventLog
from reft.faults import FaultPlan, kill_this_node
from reft.hook.coordinates import coordinate_of, local_rank, local_world_size
from reft.hook.data import DataPosition
from reft.hook.identity import Identity, hold_memory, name_job
from reft.hook.job import JobRecord
from reft.hook.joining import agree_on_incarnation, gather_topology, open_control, open_job_dir
from reft.hook.living import note_session
from reft.hook.pace import make_pacer
from reft.hook.preempt import Preemption
from reft.hook.protection import Protection
from reft.hook.recomputing import Recomputing
from reft.hook.start_checks import check_start
from reft.hook.stopping import must_stop_alone, stop_alone, stop_together
from reft.hook.tracing import Tracer
from reft.optim import ExactAdam
from reft.protect.codes import Scheme
from reft.snapshot.committing.arenas import ArenaIdentity, ArenaSet
from reft.snapshot.committing.protocol import Cause
from reft.snapshot.copying.copier import Copier
from reft.snapshot.copying.engine import CopyEngine, copy_engine_for
from reft.snapshot.copying.staging import StagingArea
from reft.snapshot.layout import LiveImages
from reft.snapshot.scheduling.has import HasSchedule, Overflow
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Watchers, WorkerOptions
from reft.state.adapters import adapter_for
from reft.state.blob import HostBlob
from reft.state.host import capture_host_state
from reft.store.client import DaemonClient
from reft.store.jobdir import JobDir
from reft.store.label import Label

if TYPE_CHECKING:
    from reft.hook.weave import Weaver

logger = logging.getLogger(__name__)

_STOP_NEXT_SECS = 1.0
"""After a step at least this long the job stops after the next one; after shorter ones it does one more."""
_LONG_STEP_SECS = 0.5
"""From here on every boundary waits for the vote before it. Well below _STOP_NEXT_SECS: the ranks do not
measure exactly the same, and all of them must have heard the vote before they decide whether to stop."""
_VOTE_SECS = 5.0
_VOTE_SHARE = 0.1
"""Of a step: most that it waits for a vote that does not come."""

ClientState = Callable[[], Mapping[str, Any]]


class Session:
    """Snapshots of one DeepSpeed engine. Made by :func:`reft.attach`, collectively on all ranks.

    Args:
        engine: a DeepSpeed engine, as ``deepspeed.initialize`` returned it.
        config: the checked ``reft`` block.
        client_state: returns what the user wants restored together with the weights.

    Raises:
        UnsupportedStateError: the engine holds state reft does not know.
        LayoutError: the ranks do not form a pp x dp x tp grid.
        ConfigError: another engine of this process has the job's memory.
    """

    def __init__(self, engine: Any, config: ReftConfig, client_state: ClientState | None) -> None:
        self.engine = engine
        self.client_state = client_state
        self.restored_client: dict[str, Any] | None = None
        """Client state of the version that was restored, until the script trains on."""
        self.adapter = adapter_for(engine)
        self.coordinate, degrees = coordinate_of(engine)
        self.control = open_control(config)
        self.config = config = name_job(config, self.control)
        log.set_place(self.job_id, str(self.coordinate), int(engine.global_steps))
        self.topology, self.places = gather_topology(self.control, self.coordinate, degrees)
        self.node = self.topology.nodes[self.control.rank]
        self.identity = Identity.of_engine(
            engine, config, at=self.coordinate, degrees=degrees, control=self.control
        )
        self._lock = hold_memory(config, self.job_id, self.control)
        try:
            self._prepare(config)
        except BaseException:
            # Whoever goes on with another engine may have the memory.
            if self._lock is not None:
                self._lock.close()
            self.control.leave()
            raise
        note_session(config.memory_dir / self.job_id, self)

    def _prepare(self, config: ReftConfig) -> None:
        """Everything that needs the job's memory."""
        engine = self.engine
        self.job_dir = open_job_dir(config, self.job_id, self.node, self.control)
        self.record = JobRecord.at(os.environ.get(ENV_STORE) if self.is_rank_zero else None, self.job_id)
        self.incarnation = agree_on_incarnation(config, self.job_dir, self.record, self.control)
        self.faults = FaultPlan(
            config.faults,
            self.coordinate,
            self.incarnation,
            kill_node=lambda: kill_this_node(self.job_dir.path),
        )
        self.stats = SnapshotStats()
        self.events = EventLog(self.control.rank)
        self.copy_engine: CopyEngine = copy_engine_for(getattr(engine, "device", "cpu"))
        chosen = config.chooses
        if chosen:
            self.config = config = self._choose_protection(config)
        self.protection = Protection(
            config,
            chosen=chosen,
            control=self.control,
            topology=self.topology,
            job_dir=self.job_dir.path,
            incarnation=self.incarnation,
            events=self.events,
        )
        self.data = DataPosition(engine)
        self.preemption = Preemption()
        self.daemon = DaemonClient(self.job_dir.path, self.job_dir.secret)
        self.worker: SnapshotWorker | None = None
        self.variant = config.variant
        self.tracer = Tracer()
        self.staging = (
            StagingArea(self.copy_engine) if Overflow(config.has.overflow) is Overflow.STAGING else None
        )
        self.pacer = make_pacer(
            config.has,
            self.copy_engine,
            stage_id=self.coordinate.pp,
            stages=self.topology.degrees.pp,
            micro_batches=int(engine.gradient_accumulation_steps()),
            staging=self.staging,
        )
        self._stopping = self._alone = False
        self._fence_secs = 0.0
        self.fence_within = False
        """Whether :meth:`before_write` is known to come before anything is written."""
        self._writes_seen = False
        self._images: LiveImages | None = None
        self._blob = HostBlob()
        self.recomputing = Recomputing(
            config,
            adapter=self.adapter,
            at=self.coordinate,
            topology=self.topology,
            scheme=lambda: Scheme.parse(self.protection.record.in_force),
            fence=self._fence,
        )
        self._capture_errors: set[type[Exception]] = set()
        self._last_step = int(engine.global_steps)
        self._boundary_secs = time.perf_counter()
        self._closed = False
        check_start(self)

    # -- facts -----------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        assert self.config.job_id is not None  # name_job() has seen to it
        return self.config.job_id

    @property
    def is_rank_zero(self) -> bool:
        return self.control.rank == 0

    @property
    def schedule(self) -> HasSchedule | None:
        """The plan by which bytes are copied now; None before one was made."""
        return self.pacer.plan

    @property
    def is_first_on_node(self) -> bool:
        """One rank per node reads and writes what the node has once."""
        return self.topology.local_ranks(self.node)[0] == self.control.rank

    def use(self, variant: Variant | str) -> None:
        """Change when bytes are copied, from the next version on. Call it between steps, on all ranks."""
        self.variant = Variant(variant)

    def pause_recomputing(self, paused: bool) -> None:
        """Have partitions sent instead of recomputed (AOR) from the next version on, or recomputed again.
        Call it between steps, on all ranks."""
        self.recomputing.paused = paused

    def woven(self, weaver: Weaver) -> None:
        """The engine's schedules are woven: windows are known from there."""
        self.tracer.weaver = weaver

    def restored(self) -> None:
        """The engine's state was replaced: the images may be other tensors, the step another one."""
        self._images = None
        self._last_step = int(self.engine.global_steps)
        log.set_step(self._last_step)

    def _choose_protection(self, config: ReftConfig) -> ReftConfig:
        """The block with the protection that suits this job's state and placement. Collective."""
        from reft.hook.choosing import choose_protection

        return choose_protection(
            config,
            self.adapter.expected_bytes(),
            control=self.control,
            topology=self.topology,
            job_dir=self.job_dir.path,
            events=self.events,
            exact=not self.copy_engine.asynchronous or isinstance(self.adapter.state.optimizer, ExactAdam),
        )

    @property
    def tolerance(self) -> int:
        """Node losses that every sharding group survives, from the real placement (P4)."""
        return self.protection.record.tolerance

    def protect(self, scheme: str) -> None:
        """Switch the protection of the versions to come, at one version boundary on all ranks. One rank
        that asks is enough; ``reft protect`` does the same from outside.

        Raises:
            ConfigError: there is no such scheme.
        """
        self.protection.order(scheme)

    # -- start and end -----------------------------------------------------------------------------

    def start(self, frozen: Mapping[int, Label]) -> None:
        """Begin to take snapshots. ``frozen`` slots hold the version that was just recovered."""
        if self.is_first_on_node:
            self.identity.record(self.job_dir.path, self.incarnation)
        limit = self.config.memory_limit_bytes
        arenas = ArenaSet(
            job_dir=self.job_dir.path,
            local_rank=local_rank(),
            count=self.config.arena_count,
            secret=self.job_dir.secret,
            identity=ArenaIdentity(self.job_id, self.node, self.topology.degrees, self.coordinate),
            frozen=frozen,
            limit_bytes=limit // local_world_size() if limit is not None else None,
            local_world_size=local_world_size(),
            engine=self.copy_engine,
            remake=self._remake_job_dir,
        )
        control = self.control.for_worker(self.job_dir.secret)
        self.worker = SnapshotWorker(
            control=control,
            topology=self.topology,
            arenas=arenas,
            options=WorkerOptions(
                scheme=self.protection.record.parsed,
                block_bytes=self.config.block_bytes,
                host_bytes=self.config.host_state_bytes,
            ),
            watchers=Watchers(self.stats, self.faults, self._committed, self._skipped),
            copier=Copier(self.copy_engine, self.config.has.chunk_bytes, self.staging),
            pacer=self.pacer,
            switch=self.protection.switch(control),
            peer_optimizers=self.recomputing.peer_optimizers(self.stats.recompute),
        )
        self.daemon.configure(self.config)
        self.tracer.profile(self)
        if self.variant is not Variant.NONE:  # without versions there are no votes to stop by
            self.preemption.install()

    @property
    def closed(self) -> bool:
        """Whether its memory may be another's."""
        return self._closed

    def close(self, timeout_secs: float | None = None) -> None:
        """Finish what is under way, within the grace unless another time is given, and release everything.
        The memory stays: the launcher removes it when the whole job ended well."""
        if self._closed:
            return
        self._closed = True
        self.preemption.uninstall()
        if self.worker is not None:
            self.worker.close(self.config.grace_secs if timeout_secs is None else timeout_secs)
        self.recomputing.close()
        self.data.close()
        self.daemon.close()
        if self._lock is not None:
            self._lock.close()
        self.control.leave()
        self.events.write("closed", **self.stats.to_json())

    def _remake_job_dir(self) -> None:
        """Somebody removed this node's memory of the job."""
        secret = self.job_dir.secret
        JobDir.open_or_create(self.config.memory_dir, self.job_id, node=self.node, secret=secret)
        self.protection.note()
        if self.is_first_on_node:
            self.identity.record(self.job_dir.path, self.incarnation)

    # -- every step --------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """The fence (P2), or, where it was seen to come within the optimizer step, its approach.

        A step with clipping or overflow checks meets the other ranks before it writes; copies may go on so
        long.
        """
        self.faults.reach(FaultPoint.DURING_STEP, self._last_step)
        self._writes_seen = False
        if self.variant is not Variant.NONE:
            self.pacer.begin_optimizer()
        if self.fence_within and self.worker is not None:
            self.worker.approach()
        else:
            self._fence()

    def before_write(self, *_: object) -> None:
        """The innermost optimizer is about to write."""
        self._writes_seen = True
        self._fence()

    def after_optimizer_step(self) -> None:
        """Nothing may have been written, on overflow: the fence comes here, and next time before the step."""
        if not self._writes_seen:
            self._fence()
        self.fence_within = self._writes_seen
        if self.variant is not Variant.NONE:
            self.pacer.end_optimizer()

    def _fence(self) -> None:
        if self.worker is not None:
            secs = self.worker.fence()
            self._fence_secs += secs
            self.stats.stalls_secs.add_to_newest(secs)

    def boundary(self) -> None:
        """The state after an optimizer step is final: take a snapshot if one is due. Never raises.

        Called behind the optimizer step where the schedule was woven, else behind the whole step; the
        second call for the same step does nothing.
        """
        step = int(self.engine.global_steps)
        if step == self._last_step or self.worker is None or self._closed:
            return
        now = time.perf_counter()
        began, self._boundary_secs = self._boundary_secs, now
        step_secs = now - began
        self._last_step = step
        log.set_step(step)
        if self.tracer.weaver is None:
            self.pacer.end_step("step", ())
        if self.variant is Variant.NONE:
            return
        if self.preemption.requested:
            # The vote that carries this is over when training gets there: all ranks know by then.
            self.worker.votes.stop_proposal = step + (1 if step_secs > _STOP_NEXT_SECS else 2)
        if step_secs > _LONG_STEP_SECS:
            self.worker.await_vote(step - 1, min(_VOTE_SECS, _VOTE_SHARE * step_secs))
        interval = max(self.config.interval_steps, self.worker.votes.interval_steps(step))
        stop_step = self.worker.votes.stop_step
        if stop_step is not None and step >= stop_step:
            self._stopping = True
        elif stop_step is None and must_stop_alone(self):
            self._stopping = self._alone = True
        elif step % interval == 0:
            self.submit(must=False)
        else:
            self.worker.submit(SnapshotRequest(Label(self.incarnation, step), None, b"", idle=True))

    def after_step(self) -> None:
        """A step has returned. Raises only to stop when told so."""
        self.boundary()
        if self.tracer.active and self.worker is not None:
            self.tracer.add(
                *(self._last_step, self.control.rank, self.coordinate.pp),
                chunks=self.worker.copier.records,
                fence_secs=self._fence_secs,
            )
        self._fence_secs = 0.0
        if self._stopping:
            (stop_alone if self._alone else stop_together)(self, self._last_step)

    def submit(self, *, must: bool) -> SnapshotRequest:
        """Capture the host state and hand the version to the worker.

        The first version of a layout is taken whatever it takes: memory is reserved at the start
        (P9), not at the expense of the versions that follow.
        """
        assert self.worker is not None
        began = time.perf_counter()
        step = int(self.engine.global_steps)
        label = Label(self.incarnation, step)
        try:
            known = self._images
            images = self._current_images()
            must = must or images is not known
            state = capture_host_state(self.engine, self.adapter, self._client(), self.data.state())
            encode = self._blob.prepare(
                self.engine, (images.replicated, images.owned), images.signature, state
            )
            request = SnapshotRequest(
                label,
                images,
                encode=encode,
                step=self.recomputing.take(step),
                must=must,
                variant=self.variant,
            )
        except Exception as error:
            # Whatever it is, training goes on (P6). This rank still has to say no in the vote, or
            # its peers would wait.
            level = logging.WARNING if isinstance(error, ReftError) else logging.ERROR
            if type(error) not in self._capture_errors:
                self._capture_errors.add(type(error))
                logger.log(level, "the state of step %d cannot be captured", step, exc_info=error)
            request = SnapshotRequest(label, self._images, cause=Cause("the state could not be captured"))
        self.worker.submit(request)
        if self.variant is Variant.BLOCKING:
            request.copied.wait(self.config.commit_timeout_secs)  # the fence says so if it has not ended
        self.stats.stalls_secs.append(time.perf_counter() - began)
        return request

    def _client(self) -> Mapping[str, Any] | None:
        if self.restored_client is not None:
            return self.restored_client
        return self.client_state() if self.client_state else None

    def _current_images(self) -> LiveImages:
        signature = self.adapter.signature()
        if self.recomputing.follow():
            self._images = None
        if self._images is None or self._images.signature != signature:
            replicated, owned = self.adapter.images()
            gradients, nbytes = self.recomputing.images, self.recomputing.partition_bytes
            self._images = LiveImages(replicated, owned, signature, gradients, nbytes)
        return self._images

    # -- worker thread -----------------------------------------------------------------------------

    def _committed(self, label: Label) -> None:
        if self.is_rank_zero:
            self.record.note_commit(label)
        stats = self.stats.to_json()
        self.daemon.notify_commit(label, self.coordinate, stats, unprotected=self.protection.lost)
        # With the counters: a rank that is killed leaves no "closed" event.
        told = {key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")}
        self.events.write("commit", step=label.step, copy_secs=self.stats.copy_secs.newest, **told)

    def _skipped(self, step: int, cause: str) -> None:
        self.daemon.notify_skip(step, cause, self.stats.to_json())
        self.events.write("skip", step=step, cause=cause)
