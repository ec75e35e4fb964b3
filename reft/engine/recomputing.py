"""The gradients that ring peers' partitions are recomputed from, captured beside the training (AOR)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from reft.config import ReftConfig
from reft.errors import UnsupportedStateError
from reft.grid import Coordinate, Topology
from reft.protect.codes import Scheme
from reft.protect.host_adam import AdamRecipe
from reft.protect.placement import place_group
from reft.snapshot.recompute import OptimizerStep, RecomputeOptions
from reft.state.adapters import StateAdapter
from reft.state.catalogue import Adapter, SectionImage
from reft.state.gradients import GradientCapture

logger = logging.getLogger(__name__)


class Recomputing:
    """AOR in one session: nothing, unless it was asked for and there are partitions.

    Args:
        config: the block.
        adapter: of the engine.
        at: this rank's coordinate.
        topology: placement of this incarnation.
        scheme: returns the scheme in force: it decides whose partitions this rank keeps.
        fence: waits until nobody copies what was captured before.

    Raises:
        UnsupportedStateError: the optimizer cannot be repeated, or gradients are not kept; says what to
            change.
    """

    def __init__(
        self,
        config: ReftConfig,
        *,
        adapter: Adapter,
        at: Coordinate,
        topology: Topology,
        scheme: Callable[[], Scheme],
        fence: Callable[[], None],
    ) -> None:
        self._options = config.aor
        self._scheme = scheme
        self._member = at.dp
        self._nodes = topology.group_nodes(at.pp, at.tp)
        self.capture: GradientCapture | None = None
        self.inexact: str | None = None
        """What to say at the start of partitions that cannot be recomputed to the bit."""
        self.paused = False
        """Set: partitions are sent by their owners, as without AOR, from the next version on."""
        if not config.recompute:
            return
        if not isinstance(adapter, StateAdapter):
            raise UnsupportedStateError(
                f"found {type(adapter).__name__}, whose optimizers reft cannot repeat on a host; expected a "
                f'DeepSpeed engine for "+aor": write "protection": "{config.scheme}" into the reft block'
            )
        if not adapter.owned:
            if topology.coordinates[0] == at:
                logger.info(
                    "%s partitions nothing: all of its state is protected by %s, aor has nothing to do",
                    type(adapter.wrapper).__name__,
                    config.scheme,
                )
            return
        sampled = config.aor.drift_ulps > 0
        self.capture = GradientCapture(adapter, self._kept_members(), fence, sampled=sampled)
        self.inexact = why_inexact(self.capture.recipe, config.aor.drift_ulps)

    def _kept_members(self) -> tuple[int, ...]:
        """Members of the group whose own bytes this rank keeps beside its own, under the scheme in force."""
        if self.paused:
            return ()
        scheme = self._scheme()
        return place_group(self._nodes, scheme.copies, scheme.parities).kept_by(self._member)[1:]

    @property
    def options(self) -> RecomputeOptions | None:
        """For the snapshot worker; None where everything is sent."""
        if self.capture is None:
            return None
        return RecomputeOptions(self.capture.recipe, self._options.drift_ulps, self._options.resync_steps)

    def follow(self) -> bool:
        """Capture for those members that are kept now. Returns whether they are others than before."""
        return self.capture is not None and self.capture.follow(self._kept_members())

    @property
    def images(self) -> Mapping[int, SectionImage]:
        """What is captured, by member."""
        return {} if self.capture is None else self.capture.images

    @property
    def partition_bytes(self) -> int:
        """Of what is captured for one member; 0 where nothing is ever recomputed."""
        return 0 if self.capture is None else self.capture.partition_bytes

    def close(self) -> None:
        """Leave nothing in the optimizer. No version is being copied any more."""
        if self.capture is not None:
            self.capture.close()

    def take(self, step: int) -> OptimizerStep | None:
        """What is known of the step that was just made."""
        taken = self.capture.take(step) if self.capture is not None else None
        if self.capture is None or taken is None:
            return None
        # Torch's kernels for devices keep denormals, whatever this thread's processor does.
        flush = not self.capture.recipe.on_device and _flushes_denormals()
        return OptimizerStep(*taken, flush_denormal=flush)


def why_inexact(recipe: AdamRecipe, drift_ulps: int) -> str | None:
    """What to say at the start where hosts cannot repeat the owner's step to the bit; None where they can."""
    if recipe.exact:
        return None
    said = (
        f"the optimizer, {recipe.kind}, steps on a device, whose kernels round differently from the host's. "
        f"For partitions that are recomputed to the bit, pass "
        f"optimizer=reft.ExactAdam(model.parameters(), lr=...) to deepspeed.initialize instead of "
        f'"optimizer", and write "zero_allow_untested_optimizer": true'
    )
    if drift_ulps:
        return f"recomputed partitions are not their owners' to the bit, only near them (drift_ulps): {said}"
    return f'"+aor" saves no traffic here, since every partition is sent after all: {said}'


def _flushes_denormals() -> bool:
    """Whether this thread's processor takes denormals for zero: the thread that recomputes must do alike."""
    return not float(torch.tensor(1e-40) * 1.0)
