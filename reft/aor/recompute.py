"""Asynchronous optimizer recomputing (AOR, REFT paper): recomputes a ring peer's ZeRO partition
on the host.

Version i of a kept partition (one that this rank stores for a peer) is computed from version
i-1, which is in this rank's newest committed arena: by one step of the owner's optimizer with
the gradients that were copied for version i. The result is written directly into the arena of
version i. Before the arena is sealed, the result is compared with the checksums that the owner
sends with every version. The owner sends blocks that differ or could not be recomputed
(:mod:`reft.snapshot.arenas`). So a missing gradient or a stale replica costs only a transfer,
and wrong bytes are never restored (P5).

Device and host kernels must agree bit for bit. Those of fused Adam on a GPU do not; those of
:mod:`reft.optim` do.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from reft.aor.host_adam import AdamRecipe, AdamReplica, OwnerStep, ReplicaTensors
from reft.errors import ReftError, StaleReplicaError, UnsupportedStateError
from reft.grid import Section
from reft.snapshot.arenas import ArenaWriter
from reft.snapshot.extension import CopiedVersion, VersionFeature
from reft.snapshot.plan import LiveImages
from reft.snapshot.stats import RecomputeStats
from reft.snapshot.version import SkipCause
from reft.state.catalogue import SectionImage, TensorSpec

logger = logging.getLogger(__name__)

_IN_VAIN = 20
"""Number of consecutive versions after which a warning is logged if every one was recomputed
with a wrong result."""


@dataclass(frozen=True)
class OptimizerStep:
    """Facts about the newest step, captured by the training thread."""

    record: OwnerStep  # Hyper-parameters, and whether the step was skipped
    # Adam's step count t after the step; None if it is only on the device
    applied: int | None = None
    flush_denormal: bool = False  # Whether the training thread treats denormals as zero


class PeerOptimizers(VersionFeature):
    """Replicas of the optimizers of those group members whose partitions this rank keeps."""

    name = "aor"

    def __init__(self, recipe: AdamRecipe, stats: RecomputeStats | None = None) -> None:
        self._recipe = recipe
        self.stats = stats or RecomputeStats()
        self.base: ArenaWriter | None = None
        """The newest committed version, from which the next one's partitions are recomputed."""
        self.replicas: dict[int, AdamReplica] = {}  # Replicas by member
        self._told: set[str] = set()
        self._refused_steps: Counter[int] = Counter()
        self._in_vain = False

    def recompute(
        self, writer: ArenaWriter, images: LiveImages, step: OptimizerStep | None
    ) -> None:
        """Recompute the kept partitions of a version whose gradients have been copied.

        If recomputing a partition fails, its bytes in the arena stay as they are, and the owner
        sends it.
        """
        began, cpu = time.perf_counter(), time.thread_time()
        for member in _kept(writer, images):
            try:
                self._recompute(member, writer, images, step)
                writer.hash_partition(member)
            except Exception as error:
                self._failed(member, writer, error)
        self.stats.secs += time.perf_counter() - began
        self.stats.cpu_secs += time.thread_time() - cpu

    def count_equal(
        self, writer: ArenaWriter, images: LiveImages, step: OptimizerStep | None
    ) -> None:
        """Count the recomputed partitions that match their owners' checksums, and those that do
        not (P5)."""
        for member in _kept(writer, images):
            replica = self.replicas.get(member)
            if (
                replica is None
                or replica.stale
                or replica.number != writer.label.step
                or step is None
            ):
                continue
            try:
                # Look at owned blocks only: the owner always sends the host block and the
                # checksums.
                equal = all(b.key.section is not Section.OWNED for b in writer.wanted(member))
            # P6: do not raise, since peers wait for this rank in the next exchange
            except Exception as error:
                self._failed(member, writer, error)
                continue
            if equal:
                self.stats.versions += 1
                self._refused_steps[member] = 0
            else:
                self._give_up(member, writer, "it is not what its owner has")
                self._refused_steps[member] += 1
                self._warn_if_in_vain(member, writer)

    def fill(self, version: CopiedVersion) -> None:
        self.recompute(version.writer, version.images, version.captured.get(self.name))

    def compare(self, version: CopiedVersion) -> SkipCause | None:
        self.count_equal(version.writer, version.images, version.captured.get(self.name))
        return None

    def committed(self, version: CopiedVersion) -> None:
        """Keep this version as the one from which the next version's partitions are computed."""
        self.base = version.writer

    def forget_arenas(self) -> None:
        self.base = None
        self.replicas.clear()

    def _warn_if_in_vain(self, member: int, writer: ArenaWriter) -> None:
        """Warn once if recomputed partitions are always wrong: the state stays correct, since
        owners send them, but recomputing is wasted."""
        if self._refused_steps[member] < _IN_VAIN or self._in_vain:
            return
        self._in_vain = True
        logger.warning(
            "recomputing gains nothing at step %d: the partition of member %d was copied from its "
            "owner %d "
            'times in a row. Leave "+aor" out of reft.protection; or, if the owner uses different '
            "kernels "
            "from this host, train with reft.ExactAdam",
            writer.label.step,
            member,
            _IN_VAIN,
        )

    # -- one partition -----------------------------------------------------------------------------

    def _recompute(
        self, member: int, writer: ArenaWriter, images: LiveImages, step: OptimizerStep | None
    ) -> None:
        base, number = self.base, writer.label.step
        if step is None:
            raise ReftError("nothing is known of how the optimizer made this step")
        if base is None or base.layout is not writer.layout:
            raise ReftError("there is no version yet to recompute from")
        if base.label.step != number - 1 or base.label.incarnation != writer.label.incarnation:
            raise ReftError("the gradients of steps since the newest version are missing")
        partition = writer.partition(member)
        partition.copy_(base.partition(member))
        tensors = _replica_tensors(partition, images.owned)
        replica = self._replica(member, tensors, step, base)
        gradients = _views(writer.gradients(member), images.gradients[member])
        record = step.record
        # The factor was copied from the device with the gradients
        if "multiplier" in gradients and not record.skipped:
            record = replace(record, multiplier=float(gradients["multiplier"][0]))
        # This mode is set per thread. Denormals must be treated as in the training thread.
        torch.set_flush_denormal(step.flush_denormal)
        replica.apply(record, [gradients[f"gradient.{g}"] for g in range(len(tensors))])
        _set_steps(partition, images.owned, replica.applied)

    def _replica(
        self, member: int, tensors: Sequence[ReplicaTensors], step: OptimizerStep, base: ArenaWriter
    ) -> AdamReplica:
        """Return the replica of the member's optimizer, bound to the new memory, in its state
        after the previous version."""
        number = base.label.step
        replica = self.replicas.get(member)
        if replica is not None and not replica.stale and replica.number == number:
            replica.bind(tensors)
            return replica
        applied = step.applied
        if applied is None:
            raise ReftError("the number of the optimizer's steps is not known")
        applied -= not step.record.skipped
        if replica is None:
            made = AdamReplica(self._recipe, step.record.groups, tensors, number, applied)
            self.replicas[member] = made
            return made
        replica.restart(tensors, number, applied)
        return replica

    def _failed(self, member: int, writer: ArenaWriter, error: Exception) -> None:
        """Handle any error without raising, because peers wait for this rank in the exchange.

        Errors other than reft's own may be bugs; they are logged with a traceback, once for each
        class.
        """
        if isinstance(error, StaleReplicaError):
            cause, detail = "its optimizer cannot follow", str(error)
        elif isinstance(error, ReftError):
            cause, detail = str(error), ""
        else:
            cause, detail = type(error).__name__, str(error)
            if cause not in self._told:
                logger.warning("recomputing of step %d failed", writer.label.step, exc_info=error)
        self._give_up(member, writer, cause, detail)

    def _give_up(self, member: int, writer: ArenaWriter, cause: str, detail: str = "") -> None:
        """Mark the replica as stale, so that the owner sends the partition."""
        replica = self.replicas.get(member)
        if replica is not None:
            replica.mark_stale(cause)
        self.stats.resynced[cause] = self.stats.resynced.get(cause, 0) + 1
        first = cause not in self._told
        self._told.add(cause)
        logger.log(
            logging.INFO if first else logging.DEBUG,
            "the partition of step %d of member %d is copied from its owner: %s%s",
            writer.label.step,
            member,
            cause,
            f" ({detail})" if detail else "",
        )


