"""The program that trains as a session sees it: the seam between reft and DeepSpeed or
Megatron-core, what is captured of it after a step, and by what and when that is copied."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reft.config import AUTO, ReftConfig, Variant
from reft.control.control import WorkerControl
from reft.device import find_vendor
from reft.engine.boundary import Encoded, StepBoundary
from reft.engine.host_state import DRAWN, host_states
from reft.engine.identity import Fact, local_rank
from reft.errors import LayoutError, ReftError, UnsupportedStateError
from reft.grid import Coordinate, Degrees, VersionId
from reft.memory.files import default_margin_bytes
from reft.memory.protection_record import (
    ProtectionRecord,
    read_record,
    resume_record,
    write_record,
)
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, surviving_schemes, tolerance
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.copying.copier import Copier, PeerCheck, StagingArea, hashing_threads, shortened
from reft.snapshot.copying.device import copy_engine_for
from reft.snapshot.copying.gate import Pacer
from reft.snapshot.plan import LiveImages
from reft.snapshot.recompute import OptimizerStep
from reft.snapshot.schedule import ChunkRecord, InstructionRecord, Overflow, StepTrace
from reft.snapshot.switching import RequestPoll, RetentionConfig, SchemeSwitch
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotRequest
from reft.state.adapters import StateAdapter
from reft.state.blob import HostBlob, capture_rng
from reft.state.catalogue import Adapter, SectionImage
from reft.state.gradients import GradientCapture

if TYPE_CHECKING:
    from reft.engine.data import DataPosition
    from reft.engine.layouts import DegreeChange
    from reft.engine.session import Session
    from reft.profile.profiler import Profiler


class TrainingEngine(Protocol):
    """One rank's part of a training: DeepSpeed's or Megatron-core's.

    Whoever implements it also calls the session: ``begin_step`` where a step begins,
    ``before_optimizer_step`` and its fence around every optimizer step, ``after_step`` after it;
    and restores through :class:`~reft.engine.load.memory.MemoryRestorer`."""

    name: str
    device: torch.device
    micro_batches: int

    @property
    def adapter(self) -> Adapter: ...

    @property
    def data(self) -> DataPosition | None:
        """None where the program keeps its position itself."""

    @property
    def resizing(self) -> DegreeChange | None:
        """None where versions of another data-parallel degree cannot be taken up."""

    @property
    def global_steps(self) -> int:
        """Optimizer steps made so far, those left out on overflow too."""

    def place(self) -> tuple[Coordinate, Degrees]:
        """A LayoutError where the ranks are split in a way that reft does not know."""

    def settings(self) -> dict[str, Fact]:
        """What would change the numbers, for the fingerprint; rank 0's counts."""

    def shapes(self) -> str:
        """What this rank's part of the model consists of, for people, with a digest of it."""

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """The host state at a step boundary (see :mod:`reft.state.blob` for its keys)."""

    def restore(self, state: dict[str, Any]) -> None:
        """The images have been written."""

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        """By which a checkpoint can be written from memory (:mod:`reft.state.deepspeed_format`);
        empty: none. A ReftError where it cannot be described."""


logger = logging.getLogger(__name__)

ClientState = Callable[[], Mapping[str, Any]]


