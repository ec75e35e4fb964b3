"""What ranks tell each other during a recovery: to all ranks little, to their sharding group the rest.

Messages are bytes under the job's secret, never pickle (P11). An error on one rank reaches all, so that
nobody waits for a rank that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgpack
import torch
import torch.distributed as dist

from reft.comm.collectives import PeerLostError, allgather_bytes, network_errors
from reft.errors import ReftError, TransferError
from reft.mac import authenticate, check_authentic
from reft.topology import Topology

_RECOVERY = b"reft-recovery-1"


class BrokenOffError(ReftError, RuntimeError):
    """This rank cannot go on while peers wait for what it was to send: they hear of it when it ends."""


class Exchange:
    """The messages of one rank.

    Args:
        topology: placement of the running incarnation.
        rank: this global rank.
        secret: the job's secret.
        group: gloo group of all ranks; the default group if None.
    """

    def __init__(self, topology: Topology, rank: int, secret: bytes, group: dist.ProcessGroup | None) -> None:
        self._topology = topology
        self._rank = rank
        self._secret = secret
        self._group = group

    def gather(self, stage: Callable[[], bytes], doing: str) -> list[bytes]:
        """Run ``stage`` on every rank; what it returned on each, in rank order, on all. Collective.

        Args:
            stage: does this rank's part; empty bytes cost nothing.
            doing: what for, for the error message.

        Raises:
            TransferError: a peer is gone, or its stage failed.
            AuthenticationError: a message does not carry the job's secret.
            Exception: what this rank's own stage raised, after the peers were told.
        """
        mine, failure = b"", None
        try:
            mine = stage()
        except Exception as error:
            failure = error
        bodies = self._tell_all(mine, failure, doing)
        if failure is not None:
            raise failure
        return bodies

    def agree(self, stage: Callable[[], bool], doing: str) -> bool:
        """Run ``stage`` on every rank; whether it said yes on any. Collective, and a few bytes where all is
        well.

        Raises:
            TransferError: a peer is gone, or its stage failed.
            PeerLostError, BrokenOffError: this rank's own stage failed so that the peers cannot be told.
            Exception: what this rank's own stage raised, after the peers were told.
        """
        said, failure = False, None
        try:
            said = stage()
        except (PeerLostError, BrokenOffError):
            raise
        except Exception as error:
            failure = error
        word = torch.tensor([failure is not None, said], dtype=torch.int64)
        with network_errors(doing):
            dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group)
        failed, any_said = word.tolist()
        if failed:
            self._tell_all(b"", failure, doing)
        if failure is not None:
            raise failure
        return bool(any_said)

    def _tell_all(self, mine: bytes, failure: Exception | None, doing: str) -> list[bytes]:
        message = b""
        if mine or failure is not None:
            body = msgpack.packb([None if failure is None else repr(failure), mine])
            message = authenticate(body, self._secret, _RECOVERY)
        errors: list[str] = []
        bodies: list[bytes] = []
        for rank, told in enumerate(allgather_bytes(message, self._group)):
            error, body = None, b""
            if told:
                error, body = msgpack.unpackb(check_authentic(told, self._secret, _RECOVERY))
            bodies.append(body)
            if error is not None:
                where = f"{self._topology.coordinates[rank]}, node {self._topology.nodes[rank]}"
                errors.append(f"rank {rank} ({where}) failed with {error}")
        if errors and failure is None:
            raise TransferError(f"{doing} did not succeed on every rank: {'; '.join(errors)}")
        return bodies

    def swap(self, bodies: Mapping[int, bytes], doing: str) -> dict[int, bytes]:
        """Give every peer its message and take the one it has for this rank. Collective among peers.

        Args:
            bodies: by global rank; each of these ranks has a message for this one, which may be empty.
            doing: what for, for the error message.

        Raises:
            TransferError: a peer is gone.
            AuthenticationError: a message does not carry the job's secret.
        """
        peers = sorted(peer for peer in bodies if peer != self._rank)
        outgoing = {peer: authenticate(bodies[peer], self._secret, _RECOVERY) for peer in peers}
        lengths = self._trade(
            {p: torch.tensor([len(m)]) for p, m in outgoing.items()}, dict.fromkeys(peers, 1), doing
        )
        arrived = self._trade(
            {p: torch.frombuffer(bytearray(m), dtype=torch.uint8) for p, m in outgoing.items()},
            {p: int(length) for p, length in lengths.items()},
            doing,
        )
        return {
            peer: check_authentic(message.numpy().data, self._secret, _RECOVERY)
            for peer, message in arrived.items()
        }

    def _trade(
        self, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], doing: str
    ) -> dict[int, torch.Tensor]:
        """One tensor to every peer, and one of the same dtype and so many elements from each."""
        into = {peer: torch.empty(sizes[peer], dtype=tensor.dtype) for peer, tensor in sends.items()}
        with network_errors(doing):
            work = [dist.irecv(tensor, peer, self._group) for peer, tensor in into.items()]
            work += [dist.isend(tensor, peer, self._group) for peer, tensor in sends.items()]
            for item in work:
                if item is None:
                    raise TransferError(NOT_IN_GROUP)
                item.wait()
        return into


NOT_IN_GROUP = "this rank is not in the process group that carries the recovery; pass the group of all"
