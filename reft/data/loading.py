"""A ``DataLoader`` whose position is part of the version, at every data-parallel degree.

    loader = reft.data.loader(dataset, batch_size=4, shuffle=True, seed=1, num_workers=3)
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

torch's ``DataLoader`` reads: workers, prefetch, pinning and collation are its own. What it reads follows
from :mod:`reft.data.order`, and random numbers of a sample from :mod:`reft.data.sample_rng`. The position
counts what was handed out, not what was read ahead; to come back sets two numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from reft.data import place
from reft.data.batches import Batches, Reached, SharedBatches, StaticBatches
from reft.data.order import Deal, JobPosition, Order, decode, encode
from reft.data.orders import Facts
from reft.data.passes import raw_iterator
from reft.data.reading import Progress, Reading
from reft.data.registry import Registry
from reft.data.sample_rng import SeededCollation, SeededDataset
from reft.data.watch import WATCH
from reft.errors import ConfigError

logger = logging.getLogger(__name__)

LOADERS: Registry[dict[str, Any]] = Registry("reft.data.loader(dataset")
_DECIDED = {
    "sampler": "the order follows from shuffle and seed",
    "batch_sampler": "the order follows from shuffle and seed",
    "generator": "give seed=",
}
"""What ``DataLoader`` takes and a position of the whole job does not allow."""


class Loader:
    """Made by :func:`loader`.

    Attributes:
        dataset: what is read.
        batch_size: samples of a replica in a micro-batch.
        drop_last: whether what does not fill a micro-batch is left out.
        inner: torch's ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        batches: Batches,
        *,
        seed: int,
        batch_size: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        replica: tuple[int, int] | None,
        name: str,
        options: dict[str, Any],
    ) -> None:
        if not options.get("in_order", True):
            raise ConfigError(
                "reft.data.loader takes no in_order=False: a position counts batches in their order, and "
                "those that were overtaken would be trained on twice, or not at all. Leave it out"
            )
        for option, instead in _DECIDED.items():
            if options.get(option) is not None:
                raise ConfigError(
                    f"reft.data.loader takes no {option}: {instead}. For an order of your own write "
                    f"loader = reft.resumable(DataLoader(...))"
                )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._order = order
        self._batches = batches
        self._loads = 0
        """How often a version was loaded."""
        self._given = replica
        self._name = name
        self.inner: DataLoader[Any] = DataLoader(
            SeededDataset(dataset, seed),  # type: ignore[arg-type]
            batch_sampler=self._batches,
            collate_fn=SeededCollation(collate_fn or default_collate),  # type: ignore[arg-type]
            # Beginning a pass draws nothing from the generator that training uses.
            generator=torch.Generator(),
            **{option: given for option, given in options.items() if option not in _DECIDED},
        )
        self._handed_out: list[Progress] = []
        """Of the passes whose batches the script has, the one that was read last at the end."""
        self._has_left_out = False
        self._begun: Progress | None = None
        """Of the pass that was begun last: perhaps a look, while another one is trained on."""
        self._followed: Progress | None = None
        """Of the pass that was trained on last."""
        self._left_within_step = False
        """Whether the batch of it that was trained on last is not the replica's last one of its step."""
        self._restored: JobPosition | None = None
        LOADERS.add(name, self)
        if (saved := LOADERS.take_waiting(name)) is not None:
            self._restored = decode(saved, order, name)
            self._loads = 1

    @property
    def replica(self) -> tuple[int, int]:
        """This rank's replica, and how many there are."""
        return self._given or place.replica()

    @property
    def deal(self) -> Deal:
        """How samples are dealt out at the degree of this start."""
        return self._batches.deal(self.replica[1])

    def __len__(self) -> int:
        """Batches of a whole pass.

        Raises:
            TypeError: replicas take as many as they come to.
        """
        return self._batches.length(self.replica[1])

    @property
    def epoch(self) -> int:
        """Number of the running pass, counted from 0; of the one to go on in, after a resumption."""
        restored = self._to_go_on_at()
        if restored is not None:
            return restored.epoch
        return 0 if self._progress is None else self._progress.at.epoch

    def __iter__(self) -> Reading:
        LOADERS.require_named(self._name, self)
        self._begun = Progress(self._beginning())
        return Reading(self, self._begun)

    def follow(self, progress: Progress) -> None:
        """A batch of its pass is trained on: this is the job's position from now on.

        Raises:
            ConfigError: the pass that was trained on before was left within a step: after so many
                micro-batches each replica was at another one; or ``step_samples`` is not the engine's.
        """
        if self._left_within_step and progress is not self._followed and self.replica[1] > 1:
            raise ConfigError(
                f'the loop over the loader {self._name!r} was left within a step: with order="dynamic" '
                f"replicas have unequally many micro-batches, and would train on the next pass from "
                f"different steps. Leave it where loader.ends_step is true, after so many steps, not "
                f"micro-batches"
            )
        self._require_step_of_engine()
        progress.train()
        self._followed, self._left_within_step = progress, progress.ends_step is False

    def _require_step_of_engine(self) -> None:
        mine, engines = self._batches.step_samples, place.step_samples()
        if mine is not None and engines is not None and mine != engines:
            raise ConfigError(
                f"the loader {self._name!r} has steps of {mine} samples (step_samples), but the engine has "
                f"steps of {engines} (train_batch_size), by which its gradients would be weighted. Write "
                f"reft.data.loader(..., step_samples=engine.train_batch_size())"
            )

    def hand_out(self, progress: Progress) -> None:
        others = [one for one in self._handed_out if one is not progress and one.is_held]
        self._handed_out = [*others, progress]

    @property
    def ends_step(self) -> bool | None:
        """Of ``order="dynamic"``, whether the batch that training takes next, or has just taken, is the
        replica's last one of its step; else None. A look changes nothing."""
        one = self._followed
        if one is not None and one.is_held and not (one.is_trained and one.ends_step):
            return one.ends_step
        held = [other for other in self._handed_out if other.is_held] or self._handed_out
        return held[-1].ends_step if held else None

    def _passes(self) -> list[Progress]:
        return [one for one in dict.fromkeys((self._begun, self._followed)) if one is not None]

    @property
    def _progress(self) -> Progress | None:
        """Of the pass that the position is of."""
        if not WATCH.is_watching:
            self._followed, self._left_within_step = None, False
        one = self._begun if self._followed is None else self._followed
        if one is not None and one.unwatched and WATCH.is_watching:
            one.counts = one.unwatched = False
        return one

    def _beginning(self) -> JobPosition:
        restored, progress = self._to_go_on_at(), self._progress
        if progress is not None and progress.counts:
            return self.deal.next_pass(progress.at)
        return restored or (JobPosition() if progress is None else progress.began)

    def read_from(self, at: JobPosition) -> tuple[Iterator[Any], Reached]:
        """torch's iterator over what is left of a pass, and what follows it."""
        reached = self._batches.begin_at(at, self.replica, self._loads)
        return raw_iterator(self.inner), reached

    def left_out(self) -> None:
        """The data set has raised an error, which the script may catch."""
        rank, replicas = self.replica
        if replicas > 1 and not self._has_left_out:
            self._has_left_out = True
            logger.warning(
                "the data set of the loader %r has raised an error: if the script goes on, replica %d leaves "
                "out that micro-batch, and the others do not: their positions differ from now on, and this "
                "one's pass ends sooner. Catch errors within the data set, and give another sample",
                self._name,
                rank,
            )

    def _to_go_on_at(self) -> JobPosition | None:
        """The restored position, until a step is trained from it, or its pass read to the end: passes begun
        before begin there."""
        one = self._progress
        if one is not None and (one.counts or one.era is None or one.era is not WATCH.resuming):
            self._restored = None
        return self._restored

    def order_facts(self, replicas: int) -> Facts | None:
        """What has to be equal on all ranks; None where the script deals out to others than the replicas,
        which :meth:`wrong` names."""
        if self.replica[1] != replicas:
            return None
        batches = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**self._order.facts(), **batches, "step_samples": self._batches.step_samples}

    def position(self) -> dict[str, Any] | None:
        """Plain values; None where no pass was begun."""
        at = self._to_go_on_at()
        if at is None and self._progress is not None:
            at = self._beginning() if self._progress.evaluates else self._progress.at
        return None if at is None else encode(at, self._order)

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on behind ``position``, in a pass that is being read too.

        Raises:
            ConfigError: it belongs to other data or another order.
        """
        self._restored = decode(position, self._order, self._name)
        self._loads, self._left_within_step = self._loads + 1, False
        self._handed_out.clear()
        for one in self._passes():
            one.go_to(self._restored)

    def begin_anew(self) -> None:
        """A version was loaded that was taken before the first pass was begun: go back to there."""
        if self._progress is not None:
            self.go_to(encode(JobPosition(), self._order))
        else:
            self._loads += 1  # as on ranks that have read something

    def state_dict(self) -> dict[str, Any]:
        """The position, for checkpoints of one's own; reft needs no call of it."""
        return self.position() or encode(JobPosition(), self._order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a :meth:`state_dict`, taken at any data-parallel degree.

        Raises:
            ConfigError: it belongs to other data or another order.
        """
        self.go_to(state)

    def wrong(self) -> str | None:
        """Why not every sample would be trained on once, and what to write; None: it would."""
        known = place.replica()
        if self._given is None or self._given == known:
            return None
        return (
            f"the loader {self._name!r} deals out samples for replica {self._given[0]} of {self._given[1]}, "
            f"but this rank trains replica {known[0]} of {known[1]}: samples are trained on twice, or not at "
            f"all. Leave dp_rank and dp_size out: they are the engine's"
        )


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    order: str = "static",
    step_samples: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    name: str = "data",
    **options: Any,
) -> Loader:
    """A loader in the place of torch's ``DataLoader``, which deals samples out to data-parallel replicas. Its
    position is part of the version: after a failure, and at another data-parallel degree, every sample of an
    epoch is trained on exactly once.

    Args:
        dataset: has a length, and gives a sample for an index.
        batch_size: samples of a replica in a micro-batch.
        shuffle: read in an order that follows from (seed, epoch).
        seed: of the order, and of the samples' random numbers.
        drop_last: leave out what does not fill a micro-batch; else the last one of a pass is smaller, its
            samples spread evenly over the replicas.
        order: ``"static"``, in which every replica has equally many micro-batches of a step; or
            ``"dynamic"``, in which replicas take them as they come to them, and a slow one takes fewer: see
            docs/data.md for the loop that this needs. A resumed run is equal to the bit with the static
            order only.
        step_samples: of ``"dynamic"``, samples of a step of all replicas: DeepSpeed's ``train_batch_size``.
        collate_fn: makes a batch of a list of samples; None: torch's.
        dp_rank: this rank's replica; None: the engine's, before there is one that of torch.distributed.
        dp_size: number of replicas; None: likewise.
        name: where a script has several, one for each; the same after a restart.
        options: of ``DataLoader``: ``num_workers``, ``prefetch_factor``, ``pin_memory``,
            ``persistent_workers``, ``worker_init_fn``, ``timeout``, ``multiprocessing_context``. With
            ``order="dynamic"`` the prefetch factor is 1 where none is given.

    Raises:
        ConfigError: the data set has no indices, or an option would decide the order.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"found {type(dataset).__module__}.{type(dataset).__qualname__}; expected a data set with a "
            f"length and indices. Streams are read by a loader that knows its position, such as torchdata's "
            f"StatefulDataLoader or mosaicml-streaming's StreamingDataLoader (docs/data.md)"
        )
    samples = Order(len(dataset), seed, shuffle=shuffle)
    if order == "dynamic" and options.get("num_workers") and options.get("prefetch_factor") is None:
        # What a worker reads ahead is taken, and no other replica can train on it.
        options["prefetch_factor"] = 1
    ahead = options.get("num_workers", 0) * (options.get("prefetch_factor") or 0)
    return Loader(
        dataset,
        samples,
        _batches(samples, order, step_samples, batch_size, drop_last=drop_last, name=name, ahead=ahead),
        seed=seed,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=collate_fn,
        replica=replica_of(dp_rank, dp_size),
        name=name,
        options=options,
    )


