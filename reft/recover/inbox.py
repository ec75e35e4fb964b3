"""The blocks that come to one rank over the network: which may arrive now, and where.

Blocks are expected in the plan's order. Those within a window of the first that is not used yet may arrive;
what lies beyond waits at its sender. So memory is bounded (P9), a fast peer does not run ahead of those whose
blocks are decoded together with its own, and the first block can always arrive: nothing waits in a circle.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from reft.recover.moves import Move
from reft.recover.plan import Fetch
from reft.recover.pool import Bytes, Pool

RoomFor = Callable[[Fetch], torch.Tensor | None]
"""Gives a block from another node memory of its own to arrive in (1-D uint8, CPU, of its length), or None: a
buffer that is used again will do."""
Arrived = Callable[[int, Fetch, torch.Tensor], None]
"""Takes a block that is here, first the number to call :meth:`Inbox.used` with."""


class Inbox:
    """One rank's blocks to come. One thread reads them; others use them and say when they have.

    Args:
        moves: to this rank, in the plan's order.
        room_for: where blocks arrive that are to stay there.
        window_bytes: receive buffers. A block that is larger still passes, alone.
        arrived: takes the blocks.
    """

    def __init__(self, moves: Sequence[Move], room_for: RoomFor, window_bytes: int, arrived: Arrived) -> None:
        self._moves = moves
        self._room_for = room_for
        self._window_bytes = window_bytes
        self.arrived = arrived
        self._ends = list(accumulate(move.fetch.nbytes for move in moves))
        self._unused = set(range(len(moves)))
        self._first = 0
        self._pool = Pool(window_bytes)
        self._buffers: dict[int, Bytes] = {}
        self.peak_bytes = 0
        self._refused = False
        self._lock = threading.Lock()
        self.wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def streams(self) -> Mapping[int, Stream]:
        """Where the bytes of each peer go."""
        numbers: dict[int, deque[int]] = {}
        for number, move in enumerate(self._moves):
            numbers.setdefault(move.src, deque()).append(number)
        return {src: Stream(self, of_peer) for src, of_peer in numbers.items()}

    def open(self, number: int) -> tuple[int, Fetch, torch.Tensor] | None:
        """A block, and where it arrives; None while it lies beyond the window."""
        fetch = self._moves[number].fetch
        with self._lock:
            begin = self._ends[self._first] - self._moves[self._first].fetch.nbytes
            if number > self._first and self._ends[number] - begin > self._window_bytes:
                self._refused = True
                return None
        room = self._room_for(fetch)
        return number, fetch, self._buffer(number, fetch.nbytes) if room is None else room

    def _buffer(self, number: int, nbytes: int) -> torch.Tensor:
        buffer = self._pool.take(nbytes)
        if buffer is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._buffers[number] = buffer
            self.peak_bytes = max(self.peak_bytes, sum(map(len, self._buffers.values())))
        return torch.from_numpy(buffer)

    def used(self, number: int) -> None:
        """A block is where it belongs: its buffer is free."""
        with self._lock:
            buffer = self._buffers.pop(number, None)
            self._unused.discard(number)
            wakes = self._refused and number == self._first
            while self._first < len(self._moves) and self._first not in self._unused:
                self._first += 1
            if wakes:
                self._refused = False
        if buffer is not None:
            self._pool.give_back(buffer)
        if wakes:
            with suppress(BlockingIOError):  # it has been woken already
                self._waker.send(b"1")

    def close(self) -> None:
        self.wake.close()
        self._waker.close()


class Stream:
    """The blocks that one peer sends.

    Args:
        inbox: whose they are.
        numbers: of the blocks, in the order in which they are sent.
    """

    def __init__(self, inbox: Inbox, numbers: deque[int]) -> None:
        self._inbox = inbox
        self._numbers = numbers
        self._open: deque[tuple[int, Fetch, torch.Tensor]] = deque()

    def room(self) -> Sequence[memoryview]:
        views = []
        while self._numbers and (opened := self._inbox.open(self._numbers[0])) is not None:
            self._open.append(opened)
            self._numbers.popleft()
            views.append(opened[2].numpy().data)
        return views

    def filled(self, count: int) -> None:
        for _ in range(count):
            self._inbox.arrived(*self._open.popleft())

    @property
    def complete(self) -> bool:
        return not self._numbers and not self._open
