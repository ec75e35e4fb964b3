"""One pass over a ``DataLoader``, and how to resume in the middle of it (P8).

The order of a pass depends on the random states at its beginning. To resume, the pass is begun
again under these states, and the indices of the samples that were taken are skipped: no data is
loaded for them, and no earlier pass is repeated. The script's own random states are restored.
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

from reft.data.samplers import (
    capture_samplers,
    holders,
    merge_samplers,
    reads_here,
    restore_samplers,
)
from reft.state import objects
from reft.state.blob import capture_host_rng, restore_host_rng, same_host_rng
from reft.state.codec import class_path


@dataclass(frozen=True)
class DistributedPass:
    """A pass that torch's ``DistributedSampler`` divides among the replicas.

    Sample ``n`` of the order is read by replica ``n % replicas``. The order does not depend on the
    number of replicas, so one position in it describes the progress of the whole job.

    Attributes:
        samples: number of samples in the data set.
        replicas: number of replicas.
        batch_size: number of samples in a batch of one replica.
        drop_last: whether the batch sampler drops an incomplete batch.
        cuts: True if the sampler drops samples that the replicas cannot share evenly, False if
            it repeats samples instead.
    """

    samples: int
    replicas: int
    batch_size: int
    drop_last: bool
    cuts: bool

    @property
    def batches(self) -> int:
        """Number of batches of one replica in a pass."""
        share = self.samples // self.replicas if self.cuts else -(-self.samples // self.replicas)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)

    def taken_at(self, taken: int, replicas: int) -> int | None:
        """Convert a number of batches of this degree to that of another degree.

        Args:
            taken: number of batches that a replica of this degree has taken.
            replicas: the other degree.

        Returns:
            Number of batches that a replica of the other degree has taken when the job has
            consumed the same samples; None if no batch of that degree begins there.
        """
        other = replace(self, replicas=replicas)
        if taken >= self.batches:
            return other.batches
        batches, rest = divmod(taken * self.batch_size * self.replicas, self.batch_size * replicas)
        return None if rest else min(batches, other.batches)


def find_distribution(loader: Any) -> DistributedPass | None:
    """Return how a ``DataLoader`` divides its samples among replicas; None if it does not use
    torch's ``DistributedSampler``."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
        return None
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    sizes = int(batches.batch_size), bool(batches.drop_last)
    return DistributedPass(samples, int(sampler.num_replicas), *sizes, bool(sampler.drop_last))


def find_order(loader: Any, replicas: int) -> dict[str, Any] | None:
    """Return the facts that determine the order of a ``DistributedSampler`` that divides it
    among all replicas.

    These facts must be equal on all ranks. Return None for other orders, which may differ
    between ranks on purpose.
    """
    dealt = find_distribution(loader)
    if dealt is None or dealt.replicas != replicas:
        return None
    return {**asdict(dealt), "seed": loader.sampler.seed, "shuffle": loader.sampler.shuffle}


