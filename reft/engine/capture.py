"""Captures the content of a version: images of the engine's tensors, and the host state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reft.aor.gradients import GradientCapture
from reft.aor.recompute import OptimizerStep, PeerOptimizers
from reft.config import Variant
from reft.engine.boundary import Encoded, StepBoundary
from reft.engine.context import JobContext
from reft.engine.fence import OptimizerFence
from reft.engine.host_state import DRAWN, host_states
from reft.engine.protection import Protection
from reft.engine.protocol import ClientState
from reft.errors import ReftError, UnsupportedStateError
from reft.grid import VersionId
from reft.snapshot.copier import shortened
from reft.snapshot.plan import LiveImages
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker
from reft.state.adapters import StateAdapter
from reft.state.blob import HostBlob, capture_rng
from reft.state.catalogue import SectionImage

logger = logging.getLogger(__name__)


class EngineState:
    """Captures the state with which a step begins. Used by the training thread.

    Args:
        context: the job.
        protection: active protection; names the sharding-group members whose gradients are
            needed.
        fence: the point in a step where training waits for copies, here before gradients are
            freed.
        client_state: returns the script's own values; None if there are none.

    Attributes:
        adapter: adapter of the engine's optimizer.
        gradients: captures gradients for peers that recompute this rank's optimizer step (AOR);
            None if no peer does.
        data: the position in the data; None if the program tracks it.
        followed: state of the script that versions hold in addition to the engine's.
        boundary: finds the host state with which a step begins.
    """

    def __init__(
        self,
        context: JobContext,
        protection: Protection,
        fence: OptimizerFence,
        client_state: ClientState | None,
    ) -> None:
        self._engine = engine = context.engine
        self._protection = protection
        self.adapter = engine.adapter
        self.gradients = gradient_capture(context, protection, fence)
        self.client_state = client_state
        self.restored_client: dict[str, Any] | None = None
        """Client state of the restored version; None once the script has continued training."""
        self.data = engine.data
        self.followed = host_states(context)
        """State of the script that versions hold in addition to the engine's."""
        self.listener: Callable[[VersionId, LiveImages, Encoded], None] | None = None
        """Function that is called with every captured state, for `reft rehearse`; None for none."""
        # Only with a plain engine does the script make the batch before the step begins: a
        # pipeline engine reads it within ``train_batch``, and a step of Megatron-core begins
        # before its batch is read.
        repeats_draws = engine.data is not None and not engine.data.is_pipeline
        self.boundary = StepBoundary(
            self._encode_host_state, repeats_draws=repeats_draws, random_states=self._random_states
        )
        if engine.data is not None:
            engine.data.boundary = self.boundary
        self.worker: SnapshotWorker | None = None
        """The snapshot worker, which lists the tensors that the script writes while they are
        copied; None before the session starts."""
        self._images: LiveImages | None = None
        self._copied_at_boundary: frozenset[str] = frozenset()
        """Names of the tensors that the script or a step writes while a version is copied; in
        their place the images contain copies that are made at each step boundary."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # In a strict job, a version that no checkpoint could be written from is not taken.
        self._blob = HostBlob(strict=context.config.strict)
        self._failures: set[type[Exception]] = set()

    def capture(self, label: VersionId, *, required: bool, variant: Variant) -> SnapshotRequest:
        """Capture a version for the snapshot worker. Never raises.

        The first version of a layout is required, so that memory is reserved at the start (P9)
        and later versions are not delayed.

        Args:
            label: name of the version.
            required: True to take the version even if training has to wait for it.
            variant: when its bytes are copied.

        Returns:
            The request, with a cause if the state could not be captured.
        """
        try:
            known = self._images
            images = self._current_images()
            for copy, live in self._copies:
                # A device queues this copy on its stream; only on a CPU does the host wait for
                # it.
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
                # Training waits for a required version, so nothing can be written meanwhile.
                written=None if required else lambda: images.written_since(counts),
                variant=variant,
            )
        except Exception as error:
            # Training continues after any error (P6). This rank must still vote, against the
            # version: its peers wait for the vote.
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
        """Return the host state of a version: all of it that is not in the engine's tensors."""
        return {**self._engine.capture(client_state), "followed": self.followed.capture()}

    def _random_states(self) -> dict[str, Any]:
        """Return states of this process's random generators, and of those registered by the
        script."""
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
        if gradients is not None and gradients.follow(self._protection.kept_members()):
            self._images = None
        by_steps = self.adapter.written_by_steps
        written = by_steps if self.worker is None else by_steps | self.worker.written_tensors
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
        """Return the replicated and the owned section. Copies made now stand for the tensors in
        ``written``, which the script or a step writes while the version is copied."""
        sections = self.adapter.images()
        self._copies = []
        if written:
            (replicated, first), (owned, second) = (
                section.with_copies(written) for section in sections
            )
            sections, self._copies = (replicated, owned), [*first, *second]
        if new := written - self._copied_at_boundary - self.adapter.written_by_steps:
            logger.warning(
                "the script writes %s after the forward pass of a step has begun. From now on reft "
                "copies %s (%.1f MiB) within the device's or the host's own memory where each step "
                "begins, and training waits for it. Write the tensors after engine.step() instead, "
                "before the next forward pass",
                *(shortened(sorted(new)), "them" if len(new) > 1 else "it"),
                sum(copy.numel() for copy, _ in self._copies) / 2**20,
            )
        self._copied_at_boundary = written
        return sections

    def _captured(self, step: int) -> dict[str, Any]:
        """Return data of the last step by feature: gradients, for peers that recompute the step
        (AOR).
        """
        taken = self.gradients.take(step) if self.gradients is not None else None
        if self.gradients is None or taken is None:
            return {}
        # This thread may flush denormals to zero; then the recomputing thread must too, or its
        # results differ. Torch's device kernels keep denormals.
        flush = not self.gradients.recipe.on_device and not float(torch.tensor(1e-40) * 1.0)
        return {PeerOptimizers.name: OptimizerStep(*taken, flush_denormal=flush)}

    def replaced(self) -> None:
        """Forget the engine's tensors after a load, which may have replaced them by other
        objects."""
        self._images = None

    def close(self) -> None:
        """Remove all hooks from the optimizer and the loaders. Called when no version is being
        copied."""
        if self.gradients is not None:
            self.gradients.close()
        if self.data is not None:
            self.data.close()
        self.followed.close()


def gradient_capture(
    context: JobContext, protection: Protection, fence: OptimizerFence
) -> GradientCapture | None:
    """Create the object that captures gradients for peers that recompute a step (AOR).

    Returns:
        The object; None if the block does not request AOR, or no state is partitioned.

    Raises:
        UnsupportedStateError: the optimizer cannot be recomputed, or gradients are not kept.
    """
    config, adapter = context.config, context.engine.adapter
    if not config.recompute:
        return None
    if not isinstance(adapter, StateAdapter):
        raise UnsupportedStateError(
            f"found {type(adapter).__name__}, whose optimizers reft cannot repeat on a host; "
            f'expected a DeepSpeed engine for "+aor": write "protection": "{config.scheme}" into '
            "the reft block"
        )
    if adapter.owned:
        return GradientCapture(adapter, protection.kept_members(), fence.hold)
    if context.is_rank_zero:
        logger.info(
            "%s partitions nothing: %s protects all of its state, and +aor has no effect",
            type(adapter.wrapper).__name__,
            config.scheme,
        )
    return None
