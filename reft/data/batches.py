"""Which samples a replica reads, micro-batch by micro-batch: batch samplers for torch's ``DataLoader``."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reft.data.order import Deal, JobPosition, Order
from reft.data.watch import WATCH, process
from reft.env import ENV_LAUNCHER_PID
from reft.errors import ConfigError

Keys = list[tuple[int, int]]
"""(epoch, sample) of each sample of a micro-batch."""
_alone = HashStore()


def shares_store() -> bool:
    """Whether torch.distributed's store is that of the starts before this one too: torchrun's is, that of
    ``reft launch`` is not."""
    return ENV_LAUNCHER_PID not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job_store(replicas: int) -> Any:
    """Where the ranks of the job find each other: torch.distributed's store, of this start alone; a
    ConfigError where there is none, and more than one replica, or the starts share one."""
    if dist.is_available() and dist.is_initialized():
        if shares_store():
            raise ConfigError(
                "found torchrun's store, which holds the samples that earlier starts took; expected a new "
                "store for each start: start the script with `reft launch`, or set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        return dist.distributed_c10d._get_default_store()
    if replicas > 1:
        raise ConfigError(
            f"found {replicas} replicas and no torch.distributed; expected its store, through which they "
            f'share out the data: call deepspeed.init_distributed() first, or leave order="dynamic" out'
        )
    return _alone


def readers(replicas: int) -> int:
    """Processes that read what is dealt out to so many replicas: all of torch.distributed's."""
    return max(replicas, process()[1])


def why_refused(loader: str, why_equal: str | None) -> str | None:
    """What is wrong with ``order="dynamic"`` where replicas have to train on equally many micro-batches."""
    return why_equal and (
        f'{loader} has order="dynamic", in which replicas train on unequal numbers of micro-batches, but '
        f'{why_equal}. Leave order="dynamic" and step_samples out'
    )


class SharedLedger:
    """Which micro-batch of a step each replica has taken (DLRover's dynamic sharding, within a step).

    Every take is a line in ``store``, appended by compare-and-set behind the last one that its writer has
    read. So every process reads the same takes in the same order, a micro-batch is handed out once, and no
    coordinator can die. ``todo``: what there is to take, the lowest first; the same in every process."""

    def __init__(self, store: Any, prefix: str, todo: Iterable[int]) -> None:
        self._store = store
        self._prefix = prefix
        self._todo = sorted(todo)
        self._takers: list[tuple[int, int]] = []
        """By line: the replica, and the number of its takes. The n-th line takes the n-th of ``todo``."""

    def take(self, replica: int, number: int) -> int | None:
        """What a replica's ``number``-th take gives, counted from 0; None: nothing is left. Ranks of one
        replica that take with the same number are given the same."""
        taker = (replica, number)
        while self._store.check([self._next_key]):
            self._read(self._store.get(self._next_key))
        while taker not in self._takers and len(self._takers) < len(self._todo):
            # What another process has written there meanwhile is read instead.
            self._read(self._store.compare_set(self._next_key, "", f"{replica} {number}"))
        return self._todo[self._takers.index(taker)] if taker in self._takers else None

    def leave(self, readers: int) -> None:
        """This process was told that nothing is left, and reads no line any more. The last of all readers
        takes the lines out of the store, so that none is missing to one that is late."""
        if self._store.add(f"{self._prefix}/left", 1) == readers:
            for name in (*range(len(self._takers)), "left"):
                self._store.delete_key(f"{self._prefix}/{name}")

    def _read(self, line: bytes) -> None:
        replica, number = line.split()
        self._takers.append((int(replica), int(number)))

    @property
    def _next_key(self) -> str:
        return f"{self._prefix}/{len(self._takers)}"


@dataclass
class Taken:
    """What a pass's batch sampler has given out to be read, and was not yet handed out."""

    # by micro-batch, the position behind it, and where its step ends, if replicas have unequally many of a
    # step: then the position is where the step begins, since its last one alone brings the job to its end
    ahead: deque[tuple[JobPosition, JobPosition | None]] = field(default_factory=deque)
    # of steps of which none is left to take, with their ends
    ledgers: deque[tuple[JobPosition, SharedLedger]] = field(default_factory=deque)
    failed: Exception | None = (
        None  # why no further one can be taken, no fault of the data set's; None: they can
    )

    def leave(self, at: JobPosition, replicas: int) -> None:
        """This process does not come back to what lies before ``at``, but by a version."""
        while self.ledgers and self.ledgers[0][0].consumed <= at.consumed:
            self.ledgers.popleft()[1].leave(readers(replicas))


