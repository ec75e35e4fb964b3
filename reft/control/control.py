"""The host-side control plane: what ranks tell and send each other while they join and load, and,
apart from it, the votes, tiny gathers and exchanges of the snapshot workers.

It has connections of its own, which no training collective shares, so that a commit in the background can
never reorder or delay a training message. Every rank takes part in every vote in the same order; votes are
the two phases of the global commit. The workers' connections can be made anew, when one worker has lost its
place in the protocol: to leave the old ones is how its peers hear of it at once (P6).
"""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reft.control.overlay import connect, shared_secret
from reft.control.transport import Buffers, Inflow, OnSilence, Open, Transport
from reft.control.wire import authenticate, check_authentic
from reft.errors import AuthenticationError, PeerLostError, TransferError
from reft.naming import Label

SOCKETS, MPI = "sockets", "mpi"  # what can carry the control plane: ``transport`` of the block
_MESSAGE = b"reft-message-1"
_GATHERED = b"reft-gathered-1"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Ballot:
    """What one rank says about one version, and, after the vote, what all ranks say together."""

    ok: bool  # the version is in order here (result: everywhere)
    # this rank was told to stop and can do so after that step; 0 if it was not (result: the latest step that
    # any rank named)
    stop_after_step: int = 0
    relayout: bool = False  # the state of this rank has another shape than the plan (result: any rank's has)
    # how often this rank could take versions at the allowed overhead (result: the largest of all ranks)
    interval_steps: int = 1
    # number of the newest order to switch protection that this rank knows of (result: the newest)
    order: int = 0
    late: bool = False  # the next votes will lag behind training here (result: anywhere)
    level: int = 0  # how far this rank would degrade the protection for want of memory (result: the farthest)
    # how often versions should go to storage for this rank (result: the largest of all); 0: as the block says
    persist_steps: int = 0
    not_finite: bool = False  # weights or optimizer state hold a NaN or an infinity here (result: anywhere)
    differs: bool = False  # what all members must have alike is not (result: in any group)
    complains: bool = False  # something failed here that the peers have not heard of (result: anywhere)


_RAISED = tuple(f.name for f in fields(Ballot) if f.name != "ok")