def _kept(writer: ArenaWriter, images: LiveImages) -> dict[int, SectionImage]:
    """Return the images of captured gradients of the members whose partitions the version keeps,
    by member.

    A switch of the protection scheme changes the layout at once, but the members whose gradients
    are captured only from the next step, so the two may differ for one version.
    """
    kept = writer.layout.plan.placement.kept_by(writer.layout.member)
    return {m: image for m, image in images.gradients.items() if m in kept}


# --- tensor views of an image's bytes -------------------------------------------------------------


def _views(memory: torch.Tensor, image: SectionImage) -> dict[str, torch.Tensor]:
    """Return the tensors of an image by name, as views of ``memory``, which holds a copy of the
    image's bytes."""
    return {
        spec.name: _view(memory, offset, spec)
        for spec, offset in zip(image.specs, image.offsets, strict=True)
    }


def _view(memory: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    return memory[offset : offset + spec.nbytes].view(spec.torch_dtype)


def _replica_tensors(memory: torch.Tensor, owned: SectionImage) -> list[ReplicaTensors]:
    """Return master weights and moments of every parameter group; their sizes and order are the
    same on all members."""
    views = _views(memory, owned)
    groups = sum(name.startswith("master.") for name in views)
    if len(views) == groups:
        raise ReftError("the optimizer has made no step yet")
    keys = ("exp_avg", "exp_avg_sq")
    expected = {f"master.{g}.0" for g in range(groups)} | {
        f"optimizer.{g}.0.{key}" for g in range(groups) for key in keys
    }
    steps = {f"optimizer.{g}.0.step" for g in range(groups)}
    if set(views) - steps != expected:
        raise UnsupportedStateError(
            f"the partition holds {sorted(views)}; expected one fp32 master and the moments "
            f"exp_avg and exp_avg_sq for each of {groups} groups"
        )
    return [
        ReplicaTensors(views[f"master.{g}.0"], *(views[f"optimizer.{g}.0.{key}"] for key in keys))
        for g in range(groups)
    ]


def _set_steps(memory: torch.Tensor, owned: SectionImage, applied: int) -> None:
    """Write the step count ``applied`` into the tensors in which torch's device kernels keep it,
    next to the moments."""
    for spec, offset in zip(owned.specs, owned.offsets, strict=True):
        if spec.name.endswith(".step"):
            _view(memory, offset, spec).fill_(applied)
