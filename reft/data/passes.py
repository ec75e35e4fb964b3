"""One pass over a ``DataLoader``, and how to return into the middle of it (P8).

The order of a pass follows from the random states at its beginning. To return, the pass is begun
again under these states, and the samples that were taken are skipped by their indices: no data is
loaded for them, and nothing of an earlier pass is repeated. The script's own random states are put
back.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from reft.data.samplers import capture_samplers, find_changes, holders, reads_here, restore_samplers
from reft.state import objects
from reft.state.blob import capture_host_rng, restore_host_rng, same_host_rng
from reft.state.codec import class_path


@dataclass(frozen=True)
class DistributedPass:
    """A pass that torch's ``DistributedSampler`` divides among the replicas.

    Its order is the same at every degree, so that a position in it is one of the whole job: replica
    ``n % replicas`` reads sample ``n``.

    Attributes:
        cuts: whether the sampler leaves out samples that the replicas cannot share evenly; else it
            repeats samples.
    """

    samples: int
    replicas: int
    batch_size: int
    drop_last: bool
    cuts: bool

    @property
    def batches(self) -> int:
        """Batches of one replica in a pass."""
        share = self.samples // self.replicas if self.cuts else -(-self.samples // self.replicas)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)

    def taken_at(self, taken: int, replicas: int) -> int | None:
        """Batches that a replica of another degree has taken if the job has consumed what it has
        after ``taken`` batches of this degree; None if no batch of the other degree begins there.
        """
        other = replace(self, replicas=replicas)
        if taken >= self.batches:
            return other.batches
        batches, rest = divmod(taken * self.batch_size * self.replicas, self.batch_size * replicas)
        return None if rest else min(batches, other.batches)


def find_distribution(loader: Any) -> DistributedPass | None:
    """How a ``DataLoader`` divides its samples; None if its order or its batches are made in
    another way."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
        return None
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    sizes = int(batches.batch_size), bool(batches.drop_last)
    return DistributedPass(samples, int(sampler.num_replicas), *sizes, bool(sampler.drop_last))


def find_order(loader: Any, replicas: int) -> dict[str, Any] | None:
    """Facts of an order that a ``DistributedSampler`` divides among all replicas, which must be
    equal on all ranks; None for other orders, which may differ on purpose."""
    dealt = find_distribution(loader)
    if dealt is None or dealt.replicas != replicas:
        return None
    return {**asdict(dealt), "seed": loader.sampler.seed, "shuffle": loader.sampler.shuffle}


@dataclass(frozen=True)
class Position:
    """Where training is in a pass.

    Attributes:
        start: random states when the pass was begun, with those of the loader's own generators.
        first: random states when the first batch was requested, if something was drawn in between.
        taken: batches that were handed out.
        length: batches of the pass; None if the loader does not know.
        source: describes the data.
        number: of the pass, for loaders that count them.
        renewed: whether nothing was drawn after ``start`` to begin the pass: the loader's
            persistent workers had read an earlier pass, or it was begun unobserved.
        ahead: random states when the batch was read that was read ahead of training.
        evaluates: whether the next pass begins anew: it was about to begin, or this one was read
            while no engine trained.
        dealt: how the replicas share the pass, as fields of :class:`DistributedPass`; None if not
            known.
        dataset: state of a data set that is read by index and has one.
    """

    start: dict[str, Any]
    first: dict[str, Any] | None
    taken: int
    length: int | None
    source: str
    number: int = 0
    renewed: bool = False
    ahead: dict[str, Any] | None = None
    evaluates: bool = False
    dealt: dict[str, Any] | None = None
    dataset: Any = None

    @property
    def complete(self) -> bool:
        """Whether the next batch is the first one of another pass."""
        return self.length is not None and self.taken >= self.length

    def fits(self, loader: Any) -> bool:
        """Whether it may be a position in this loader: the script may read others before the first
        step."""
        return (
            find_length(loader) == self.length
            and find_source(loader) == self.source
            and not iterates_itself(loader)
            and len(own_generators(loader)) == len(self.start["generators"])
        )

    def at_degree(self, old: int, new: int) -> Position | None:
        """The position of a replica if ``new`` replicas continue from ``old`` ones; None if no
        batch of theirs begins there, or the order is not known to be the job's."""
        dealt = None if self.dealt is None else DistributedPass(**self.dealt)
        taken = None if dealt is None or dealt.replicas != old else dealt.taken_at(self.taken, new)
        if dealt is None or taken is None:
            return None
        now = replace(dealt, replicas=new)
        return replace(
            self, taken=taken, length=now.batches, first=None, ahead=None, dealt=asdict(now)
        )


