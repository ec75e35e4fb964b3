"""The program that trains as a session sees it: the seam between reft and DeepSpeed or
Megatron-core, what is captured of it after a step, and by what and when that is copied."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from reft.aor.gradients import GradientCapture
from reft.aor.recompute import OptimizerStep, PeerOptimizers
from reft.config import Variant
from reft.device import find_vendor
from reft.engine.boundary import Encoded, StepBoundary
from reft.engine.host_state import DRAWN, host_states
from reft.engine.protection import kept_members
from reft.engine.protocol import ClientState
from reft.errors import ReftError, UnsupportedStateError
from reft.grid import VersionId
from reft.pacing.pacer import Pacer
from reft.pacing.schedule import InstructionRecord, Overflow, StepTrace
from reft.pacing.staging import StagingArea
from reft.snapshot.copier import Copier, hashing_threads, shortened
from reft.snapshot.device_engine import copy_engine_for
from reft.snapshot.gate import ChunkRecord
from reft.snapshot.plan import LiveImages
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotRequest
from reft.state.adapters import StateAdapter
from reft.state.blob import HostBlob, capture_rng
from reft.state.catalogue import SectionImage

if TYPE_CHECKING:
    from reft.engine.session import Session
    from reft.profile.profiler import Profiler


logger = logging.getLogger(__name__)


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
                captured=self._captured(label.step),
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

    def _captured(self, step: int) -> dict[str, Any]:
        """What features need to know of the step that was just made, for peers that repeat it."""
        taken = self.gradients.take(step) if self.gradients is not None else None
        if self.gradients is None or taken is None:
            return {}
        # The thread that recomputes must do as this one, whose processor may take denormals for
        # zero. Torch's kernels for devices keep them.
        flush = not self.gradients.recipe.on_device and not float(torch.tensor(1e-40) * 1.0)
        return {PeerOptimizers.name: OptimizerStep(*taken, flush_denormal=flush)}

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
        self.pacer = Pacer(
            config.has,
            self.engine,
            stage_id=session.coordinate.pp,
            stages=session.topology.degrees.pp,
            micro_batches=session.engine.micro_batches,
            ranks_here=session.ranks_here,
            staging=self._staging,
        )

    @property
    def takes_versions(self) -> bool:
        return self.variant is not Variant.NONE

    def copier(self) -> Copier:
        """Made anew for every worker."""
        return Copier(self.engine, self._chunk_bytes, self._staging, self._hashers)


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
