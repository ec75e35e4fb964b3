"""The host-side control group: votes, tiny gathers and the exchange with ring peers.

It is a gloo group that no training collective shares, so that a commit in the background can never
reorder or delay a training message. Every rank takes part in every vote in the same order; votes are
the two phases of the global commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reft.errors import TransferError

EXCHANGE_WINDOW = 8
"""Blocks in flight per peer and direction; bounds what gloo buffers."""


@dataclass(frozen=True)
class Ballot:
    """What one rank says about one version, and, after the vote, what all ranks say together.

    Attributes:
        ok: the version is in order here (result: everywhere).
        stop_after_step: this rank was told to stop and can do so after that step; 0 if it was not
            (result: the latest step that any rank named).
        relayout: the state of this rank has another shape than the plan (result: any rank's has).
        interval_steps: how often this rank could take versions at the allowed overhead (result: the
            largest of all ranks).
        order: number of the newest order to switch protection that this rank knows of (result: the newest).
        late: the next votes will lag behind training here (result: anywhere).
        rung: how far this rank would degrade the protection for want of memory (result: the farthest).
    """

    ok: bool
    stop_after_step: int = 0
    relayout: bool = False
    interval_steps: int = 1
    order: int = 0
    late: bool = False
    rung: int = 0


class ControlGroup:
    """Votes and point-to-point transfers of the snapshot protocol.

    Used by one thread at a time: the worker thread while training, the main thread while loading.

    Args:
        timeout_secs: how long a silent peer is waited for.
    """

    def __init__(self, timeout_secs: float) -> None:
        # Two groups: a vote never queues behind a long exchange. Both hold all ranks in global
        # order, and their methods are called directly: a script that ends with
        # destroy_process_group() forgets the groups while the last version is still being committed.
        timeout = timedelta(seconds=timeout_secs)
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._exchange: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def vote(self, ballot: Ballot, version: int) -> Ballot:
        """All-reduce a ballot over all ranks; everybody gets the same result.

        Args:
            ballot: this rank's word.
            version: the step voted on; all ranks must vote on the same one.

        Raises:
            TransferError: a peer is gone, or votes on another version.
        """
        word = torch.tensor(
            [
                int(ballot.ok),
                -ballot.stop_after_step,
                -int(ballot.relayout),
                -ballot.interval_steps,
                -ballot.order,
                -int(ballot.late),
                -ballot.rung,
                version,
                -version,
            ],
            dtype=torch.int64,
        )
        try:
            self._all_reduce_min(word)
        except RuntimeError as error:
            raise TransferError(f"a peer vanished during the vote on step {version}: {error}") from error
        ok, stop, relayout, interval, order, late, rung, lowest, highest = word.tolist()
        if lowest != -highest:
            raise TransferError(
                f"ranks vote on different steps ({lowest} and {-highest}); expected all at {version}. "
                f"Every rank must take the same optimizer steps"
            )
        return Ballot(bool(ok), -stop, bool(relayout), -interval, -order, bool(late), -rung)

    def _all_reduce_min(self, tensor: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self.group.allreduce([tensor], options).wait()

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather a fixed-length list of integers; entry r is what rank r gave."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            self.group.allgather([out], [mine]).wait()
        except RuntimeError as error:
            raise TransferError(f"a peer vanished during a gather: {error}") from error
        return [t.tolist() for t in out]

    def exchange(
        self, sends: Mapping[int, Sequence[torch.Tensor]], receives: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send tensors to peers and receive from peers, a window of each pair at a time.

        The i-th send of a pair meets its i-th receive, and both sides hold equally long lists, so
        both are always in the same round of that pair: the rank in the lowest round can proceed.

        Args:
            sends: per global rank, contiguous CPU tensors.
            receives: per global rank, tensors to fill.

        Raises:
            TransferError: a peer vanished.
        """
        rounds = max((len(t) for t in (*sends.values(), *receives.values())), default=0)
        try:
            for lo in range(0, rounds, EXCHANGE_WINDOW):
                window = slice(lo, lo + EXCHANGE_WINDOW)
                work = [
                    self._exchange.recv([t], peer, 0)
                    for peer, tensors in receives.items()
                    for t in tensors[window]
                ]
                work += [
                    self._exchange.send([t], peer, 0)
                    for peer, tensors in sends.items()
                    for t in tensors[window]
                ]
                for item in work:
                    item.wait()
        except RuntimeError as error:
            raise TransferError(f"a ring peer vanished during the exchange: {error}") from error
