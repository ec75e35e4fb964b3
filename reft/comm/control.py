"""The host-side control groups: what ranks tell each other while they join and load, and, apart from it, the
votes, tiny gathers and exchanges of the snapshot workers.

They are gloo groups that no training collective shares, so that a commit in the background can never
reorder or delay a training message. Every rank takes part in every vote in the same order; votes are
the two phases of the global commit. The workers' groups can be made anew, when one worker has lost its place
in the protocol: to leave the old ones is how its peers hear of it at once (P6).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reft.errors import TransferError

EXCHANGE_WINDOW = 8
"""Blocks in flight per peer and direction; bounds what gloo buffers."""
_ARRIVAL_POLL_SECS = 0.05


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
    """What all ranks tell each other; used by the main thread, while they join and while they load.

    Args:
        timeout_secs: how long a silent peer is waited for.
    """

    _numbers = itertools.count()

    def __init__(self, timeout_secs: float) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_secs))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout_secs = timeout_secs

    def for_worker(self) -> WorkerControl:
        """The groups of the snapshot worker. Collective, in the same order on all ranks."""
        return WorkerControl(self.rank, self.world_size, self._timeout_secs, next(self._numbers))

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather a fixed-length list of integers; entry r is what rank r gave.

        Raises:
            TransferError: a peer is gone.
        """
        mine = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            self.group.allgather([out], [mine]).wait()
        except RuntimeError as error:
            raise TransferError(f"a peer vanished during a gather: {error}") from error
        return [t.tolist() for t in out]


class WorkerControl(ControlGroup):
    """Votes and point-to-point transfers of the snapshot protocol. Used by the worker thread alone.

    Args:
        rank: this rank.
        world_size: all ranks.
        timeout_secs: how long a silent peer is waited for.
        number: of these groups among those of the process, the same on all ranks.
    """

    def __init__(self, rank: int, world_size: int, timeout_secs: float, number: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_secs = timeout_secs
        self._number = number
        self._epoch = 0
        # Not registered with torch.distributed: they must be made and left by the worker thread, and a
        # script that ends with destroy_process_group() forgets registered groups while the last version
        # is still being committed.
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._connect()

    def _connect(self) -> None:
        # Two groups: a vote never queues behind a long exchange.
        self.group = self._make("votes")
        self._exchange = self._make("exchange")

    def _make(self, name: str) -> Any:
        store = dist.PrefixStore(f"{self._prefix}/{name}", self._store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=self._timeout_secs)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)

    @property
    def _prefix(self) -> str:
        return f"reft-worker/{self._number}/{self._epoch}"

    def leave(self) -> None:
        """Close this rank's connections: peers that wait for it hear of it now, others in their next vote."""
        self.group = self._exchange = None

    def rejoin(self, go_on: Callable[[], bool]) -> None:
        """Make the groups anew, once all ranks have left the old ones. Collective.

        Args:
            go_on: asked now and then; the wait ends when it says no.

        Raises:
            TransferError: a peer did not come in time, or cannot be reached.
        """
        self.leave()
        self._epoch += 1
        deadline = time.monotonic() + self._timeout_secs
        key = f"{self._prefix}/came"
        try:
            came = self._store.add(key, 1)
            # Asked again and again: a blocking wait would keep the training thread from the store.
            while came < self.world_size:
                if not go_on() or time.monotonic() > deadline:
                    raise TransferError(
                        f"only {came} of {self.world_size} ranks came together again after the snapshot "
                        f"protocol broke off"
                    )
                time.sleep(_ARRIVAL_POLL_SECS)
                came = self._store.add(key, 0)
            self._connect()
        except RuntimeError as error:
            raise TransferError(f"the ranks cannot come together again: {error}") from error

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; entry r is what rank r gave.

        Raises:
            TransferError: a peer is gone.
        """
        lengths = [size for (size,) in self.gather_ints([len(data)])]
        words = -(-max(lengths) // 8)
        padded = np.frombuffer(data.ljust(8 * words, b"\0"), np.int64).tolist()
        rows = self.gather_ints(padded)
        return [np.array(row, np.int64).tobytes()[:n] for row, n in zip(rows, lengths, strict=True)]

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
