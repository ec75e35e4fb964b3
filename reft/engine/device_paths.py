"""What of reft runs on a device only, and where it has ever run: said at the start of a job that uses it.

On CPUs these paths are tested with a simulated device, or with their kernels compiled for the host.
``make gpu`` runs their tests on a real one; whoever has run it adds the result to :data:`PATHS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from reft.config import Variant
from reft.snapshot.scheduling.has import Overflow

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run of a path's tests on a real device.

    Attributes:
        platform: ``CUDA`` or ``ROCm``.
        device: its name, as ``torch.cuda.get_device_name`` gives it.
        measured: file below ``docs/measurements`` with the result.
    """

    platform: str
    device: str
    measured: str


@dataclass(frozen=True)
class DevicePath:
    """Something that only a job on a device uses.

    Attributes:
        name: for people.
        modules: where it is.
        used: whether a job with this session uses it.
        runs: on real devices.
    """

    name: str
    modules: tuple[str, ...]
    used: Callable[[Session], bool]
    runs: tuple[Run, ...] = ()


def _always(_: Session) -> bool:
    return True


def _windows(session: Session) -> bool:
    return session.copying.variant is Variant.HAS


def _stages(session: Session) -> bool:
    return Overflow(session.config.has.overflow) is Overflow.STAGING


def _parities_by_cupy(session: Session) -> bool:
    return bool(session.protection.record.parsed.parities) and find_spec("cupy") is not None


def _parities_by_torch(session: Session) -> bool:
    return bool(session.protection.record.parsed.parities) and find_spec("cupy") is None


def _recomputes(session: Session) -> bool:
    return session.config.recompute


def _finds_the_interval(session: Session) -> bool:
    return session.config.adapts


def _exact_adam(session: Session) -> bool:
    return session.state.adapter.steps_exactly


PATHS: tuple[DevicePath, ...] = (
    DevicePath("copies on a side stream", ("reft.snapshot.copying.cuda",), _always),
    DevicePath("pinned arenas", ("reft.snapshot.copying.pinning", "reft.snapshot.copying.bounce"), _always),
    DevicePath("buffers that are late", ("reft.state.blob",), _always),
    DevicePath("windows by the device's clock", ("reft.profile.clock",), _windows),
    DevicePath("staging in device memory", ("reft.snapshot.copying.staging",), _stages),
    DevicePath("parities by CuPy", ("reft.protect.xor_cupy", "reft.protect.kernels"), _parities_by_cupy),
    DevicePath("parities by torch", ("reft.protect.xor_torch",), _parities_by_torch),
    DevicePath("capture of gradients", ("reft.state.gradients",), _recomputes),
    DevicePath("ExactAdam", ("reft.optim",), _exact_adam),
    DevicePath("costs of copies within the device", ("reft.engine.device_costs",), _finds_the_interval),
    DevicePath("watching the memory of a device", ("reft.engine.device_memory",), _always),
    DevicePath("restoring to a device", ("reft.engine.restore",), _always),
    DevicePath("random states of a device", ("reft.state.rng",), _always),
)
"""Each with its runs on real devices: none so far."""


def untried(paths: Sequence[DevicePath], session: Session, platform: str) -> Iterator[str]:
    """Names of the paths that a job uses and that never ran on a platform."""
    for path in paths:
        if path.used(session) and platform not in {run.platform for run in path.runs}:
            yield path.name


def report_untried(session: Session, paths: Sequence[DevicePath] = PATHS) -> None:
    """One line on rank 0 of a job on a device, where there is anything to say."""
    if not (session.copying.engine.asynchronous and session.is_rank_zero):
        return
    platform = platform_of(torch.version)
    if names := ", ".join(untried(paths, session, platform)):
        logger.warning(
            "never run on a %s device before, only on simulated ones: %s. What is restored is verified all "
            "the same; run 'make gpu' in reft's sources first, and compare losses with a run without reft",
            platform,
            names,
        )


def platform_of(version: Any) -> str:
    """``CUDA`` or ``ROCm``, by ``torch.version``."""
    return "ROCm" if getattr(version, "hip", None) else "CUDA"