class EngineState:
    """Captures the state with which a step begins. Used by the training thread."""

    def __init__(self, session: Session, client_state: ClientState | None) -> None:
        self._session = session
        self._engine = engine = session.engine
        self.adapter = engine.adapter
        self.gradients = gradient_capture(session)
        self.client_state = client_state
        self.restored_client: dict[str, Any] | None = None
        """Client state of the version that was restored, until the script trains on."""
        self.data = engine.data
        self.followed = host_states(session)
        """State of the script that versions hold besides the engine's own."""
        self.listener: Callable[[VersionId, LiveImages, Encoded], None] | None = None
        """Called with every state that is captured; for `reft rehearse`."""
        # A pipeline engine reads within ``train_batch``, and Megatron-core's step begins before its
        # batch.
        repeats_draws = engine.data is not None and not engine.data.is_pipeline
        self.boundary = StepBoundary(
            self._encode_host_state, repeats_draws=repeats_draws, random_states=self._random_states
        )
        if engine.data is not None:
            engine.data.boundary = self.boundary
        self._images: LiveImages | None = None
        self._copied_at_boundary: frozenset[str] = frozenset()
        """Names of tensors that the script writes while they are copied: the images have copies of
        them."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Strict: a version of which no checkpoint could be written is not taken.
        self._blob = HostBlob(strict=session.config.strict)
        self._failures: set[type[Exception]] = set()

    def capture(self, label: VersionId, *, required: bool, variant: Variant) -> SnapshotRequest:
        """What the snapshot worker needs of the version; a cause where it cannot be had. Never
        raises.

        The first version of a layout is taken whatever it takes: memory is reserved at the start
        (P9), not at the expense of the versions that follow."""
        try:
            known = self._images
            images = self._current_images()
            for copy, live in self._copies:
                # The device does it in the order of its stream; the host waits on a CPU alone.
                copy.copy_(live)
            counts = images.write_counts()
            encode = self.boundary.take(None if self.data is None else self.data.read_to_train())
            if self.listener is not None:
                self.listener(label, images, encode)
            return SnapshotRequest(
                label,
                images,
                encode=encode,
                step=self._step_made(label.step),
                required=required or images is not known,
                # Training waits for a version that must be taken, and writes nothing meanwhile.
                written=None if required else lambda: images.written_since(counts),
                variant=variant,
            )
        except Exception as error:
            # Whatever it is, training goes on (P6). This rank still has to say no in the vote, or
            # its peers would wait.
            level = logging.WARNING if isinstance(error, ReftError) else logging.ERROR
            if type(error) not in self._failures:
                self._failures.add(type(error))
                logger.log(
                    level, "the state of step %d cannot be captured", label.step, exc_info=error
                )
            return SnapshotRequest(
                label, self._images, cause=SkipCause("the state could not be captured")
            )

    def host_state(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a version holds besides tensors of the engine."""
        return {**self._engine.capture(client_state), "followed": self.followed.capture()}

    def _random_states(self) -> dict[str, Any]:
        """Of the generators of this process, and of those that the script has given."""
        return {"rng": capture_rng(), "followed": self.followed.generators()}

    def _encode_host_state(self, drawn: dict[str, Any] | None) -> Encoded:
        images = self._current_images()
        state = self.host_state(self._client())
        if drawn is not None:
            state["rng"] = drawn["rng"]
            state["followed"][DRAWN] = drawn["followed"]
        pair = images.replicated, images.owned
        return self._blob.prepare(self._engine.template, pair, images.signature, state)

    def _client(self) -> Mapping[str, Any] | None:
        if self.restored_client is not None:
            return self.restored_client
        return self.client_state() if self.client_state else None

    def _current_images(self) -> LiveImages:
        signature, gradients = self.adapter.signature(), self.gradients
        if gradients is not None and gradients.follow(kept_members(self._session)):
            self._images = None
        worker = self._session.worker
        written = frozenset() if worker is None else frozenset(worker.written_tensors)
        if (
            self._images is None
            or self._images.signature != signature
            or written != self._copied_at_boundary
        ):
            captured = (
                ({}, 0) if gradients is None else (gradients.images, gradients.partition_bytes)
            )
            self._images = LiveImages(*self._sections(written), signature, *captured)
        return self._images

    def _sections(self, written: frozenset[str]) -> tuple[SectionImage, SectionImage]:
        """Both sections; copies stand for the tensors that the script writes after the boundary."""
        sections = self.adapter.images()
        self._copies = []
        if written:
            (replicated, first), (owned, second) = (
                section.with_copies(written) for section in sections
            )
            sections, self._copies = (replicated, owned), [*first, *second]
        if new := written - self._copied_at_boundary:
            logger.warning(
                "the script writes %s after the forward pass of a step has begun. From now on "
                "reft copies %s "
                "(%.1f MiB) within the device's or the host's own memory where each step begins, "
                "and training"
                " waits for it. Write the tensors after engine.step() instead, before the next "
                "forward pass",
                *(shortened(sorted(new)), "them" if len(new) > 1 else "it"),
                sum(copy.numel() for copy, _ in self._copies) / 2**20,
            )
        self._copied_at_boundary = written
        return sections

    def _step_made(self, step: int) -> OptimizerStep | None:
        """What is known of the step that was just made, for peers that repeat it."""
        taken = self.gradients.take(step) if self.gradients is not None else None
        if self.gradients is None or taken is None:
            return None
        # The thread that recomputes must do as this one, whose processor may take denormals for
        # zero. Torch's kernels for devices keep them.
        flush = not self.gradients.recipe.on_device and not float(torch.tensor(1e-40) * 1.0)
        return OptimizerStep(*taken, flush_denormal=flush)

    def replaced(self) -> None:
        """Something was loaded: the images may be other tensors."""
        self._images = None

    def close(self) -> None:
        """Leave nothing in the optimizer and in the loaders. No version is being copied any
        more."""
        if self.gradients is not None:
            self.gradients.close()
        if self.data is not None:
            self.data.close()
        self.followed.close()


