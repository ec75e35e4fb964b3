"""Writes restored blocks to a device, several at a time.

A block is in an arena or in a receive buffer. Neither is registered (pinned) with the device's
driver, and registering a whole arena would take longer than copying it. So each thread copies
its block into a small registered buffer and computes the checksum in the same pass. The device
reads this buffer on a stream of its own, while other threads fill their buffers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from reft.device import Vendor
from reft.memory.stream import HashingCopier, find_ranges, hashing_copier
from reft.snapshot.copy_engine import own_pages

logger = logging.getLogger(__name__)


@dataclass
class _Lane:
    """Stream, registered buffer and hasher of one copy in flight."""

    stream: Any
    buffer: torch.Tensor
    hasher: HashingCopier


class DeviceWriter:
    """Copies blocks from host memory into tensors of a device.

    Args:
        device: Device of the tensors; without an index, the thread's current device.
        vendor: The device's vendor.
    """

    def __init__(self, device: torch.device, vendor: Vendor) -> None:
        index = vendor.module.current_device() if device.index is None else device.index
        self.device, self._vendor = torch.device(vendor.type, index), vendor
        self._idle: SimpleQueue[_Lane] = SimpleQueue()
        self._registered: list[torch.Tensor] = []
        self._warned = False
        self._lock = threading.Lock()  # Guards _registered and _warned: write is thread-safe

    def begin(self) -> None:
        """Wait until the work queued on the calling thread's stream has ended, since it may
        still write to the targets."""
        self._vendor.module.current_stream(self.device).synchronize()

    def write(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], data: torch.Tensor) -> int:
        """Copy parts of a block into place and wait until they have arrived. Thread-safe.

        Args:
            parts: Pairs of target and source, 1-D uint8; the sources are views of ``data``.
            data: The block, 1-D uint8 in host memory.

        Returns:
            The checksum of ``data``.

        Raises:
            RuntimeError: The device failed.
        """
        self._vendor.enter(self.device)
        lane = self._take_lane(data.numel())
        begin, buffer = data.data_ptr(), lane.buffer
        lane.hasher.copy(find_ranges([(buffer.data_ptr(), begin, data.numel())]))
        with self._vendor.module.stream(lane.stream):
            for target, part in parts:
                at = part.data_ptr() - begin
                target.copy_(buffer[at : at + part.numel()], non_blocking=True)
        # Wait, since the next block will overwrite the buffer, and training will read the target
        # on another stream.
        lane.stream.synchronize()
        checksum = lane.hasher.take()
        self._idle.put(lane)
        return checksum

    def _take_lane(self, nbytes: int) -> _Lane:
        try:
            lane = self._idle.get_nowait()
        except Empty:
            # A stream from torch's pool may be shared, but nothing else uses the device
            # meanwhile.
            stream = self._vendor.module.Stream(self.device)
            lane = _Lane(stream, self._new_buffer(nbytes), hashing_copier())
        if lane.buffer.numel() < nbytes:
            lane.buffer = self._new_buffer(nbytes)
        return lane

    def _new_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = own_pages(nbytes)
        try:
            self._vendor.host_register(self.device, buffer.data_ptr(), nbytes)
        except (RuntimeError, OSError, AttributeError) as error:
            with self._lock:
                warned, self._warned = self._warned, True
            if not warned:
                logger.warning(
                    "%s: memory cannot be pinned: %s. The state is restored through the driver's "
                    "buffers, more slowly; raise the limit of locked memory (ulimit -l)",
                    *(self.device, error),
                )
        else:
            with self._lock:
                self._registered.append(buffer)
        return buffer

    def close(self) -> None:
        """Unregister all buffers. No :meth:`write` may be in progress."""
        for buffer in self._registered:
            try:
                self._vendor.host_unregister(self.device, buffer.data_ptr())
            except (RuntimeError, OSError, AttributeError) as error:
                logger.warning("%s: memory could not be unpinned: %s", self.device, error)
        self._registered.clear()
