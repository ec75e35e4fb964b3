"""The bytes between two ranks over MPI, in pieces of at most :data:`PIECE_BYTES`.

A piece is sent in the synchronous mode: it counts as sent when the receiver has taken it, however MPI would
buffer it, so that what is on its way is bounded (P9). A receiver takes a piece only when it has a buffer
for it, and copies from there into place: a receive that MPI has begun cannot be taken back, and may not
write into memory that has found another use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from reft.control.peers import advance
from reft.control.transport import Bytes, Inflow

BYTES = 4
"""The tag of these messages."""
PIECE_BYTES = 2**20
AHEAD = 2
"""Pieces on their way to, and from, each peer."""


class Outgoing:
    """What one peer gets.

    Args:
        communicator: of both.
        peer: its rank there.
        views: flat bytes, none of them empty.
    """

    def __init__(self, communicator: Any, peer: int, views: Sequence[memoryview]) -> None:
        self._comm = communicator
        self._peer = peer
        self._views = deque(views)
        self._under_way: deque[tuple[Any, memoryview]] = deque()

    @property
    def done(self) -> bool:
        return not self._views and not self._under_way

    def go_on(self) -> bool:
        """Send what may be sent; whether anything moved."""
        moved = False
        while self._under_way and self._under_way[0][0].Test():
            self._under_way.popleft()
            moved = True
        while self._views and len(self._under_way) < AHEAD:
            piece = self._next()
            self._under_way.append((self._comm.Issend(piece, self._peer, BYTES), piece))
            moved = True
        return moved

    def _next(self) -> memoryview:
        """The next piece: a part of a long view, or several short ones together."""
        first = self._views[0]
        if len(first) >= PIECE_BYTES or len(self._views) == 1:
            piece = first[:PIECE_BYTES]
            advance(self._views, len(piece))
            return piece
        parts: list[memoryview] = []
        room = PIECE_BYTES
        while self._views and room:
            part = self._views[0][:room]
            parts.append(part)
            room -= len(part)
            advance(self._views, len(part))
        return memoryview(b"".join(parts))


class Incoming:
    """What one peer sends. What was taken and has no place yet waits here, also for the next exchange.

    Args:
        mpi: the module ``mpi4py.MPI``.
        communicator: of both.
        peer: its rank there.
    """

    def __init__(self, mpi: Any, communicator: Any, peer: int) -> None:
        self._mpi = mpi
        self._comm = communicator
        self._peer = peer
        self._free: list[Bytes] = []
        self._buffers = 0
        self._under_way: deque[tuple[Any, Bytes, int]] = deque()
        self._here: deque[tuple[memoryview, Bytes]] = deque()
        self._rooms: deque[memoryview] = deque()

    def go_on(self, inflow: Inflow) -> bool:
        """Put into place what is here, and take what has come; whether anything moved."""
        moved = False
        while self._under_way and self._under_way[0][0].Test():
            _, buffer, nbytes = self._under_way.popleft()
            self._here.append((buffer[:nbytes].data, buffer))
            moved = True
        moved |= self._place(inflow)
        while not inflow.complete and (free := self._buffer()) is not None:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._peer, BYTES, status)
            if message is None:
                self._free.append(free)
                break
            nbytes = status.Get_count(self._mpi.BYTE)
            self._under_way.append((message.Irecv(free[:nbytes]), free, nbytes))
            moved = True
        return moved

    def _place(self, inflow: Inflow) -> bool:
        moved = False
        while self._here and not inflow.complete:
            if not self._rooms:
                self._rooms.extend(inflow.room())
            if not self._rooms:
                break
            data, buffer = self._here[0]
            nbytes = min(len(data), len(self._rooms[0]))
            self._rooms[0][:nbytes] = data[:nbytes]
            if full := advance(self._rooms, nbytes):
                inflow.filled(full)
            moved = True
            if nbytes < len(data):
                self._here[0] = data[nbytes:], buffer
            else:
                self._here.popleft()
                self._free.append(buffer)
        return moved

    def _buffer(self) -> Bytes | None:
        if self._free:
            return self._free.pop()
        if self._buffers == AHEAD:
            return None
        self._buffers += 1
        return np.empty(PIECE_BYTES, np.uint8)

    def rest(self) -> None:
        """An exchange is over: the free buffers go."""
        self._buffers -= len(self._free)
        self._free.clear()