def own_generators(loader: Any) -> list[torch.Generator]:
    """Generators of a loader and its samplers, each once, in a fixed order."""
    found = (getattr(holder, "generator", None) for holder in holders(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def capture_start(loader: Any) -> dict[str, Any]:
    """All states that decide the order of the pass that is about to begin."""
    generators = [g.get_state() for g in own_generators(loader)]
    return {**capture_host_rng(), "generators": generators, "samplers": capture_samplers(loader)}


def _restore_start(loader: Any, start: dict[str, Any]) -> None:
    restore_host_rng(start)
    for generator, state in zip(own_generators(loader), start["generators"], strict=False):
        generator.set_state(state)
    restore_samplers(loader, start.get("samplers", []))


def _same_start(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing was drawn from any generator in between."""
    own = zip(one["generators"], other["generators"], strict=True)
    samplers = one.get("samplers") == other.get("samplers")
    return samplers and same_host_rng(one, other) and all(torch.equal(a, b) for a, b in own)


def find_length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def find_source(loader: Any) -> str:
    return f"{class_path(loader.dataset)} of {find_length(loader.dataset)}"


def described(loader: Any) -> str:
    sampler = type(getattr(loader, "sampler", None)).__name__
    return f"{find_source(loader)}, {sampler}, num_workers={getattr(loader, 'num_workers', 0)}"


def reads_lazily(loader: Any) -> bool:
    """Whether samples are chosen when batches are requested. Worker processes are given theirs in
    advance."""
    return int(getattr(loader, "num_workers", 0)) == 0


class PassReader:
    """A pass over ``loader`` that is being read.

    Attributes:
        loader: torch's.
        taken: batches that were handed out.
        counts: whether it was trained on, or read to its end: to look at a batch is no epoch.
        era: the resumption that it was begun or moved in.
        handle: refers to the script's iterator.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.taken = 0
        self.counts = False
        self.unwatched = False
        """Whether it counts only until there is an engine, which may train on another one."""
        self.evaluates = False
        """Whether it was read while no engine trained. A version then has the place where the next
        one begins."""
        self.era: object = None
        self.handle: weakref.ref[Any] | None = None
        self.follow: weakref.WeakMethod[Any] | None = None
        """Called when a batch is trained on, if reft restores the loader's position. The reference
        is weak: a loader that the script does not keep is freed with its iterator."""

    @property
    def is_held(self) -> bool:
        """Whether the script is known to have its iterator still. After a look it has not."""
        return self.handle is not None and self.handle() is not None

    def train(self) -> None:
        """The batch that was handed out last is trained on."""
        if self.follow is not None and (follow := self.follow()) is not None:
            follow(self)
        self.counts, self.unwatched, self.evaluates = True, False, False


class LoaderIterator(PassReader):
    """The iterator of one pass: the loader's own, counted.

    Args:
        loader: torch's.
        inner: the loader's own iterator, of which nothing was taken.
        start: the random states under which it was begun.
        watch: receives the reads.
        adopted: whether it was begun unobserved.
        renewed: see :class:`Position`.

    Attributes:
        natural: whether it was begun with the random states of training.
    """

    def __init__(
        self,
        loader: Any,
        inner: Iterator[Any],
        start: dict[str, Any],
        watch: Any,
        *,
        adopted: bool = False,
        renewed: bool = False,
    ) -> None:
        super().__init__(loader)
        self.start = start
        self.number = 0
        self.natural = True
        self.reads_ahead = False
        """Whether its consumer hands batches out later, and calls :meth:`hand_out`."""
        self._inner = inner
        self._watch = watch
        self._renewed = renewed or adopted
        # batches that were read: those that were taken, and those read ahead
        self._read = 0
        self._before_read: dict[str, Any] | None = None
        self._read_under: dict[str, Any] | None = None
        """The random states of the next batch, if it is not read under those of training."""
        self._first: dict[str, Any] | None = None
        self._notes_first = reads_lazily(loader)
        self._begun: dict[str, Any] | None = None if adopted else capture_start(loader)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_inner", name)

    def __next__(self) -> Any:
        self._watch.before_batch(self)
        if self._read == 0 and self._notes_first:
            now = capture_start(self.loader)
            self._first = now if self._begun is None or not _same_start(now, self._begun) else None
            self._begun = None
        self._watch.before_read(self)
        received = count_received(self._inner)
        try:
            batch = self._read_one()
        except StopIteration:
            if not self.reads_ahead:
                self.end()
            raise
        except Exception:
            if is_left_out(self._inner, received):
                self._read += 1
                self.taken += not self.reads_ahead
            raise
        self._read += 1
        if not self.reads_ahead:
            self.hand_out()
        return batch

    def _read_one(self) -> Any:
        here, under = capture_host_rng() if self.reads_ahead else None, self._read_under
        self._before_read, self._read_under = under or here, None
        if under is None or here is None:
            return next(self._inner)
        restore_host_rng(under)
        try:
            return next(self._inner)
        finally:
            restore_host_rng(here)

    def hand_out(self) -> None:
        self.taken += 1
        self._watch.after_batch(self)
        self.evaluates = not self.counts and self._watch.is_evaluating

    def end(self) -> None:
        self.counts, self.unwatched = True, not self._watch.is_watching
        self._watch.after_last(self)

    def position(self) -> Position:
        dealt = find_distribution(self.loader)
        return Position(
            self.start,
            self._first,
            self.taken,
            find_length(self.loader),
            find_source(self.loader),
            number=self.number,
            renewed=self._renewed,
            ahead=self._before_read if self._read > self.taken else None,
            evaluates=self.evaluates,
            dealt=None if dealt is None else asdict(dealt),
            dataset=self.loader.dataset.state_dict() if _has_stateful_items(self.loader) else None,
        )

    def adopt(self, other: LoaderIterator) -> None:
        """Become another pass over the same loader, of which nothing was taken."""
        for name in (
            "start",
            "natural",
            "era",
            "_inner",
            "_first",
            "_notes_first",
            "_begun",
            "_renewed",
        ):
            setattr(self, name, getattr(other, name))

    def go_to(self, position: Position, *, skip: bool = True) -> None:
        """Become the pass of ``position``: after what was taken of it, or at its beginning. The
        random states of training are unchanged."""
        taken = position.taken if skip else 0
        self._inner = positioned(self.loader, position, taken)
        self.start, self._first, self._notes_first = position.start, position.first, False
        self._renewed = position.renewed
        if skip:
            restore_items(self.loader, position)
        self.taken, self.number, self.natural = taken, position.number, False
        self._read, self._read_under = taken, position.ahead if skip else None


def _has_stateful_items(loader: Any) -> bool:
    """Whether reading items changes a state of the data set that it can return. Skipped items are
    not read."""
    data = loader.dataset
    return (
        objects.is_stateful(data) and not isinstance(data, IterableDataset) and reads_here(loader)
    )


def restore_items(loader: Any, position: Position) -> None:
    """Restore the state of the data set, if it is read by index and has one."""
    if position.dataset is not None and _has_stateful_items(loader):
        loader.dataset.load_state_dict(position.dataset)


def positioned(loader: Any, position: Position, taken: int) -> Iterator[Any]:
    """The loader's iterator as the pass of ``position`` had it after ``taken`` batches."""
    here = capture_host_rng()
    try:
        _restore_start(loader, position.start)
        if isinstance(loader.dataset, IterableDataset):
            # There are no indices to skip: the pass is read again.
            inner = raw_iterator(loader)
            for _ in range(taken):
                # errors that were raised when they were taken
                with suppress(StopIteration, Exception):
                    next(inner)
            return inner
        twin = copy.copy(loader)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        skipping = SkippingSampler(getattr(loader, name), taken)
        # DataLoader refuses to have these set. Nothing else refers to the copy's.
        vars(twin).update({name: skipping, "_iterator": None})
        if position.renewed:
            skipping.before = lambda: _restore_start(loader, position.start)
        inner = raw_iterator(twin)
        if reads_lazily(loader):
            start = position.start if position.renewed else capture_start(loader)
            first = {**start, **(position.first or {})}
            skipping.before = lambda: _restore_start(loader, first)
        elif getattr(loader, "persistent_workers", False):
            # Later passes are read by these workers, without the skipping.
            inner._index_sampler = loader._index_sampler  # type: ignore[attr-defined]
            vars(loader)["_iterator"] = inner
        return inner
    finally:
        restore_host_rng(here)


def leave_behind(loader: Any, position: Position) -> None:
    """Put the loader's own state, generators and persistent workers, where the pass of ``position``
    leaves it: at its end, or where an evaluation was broken off. At most one batch is loaded."""
    waits = getattr(loader, "persistent_workers", False) and not has_workers(loader)
    own = (
        own_generators(loader)
        or any(capture_samplers(loader))
        or any(position.start.get("samplers", ()))
    )
    if position.length is None or not (waits or own):
        return
    before = capture_samplers(loader)
    if position.complete or not reads_lazily(loader):
        # Workers are given more batches than are taken, and all batches of a short evaluation.
        for _ in positioned(loader, position, position.length):
            pass
    else:
        next(positioned(loader, position, position.taken - 1), None)
    find_changes(before, loader, position.start.get("samplers", []))


def has_workers(loader: Any) -> bool:
    """Whether persistent workers wait for the next pass."""
    return getattr(loader, "_iterator", None) is not None


def is_within(loader: Any) -> bool | None:
    """Whether the pass that is about to begin was begun before and broken off: Megatron's random
    sampler continues after the samples that the job has consumed. None if not known."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    left_out = getattr(sampler, "last_batch_size", None)
    return (
        None
        if left_out is None
        else sampler.consumed_samples % (sampler.total_samples - left_out) != 0
    )


ORIGINAL = "_reft_original"  # attribute of a replaced ``__iter__``: the class's own


def raw_iterator(loader: Any) -> Iterator[Any]:
    """What ``DataLoader.__iter__`` of torch returns. Not iter(): a subclass with an __iter__ of its
    own calls this one, and must not be called again."""
    iterate = DataLoader.__iter__
    while (original := getattr(iterate, ORIGINAL, None)) is not None:
        iterate = original
    return iterate(loader)


def count_received(iterator: Iterator[Any]) -> int | None:
    """Batches that torch's iterator has received from its workers; None if there are none."""
    return getattr(iterator, "_rcvd_idx", None)


def is_left_out(iterator: Iterator[Any], received: int | None) -> bool:
    """Whether torch's iterator continues after the batch in whose place it raised an error. It does
    after an error of the data set, but not after workers died or timed out."""
    return received is None or count_received(iterator) != received


class SkippingSampler:
    """A sampler without its first draws.

    Attributes:
        before: sets the random states for the draws at the beginning, in which most samplers choose
            the whole order; None for the present ones.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self.before: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return of_inner(self, "_sampler", name)

    def __iter__(self) -> Iterator[Any]:
        here = capture_host_rng() if self.before is not None else None
        if self.before is not None:
            self.before()
        indices = itertools.islice(iter(self._sampler), self._skip, None)
        head = list(itertools.islice(indices, 1))
        if here is not None:
            restore_host_rng(here)
        yield from head
        yield from indices


def of_inner(outer: Any, inner: str, name: str) -> Any:
    """An attribute that ``outer`` does not have, from what it wraps. A copy that is being made
    wraps nothing yet."""
    if inner not in vars(outer):
        raise AttributeError(f"{type(outer).__name__!r} object has no attribute {name!r}")
    return getattr(vars(outer)[inner], name)


def iterates_itself(loader: Any) -> bool:
    """Whether it is of a subclass with an ``__iter__`` of its own: what that does with batches is
    not known."""
    return type(loader).__iter__ is not DataLoader.__iter__
