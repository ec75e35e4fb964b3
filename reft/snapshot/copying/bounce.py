"""Buffers of pinned host memory, by way of which a device copies where memory cannot be pinned itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from reft.snapshot.copying.cpu import copy_on_host


class BounceBuffers:
    """Two buffers, one filled by the device while the other is emptied.

    Made when first needed. Where they cannot be had, copies go through the driver's own.

    Args:
        nbytes: size of each.
        make: makes one, pinned.
        dma: queues a copy from the device on the current stream.
        event: makes an event that a thread can wait for.
        closed: whether the engine was closed.
        warn: called once with what the driver said, if there are none.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        make: Callable[[], torch.Tensor],
        dma: Callable[[torch.Tensor, torch.Tensor], None],
        event: Callable[[], Any],
        closed: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._nbytes = nbytes
        self._make = make
        self._dma = dma
        self._event = event
        self._closed = closed
        self._warn = warn
        self._buffers: list[torch.Tensor] | None = None
        self._lock = threading.Lock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Copy ``source`` on the device to ``target``, both 1-D uint8, by ``stream``, the current one;
        returns when the bytes have arrived."""
        with self._lock:
            buffers = self._ready()
            if not buffers:
                self._dma(source, target)
                stream.synchronize()
                return
            landing: deque[Callable[[], None]] = deque()
            for number, at in enumerate(range(0, source.numel(), self._nbytes)):
                if len(landing) == len(buffers):
                    landing.popleft()()
                stop = min(at + self._nbytes, source.numel())
                buffer = buffers[number % len(buffers)][: stop - at]
                self._dma(source[at:stop], buffer)
                landing.append(self._land(buffer, target[at:stop], stream))
            while landing:
                landing.popleft()()

    def _land(self, buffer: torch.Tensor, target: torch.Tensor, stream: Any) -> Callable[[], None]:
        arrived = self._event()
        arrived.record(stream)

        def land() -> None:
            arrived.synchronize()
            copy_on_host(buffer, target, self._closed)

        return land

    def _ready(self) -> list[torch.Tensor]:
        if self._buffers is None:
            try:
                self._buffers = [self._make() for _ in range(2)]
            except RuntimeError as error:
                self._buffers = []
                self._warn(str(error))
        return self._buffers

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = None
