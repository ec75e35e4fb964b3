"""Which samples a replica reads, micro-batch by micro-batch: batch samplers for torch's ``DataLoader``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from reft.data import place
from reft.data.ledger import SharedLedger
from reft.data.order import Deal, JobPosition, Order
from reft.errors import ConfigError

Keys = list[tuple[int, int]]
"""(epoch, sample) of each sample of a micro-batch."""


class Reached(Protocol):
    """Told in turn of the micro-batches of one pass."""

    ends_step: bool | None
    """Whether the last one was the replica's last of a step; None: all replicas have equally many."""

    def behind(self, at: JobPosition) -> JobPosition:
        """The position behind the next micro-batch, which was handed out at ``at``."""


class Batches(Protocol):
    """A batch sampler of one replica."""

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
    ends_step: bool | None = None

    def behind(self, at: JobPosition) -> JobPosition:
        return self.deal.behind(at)


class SharedBatches:
    """The micro-batches of a step are taken by the replicas as they come to them: a slow one takes fewer.

    A step trains on the samples that follow the position, as in the static order; which replica trains on
    which of its micro-batches is written in a ledger in the job's store. So a position is what it is in the
    static order, and a version that is loaded gives back all that was taken behind it. Every replica has its
    first micro-batch of a step by its number, so that none is without; the rest is taken, one ahead of
    training, for the last of a step has to be known before it is trained on.

    Args:
        order: of the samples.
        batch_size: samples of a micro-batch.
        step_samples: samples of a step, of all replicas.
        drop_last: leave out what does not fill a step; else it is read with the first step of the next pass.
        name: of the loader.
    """

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
        self._order = order
        self._batch_size = batch_size
        # Of samples one by one: what does not fill a step is left for the next pass.
        self._deal = Deal(order.size, 1, step_samples, drop_last)
        self._name = name
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
        taken = _Taken()
        self._pass = self._rest(at, replica, f"reft.data/{self._name}/{loads}", taken)
        return taken

    def __iter__(self) -> Iterator[Keys]:
        return self._pass

    def _rest(self, at: JobPosition, replica: tuple[int, int], prefix: str, taken: _Taken) -> Iterator[Keys]:
        while self._deal.next(at):
            rank, replicas = replica
            behind = self._deal.behind(at)
            rest = range(replicas, self._deal.full // self._batch_size)
            # Of the pass too: a position comes again in the next one.
            key = f"{prefix}/{at.epoch}/{at.consumed}"
            ledger = SharedLedger(place.store(replicas), key, rest)
            piece: int | None = rank
            number = 0
            while piece is not None:
                following = ledger.take(rank, number)
                ends = following is None
                if ends and rest:
                    ledger.leave(place.readers(replicas))
                taken.ahead.append((behind if ends else at, ends))
                first = at.consumed + piece * self._batch_size
                yield self._order.part(first, self._batch_size, slice(None))
                piece, number = following, number + 1
            at = behind


@dataclass
class _Taken:
    """A :class:`Reached`: what was taken, and not yet handed out."""

    ends_step: bool | None = None
    ahead: deque[tuple[JobPosition, bool]] = field(default_factory=deque)

    def behind(self, at: JobPosition) -> JobPosition:
        if not self.ahead:
            return at  # nothing was taken: the store has failed
        at, self.ends_step = self.ahead.popleft()
        return at