def gradient_capture(session: Session) -> GradientCapture | None:
    """What AOR takes of every step; None unless it was asked for and there are partitions. Raises
    UnsupportedStateError: the optimizer cannot be repeated, or gradients are not kept; says what to
    change."""
    config, adapter = session.config, session.engine.adapter
    if not config.recompute:
        return None
    if not isinstance(adapter, StateAdapter):
        raise UnsupportedStateError(
            f"found {type(adapter).__name__}, whose optimizers reft cannot repeat on a host; "
            "expected a "
            f'DeepSpeed engine for "+aor": write "protection": "{config.scheme}" into the reft '
            "block"
        )
    if adapter.owned:
        return GradientCapture(adapter, kept_members(session), session.fence.hold)
    if session.is_rank_zero:
        logger.info(
            "%s partitions nothing: %s protects all of its state, and +aor has no effect",
            type(adapter.wrapper).__name__,
            config.scheme,
        )
    return None


def kept_members(session: Session) -> tuple[int, ...]:
    """Members of the group whose own bytes this rank keeps beside its own, under the scheme in
    force."""
    at, scheme = session.coordinate, Scheme.parse(session.protection.record.in_force)
    placement = place_group(
        session.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities
    )
    return placement.kept_by(at.dp)[1:]


def margin_bytes(config: ReftConfig, job_dir: Path) -> int:
    margin = config.memory_margin_bytes
    return default_margin_bytes(job_dir) if margin is None else margin


class Protection:
    """The protection that is in force, the same on all ranks. Made collectively; a ConfigError
    where the groups are too small for the scheme. ``chosen``: whether the scheme was chosen
    (``auto``), not named by the block."""

    def __init__(self, session: Session, *, chosen: bool) -> None:
        config = session.config
        self._session = session
        self.is_chosen = chosen
        # The last switch, if any node's memory tells of one and the block has not been edited
        # since; else what the block says.
        scheme, mine = str(config.scheme), read_record(session.memory.job_dir.path)
        told = b"" if mine is None else json.dumps(mine.to_json()).encode()
        records = [
            ProtectionRecord.from_json(json.loads(d))
            for d in session.control.gather_bytes(told)
            if d
        ]
        found = resume_record(records, f"{AUTO}:{config.tolerance}" if chosen else scheme, scheme)
        self.record = replace(
            found,
            tolerance=tolerance(session.topology, found.parsed.copies, found.parsed.parities),
            incarnation=session.memory.incarnation,
            aor=config.recompute,
        )

    def switch(self, control: WorkerControl, arenas: ArenaSet) -> SchemeSwitch:
        """For the snapshot worker, which agrees by ``control``; from here on orders are
        followed."""
        self.note()
        config, job_dir = self._session.config, self._session.memory.job_dir.path
        return SchemeSwitch(
            *(control, self._session.topology, arenas, self.record, RequestPoll(job_dir)),
            keeping=RetentionConfig(config.arena_count, margin_bytes(config, job_dir)),
            on_change=self._changed,
            reach=self._session.faults.reach,
        )

    @property
    def lost(self) -> bool:
        """Whether memory has become too short to survive the loss of a node, which it did
        before."""
        return self.record.degraded is not None and self.record.tolerance == 0

    def why_unprotected(self) -> str:
        if self.record.in_force == "none":
            return 'the protection is "none"'
        topology, d = self._session.topology, self._session.topology.degrees
        if d.dp == 1:
            return "with a data-parallel degree of 1 nothing is redundant"
        if len(set(topology.failure_domains)) == 1:
            return (
                "all ranks share a node with their copies: killed trainers are survived, the loss "
                "of the "
                "node is not"
            )
        nodes = [topology.group_nodes(*group) for group in topology.groups()]
        order = "across-nodes" if d.tp == 1 else f"across-nodes:{d.tp}"
        to_write = (
            f"start it with reft launch --rank-order {order}, or give PipelineModule "
            f"topology=reft.topology(pp={d.pp}, dp={d.dp}, tp={d.tp})"
        )
        others = " or ".join(f'"{scheme}"' for scheme in surviving_schemes(topology))
        if others:
            return (
                "a node holds several data-parallel members of a stage, more than "
                f"{self.record.in_force} "
                f"restores (found nodes {nodes}); write {others}, which survive the loss of a "
                "node here, or "
                f"put the members on different nodes: {to_write}"
            )
        return (
            "data-parallel members of a stage share a node with their copies (found nodes "
            f"{nodes}); put "
            f"them on different nodes: {to_write}"
        )

    def _changed(self, record: ProtectionRecord) -> None:
        """An order was carried out, or refused; or memory ran short, or came back. Called by the
        worker."""
        before, self.record = self.record, record
        self.note()
        self._session.events.write("protection", **record.to_json())
        if self._session.is_rank_zero:
            logger.warning("%s", self._words(before, record))

    def _words(self, before: ProtectionRecord, now: ProtectionRecord) -> str:
        if now.refused is not None and now.number != before.number:
            refused = now.refused
            return (
                f"protection stays {before.in_force}; {refused.scheme} was refused at step "
                f"{refused.step}: "
                f"{refused.cause}"
            )
        survives = f"it survives the loss of {now.tolerance} node(s) per sharding group"
        if not now.tolerance:
            survives += f": TOLERANCE IS 0, {self.why_unprotected()}"
        config = self._session.config
        if self.lost:
            survives += (
                f"; this version is written to {config.persist.dir} at once"
                if config.persist.dir is not None
                else '; nothing is on disk to fall back to: write "persist": {"dir": ...} into '
                '"reft"'
            )
        changed = (
            f"protection {before.in_force} -> {now.in_force} from the version after step "
            f"{now.step} on"
        )
        if now.degraded is None:
            back = (
                "; there is enough memory for the wanted protection again"
                if before.degraded
                else ""
            )
            return f"{changed}{back}; {survives}"
        return (
            f"{changed}, {now.degraded.versions} versions a rank instead of {now.scheme} with "
            f"{config.arena_count}: MEMORY IS SHORT: {now.degraded.cause}; {survives}"
        )

    def note(self) -> None:
        """Say on this node what is in force: for ``reft status``, and for the next start."""
        if local_rank() != 0:
            return
        try:
            write_record(self._session.memory.job_dir.path, self.record)
        except OSError as error:
            logger.warning(
                "the current protection cannot be recorded for the next start: %s", error
            )


