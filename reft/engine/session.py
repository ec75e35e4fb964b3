"""One engine under reft's care: how its parts come together; what happens where a step begins and
ends."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from reft import log
from reft.aor.recompute import PeerOptimizers
from reft.checks.start import check_start, warn
from reft.config import FaultPoint, ReftConfig, Variant
from reft.control.control import ControlGroup, WorkerControl
from reft.engine.engine import CopySetup, EngineState, OptimizerFence, Tracer
from reft.engine.identity import (
    JobMemory,
    NodeIdentity,
    declared_on_one_host,
    gather_topology,
    local_rank,
    name_job,
)
from reft.engine.protection import Protection
from reft.engine.protocol import ClientState, TrainingEngine
from reft.engine.stopping import StopController
from reft.env import ENV_REHEARSE
from reft.faults import FaultPlan, kill_this_node
from reft.grid import VersionId
from reft.log import EventLog
from reft.memory.arena import SlotFiles
from reft.memory.job_secret import read_environment_secret
from reft.memory.protection_record import write_request
from reft.node.client import DaemonClient
from reft.node.monitors import DeviceMemory, MonitorWriter
from reft.node.progress import open_page
from reft.pacing.mirror import MirrorToPeer
from reft.policy.choice import check_device, choose_protection
from reft.policy.rates import IntervalRates
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.extension import VersionFeature
from reft.snapshot.stats import PeerErrors, SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, WorkerCallbacks
from reft.verify.finite import FiniteCheck
from reft.verify.peers import PeerCheck

logger = logging.getLogger(__name__)


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
        topology: where all ranks are.
        declared_on_one_host: declared nodes that share a host with another one.
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
        self.topology, places = gather_topology(self.control, self.coordinate, degrees)
        self.declared_on_one_host = declared_on_one_host(places)
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
        scheme = self.protection.switch(control, arenas)
        self.worker = SnapshotWorker(
            control=control,
            topology=self.topology,
            arenas=arenas,
            block_bytes=self.config.block_bytes,
            host_bytes=self.config.host_state_bytes,
            copier=self.copying.copier(),
            callbacks=WorkerCallbacks(
                self.stats, self.faults, self._committed, self._skipped, self.peer_errors
            ),
            scheme=scheme,
            features=self._features(control),
            gate=self.copying.pacer.gate,
        )
        self.daemon.configure(self.config)
        self.tracer.profile(self)
        # Without versions there are no votes to stop by.
        if self.copying.takes_versions and (lacks := self.stopping.install(self)):
            warn(self, lacks)

    def _features(self, control: WorkerControl) -> list[VersionFeature]:
        """Everything that takes part in the versions of this job. The order counts: partitions are
        recomputed before their checksums are compared."""
        config, verify = self.config, self.config.verify
        features: list[VersionFeature] = [self.rates.agreed, self.copying.pacer]
        if self.state.gradients is not None:
            features.append(PeerOptimizers(self.state.gradients.recipe, self.stats.recompute))
        if verify.suspects:
            features.append(FiniteCheck(verify.suspects))
        if verify.peers != "off":
            features.append(
                PeerCheck(
                    by_turns=verify.peers == "rotate",
                    block_bytes=config.block_bytes,
                    chunk_bytes=config.has.chunk_bytes,
                    on_difference=verify.on_difference,
                ).connect(control, self.topology)
            )
        features.append(MirrorToPeer(control, self.topology, config.block_bytes))
        return features

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