@dataclass(frozen=True)
class Position:
    """The position of training within a pass. Part of the version.

    Attributes:
        start: random states when the pass was begun, including those of the loader's own
            generators.
        first: random states when the first batch was requested; None if they were still those of
            ``start``.
        taken: number of batches that were handed out.
        length: number of batches of the pass; None if the loader does not know.
        source: description of the data.
        number: number of the pass, for loaders that count them.
        renewed: True if beginning the pass drew no random numbers after ``start``, because the
            loader's persistent workers had read an earlier pass, or the beginning of this pass
            was not observed.
        ahead: random states under which the next batch was read, if it was read in advance and not
            handed out yet; otherwise None.
        evaluates: True if training continues with a new pass: the script was about to begin it,
            or this pass was read while no engine trained (an evaluation).
        dealt: how the replicas share the pass, as fields of :class:`DistributedPass`; None if
            unknown.
        dataset: state of the data set, if it is read by index and has a state; otherwise None.
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
        """Whether the next batch is the first of another pass."""
        return self.length is not None and self.taken >= self.length

    def fits(self, loader: Any) -> bool:
        """Return whether this position may belong to ``loader``; the script may also read other
        loaders.
        """
        return (
            find_length(loader) == self.length
            and find_source(loader) == self.source
            and not iterates_itself(loader)
            and len(own_generators(loader)) == len(self.start["generators"])
        )

    def at_degree(self, old: int, new: int) -> Position | None:
        """Convert the position to another degree.

        Args:
            old: old number of replicas.
            new: new number of replicas.

        Returns:
            The position of a replica of the new degree; None if no batch of the new degree
            begins there, or the order is not known to be the same at every degree.
        """
        dealt = None if self.dealt is None else DistributedPass(**self.dealt)
        taken = None if dealt is None or dealt.replicas != old else dealt.taken_at(self.taken, new)
        if dealt is None or taken is None:
            return None
        now = replace(dealt, replicas=new)
        return replace(
            self, taken=taken, length=now.batches, first=None, ahead=None, dealt=asdict(now)
        )


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once, in a fixed order."""
    found = (getattr(holder, "generator", None) for holder in holders(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def capture_start(loader: Any) -> dict[str, Any]:
    """Capture all random states that determine the order of the pass that is about to begin."""
    generators = [g.get_state() for g in own_generators(loader)]
    return {**capture_host_rng(), "generators": generators, "samplers": capture_samplers(loader)}


def _restore_start(loader: Any, start: dict[str, Any]) -> None:
    restore_host_rng(start)
    for generator, state in zip(own_generators(loader), start["generators"], strict=False):
        generator.set_state(state)
    restore_samplers(loader, start.get("samplers", []))


def _same_start(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether no random numbers were drawn between the two captures."""
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
    """Return whether the loader chooses samples only when batches are requested. With workers it
    chooses them in advance."""
    return int(getattr(loader, "num_workers", 0)) == 0


class PassReader:
    """A pass over ``loader`` that is being read.

    Attributes:
        loader: torch's loader.
        taken: number of batches that were handed out.
        counts: whether the pass determines the position, because it was trained on or read to
            its end; looking at a batch is not enough.
        unwatched: True if the pass counts only because there was no engine yet; an engine may
            train on another pass.
        evaluates: whether the pass was read while no engine trained. A version then holds the
            beginning of the next pass as the position.
        resume_phase: the phase after a restart (:class:`~reft.data.watch.ResumePhase`) in which
            the pass was begun or moved; None if it was neither.
        handle: weak reference to the script's iterator.
        follow: called when a batch is trained on, if reft restores the loader's position. The
            reference is weak, so that a loader without a variable is freed with its iterator.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.taken = 0
        self.counts = False
        self.unwatched = False
        self.evaluates = False
        self.resume_phase: object = None
        self.handle: weakref.ref[Any] | None = None
        self.follow: weakref.WeakMethod[Any] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the script still holds the pass's iterator, as in a loop over it; after a mere
        look at one batch it does not."""
        return self.handle is not None and self.handle() is not None

    def train(self) -> None:
        """Record that training uses the batch that was handed out last."""
        if self.follow is not None and (follow := self.follow()) is not None:
            follow(self)
        self.counts, self.unwatched, self.evaluates = True, False, False


class LoaderIterator(PassReader):
    """The iterator of one pass: the loader's own iterator, with a count of the batches taken.

    Args:
        loader: torch's loader.
        inner: the loader's own iterator, from which nothing was taken.
        start: random states under which the pass was begun.
        watch: the loader hook, which receives the reads.
        adopted: True if the beginning of the pass was not observed.
        renewed: True if beginning the pass drew no random numbers after ``start``, as in
            :class:`Position`.

    Attributes:
        uses_training_rng: whether the pass was begun under the random states of training.
        reads_ahead: whether the consumer of this iterator hands batches out later, and then
            calls :meth:`hand_out`.
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
        self.uses_training_rng = True
        self.reads_ahead = False
        self._inner = inner
        self._watch = watch
        self._renewed = renewed or adopted
        self._read = 0  # Number of batches that were taken or read ahead
        self._before_read: dict[str, Any] | None = None
        # Random states to set while the next batch is read; None to use those of training
        self._read_under: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None
        self._notes_first = reads_lazily(loader)
        self._begun: dict[str, Any] | None = None if adopted else capture_start(loader)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return get_inner_attribute(self, "_inner", name)

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
        """Continue as another pass over the same loader, from which nothing was taken yet."""
        for name in (
            "start",
            "uses_training_rng",
            "resume_phase",
            "_inner",
            "_first",
            "_notes_first",
            "_begun",
            "_renewed",
        ):
            setattr(self, name, getattr(other, name))

    def go_to(self, position: Position, *, skip: bool = True) -> None:
        """Continue as the pass of ``position``.

        The random states of training stay unchanged.

        Args:
            position: the position.
            skip: True to continue after the batches that were taken, False to start the pass
                from its beginning.
        """
        taken = position.taken if skip else 0
        self._inner = positioned(self.loader, position, taken)
        self.start, self._first, self._notes_first = position.start, position.first, False
        self._renewed = position.renewed
        if skip:
            restore_items(self.loader, position)
        self.taken, self.number, self.uses_training_rng = taken, position.number, False
        self._read, self._read_under = taken, position.ahead if skip else None


def _has_stateful_items(loader: Any) -> bool:
    """Return whether reading samples changes a state of the data set, which skipping samples
    would not change."""
    data = loader.dataset
    return (
        objects.is_stateful(data) and not isinstance(data, IterableDataset) and reads_here(loader)
    )


def restore_items(loader: Any, position: Position) -> None:
    """Restore the state of the data set, if it is read by index and has one."""
    if position.dataset is not None and _has_stateful_items(loader):
        loader.dataset.load_state_dict(position.dataset)


def positioned(loader: Any, position: Position, taken: int) -> Iterator[Any]:
    """Return an iterator of the loader in the state that it had in the pass of ``position``
    after ``taken`` batches."""
    here = capture_host_rng()
    try:
        _restore_start(loader, position.start)
        if isinstance(loader.dataset, IterableDataset):
            # There are no indices to skip, so read the pass again up to the position.
            inner = raw_iterator(loader)
            for _ in range(taken):
                # Ignore errors: the same ones were raised when the batches were taken the first
                # time
                with suppress(StopIteration, Exception):
                    next(inner)
            return inner
        twin = copy.copy(loader)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        skipping = SkippingSampler(getattr(loader, name), taken)
        # Change the copy's attributes through vars(), since DataLoader refuses to set them.
        vars(twin).update({name: skipping, "_iterator": None})
        if position.renewed:
            skipping.before = lambda: _restore_start(loader, position.start)
        inner = raw_iterator(twin)
        if reads_lazily(loader):
            start = position.start if position.renewed else capture_start(loader)
            first = {**start, **(position.first or {})}
            skipping.before = lambda: _restore_start(loader, first)
        elif getattr(loader, "persistent_workers", False):
            # These workers also read later passes, which must not skip anything.
            inner._index_sampler = loader._index_sampler  # type: ignore[attr-defined]
            vars(loader)["_iterator"] = inner
        return inner
    finally:
        restore_host_rng(here)


def finish_pass(loader: Any, position: Position) -> None:
    """Bring the loader's own state to what it is at the end of the pass of ``position``.

    This concerns generators, samplers and persistent workers. If an evaluation stopped early,
    the state is that at the point where it stopped. At most one batch is loaded.
    """
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
        # Workers were given more batches than were taken; for a short evaluation, all batches.
        for _ in positioned(loader, position, position.length):
            pass
    else:
        next(positioned(loader, position, position.taken - 1), None)
    merge_samplers(before, loader, position.start.get("samplers", []))


def has_workers(loader: Any) -> bool:
    """Return whether persistent workers wait for the next pass."""
    return getattr(loader, "_iterator", None) is not None


def is_within(loader: Any) -> bool | None:
    """Return whether the pass that is about to begin continues one that was left before its end.

    This is possible with Megatron's random sampler, which continues after the samples that the
    job has consumed. None if unknown.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    left_out = getattr(sampler, "last_batch_size", None)
    return (
        None
        if left_out is None
        else sampler.consumed_samples % (sampler.total_samples - left_out) != 0
    )


# Name of an attribute of a replaced ``__iter__``, which holds the class's original method
ORIGINAL = "_reft_original"


def raw_iterator(loader: Any) -> Iterator[Any]:
    """Return the result of torch's own ``DataLoader.__iter__``.

    ``iter(loader)`` would recurse: a subclass with its own ``__iter__`` calls this function from
    its ``__iter__``.
    """
    iterate = DataLoader.__iter__
    while (original := getattr(iterate, ORIGINAL, None)) is not None:
        iterate = original
    return iterate(loader)


def count_received(iterator: Iterator[Any]) -> int | None:
    """Return how many batches torch's iterator has received from its workers; None without
    workers."""
    return getattr(iterator, "_rcvd_idx", None)


def is_left_out(iterator: Iterator[Any], received: int | None) -> bool:
    """Return whether torch's iterator continues after the batch for which it raised an error.

    The iterator continues after an error in the data set, but not after a worker has died or
    timed out.
    """
    return received is None or count_received(iterator) != received


class SkippingSampler:
    """A sampler that skips the first samples that it draws.

    Attributes:
        before: sets the random states under which the first samples are drawn; most samplers then
            choose the whole order; None to use the current states.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self.before: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return get_inner_attribute(self, "_sampler", name)

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


def get_inner_attribute(outer: Any, inner: str, name: str) -> Any:
    """Look up a missing attribute of ``outer`` in the object that it wraps.

    Raises:
        AttributeError: the wrapped object lacks the attribute, or ``outer`` is a copy under
            construction.
    """
    if inner not in vars(outer):
        raise AttributeError(f"{type(outer).__name__!r} object has no attribute {name!r}")
    return getattr(vars(outer)[inner], name)


def iterates_itself(loader: Any) -> bool:
    """Return whether the loader's class has its own ``__iter__``; then it is unknown which
    batches reach the script."""
    return type(loader).__iter__ is not DataLoader.__iter__
