"""Reproduces the network traffic of Gemini, for comparison: every rank sends its data to another
rank.

Recovery does not use the received copy, and works the same in every variant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from reft.config import Variant
from reft.control.control import WorkerControl
from reft.grid import Topology
from reft.snapshot.arenas import count_sent
from reft.snapshot.extension import CopiedVersion, VersionFeature
from reft.snapshot.plan import GroupLayout
from reft.snapshot.stats import ByteKind


class MirrorToPeer(VersionFeature):
    """Sends each version of the variant ``inter_node`` to the rank with the next number.

    Args:
        control: messages between the worker threads.
        topology: placement of the ranks.
        block_bytes: largest number of bytes in one network transfer.
    """

    def __init__(self, control: WorkerControl, topology: Topology, block_bytes: int) -> None:
        self._control = control
        self._topology = topology
        self._block_bytes = block_bytes
        self._kept_bytes: Sequence[int] = ()  # Size in bytes of each rank's arena data, by rank
        self._received: torch.Tensor | None = None

    def laid_out(self, layout: GroupLayout) -> None:
        kept = self._control.gather_ints([layout.mine.data_bytes])
        self._kept_bytes = [nbytes for (nbytes,) in kept]
        self._received = None

    def exchanged(self, version: CopiedVersion) -> None:
        rank, world = self._control.rank, self._control.world_size
        if version.variant is not Variant.INTER_NODE or world == 1:
            return
        if self._received is None:
            self._received = torch.empty(self._kept_bytes[rank - 1], dtype=torch.uint8)
        data = torch.frombuffer(version.writer.arena.data, dtype=torch.uint8)
        data = data[: self._kept_bytes[rank]]
        following = (rank + 1) % world
        self._control.exchange(
            {following: torch.split(data, self._block_bytes)},
            {(rank - 1) % world: torch.split(self._received, self._block_bytes)},
        )
        sent = Counter({ByteKind.MIRROR: data.numel()})
        count_sent(version.writer, self._topology, rank, following, sent)