def _batches(
    samples: Order,
    order: str,
    step_samples: int | None,
    batch_size: int,
    *,
    drop_last: bool,
    name: str,
    ahead: int,
) -> Batches:
    check_batch_size(batch_size)
    if order not in ("static", "dynamic") or (order == "dynamic") != (step_samples is not None):
        raise ConfigError(
            f"found order {order!r} with step_samples {step_samples}; expected 'static' without, or "
            f"'dynamic' with the samples of a step of all replicas: DeepSpeed's train_batch_size"
        )
    if step_samples is None:
        return StaticBatches(samples, batch_size, drop_last=drop_last)
    return SharedBatches(samples, batch_size, step_samples, drop_last=drop_last, name=name, ahead=ahead)


def check_batch_size(batch_size: int) -> None:
    """
    Raises:
        ConfigError: it is none.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"found batch_size {batch_size}; expected 1 or more samples")


def replica_of(dp_rank: int | None, dp_size: int | None) -> tuple[int, int] | None:
    """What was given, checked; None where nothing was.

    Raises:
        ConfigError: one without the other, or no such replica.
    """
    if dp_rank is None and dp_size is None:
        return None
    if dp_rank is None or dp_size is None or not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"found dp_rank {dp_rank} and dp_size {dp_size}; expected 0 <= dp_rank < dp_size, or none"
        )
    return dp_rank, dp_size
