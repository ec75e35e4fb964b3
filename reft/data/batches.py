"""Which samples a replica reads, micro-batch by micro-batch: batch samplers for torch's ``DataLoader``."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from reft.data import place
from reft.data.ledger import SharedLedger
from reft.data.order import Deal, JobPosition, Order
from reft.errors import ConfigError

logger = logging.getLogger(__name__)

Keys = list[tuple[int, int]]
"""(epoch, sample) of each sample of a micro-batch."""


class Reached(Protocol):
    """Told in turn of the micro-batches of one pass.

    Attributes:
        step_end: the position behind the step of the last one; None: all replicas have equally many.
        failed: why no further one can be taken, which is no fault of the data set's; None: they can.
    """

    step_end: JobPosition | None
    failed: Exception | None

    def behind(self, at: JobPosition) -> JobPosition:
        """The position behind the next micro-batch, which was handed out at ``at``. Where replicas have
        unequally many, that is where its step begins: the last one alone brings the job to its end."""

    def leave(self, at: JobPosition) -> None:
        """This process does not come back to what lies before ``at``, but by a version."""


class Batches(Protocol):
    """A batch sampler of one replica.

    Attributes:
        step_samples: of a step of all replicas; None: it is not bound to one.
    """

    step_samples: int | None

    def deal(self, replicas: int) -> Deal:
        """How an epoch is dealt out."""

    def length(self, replicas: int) -> int:
        """Micro-batches of a replica in a whole pass.

        Raises:
            TypeError: it is not known before.
        """

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> Reached:
        """The next iteration reads on from ``at``.

        Args:
            at: within a pass.
            replica: which one, and how many there are.
            loads: how often a version was loaded in this process; the same on every rank.
        """

    def __iter__(self) -> Iterator[Keys]: ...


class StaticBatches:
    """Every replica has its part of every micro-batch of the job.

    Args:
        order: of the samples.
        batch_size: samples of a replica in a micro-batch.
        drop_last: leave out what does not fill a micro-batch.
    """

    step_samples: int | None = None

    def __init__(self, order: Order, batch_size: int, *, drop_last: bool) -> None:
        self._order = order
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._pass: Iterator[Keys] = iter(())

    def deal(self, replicas: int) -> Deal:
        return Deal(self._order.size, self._batch_size, replicas, self._drop_last)

    def length(self, replicas: int) -> int:
        return len(self.deal(replicas))

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> Reached:
        deal = self.deal(replica[1])
        self._pass = self._rest(at, deal, replica[0])
        return _Dealt(deal)

    def __iter__(self) -> Iterator[Keys]:
        return self._pass

    def _rest(self, at: JobPosition, deal: Deal, rank: int) -> Iterator[Keys]:
        while count := deal.next(at):
            yield self._order.part(at.consumed, count, deal.part(count, rank))
            at = deal.behind(at)


@dataclass
class _Dealt:
    """A :class:`Reached`."""

    deal: Deal
    step_end: JobPosition | None = None
    failed: Exception | None = None

    def behind(self, at: JobPosition) -> JobPosition:
        return self.deal.behind(at)

    def leave(self, at: JobPosition) -> None:
        pass


BEGUN: Counter[tuple[str, int, int]] = Counter()
"""How many loaders of a name this process has begun to read, for each replica and number of replicas."""


class SharedBatches:
    """The micro-batches of a step are taken by the replicas as they come to them: a slow one takes fewer.

    A step trains on the samples that follow the position, as in the static order; which replica trains on
    which of its micro-batches is written in a ledger in the job's store. So a position is what it is in the
    static order, and a version that is loaded gives back all that was taken behind it. Every replica has its
    first micro-batch of a step by its number, so that none is without; the rest is taken when it is to be
    read. Who begins a pass again before training on it is given what he had taken.

    Args:
        order: of the samples.
        batch_size: samples of a micro-batch.
        step_samples: samples of a step, of all replicas.
        drop_last: leave out what does not fill a step; else it is read with the first step of the next pass.
        ahead: micro-batches that are read ahead of those that are asked for, by workers.
        name: of the loader.
    """

    def __init__(
        self, order: Order, batch_size: int, step_samples: int, *, drop_last: bool, name: str, ahead: int = 0
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
        self.step_samples: int | None = step_samples
        self._order = order
        self._batch_size = batch_size
        # Of samples one by one: what does not fill a step is left for the next pass.
        self._deal = Deal(order.size, 1, step_samples, drop_last)
        self._ahead = ahead
        self._name = name
        self._number: int | None = None
        """Of the loader, among those of its name that this process reads one after another."""
        self._pass: Iterator[Keys] = iter(())

    def deal(self, replicas: int) -> Deal:
        return self._deal

    def length(self, replicas: int) -> int:
        raise TypeError(
            f"the loader {self._name!r} has no length: replicas take micro-batches as they come to them"
        )

    def begin_at(self, at: JobPosition, replica: tuple[int, int], loads: int) -> Reached:
        if why := place.why_equal():
            raise ConfigError(
                f'the loader {self._name!r} has order="dynamic", in which replicas train on unequal '
                f'numbers of micro-batches, but {why}. Leave order="dynamic" and step_samples out'
            )
        micro_batches = self._deal.full // self._batch_size
        if micro_batches < replica[1]:
            raise ConfigError(
                f"found {micro_batches} micro-batches in a step of {self._deal.full} samples for "
                f"{replica[1]} replicas; expected one or more for each: give a larger step_samples, or a "
                f"smaller batch_size"
            )
        if self._number is None:
            self._number = BEGUN[self._name, *replica]
            BEGUN[self._name, *replica] += 1
            self._say_what_is_held(micro_batches, replica)
        taken = _Taken(replica[1])
        prefix = f"reft.data/{self._name}/{replica[1]}/{self._number}/{loads}"
        self._pass = self._noted(self._rest(at, replica, prefix, taken), taken)
        return taken

    def __iter__(self) -> Iterator[Keys]:
        return self._pass

    def _say_what_is_held(self, micro_batches: int, replica: tuple[int, int]) -> None:
        rank, replicas = replica
        held = 2 + self._ahead  # one that is trained on, and one that was read
        if replicas > 1 and rank == 0 and micro_batches <= held * replicas:
            logger.warning(
                'the loader %r has order="dynamic", but a slow replica takes as many micro-batches as the '
                "others: a step has %d for %d replicas, and each holds %d (one that it trains on, one that "
                "it has read, and num_workers x prefetch_factor = %d). Give fewer workers, or a smaller "
                "batch_size, or a larger train_batch_size",
                self._name,
                micro_batches,
                replicas,
                held,
                self._ahead,
            )

    @staticmethod
    def _noted(batches: Iterator[Keys], taken: _Taken) -> Iterator[Keys]:
        try:
            yield from batches
        except Exception as error:
            taken.failed = error
            raise

    def _rest(self, at: JobPosition, replica: tuple[int, int], prefix: str, taken: _Taken) -> Iterator[Keys]:
        rank, replicas = replica
        rest = range(replicas, self._deal.full // self._batch_size)
        while self._deal.next(at):
            behind = self._deal.behind(at)
            # Of the pass too: a position comes again in the next one.
            key = f"{prefix}/{at.epoch}/{at.consumed}"
            ledger = SharedLedger(place.store(replicas), key, rest)
            piece: int | None = rank
            number = 0
            while piece is not None:
                taken.ahead.append((at, behind))
                first = at.consumed + piece * self._batch_size
                yield self._order.part(first, self._batch_size, slice(None))
                piece, number = ledger.take(rank, number) if rest else None, number + 1
            if rest:
                taken.ledgers.append((behind, ledger))
            at = behind


@dataclass
class _Taken:
    """A :class:`Reached`: what was taken, and not yet handed out."""

    replicas: int
    step_end: JobPosition | None = None
    failed: Exception | None = None
    ahead: deque[tuple[JobPosition, JobPosition]] = field(default_factory=deque)
    """By micro-batch, where its step begins and ends."""
    ledgers: deque[tuple[JobPosition, SharedLedger]] = field(default_factory=deque)
    """Of steps of which none is left to take, with their ends."""

    def behind(self, at: JobPosition) -> JobPosition:
        at, self.step_end = self.ahead.popleft()
        return at

    def leave(self, at: JobPosition) -> None:
        while self.ledgers and self.ledgers[0][0].consumed <= at.consumed:
            self.ledgers.popleft()[1].leave(place.readers(self.replicas))