class Tracer:
    """Collects the traces of one rank; what executes the instructions of a pipeline notes them
    here. Used by the training thread."""

    def __init__(self) -> None:
        # set to a bounded deque to have every step traced
        self.traces: deque[StepTrace] | None = None
        self.profiler: Profiler | None = None
        self.woven = False  # whether the instructions of a pipeline are noted
        self.mark: Callable[[], Any] | None = None
        """Set to have the device's time marked before and after every traced instruction, too."""
        self.records: list[InstructionRecord] = []  # of this step
        self.marks: list[tuple[Any, Any]] = []  # before and after each of them
        self.began = 0.0  # the last schedule

    @property
    def active(self) -> bool:
        return self.traces is not None or (self.profiler is not None and self.profiler.measuring)

    def profile(self, session: Session) -> None:
        """Begin a profile, if the session's block wants one. Collective."""
        config = session.config.profile
        if not config.steps:
            return
        if not self.woven:
            name = session.engine.name
            logger.warning("%s cannot be profiled; only a pipeline engine can", name)
            return
        from reft.profile.profiler import DeviceClock, Profiler

        # On a device calls return before their work is done; its own clock is read, without
        # waiting.
        vendor = find_vendor(session.engine.device)
        clock = None if vendor is None else DeviceClock(vendor)
        self.mark = None if clock is None else clock.mark
        self.profiler = Profiler(
            config,
            clock,
            job_id=session.job_id,
            at=session.coordinate,
            degrees=session.topology.degrees,
            control=session.control,
            snapshot_bytes=lambda: session.stats.device_bytes,
        )

    def add(
        self, session: Session, step: int, chunks: deque[ChunkRecord], fence_secs: float
    ) -> None:
        """A step has ended. ``chunks``: what was copied since the step before; emptied.
        ``fence_secs``: what training waited for copies."""
        records, self.records = self.records, []
        marks, self.marks = self.marks, []
        copied = []
        while chunks:  # the thread that copies adds more
            copied.append(chunks.popleft())
        trace = StepTrace(
            step=step,
            rank=session.control.rank,
            stage_id=session.coordinate.pp,
            begin_secs=self.began,
            end_secs=time.perf_counter(),
            instructions=tuple(records),
            chunks=tuple(copied),
            fence_secs=fence_secs,
        )
        if self.traces is not None:
            self.traces.append(trace)
        if self.profiler is not None:
            self.profiler.add(trace, marks)
            if not self.profiler.measuring:
                self.mark = None


# -- facts of an engine ----------------------------------------------------------------------------