class Batches:
    """A batch sampler in the static order: every replica has its part of every micro-batch of the job."""

    step_samples: int | None = None
    """Samples of a step of all replicas; None: it is not bound to one."""

    def __init__(self, order: Order, batch_size: int, *, drop_last: bool) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._pass: Iterator[Keys] = iter(())

    def deal(self, replicas: int) -> Deal:
        return Deal(self.order.size, self.batch_size, replicas, self.drop_last)

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> Taken:
        """The next iteration reads on from ``at``, within a pass. ``loads``: how often this process has
        loaded a version; the same on every rank."""
        taken = Taken()
        self._pass = self._noted(self._rest(at, replica, loads, taken), taken)
        return taken

    def __iter__(self) -> Iterator[Keys]:
        return self._pass

    @staticmethod
    def _noted(batches: Iterator[Keys], taken: Taken) -> Iterator[Keys]:
        try:
            yield from batches
        except Exception as error:
            taken.failed = error
            raise

    def _rest(self, at: JobPosition, replica: tuple[int, int], loads: int, taken: Taken) -> Iterator[Keys]:
        rank, replicas = replica
        deal = self.deal(replicas)
        while count := deal.next(at):
            keys = self.order.part(at.consumed, count, deal.part(count, rank))
            at = deal.behind(at)
            taken.ahead.append((at, None))
            yield keys


BEGUN: Counter[tuple[str, int, int]] = Counter()
"""How many loaders of a name this process has begun to read, for each replica and number of replicas."""


class SharedBatches(Batches):
    """The micro-batches of a step are taken by the replicas as they come to them: a slow one takes fewer.

    A step trains on the samples that follow the position, as in the static order; which replica trains on
    which of its micro-batches is written in a ledger in the job's store. So a position is what it is in the
    static order, and a version that is loaded gives back all that was taken behind it. Every replica has its
    first micro-batch of a step by its number, so that none is without; the rest is taken when it is to be
    read. Who begins a pass again before training on it is given what he had taken.
    """

    step_samples: int

    def __init__(
        self, order: Order, batch_size: int, step_samples: int, *, drop_last: bool, name: str
    ) -> None:
        if step_samples < 1 or step_samples % batch_size:
            raise ConfigError(
                f"found step_samples {step_samples} with batch_size {batch_size}; expected whole "
                f"micro-batches: DeepSpeed's train_batch_size"
            )
        if order.size < step_samples:
            raise ConfigError(
                f"found {order.size} samples with step_samples {step_samples}; expected at least a "
                f"whole step: give more data, or a smaller train_batch_size"
            )
        super().__init__(order, batch_size, drop_last=drop_last)
        self.step_samples = step_samples
        self._name = name
        self._number: int | None = None
        """Of the loader, among those of its name that this process reads one after another."""

    def deal(self, replicas: int) -> Deal:
        # Of samples one by one: what does not fill a step is left for the next pass.
        return Deal(self.order.size, 1, self.step_samples, self.drop_last)

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> Taken:
        if refused := why_refused(f"the loader {self._name!r}", WATCH.why_equal()):
            raise ConfigError(refused)
        if (micro_batches := self.step_samples // self.batch_size) < replica[1]:
            raise ConfigError(
                f"found {micro_batches} micro-batches in a step of {self.step_samples} samples for "
                f"{replica[1]} replicas; expected one or more for each: give a larger step_samples, or a "
                f"smaller batch_size"
            )
        if self._number is None:
            self._number = BEGUN[self._name, *replica]
            BEGUN[self._name, *replica] += 1
        return super().begin_at(at, replica, loads)

    def _rest(self, at: JobPosition, replica: tuple[int, int], loads: int, taken: Taken) -> Iterator[Keys]:
        rank, replicas = replica
        deal, rest = self.deal(replicas), range(replicas, self.step_samples // self.batch_size)
        while deal.next(at):
            behind = deal.behind(at)
            # Of the pass too: a position comes again in the next one.
            key = f"reft.data/{self._name}/{replicas}/{self._number}/{loads}/{at.epoch}/{at.consumed}"
            ledger = SharedLedger(job_store(replicas), key, rest)
            piece: int | None = rank
            number = 0
            while piece is not None:
                taken.ahead.append((at, behind))
                first = at.consumed + piece * self.batch_size
                yield self.order.part(first, self.batch_size, slice(None))
                piece, number = ledger.take(rank, number) if rest else None, number + 1
            if rest:
                taken.ledgers.append((behind, ledger))
            at = behind