class ControlGroup:
    """What all ranks tell each other; used by the main thread, while they join and while they load.
    Collective, as all its methods are.

    Args:
        timeout_secs: how long a silent peer is waited for.
        node: the node that this rank runs on; by default its host.
        secret: what ranks prove to each other; None: the first one writes one to torch's store.
        transport: what carries it, ``sockets`` or ``mpi``.

    Raises:
        TransferError: a peer did not come in time, or cannot be reached.
        AuthenticationError: a peer has another secret.
        ConfigError: MPI cannot be used here; says what is missing.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        timeout_secs: float,
        *,
        node: str | None = None,
        secret: bytes | None = None,
        transport: str = SOCKETS,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_secs = timeout_secs
        self._node = node or socket.gethostname()
        # Not through torch's groups: a script that ends with destroy_process_group() would take them along
        # while the last version is still being committed.
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._prefix = f"reft-control/{next(self._numbers)}"
        self._secret = secret or shared_secret(
            self._store, f"{self._prefix}/secret", lambda: secrets.token_bytes(32)
        )
        self.on_silence: OnSilence = lambda missing, secs: None
        """Told, next to the log, whose answer is missing for long."""
        self._times = itertools.count()
        self._over_mpi: Open | None = None
        if transport == MPI:
            from reft.control.mpi import mpi_carrier  # mpi4py starts MPI when it is imported

            self._over_mpi = mpi_carrier(self.rank, self.world_size, self._node, timeout_secs)
        self._transport: Transport | None = None
        self._connect(lambda: True)

    def _connect(self, go_on: Callable[[], bool]) -> None:
        def silent(missing: list[str], secs: float) -> None:
            self.on_silence(missing, secs)  # which may be set later

        if self._over_mpi is not None:
            self._transport = self._over_mpi(self.timeout_secs, go_on, silent)
            return
        self._transport = connect(
            self._store,
            f"{self._prefix}/{next(self._times)}",
            rank=self.rank,
            world_size=self.world_size,
            node=self._node,
            secret=self._secret,
            timeout_secs=self.timeout_secs,
            go_on=go_on,
            on_silence=silent,
        )

    @property
    def _connections(self) -> Transport:
        if self._transport is None:
            raise TransferError("this rank has left the control plane, or its job is closed")
        self._transport.limits.timeout_secs = self.timeout_secs
        return self._transport

    def for_worker(self, secret: bytes | None = None) -> WorkerControl:
        """The connections of the snapshot worker, under the job's secret (None: this group's). Collective."""
        worker = WorkerControl(
            self.timeout_secs,
            node=self._node,
            secret=secret or self._secret,
            transport=MPI if self._over_mpi else SOCKETS,
        )
        worker.on_silence = self.on_silence
        return worker

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; entry r is what rank r gave. Raises TransferError, and over MPI
        AuthenticationError (sockets see to that themselves)."""
        if self._over_mpi is None:
            return self._connections.gather(data)
        told = self._connections.gather(authenticate(data, self._secret, _GATHERED))
        return [check_authentic(body, self._secret, _GATHERED) for body in told]

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather a list of integers of 64 bits; entry r is what rank r gave. Raises TransferError."""
        rows = self.gather_bytes(np.array(values, np.int64).tobytes())
        return [np.frombuffer(row, np.int64).tolist() for row in rows]

    def any_of(self, *said: bool) -> list[bool]:
        """Of each of these, whether any rank says yes. Raises TransferError."""
        return [not value for value in self._connections.reduce_min([not yes for yes in said])]

    def swap(self, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        """Give every peer its message and take the one it has for this rank. Collective among these.
        ``bodies``: by global rank, this one left aside; each has a message for this one, which may be
        empty. Raises PeerLostError: a peer vanished. Raises AuthenticationError: a message does not carry
        the job's secret."""
        outgoing = {p: authenticate(m, self._secret, _MESSAGE) for p, m in bodies.items() if p != self.rank}
        lengths = self._trade(
            {p: len(m).to_bytes(_LENGTH_BYTES) for p, m in outgoing.items()},
            dict.fromkeys(outgoing, _LENGTH_BYTES),
        )
        told = self._trade(outgoing, {p: int.from_bytes(length) for p, length in lengths.items()})
        return {
            peer: check_authentic(bytes(message), self._secret, _MESSAGE) for peer, message in told.items()
        }

    def _trade(self, sends: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytearray]:
        into = {peer: bytearray(size) for peer, size in sizes.items()}
        self.stream(
            {peer: [memoryview(body)] for peer, body in sends.items()},
            {peer: Buffers([memoryview(room)]) for peer, room in into.items()},
        )
        return into

    def exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send tensors to peers and receive from peers. Both sides of a pair hold equally many bytes for each
        other, and name each other in the same call. Raises PeerLostError."""
        self.stream(_bytes_of(sends), {peer: Buffers(views) for peer, views in _bytes_of(receives).items()})

    def stream(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, Inflow],
        wake: socket.socket | None = None,
    ) -> None:
        """As :meth:`exchange`, where there may be no room yet; see :meth:`Transport.stream`."""
        with self._in_step():
            self._connections.stream(sends, receives, wake)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Some pairs have moved a part of their bytes: only new connections are in step again.
            self.leave()
            if isinstance(error, (OSError, EOFError, AuthenticationError)):
                raise PeerLostError(
                    f"a peer died, left or is silent while bytes were exchanged: "
                    f"{error or type(error).__name__}. Nothing was committed; restart the job"
                ) from error
            raise

    def end_pairs(self) -> None:
        """Let the connections go that an exchange has made, beyond the tree's. Nothing is waited for: the
        ranks meet in a collective before the next exchange."""
        self._connections.end_pairs()

    def leave(self) -> None:
        """Close this rank's connections: its neighbours hear of it now, the others through them."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class WorkerControl(ControlGroup):
    """Votes and point-to-point transfers of the snapshot protocol. Used by the worker thread alone."""

    def rejoin(self, go_on: Callable[[], bool]) -> None:
        """Make the connections anew, once all ranks have left the old ones, as long as ``go_on`` says so.
        Collective; raises TransferError where a peer did not come in time, or cannot be reached."""
        self.leave()
        self._connect(go_on)

    def vote(self, ballot: Ballot, version: Label) -> Ballot:
        """All-reduce a ballot over all ranks, which must vote on the same version of the same incarnation;
        everybody gets the same result. Raises TransferError: a peer is gone, or votes on another version."""
        # A minimum is all that is reduced: what any rank may raise is sent negated.
        said = [getattr(ballot, name) for name in _RAISED]
        word = [int(ballot.ok), *(-int(value) for value in said)]
        word += [version.step, -version.step, version.incarnation, -version.incarnation]
        ok, *raised, lowest, highest, oldest, newest = self._connections.reduce_min(word)
        if oldest != -newest:
            raise TransferError(
                f"ranks of different starts of the job vote (incarnations {oldest} and {-newest}); this rank "
                f"is of {version.incarnation}. Nothing is committed: the older was replaced and has to end"
            )
        if lowest != -highest:
            raise TransferError(
                f"ranks vote on different steps ({lowest} and {-highest}); expected all at {version.step}. "
                f"Every rank must take the same optimizer steps"
            )
        kinds = [type(value) for value in said]
        results = {n: kind(-value) for n, kind, value in zip(_RAISED, kinds, raised, strict=True)}
        return Ballot(ok=bool(ok), **results)


def _bytes_of(tensors: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[memoryview]]:
    return {
        rank: [t.view(-1).view(torch.uint8).numpy().data for t in of_rank]
        for rank, of_rank in tensors.items()
    }