def find_coordinate(engine: Any) -> tuple[Coordinate, Degrees]:
    """Read the parallel coordinate of this rank from a DeepSpeed engine; a LayoutError where it
    splits ranks in a way reft does not know (experts, sequences)."""
    import torch.distributed as dist

    grid = getattr(engine, "grid", None)
    if grid is not None:
        at = Coordinate(
            grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()
        )
        degrees = Degrees(
            grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()
        )
    else:
        mpu = getattr(engine, "mpu", None)
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        tp_rank, tp_size = 0, 1
        if mpu is not None:
            dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            tp_rank, tp_size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        at, degrees = Coordinate(0, dp_rank, tp_rank), Degrees(1, dp_size, tp_size)
    if degrees.world_size != dist.get_world_size():
        raise LayoutError(
            f"the engine reports {degrees}, which is {degrees.world_size} ranks, but the job has "
            f"{dist.get_world_size()}. reft needs a plain pp x dp x tp grid without expert or "
            f"sequence parallel ranks"
        )
    return at, degrees


def flat_facts(name: str, value: Any) -> Iterator[tuple[str, Fact]]:
    """Every number, text and truth value in ``value``, by dotted name; other objects are left
    out."""
    if isinstance(value, Mapping):
        for key in value:
            yield from flat_facts(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat_facts(f"{name}.{index}", item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield name, value
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield name, value.item()


def read_shapes(kind: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What this rank's part of a model consists of, for people, with a digest of every name and
    shape."""
    digest = hashlib.blake2b(digest_size=6)
    tensors = numbers = 0
    for name, parameter in parameters:
        tensors, numbers = tensors + 1, numbers + parameter.numel()
        digest.update(
            f"{name} {tuple(parameter.shape)} {parameter.dtype} "
            f"{parameter.requires_grad}\n".encode()
        )
    return (
        f"{kind}, {tensors} parameters of {numbers} numbers, names and shapes {digest.hexdigest()}"
    )


class CopySetup:
    """How one rank's bytes are copied."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self.variant = config.variant
        self.engine = copy_engine_for(session.engine.device)
        stages_bytes = (
            self.engine.asynchronous and Overflow(config.has.overflow) is Overflow.STAGING
        )
        self._staging = StagingArea(self.engine) if stages_bytes else None
        self._chunk_bytes = config.has.chunk_bytes
        self._hashers = hashing_threads(session.ranks_here)
        self._peers = None
        if config.verify.peers != "off":
            self._peers = PeerCheck(config.verify.peers == "rotate", config.block_bytes)
        self.pacer = Pacer(
            config.has,
            self.engine,
            stage_id=session.coordinate.pp,
            stages=session.topology.degrees.pp,
            micro_batches=session.engine.micro_batches,
            ranks_here=session.ranks_here,
            staging_room=None if self._staging is None else self._staging.room,
        )

    @property
    def takes_versions(self) -> bool:
        return self.variant is not Variant.NONE

    def copier(self) -> Copier:
        """Made anew for every worker."""
        return Copier(self.engine, self._chunk_bytes, self._staging, self._peers, self._hashers)


class OptimizerFence:
    """Stands before the optimizer step or, where it was seen to come within it, before the first
    write.

    A step with clipping or overflow checks meets the other ranks before it writes; copies may go on
    so long.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_within = False  # whether `before_write` is known to come before anything is written
        self._writes_seen = False
        self._waited_secs = 0.0

    def before_optimizer_step(self) -> None:
        """The fence, or its approach."""
        self._writes_seen = False
        if self._session.copying.takes_versions:
            self._session.copying.pacer.begin_optimizer()
        worker = self._session.worker
        if self.is_within and worker is not None:
            worker.near_fence()
        else:
            self.hold()

    def before_write(self, *_: object) -> None:
        """The innermost optimizer is about to write."""
        self._writes_seen = True
        self.hold()

    def after_optimizer_step(self) -> None:
        """Nothing may have been written, on overflow: the fence comes here, and next time before
        the step."""
        if not self._writes_seen:
            self.hold()
        self.is_within = self._writes_seen
        if self._session.copying.takes_versions:
            self._session.copying.pacer.end_optimizer()

    def hold(self) -> None:
        """Hold training until no copy reads the live tensors."""
        if self._session.worker is not None:
            secs = self._session.worker.fence()
            self._waited_secs += secs
            self._session.stats.stalls_secs.add_to_newest(secs)

    def take_waited_secs(self) -> float:
        """What training has waited here since this was asked last."""
        secs, self._waited_secs = self._waited_secs, 0.0
        return secs
