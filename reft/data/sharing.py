"""Ranges of samples that processes read at their own pace, each range once: evaluation and preprocessing.

shards = reft.data.share_out(len(dataset), 1000)
for shard in shards:                # a range of indices
    results = [work(dataset[index]) for index in shard]
    if shards.finish():             # False: it took too long, another process has it
        write(shard.start, results)
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from reft.data import place
from reft.data.ledger import SharedLedger, Store
from reft.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOK_SECS = 0.2
"""Between looks at what others have in hand."""
_PROCESS = uuid.uuid4().hex
"""Of this process; one with the rank of a dead one is another."""


class SharedShards:
    """Made by :func:`share_out`. An iterator of ranges."""

    def __init__(
        self,
        samples: int,
        shard_samples: int,
        *,
        name: str,
        timeout_secs: float,
        rank: int,
        store: Store,
    ) -> None:
        self._samples = samples
        self._shard_samples = shard_samples
        self._name = name
        self._timeout_secs = timeout_secs
        self._rank = rank
        self._store = store
        self._loads = 0
        self._hand: tuple[int, int] | None = None
        """The shard that is being read, and the number of its take."""
        again = store.add(f"reft.data.shards/{name}/{rank}/{_PROCESS}.{os.getpid()}", 1) > 1
        self._begin(set())
        if again and not self._shared.ledger.todo and not self._shared.ledger.doing:
            raise ConfigError(
                f"found the name {name!r}, under which this process has shared out data before, and all of "
                f"it was read: nothing would be left. Give each time another one: share_out(..., name='...')"
            )

    def _begin(self, done: set[int]) -> None:
        count = -(-self._samples // self._shard_samples)
        self._shared = SharedLedger(
            self._store,
            f"reft.data.shards/{self._name}/{self._loads}",
            [shard for shard in range(count) if shard not in done],
            timeout_secs=self._timeout_secs,
        )
        self._before = done
        self._shared.catch_up()
        # Behind those of a process that had the rank before, and has died.
        self._number = self._shared.ledger.takes_of(self._rank)

    def __iter__(self) -> SharedShards:
        return self

    def __next__(self) -> range:
        if self._hand is not None and not self.finish():
            logger.warning(
                "a shard of %r took longer than timeout_secs (%.0f s) and was handed to another process: its "
                "samples were read twice. Raise timeout_secs, or give a smaller shard_samples",
                self._name,
                self._timeout_secs,
            )
        while (shard := self._shared.take(self._rank, self._number)) is None:
            if not self._shared.ledger.doing:
                raise StopIteration
            # What others have in hand comes back if they die.
            time.sleep(_LOOK_SECS)
        self._hand, self._number = (shard, self._number), self._number + 1
        first = shard * self._shard_samples
        return range(first, min(first + self._shard_samples, self._samples))

    def finish(self) -> bool:
        """The shard in hand was read. Asking for the next one says so too.

        Returns:
            Whether it counts. If not, it had taken too long, and is another process's: throw away what was
            made of it.

        Raises:
            ConfigError: there is none in hand.
        """
        if self._hand is None:
            raise ConfigError(
                f"found no shard of {self._name!r} in hand; call finish() once for each, within the loop"
            )
        shard, number = self._hand
        self._hand = None
        return self._shared.finish(shard, self._rank, number)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what was read, by all processes, as far as this one knows. What is in hand is not."""
        self._shared.catch_up()
        done = sorted(self._before | self._shared.ledger.done)
        runs: list[list[int]] = []
        for shard in done:
            if runs and runs[-1][1] == shard:
                runs[-1][1] += 1
            else:
                runs.append([shard, shard + 1])
        return {"samples": self._samples, "shard_samples": self._shard_samples, "done": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read what ``state`` lacks; every process is given the same state, and as often.

        Raises:
            ConfigError: it belongs to other data or other shards.
        """
        for key, have in (("samples", self._samples), ("shard_samples", self._shard_samples)):
            if state.get(key) != have:
                raise ConfigError(
                    f"the state of the shards {self._name!r} was taken with {key} {state.get(key)!r}, but "
                    f"here it is {have}: the shards would be others. Share out as before, or begin anew"
                )
        self._loads += 1
        self._hand = None
        self._begin({shard for first, behind in state["done"] for shard in range(first, behind)})


def share_out(
    samples: int,
    shard_samples: int,
    *,
    name: str = "shards",
    timeout_secs: float = 1800.0,
    rank: int | None = None,
    store: Store | None = None,
) -> SharedShards:
    """Hand out ranges of samples to processes that do not wait for each other: a slow one takes fewer, and
    what a dead one had in hand is read by another (DLRover's dynamic data sharding).

    Args:
        samples: of the data set.
        shard_samples: of a range; the last one has the rest.
        name: one for each time that data is shared out, in this start of the job; the same in every process.
        timeout_secs: after it a shard is handed to another process. More than any takes.
        rank: of this process, another one in each; None: that of torch.distributed.
        store: of torch.distributed, that all processes reach; None: the job's.

    Raises:
        ConfigError: a number is not positive, there is no store for more than one process, or this process
            has read all under the name before.
    """
    if min(samples, shard_samples, timeout_secs) <= 0:
        raise ConfigError(
            f"found {samples} samples, shard_samples {shard_samples} and timeout_secs {timeout_secs}; "
            f"expected more than 0 of each"
        )
    mine, replicas = place.process()
    return SharedShards(
        samples,
        shard_samples,
        name=name,
        timeout_secs=timeout_secs,
        rank=mine if rank is None else rank,
        store=place.store(replicas) if store is None else store,
    )
