"""What the baselines do that reft itself does not: they exist to be measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reft.control.control import WorkerControl


class PeerTraffic:
    """Gemini's inter-node traffic: a copy of everything a rank keeps, to another rank, over the network.

    The bytes land in memory that recovery knows nothing of; what it uses is the same in every variant.

    Args:
        control: carries the bytes.
        block_bytes: most bytes of a message.
    """

    def __init__(self, control: WorkerControl, block_bytes: int) -> None:
        self._control = control
        self._block_bytes = block_bytes
        self._sizes: Sequence[int] = ()
        self._memory: torch.Tensor | None = None

    def agree(self, nbytes: int) -> None:
        """Tell all ranks how much this one keeps. Collective."""
        self._sizes = [size for (size,) in self._control.gather_ints([nbytes])]
        self._memory = None

    def send(self, data: memoryview) -> tuple[int, int]:
        """Send to the next rank and receive from the one before. Collective.

        Returns:
            The rank that was sent to, and the bytes.

        Raises:
            TransferError: a peer vanished.
        """
        rank, world = self._control.rank, self._control.world_size
        if world == 1:
            return rank, 0
        if self._memory is None:
            self._memory = torch.empty(self._sizes[rank - 1], dtype=torch.uint8)
        mine = torch.frombuffer(data, dtype=torch.uint8)[: self._sizes[rank]]
        self._control.exchange(
            {(rank + 1) % world: torch.split(mine, self._block_bytes)},
            {(rank - 1) % world: torch.split(self._memory, self._block_bytes)},
        )
        return (rank + 1) % world, mine.numel()
