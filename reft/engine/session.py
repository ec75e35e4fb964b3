"""The session of one training engine: creates the parts and calls them when a step begins and
ends."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

from reft import log
from reft.aor.recompute import PeerOptimizers
from reft.checks.start import StartFacts, end_dry_run, is_dry_run, start_findings
from reft.config import FaultPoint, ReftConfig, Variant
from reft.control.control import ControlGroup, WorkerControl
from reft.engine.capture import EngineState
from reft.engine.context import JobContext
from reft.engine.fence import OptimizerFence
from reft.engine.host_state import HostState
from reft.engine.identity import name_job
from reft.engine.job_memory import JobMemory
from reft.engine.load_memory import MemoryRestorer
from reft.engine.nodes import NodeIdentity, declared_on_one_host, gather_topology, local_rank
from reft.engine.protection import Protection
from reft.engine.protocol import ClientState, OnResize, TrainingEngine
from reft.engine.stopping import StopController
from reft.env import ENV_REHEARSE
from reft.errors import ConfigError
from reft.faults import FaultPlan, kill_this_node
from reft.grid import VersionId
from reft.log import EventLog
from reft.memory.arena import SlotFiles
from reft.memory.files import margin_bytes
from reft.memory.job_secret import read_environment_secret
from reft.memory.protection_record import write_request
from reft.node.client import DaemonClient
from reft.node.monitors import DeviceMemory, MonitorWriter
from reft.node.progress import open_page
from reft.pacing.mirror import MirrorToPeer
from reft.pacing.setup import CopySetup
from reft.pacing.tracer import Tracer
from reft.policy.choice import JobFacts, check_device, choose_protection
from reft.policy.rates import IntervalRates
from reft.policy.switching import RequestPoll, RetentionConfig, SchemeSwitch
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.extension import VersionFeature
from reft.snapshot.stats import PeerErrors, SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, WorkerCallbacks
from reft.storage.epochs import EpochEnds
from reft.storage.local_disks import find_local_disks
from reft.verify.finite import FiniteCheck
from reft.verify.peers import PeerCheck

logger = logging.getLogger(__name__)


def _fails() -> bool:
    """Return whether the script ends with an exception, so that its state may be inconsistent."""
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return raised is not None and not isinstance(raised, SystemExit)


class Session:
    """Takes and restores versions of one training engine. Created collectively by
    :func:`reft.attach` and similar functions.

    A session creates its parts and calls them in the order of a step. Parts have no access to it:
    each takes the :class:`~reft.engine.context.JobContext` and the parts that it works with.

    Args:
        engine: the training engine.
        config: the checked ``reft`` block.
        client_state: returns the script's own values for a version; None if there are none.

    Raises:
        UnsupportedStateError: the engine holds state that reft does not support.
        LayoutError: the ranks do not form a pp x dp x tp grid.
        ConfigError: another engine of this process has the job's memory, or the start is refused.

    Attributes:
        context: the job as this rank sees it.
        memory: the job's memory on this node.
        progress: progress page of this rank, a shared-memory page that the node's daemon reads.
        copying: copy engine and pacing of this rank.
        protection: the active protection scheme.
        fence: makes training wait for copies (P2).
        epochs: finds the versions with which passes over the data end.
        state: captures the state with which a step begins.
        tracer: traces steps, for tests, figures and the profiler.
        stopping: stops the job on request.
        worker: takes versions; None before :meth:`start`.
        rates: decides which versions are taken and persisted; set by :meth:`start`.
        closed: True once :meth:`close` has been called.
        first_request: request of the first version in this process; None before.
        on_resize: function of the script that is called when a state of another data-parallel
            degree was loaded; None if there is none.
    """

    def __init__(
        self, engine: TrainingEngine, config: ReftConfig, client_state: ClientState | None
    ) -> None:
        coordinate, degrees = engine.place()
        control = ControlGroup(
            config.commit_timeout_secs,
            node=NodeIdentity.here().node,
            secret=read_environment_secret(),
            transport=config.transport,
        )
        config = name_job(config, control)
        log.set_place(str(config.job_id), str(coordinate), engine.global_steps)
        topology, places = gather_topology(control, coordinate, degrees)
        config = find_local_disks(config, control, topology.nodes)
        # Undo everything if this engine is refused: the script may continue with another engine,
        # which needs the same locks and connections.
        with ExitStack() as undo:
            undo.callback(control.leave)
            if engine.data is not None:
                undo.callback(engine.data.close)
            self.memory = JobMemory(config, engine, control, topology)
            undo.callback(self.memory.close)
            job_dir = self.memory.job_dir
            self.progress = open_page(
                job_dir.path,
                local_rank(),
                control.rank,
                config.hang_factor,
                config.hang_timeout_secs,
            )
            undo.callback(self.progress.close)
            context = JobContext(
                config=config,
                engine=engine,
                coordinate=coordinate,
                topology=topology,
                control=control,
                job_dir=job_dir,
                stats=SnapshotStats(),
                events=EventLog(control.rank),
            )
            control.on_silence = lambda missing, secs: context.events.write(
                "silent", ranks=missing, secs=secs
            )
            self.copying = CopySetup(
                config,
                engine.device,
                stage_id=coordinate.pp,
                stages=topology.degrees.pp,
                micro_batches=engine.micro_batches,
                ranks_here=context.ranks_here,
            )
            job = self._choose_protection(context)
            self._make_parts(client_state)
            undo.callback(self.state.close)
            self._check_start(job, declared_on_one_host(places))
            undo.pop_all()

    # -- the parts ---------------------------------------------------------------------------------

    def _choose_protection(self, context: JobContext) -> JobFacts:
        """Test the devices, choose the protection if the block leaves the choice to reft
        (``auto``), and set :attr:`context`. Collective."""
        config = context.config
        job = JobFacts(
            config=config,
            topology=context.topology,
            control=context.control,
            adapter=context.engine.adapter,
            copies=self.copying.engine,
            job_dir=context.job_dir.path,
            devices=(),
        )
        job = replace(job, devices=check_device(job))
        if config.chooses:
            job = replace(job, config=choose_protection(job, context.events))
        self.context = context = replace(context, config=job.config)
        self.protection = Protection(context, self.memory.incarnation, chosen=config.chooses)
        return job

    def _make_parts(self, client_state: ClientState | None) -> None:
        """Make the parts of the session that depend on the protection."""
        context, memory, at = self.context, self.memory, self.context.coordinate
        path, engine = context.job_dir.path, context.engine
        self.worker: SnapshotWorker | None = None
        self.peer_errors = PeerErrors()
        self.epochs = EpochEnds()
        self.faults = FaultPlan(
            context.config.faults,
            at,
            memory.incarnation,
            kill_node=lambda: kill_this_node(path),
        )
        self.fence = OptimizerFence(self.copying, context.stats)
        self.state = EngineState(context, self.protection, self.fence, client_state)
        self.daemon = DaemonClient(path, context.job_dir.secret, self.progress, memory.incarnation)
        self.stopping = StopController(context, lambda: memory.incarnation, self.daemon)
        self.tracer = Tracer(context.rank, at.pp)
        self._monitor = MonitorWriter(
            getattr(engine, "engine", None) if context.is_rank_zero else None,
            path,
            context.stats,
            lambda: self.tolerance,
        )
        self._device_memory = DeviceMemory(self.progress, engine.device)
        # Only without a device: on a device, calls return before their work is done
        if not self.copying.engine.asynchronous:
            self.progress.set_place((at.pp, at.dp, at.tp))
        self._last_step = engine.global_steps
        self._stepped = False  # Whether a step has ended and the next has not begun
        self._is_due = False  # Whether a version is taken when the next step begins
        self.progress.set_step(self._last_step)
        self._boundary_secs = time.perf_counter()
        self.closed = False
        self.first_request: SnapshotRequest | None = None
        self.on_resize: OnResize | None = None

    def _check_start(self, job: JobFacts, declared_together: Sequence[str]) -> None:
        """Report the findings of all ranks before any state is restored or copied. Collective.

        An error is raised on all ranks. It ends the start and leaves the job's memory unchanged.

        Raises:
            ConfigError: the start is refused.
            SystemExit: this start is a dry run.
        """
        context, record = self.context, self.protection.record
        restarted = self.memory.identity.restarted
        context.events.write(
            "attached",
            incarnation=self.memory.incarnation,
            coordinate=str(context.coordinate),
            node=context.node,
            tolerance=record.tolerance,
            adapter=type(self.state.adapter).__name__,
        )
        gradients = self.state.gradients
        start = StartFacts(
            job=job,
            record=record,
            incarnation=self.memory.incarnation,
            restarted=restarted,
            chosen=self.protection.is_chosen,
            why_unprotected="" if record.tolerance else self.protection.why_unprotected(),
            recipe=None if gradients is None else gradients.recipe,
            declared_on_one_host=declared_together,
        )
        # Warnings must not make an automatic restart fail: it may be on fewer nodes than the first
        # start.
        context.report(start_findings(start), strict=not restarted)
        if is_dry_run():
            end_dry_run(start, context.engine.name)

    def memory_restorer(self) -> MemoryRestorer:
        """Create the object that restores this session from the job's memory."""
        return MemoryRestorer(
            self.context, self, self.memory, self.state, self.protection, self.faults
        )

    # -- facts -------------------------------------------------------------------------------------

    @property
    def stats(self) -> SnapshotStats:
        """Counters of this rank's versions."""
        return self.context.stats

    @property
    def started(self) -> bool:
        """Whether the session takes versions. It begins to do so after a state was loaded, or
        none was found."""
        return self.worker is not None

    @property
    def takes_versions(self) -> bool:
        """Whether the configured variant takes versions at all."""
        return self.copying.takes_versions

    @property
    def stepped(self) -> bool:
        """Whether a step has ended and the next one has not begun; the script may be evaluating,
        saving or reading data."""
        return self._stepped

    @property
    def stops_together(self) -> bool:
        """Whether the job is being stopped after the same step on all ranks."""
        return self.stopping.together

    @property
    def tolerance(self) -> int:
        """Number of node losses that every sharding group survives, computed from the real
        placement (P4)."""
        return self.protection.record.tolerance

    # -- what the script may change ----------------------------------------------------------------

    def use(self, variant: Variant | str) -> None:
        """Change when bytes are copied, from the next version on. Call it between steps on all
        ranks."""
        self.copying.variant = Variant(variant)

    def protect(self, scheme: str) -> None:
        """Request another protection scheme. All ranks switch to it between the same two
        versions.

        A call on one rank is sufficient; ``reft protect`` does the same from outside.

        Raises:
            ConfigError: there is no such scheme.
        """
        write_request([self.context.job_dir.path], scheme)

    def give(self, state: Mapping[str, Any]) -> None:
        """Make objects of the script part of every version, by name, as with ``state`` in
        :func:`reft.attach`."""
        self.state.followed.give(state)

    def follow(self, follower: HostState) -> None:
        """Add a follower, which captures and restores one more kind of host state."""
        self.state.followed.add(follower)

    def set_client_state(self, client_state: ClientState) -> None:
        self.state.client_state = client_state

    def set_on_resize(self, on_resize: OnResize) -> None:
        """Set the function that is called when a state of another data-parallel degree was loaded.

        Raises:
            ConfigError: a state was already loaded, so the function would not be called.
        """
        if self.started:
            raise ConfigError(
                "on_resize was given after the state was loaded, so it would never be called; "
                "call reft.attach(engine, on_resize=...) before engine.load_checkpoint or "
                "reft.resume"
            )
        self.on_resize = on_resize

    # -- start and end -----------------------------------------------------------------------------

    def start(self, frozen: Mapping[int, VersionId]) -> None:
        """Begin to take versions. Collective.

        Args:
            frozen: versions that were just recovered, by number of the slot that holds them;
                these slots are not overwritten yet.
        """
        context = self.context
        config, topology, job_dir = context.config, context.topology, context.job_dir
        self.memory.record_identity()
        self.rates = IntervalRates(
            config,
            context.engine,
            context.control,
            topology,
            job_dir=job_dir.path,
            scheme=self.protection.record.in_force,
            tolerance=lambda: self.tolerance,
            pacer=self.copying.pacer,
            peer_errors=self.peer_errors,
            from_memory=bool(frozen),
        )
        if self.rates.storage is not None:
            self.daemon.on_storage_state = self.rates.storage.answered
        # Close the load's connections to all ranks of the sharding group; versions need ring
        # peers only.
        context.control.end_pairs()
        control = context.control.for_worker(job_dir.secret)
        limit, ranks = config.memory_limit_bytes, context.ranks_here
        arenas = ArenaSet(
            SlotFiles(job_dir.path, local_rank(), config.arena_count, job_dir.secret, ranks),
            *(context.job_id, topology, context.rank),
            frozen=frozen,
            limit_bytes=limit // ranks if limit is not None else None,
            engine=self.copying.engine,
            remake=self._remake_memory,
        )
        self.protection.note()
        scheme = SchemeSwitch(
            *(control, topology, arenas, self.protection.record, RequestPoll(job_dir.path)),
            keeping=RetentionConfig(
                config.arena_count, margin_bytes(config.memory_margin_bytes, job_dir.path)
            ),
            on_change=self.protection.changed,
            reach=self.faults.reach,
        )
        self.worker = worker = SnapshotWorker(
            control=control,
            topology=topology,
            arenas=arenas,
            block_bytes=config.block_bytes,
            host_bytes=config.host_state_bytes,
            copier=self.copying.copier(),
            callbacks=WorkerCallbacks(
                context.stats, self.faults, self._committed, self._skipped, self.peer_errors
            ),
            scheme=scheme,
            features=self._features(control),
            gate=self.copying.pacer.gate,
        )
        # Set these before the first step, since training's hooks read them without a lock.
        self.fence.worker = self.state.worker = worker
        self.rates.votes = worker.votes
        self.daemon.configure(config)
        self._start_profile()
        # Without versions there are no votes that could carry a request to stop.
        if self.copying.takes_versions and (found := self.stopping.install(self, worker)):
            context.warn(found)

    def _features(self, control: WorkerControl) -> list[VersionFeature]:
        """Create the features that take part in this job's versions. Their order matters:
        partitions are recomputed before their checksums are compared."""
        context, config = self.context, self.context.config
        verify = config.verify
        features: list[VersionFeature] = [self.rates.agreed, self.copying.pacer]
        if self.state.gradients is not None:
            features.append(PeerOptimizers(self.state.gradients.recipe, context.stats.recompute))
        if verify.suspects:
            features.append(FiniteCheck(verify.suspects))
        if verify.peers != "off":
            features.append(
                PeerCheck(
                    by_turns=verify.peers == "rotate",
                    block_bytes=config.block_bytes,
                    chunk_bytes=config.has.chunk_bytes,
                    on_difference=verify.on_difference,
                ).connect(control, context.topology)
            )
        if config.persist.keep_epochs:
            features.append(self.epochs)
        features.append(MirrorToPeer(control, context.topology, config.block_bytes))
        return features

    def _start_profile(self) -> None:
        """Start the profiler, if the block requests a profile. Collective."""
        context = self.context
        config = context.config.profile
        if not config.steps:
            return
        if not self.tracer.woven:
            logger.warning("%s cannot be profiled; only a pipeline engine can", context.engine.name)
            return
        from reft.profile.profiler import start_profile

        start_profile(
            self.tracer,
            config,
            context.engine.device,
            job_id=context.job_id,
            at=context.coordinate,
            degrees=context.topology.degrees,
            control=context.control,
            snapshot_bytes=lambda: self.stats.device_bytes,
        )

    def _remake_memory(self) -> None:
        self.memory.remake()
        self.protection.note()

    def flush(self, timeout_secs: float) -> bool:
        """Take a version of the last step now, instead of when the next step begins, and wait
        for all versions. Collective.

        Returns:
            Whether all versions have ended in time, committed or given up (not committed by any
            rank).
        """
        self._take_last_step()
        return self.worker is not None and self.worker.drain(timeout_secs)

    def _take_last_step(self) -> None:
        if self._stepped and self.worker is not None and self.copying.takes_versions:
            self._stepped = False
            self.submit(required=True)

    def close(self, timeout_secs: float | None = None) -> None:
        """Take a version of the last step unless the script failed, finish versions in progress,
        and release all resources. The memory stays.

        Args:
            timeout_secs: time limit in seconds; None for the grace period of the configuration.
        """
        if self.closed:
            return
        if not _fails():
            self._take_last_step()
        self.closed = True
        self.progress.close()
        self.stopping.uninstall()
        if self.worker is not None:
            self.worker.close(
                self.context.config.grace_secs if timeout_secs is None else timeout_secs
            )
        self.state.close()
        self.memory.record.close()
        self.memory.close()
        self.context.control.leave()
        self.context.events.write("closed", **self.stats.to_json())

    # -- called by the worker thread ---------------------------------------------------------------

    def _committed(self, label: VersionId) -> None:
        """Report a commit. A failing listener must not stop the others.

        Replies of the daemon and the rendezvous store are awaited on other threads: if the
        worker thread waited here, the next vote would be late.
        """
        stats = self.stats.to_json()
        due, rate_stats = False, dict[str, Any]()
        ends_epoch, epochs = self.epochs.take(label)
        try:
            due, rate_stats = self.rates.committed(label)
        except Exception as error:
            self.peer_errors.record("the rates of versions cannot be computed", error)
        self.peer_errors.run_guarded(
            "the daemon cannot be informed of a commit",
            lambda: self.daemon.report_commit(
                label,
                stats | rate_stats,
                unprotected=self.protection.lost,
                due=due or ends_epoch,
                epochs=epochs,
            ),
        )
        # Include counters, since a killed rank writes no "closed" event.
        counters = {
            key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")
        }
        self.context.events.write(
            "commit", step=label.step, copy_secs=self.stats.copy_secs.newest, **counters
        )
        if self.context.is_rank_zero:
            self.memory.record.committed(label, self.peer_errors)

    def _skipped(self, step: int, cause: str) -> None:
        self.daemon.report_skip(cause, self.stats.to_json())
        self.context.events.write("skip", step=step, cause=cause)

    # -- every step --------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        self.faults.reach(FaultPoint.DURING_STEP, self._last_step)
        self.fence.before_optimizer_step()

    def after_optimizer_step(self) -> None:
        self.fence.after_optimizer_step()

    def begin_step(self) -> None:
        """Called when a step begins: if a version is due, take one of the state with which the
        step begins (P2).

        The step begins with its first training forward pass or ``train_batch``; further calls
        for the same step do nothing. If capturing the state fails, no error is raised: this rank
        votes no on the version (P6).

        Raises:
            SystemExit: the job stops here on request.
        """
        if not self._stepped or self.worker is None or self.closed:
            return
        self._stepped = False
        step = self._last_step
        now = time.perf_counter()
        step_secs, self._boundary_secs = now - self._boundary_secs, now
        self.rates.step(step, step_secs)
        if not self.copying.takes_versions:
            return
        self.stopping.stop_if_due(step, step_secs)
        if self._is_due:
            self.rates.begun(self.submit(required=False))
        else:
            self.state.boundary.skip()
            self.worker.submit(
                SnapshotRequest(VersionId(self.memory.incarnation, step), None, b"", vote_only=True)
            )

    def hold(self) -> None:
        """Wait until no copy reads the live tensors, which the caller is about to replace (P2)."""
        if self.worker is not None:
            self.worker.fence()

    def go_back(self) -> None:
        """Prepare to load an older version: versions in memory become obsolete, and the next
        versions belong to a new incarnation. Collective."""
        assert self.worker is not None
        self.worker.drain(self.context.config.commit_timeout_secs)
        # P2: no copy of an earlier version may read the tensors after the load has written them.
        self.worker.fence()
        # P3: change the incarnation after the fence, so that no obsolete version gets the new
        # incarnation.
        self.memory.count_on(self.memory.incarnation + 1)

    def require_first_version(self) -> None:
        """Wait for the first version in a strict job. If the first version fails, later ones
        would fail as well. All ranks get the same result, since they vote on it.

        Raises:
            ConfigError: the first version could not be taken.
        """
        context, request = self.context, self.first_request
        if not context.config.strict or request is None:
            return
        # Wait for the worker, since the result of the vote decides whether training continues.
        request.done.wait(context.config.commit_timeout_secs)
        if not request.committed:
            why = self.stats.last_error or "it did not finish within commit_timeout_secs"
            context.warn(
                f"the version of step {request.label.step} could not be taken: {why}. The job "
                f"could not resume after a failure. Remove the cause, which is in the log"
            )

    def check_tensors(self) -> None:
        """Check, between two passes of a step, whether the script has written tensors that are
        being copied (:meth:`~reft.snapshot.worker.SnapshotWorker.check_between_passes`). Called on
        the training thread.
        """
        if self.worker is not None:
            self.worker.check_between_passes()

    def after_step(self) -> None:
        """Called after a call that may have made an optimizer step. Decides whether a version of
        that step is due. If so, the version is taken at the start of the next step, so it includes
        what the script changes in between."""
        step = self.context.engine.global_steps
        if step != self._last_step and not self.closed:
            self._last_step, self._stepped = step, True
            log.set_step(step)
            if self.context.config.persist.keep_epochs and self.context.engine.data is not None:
                self.epochs.step_ended(step, self.context.engine.data.epochs())
            self._is_due = self.worker is not None and self.rates.takes_version(step)
            self.state.boundary.step_ended(is_due=self._is_due)
            if not self.tracer.woven:
                self.copying.pacer.end_step("step", ())
        self.progress.end_step(self._last_step)
        self._device_memory.after_step()
        self._monitor.after_step(self._last_step)
        waited_secs = self.fence.take_waited_secs()
        if self.tracer.active and self.worker is not None:
            self.tracer.add(self._last_step, self.worker.copier.records, waited_secs)

    def submit(self, *, required: bool) -> SnapshotRequest:
        """Capture the host state and hand the version to the worker."""
        assert self.worker is not None
        began = time.perf_counter()
        label = VersionId(self.memory.incarnation, self.context.engine.global_steps)
        request = self.state.capture(label, required=required, variant=self.copying.variant)
        self.worker.submit(request)
        self.first_request = self.first_request or request
        if request.variant is Variant.BLOCKING:
            # If the copy has not ended within this time, the fence continues to wait and logs that.
            request.copied.wait(self.context.config.commit_timeout_secs)
        self.stats.stalls_secs.append(time.perf_counter() - began)
        return request

    def restored(self) -> None:
        """Adapt to an engine whose state was replaced: its tensors and its step may be different
        now."""
        self.state.replaced()
        if self.worker is not None and self._last_step != self.context.engine.global_steps:
            self.rates.went_to(self.context.engine.global_steps)
        self._last_step, self._stepped = self.context.engine.global_steps, False
        self._monitor.starts_at(self._last_step)
        self.progress.set_step(self._last_step)
        log.set_step(self._last_step)


def record(session: Session) -> None:
    """Record every step if `reft rehearse` requests it. The recorder is a feature, which the
    core does not import. Called after the engine's methods were wrapped, so that the recorder's
    wrappers are outermost.
    """
    if os.environ.get(ENV_REHEARSE):
        import_module("reft.rehearse.record").attach(
            session.context, session, session.memory, session.state, session.fence, session.stopping
        )
