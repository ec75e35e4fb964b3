"""What a trainer has of its device's memory, for its page: counted by torch's allocator, which is asked for
numbers that it keeps anyway. The device is neither waited for nor asked, but once for what others take of it.

``torch.cuda`` is ROCm's HIP too, on AMD's devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reft.node.progress import DeviceUse, ProgressPage

logger = logging.getLogger(__name__)


class DeviceMemory:
    """Notes a device's memory on a trainer's page, behind steps.

    Args:
        page: of the trainer.
        device: its.
        stats: what the allocator counts; as :func:`torch.cuda.memory_stats_as_nested_dict`.
        info: bytes that are free on the device, and all; as :func:`torch.cuda.mem_get_info`.
        every_secs: between two looks, at least.
    """

    def __init__(
        self,
        page: ProgressPage,
        device: torch.device,
        stats: Callable[[torch.device], Mapping[str, Any]] = torch.cuda.memory_stats_as_nested_dict,
        info: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
        *,
        every_secs: float = 1.0,
    ) -> None:
        self._page = page
        self._device = device
        self._stats = stats
        self._info = info
        self._every_secs = every_secs
        self._total = 0
        self._next = 0.0
        self._off = device.type != "cuda"

    def after_step(self) -> None:
        """Note it, if it is time. It never raises."""
        now = time.monotonic()
        if self._off or now < self._next:
            return
        self._next = now + self._every_secs
        try:
            use = self._look()
        except (RuntimeError, KeyError, TypeError) as error:  # another allocator counts nothing
            logger.info("the memory of %s is not watched: %s", self._device, error)
            self._off = True
            return
        if use is not None:
            self._page.set_device(use)

    def _look(self) -> DeviceUse | None:
        stats = self._stats(self._device)
        if not stats:
            return None
        allocated, reserved = (stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
        if not self._total:
            free, _ = self._info(self._device)
            self._total = free + reserved["current"]
        return DeviceUse(
            total=self._total,
            allocated=allocated["current"],
            peak_allocated=allocated["peak"],
        )
