"""The iterator of one pass over ``reft.data.loader``'s loader, and where it is."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from torch.utils.data import DataLoader

from reft.data.batches import Reached
from reft.data.order import JobPosition
from reft.data.passes import is_left_out, received_by
from reft.data.watch import WATCH
from reft.errors import ConfigError


class Progress:
    """Of one pass; it outlives the iterator, and does not keep the loader alive."""

    def __init__(self, began: JobPosition) -> None:
        self.reading: weakref.ref[Reading] | None = None
        """The iterator, as long as the script has it."""
        self.moves = 0
        """How often a version has taken it elsewhere."""
        self.go_to(began)

    def go_to(self, at: JobPosition) -> None:
        self.began = self.at = at
        self.taken = 0
        self.ends_step: bool | None = None
        """Of the batch that was handed out last: see :class:`Owner`."""
        self.is_trained = False
        """Whether that one was trained on."""
        self.counts = False
        """Whether it was trained on or read to its end; a look at a batch makes no epoch."""
        self.unwatched = False
        """Whether it counts only as long as there is no engine, which would train on another."""
        self.evaluates = False
        """Whether it was read while no engine trained: a version has where the next one begins."""
        self.era = WATCH.resuming
        self.moves += 1

    @property
    def is_held(self) -> bool:
        """Whether the script has its iterator yet: of a look, it has none."""
        return self.reading is not None and self.reading() is not None

    def train(self) -> None:
        """The batch that was handed out last is trained on."""
        self.counts, self.unwatched, self.evaluates, self.is_trained = True, False, False, True


@dataclass(frozen=True)
class _Read:
    """A micro-batch that was read, or the data set's ``error`` in its place.

    Attributes:
        at: the position behind it; see :class:`reft.data.batches.Reached`.
        step_end: see there.
        ends_step: whether it is the replica's last of its step; None: all replicas have equally many.
    """

    batch: Any
    error: Exception | None
    at: JobPosition
    step_end: JobPosition | None
    ends_step: bool | None = None


class Owner(Protocol):
    """What a pass needs of its loader.

    Attributes:
        inner: torch's.
    """

    inner: DataLoader[Any]

    @property
    def replica(self) -> tuple[int, int]: ...

    def read_from(self, at: JobPosition) -> tuple[Iterator[Any], Reached]: ...

    def hand_out(self, progress: Progress) -> None:
        """The script gets the next batch of a pass."""

    def follow(self, progress: Progress) -> None: ...

    def left_out(self) -> None: ...


class ReadOfLoader:
    """A :class:`~reft.data.watch.Read`, which does not keep the script's iterator alive."""

    resumable = True

    def __init__(self, owner: Owner, progress: Progress) -> None:
        self._owner = owner
        self._progress = progress

    @property
    def loader(self) -> Any:
        """torch's."""
        return self._owner.inner

    @property
    def taken(self) -> int:
        return self._progress.taken

    @property
    def counts(self) -> bool:
        return self._progress.counts

    @property
    def is_held(self) -> bool:
        return self._progress.is_held

    def train(self) -> None:
        """A batch of it is trained on."""
        self._owner.follow(self._progress)


class Reading:
    """The iterator of one pass."""

    def __init__(self, owner: Owner, progress: Progress) -> None:
        self._owner = owner
        self._progress = progress
        progress.reading = weakref.ref(self)
        self._read_of = ReadOfLoader(owner, progress)
        self._inner: Iterator[Any] = iter(())
        self._reached: Reached | None = None
        self._moves = 0
        self._ahead: deque[_Read] = deque()
        """Where replicas take unequally many: read to know which is the last of a step, not handed out."""
        self._read_to = progress.at
        self._ended_at: JobPosition | None = None
        """Behind the last step whose end was handed out."""

    def train(self) -> None:
        """A batch of it is trained on."""
        self._read_of.train()

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        WATCH.before_batch(self._read_of)
        progress = self._progress
        if self._reached is None or self._moves != progress.moves:
            # What was read ahead from elsewhere is dropped.
            self._moves = progress.moves
            self._inner, self._reached = self._owner.read_from(progress.at)
            self._read_to, self._ended_at = progress.at, None
            self._ahead.clear()
        if progress.counts:
            self._reached.leave(progress.at)
        try:
            read = self._next(self._reached)
        except StopIteration:
            progress.counts, progress.unwatched = True, not WATCH.is_watching
            self._reached.leave(progress.at)
            raise
        progress.at = read.at
        if read.error is not None:
            self._leave_out(read, read.error)
        progress.ends_step, progress.is_trained = read.ends_step, False
        self._owner.hand_out(progress)
        if read.ends_step:
            self._ended_at = read.at
        progress.taken += 1
        if not WATCH.is_watching:
            progress.counts = progress.unwatched = True
        WATCH.after_batch(self._read_of)
        progress.evaluates = not progress.counts and WATCH.is_evaluating
        return read.batch

    def _next(self, reached: Reached) -> _Read:
        """The next one. It is the last of its step where none follows it there that can be read: the replica
        would not see the step's end else, and the others would wait for it."""
        ahead = self._ahead
        if not ahead:
            ahead.append(self._read(reached))
        first = ahead[0]
        if first.step_end is not None:
            if ends := not self._is_followed(reached, first.step_end):
                # The step is whole: a version of it goes on behind what was left out.
                first = replace(first, at=first.step_end)
            first = replace(first, ends_step=ends)
        ahead.popleft()
        return first

    def _is_followed(self, reached: Reached, step_end: JobPosition) -> bool:
        """Whether one that can be read, of the same step, comes behind the next one."""
        for number in itertools.count(1):
            if len(self._ahead) == number:
                try:
                    self._ahead.append(self._read(reached))
                except StopIteration:
                    break
            if self._ahead[number].step_end != step_end:
                break
            if self._ahead[number].error is None:
                return True
        return False

    def _read(self, reached: Reached) -> _Read:
        """Raises what does not leave a micro-batch out: the end, workers that died or are late, or a failure
        to take one."""
        if reached.failed is not None:
            raise reached.failed
        received = received_by(self._inner)
        batch, found = None, None
        try:
            batch = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:
            if reached.failed is not None or not is_left_out(self._inner, received):
                raise
            found = error
        self._read_to = reached.behind(self._read_to)
        return _Read(batch, found, self._read_to, reached.step_end)

    def _leave_out(self, read: _Read, error: Exception) -> NoReturn:
        self._owner.left_out()
        if read.ends_step and self._owner.replica[1] > 1 and self._ended_at != read.at:
            raise ConfigError(
                f"this replica has no micro-batch of the step that can be read, and the others wait for it "
                f"({type(error).__name__}: {error}); expected one or more: catch errors within the data set, "
                f"and give another sample"
            ) from error
        raise error
