"""The stages of a recovery, which all ranks go through together: an error on one rank reaches all, so that
nobody waits for a rank that has given up.

Messages are bytes, never pickle, and go over the authenticated connections of the control plane (P11).
"""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from reft.control.control import ControlGroup
from reft.errors import PeerLostError, ReftError, TransferError
from reft.grid import Topology


class BrokenOffError(ReftError, RuntimeError):
    """This rank cannot go on, and has left the control plane: its peers hear of it at once."""


class Exchange:
    """One rank's part in the stages.

    Args:
        topology: placement of the running incarnation.
        control: connections to all ranks.
    """

    def __init__(self, topology: Topology, control: ControlGroup) -> None:
        self._topology = topology
        self.control = control

    def gather(self, stage: Callable[[], bytes], doing: str) -> list[bytes]:
        """Run ``stage`` on every rank; what it returned on each, in rank order, on all. Collective.

        Args:
            stage: does this rank's part.
            doing: what for, for the error message.

        Raises:
            TransferError: a peer is gone, or its stage failed.
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
        failed, any_said = self.control.any_of(failure is not None, said)
        if failed:
            self._tell_all(b"", failure, doing)
        if failure is not None:
            raise failure
        return any_said

    def _tell_all(self, mine: bytes, failure: Exception | None, doing: str) -> list[bytes]:
        errors: list[str] = []
        bodies: list[bytes] = []
        told = self.control.gather_bytes(msgpack.packb([None if failure is None else repr(failure), mine]))
        for rank, message in enumerate(told):
            error, body = msgpack.unpackb(message)
            bodies.append(body)
            if error is not None:
                where = f"{self._topology.coordinates[rank]}, node {self._topology.nodes[rank]}"
                errors.append(f"rank {rank} ({where}) failed with {error}")
        if errors and failure is None:
            raise TransferError(f"{doing} did not succeed on every rank: {'; '.join(errors)}")
        return bodies
