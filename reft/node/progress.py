"""What a trainer does, on a page of shared memory: its node's daemon and launcher read it without its help.

The page lies in the job's memory, one per trainer. A trainer writes numbers of eight bytes each, which are
never seen half written: a few memory accesses per instruction, no system call. After the page comes a ring of
what its last steps consisted of: computing, waiting, the quickest transfer. Readers copy both.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

PROGRESS_SUFFIX, STACKS_SUFFIX = ".progress", ".stacks"
"""Of the page of a trainer, and of the file for its stacks; before them its local rank."""
STEPS = 64
"""Whose records a page keeps."""
_RECORD_WORDS = 16
_NEVER = 2**62
_PAGE_BYTES = 4096
_FILE_BYTES = _PAGE_BYTES + STEPS * _RECORD_WORDS * 8
_MAGIC = 0x72656674_70616733
_NAMES_AT, _NAME_BYTES, _MOST_NAMES = 1024, 32, 96
_PER_SEC = 10**9


class Phase(IntEnum):
    LOADING = 1
    """It has an engine and has not begun its first step."""
    FIRST_STEP = 2
    STEP = 3
    BETWEEN = 4
    """The script's own, between two steps."""
    EVALUATION = 5
    SAVING = 6
    PAUSED = 7
    """The script has asked not to be watched."""
    ENDED = 8


_IS, _PID, _RANK, _STEP, _PHASE, _POSITION, _INSTRUCTION, _NANOS = range(8)
_HANG_FACTOR, _SIGNAL, _PLACE, _SAMPLES, _FLOPS, _TOKENS = range(8, 14)
_LONGEST, _DEVICE, _HANG_TIMEOUT, _WORDS = 14, 17, 20, 21
_PLACE_BITS = 20
_LONGEST_OF = {Phase.EVALUATION: _LONGEST, Phase.SAVING: _LONGEST + 1, Phase.BETWEEN: _LONGEST + 2}
"""Where the longest time is that one took; the records of steps hold the steps'."""


@dataclass(frozen=True)
class DeviceUse:
    """A trainer's device memory, as its allocator counts it; bytes."""

    total: int  # that the trainer may have: the device's, without what others take
    allocated: int  # allocated, peak_allocated: in tensors, now and at most
    peak_allocated: int


@dataclass(frozen=True)
class Seen:
    """A trainer as its page tells of it."""

    local_rank: int
    rank: int
    pid: int
    phase: Phase  # what it is at
    step: int  # last step that it has made
    position: int  # instructions that it has begun in this step
    instruction: str  # the newest; "": not known
    nanos: int  # when it last wrote, by the host's monotonic clock
    hang_factor: float  # of the job's block, as the next; 0: the trainer is not watched
    hang_timeout_secs: float
    step_secs: float  # longest of its last 64 steps, the first one not among them; 0: none yet
    phase_secs: float  # longest time that it took for what it is at; 0: none yet
    stack_signal: int  # signal on which it writes its stacks; 0: none
    state: str  # of the process, a letter as in ``/proc/PID/stat``; "": it is gone
    samples_per_step: int = 0  # of the whole job; 0: not known
    device: DeviceUse | None = None  # its memory; None: it has none
    flops_per_token: int = 0  # of the whole model; 0: not known, below 0: it has experts
    tokens_per_sample: int = 0  # 0: not known


class Part(IntEnum):
    """What a rank is at between two instructions."""

    COMPUTE = 0
    """By itself; with tensor parallelism, together with its tensor-parallel peers."""
    PREVIOUS = 1
    """Sends to, or receives from, the stage before it."""
    NEXT = 2
    COLLECTIVE = 3
    """Reduces, or may."""
    OPTIMIZER = 4
    """The optimizer's step, in which it may ask for the norm of all gradients, and gather weights."""
    OTHER = 5
    """The data's loader, the script's own, reft's."""


_PARTS = {
    "RecvActivation": Part.PREVIOUS,
    "SendGrad": Part.PREVIOUS,
    "SendActivation": Part.NEXT,
    "RecvGrad": Part.NEXT,
    "LoadMicroBatch": Part.OTHER,
    # A plain engine's: it reduces within.
    "Backward": Part.COLLECTIVE,
    "Step": Part.OPTIMIZER,
    "OptimizerStep": Part.OPTIMIZER,
}
_COMPUTING = ("Forward", "Backward", "Weight")
_COLLECTIVES = ("Reduce", "AggregateTotalLoss", "Recv", "Send", "CommitP2P")


def part_of(name: str) -> Part:
    """What an instruction of that name is; "" stands for what lies before the first one."""
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith(_COMPUTING):
        return Part.COMPUTE
    return Part.COLLECTIVE if name.startswith(_COLLECTIVES) else Part.OTHER


class StepTimes(NamedTuple):
    """One step of one rank. Times in seconds."""

    step: int  # number of the step, after it
    whole: float  # from the engine's call to its return
    compute: float  # in which it computed, without ``busy``
    busy: float  # of computing, in which the training thread was ready to run and had no core
    linked: float  # in transfers from and to the neighbouring stages, and waiting for them
    collective: float  # in collectives, likewise
    optimizer: float  # in the optimizer's step, likewise
    previous: float  # previous, next: the quickest transfer with that stage; 0: there was none
    next: float
    transfers: int  # with both


@dataclass(frozen=True)
class RankSteps:
    """The last steps of one rank, by number; ``at``: its pipeline stage, replica and tensor slice."""

    rank: int
    pid: int
    at: tuple[int, int, int]
    steps: tuple[StepTimes, ...]


class StepClock:
    """Adds up the parts of the step that runs. Used by the training thread.

    A call that sends or receives returns when both sides were there and the bytes have passed. Which part of
    it was waiting one rank cannot tell; its neighbour can: for each message one of the two came last and
    waited for nothing, so that the smaller of both times is the transfer. Hence the quickest of a step is
    noted, by link. ``ring``: the records' memory, as words.
    """

    def __init__(self, ring: memoryview) -> None:
        self._ring = ring
        self._at = 0
        self._part = Part.OTHER
        self._spent = [0] * len(Part)
        self._least = [_NEVER, _NEVER]
        self._transfers = 0
        self._delayed = self._delay_at = 0
        self._delays: int | None = None
        self._count = 0

    def begin(self, now: int) -> None:
        """A step begins. ``now``: nanoseconds of the monotonic clock."""
        if self._delays is None:
            self._delays = _open_delays()
        self._at, self._part = now, Part.OTHER
        self._spent = [0] * len(Part)
        self._least = [_NEVER, _NEVER]
        self._transfers = self._delayed = 0

    def enter(self, part: Part) -> int:
        """Another part begins, or another instruction of the same. Returns the time, in nanoseconds."""
        before = self._part
        if before == Part.COMPUTE and part != before:
            # Before the time is taken: no delay is counted that lies outside of what was timed.
            self._delayed += self._delay() - self._delay_at
        now = time.monotonic_ns()
        secs = now - self._at
        self._at = now
        self._spent[before] += secs
        if before in (Part.PREVIOUS, Part.NEXT):
            self._transfers += 1
            self._least[before - 1] = min(self._least[before - 1], secs)
        if part != before:
            self._part = part
            if part == Part.COMPUTE:
                self._delay_at = self._delay()
        return now

    def leave_out(self, nanos: int) -> None:
        """So much of what runs is none of the step's."""
        self._at += nanos

    def go_on(self, now: int) -> None:
        """The step goes on, which had paused at :data:`Part.OTHER`: what lies between is none of it."""
        self._at = now

    def end(self, step: int, began: int) -> None:
        """The step has ended, which began at ``began``: write its record."""
        whole = self.enter(Part.OTHER) - began
        at = self._count % STEPS * _RECORD_WORDS
        self._count += 1
        spent, ring = self._spent, self._ring
        linked, compute = spent[Part.PREVIOUS] + spent[Part.NEXT], max(0, spent[Part.COMPUTE] - self._delayed)
        ring[at] = step  # a reader takes a record whose ends are equal
        ring[at + 1 : at + 4] = _words(whole, compute, self._delayed)
        ring[at + 4 : at + 7] = _words(linked, spent[Part.COLLECTIVE], spent[Part.OPTIMIZER])
        ring[at + 7 : at + 10] = _words(*self._least, self._transfers)
        ring[at + _RECORD_WORDS - 1] = step

    def _delay(self) -> int:
        """Nanoseconds that this thread has waited for a core in its life; 0 where the kernel does not say."""
        if not self._delays:
            return 0
        try:
            return int(os.pread(self._delays, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self._delays = 0
            return self._delay_at

    def close(self) -> None:
        """No step follows."""
        if self._delays:
            os.close(self._delays)
        self._delays = 0


def _words(*numbers: int) -> memoryview:
    return memoryview(array("q", numbers))


def _open_delays() -> int:
    with suppress(OSError):
        return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return 0


class ProgressPage:
    """A trainer's page, for writing. Where it cannot be made, which is said, it is not watched (P6)."""

    def __init__(
        self, job_dir: Path, local_rank: int, rank: int, hang_factor: float, hang_timeout_secs: float
    ) -> None:
        self._path = job_dir / f"{local_rank}{PROGRESS_SUFFIX}"
        self._page = _make(self._path)
        self._words = memoryview(self._page).cast("q")
        self._names: dict[str, int] = {}
        self._position = 0
        self._began = time.monotonic_ns()
        self._made_first = False
        self._parts_nanos: int | None = None
        self._clock = StepClock(memoryview(self._page)[_PAGE_BYTES:].cast("q"))
        self._parts = [Part.OTHER] * _MOST_NAMES
        words = self._words
        words[_PID], words[_RANK] = os.getpid(), rank
        words[_HANG_FACTOR], words[_HANG_TIMEOUT] = int(hang_factor * 1000), int(hang_timeout_secs * 1000)
        words[_PHASE], words[_NANOS] = Phase.LOADING, self._began
        words[_IS] = _MAGIC

    # -- every instruction -------------------------------------------------------------------------

    def instruction(self, number: int) -> None:
        """An instruction begins; ``number`` is what :meth:`number_of` gave for its name."""
        words = self._words
        self._position = position = self._position + 1
        words[_POSITION] = position
        words[_INSTRUCTION] = number
        words[_NANOS] = self._clock.enter(self._parts[number])

    def number_of(self, name: str) -> int:
        """The number for a name; 0 where the page has no room for another."""
        if name not in self._names and len(self._names) + 1 < _MOST_NAMES:
            number = len(self._names) + 1
            at = _NAMES_AT + number * _NAME_BYTES
            self._page[at : at + _NAME_BYTES] = name.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
            self._names[name] = number
            self._parts[number] = part_of(name)
        return self._names.get(name, 0)

    # -- every step --------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return Phase(self._words[_PHASE])

    def begin_step(self) -> None:
        """A step begins, or its next micro-batch, if it has not begun."""
        if self._words[_PHASE] in (Phase.STEP, Phase.FIRST_STEP):
            return
        self._enter(Phase.STEP if self._made_first else Phase.FIRST_STEP)
        if self._parts_nanos is None:
            self._position = 0
            self._clock.begin(self._began)
        else:
            self._clock.go_on(self._began)
            self._began -= self._parts_nanos

    def end_step(self, step: int) -> None:
        """The step, or one of its micro-batches, has returned. ``step``: the last one that was made."""
        words = self._words
        if words[_PHASE] in (Phase.STEP, Phase.FIRST_STEP):
            if step == words[_STEP]:
                self._parts_nanos = self._clock.enter(Part.OTHER) - self._began
            else:
                if self._made_first:
                    self._clock.end(step, self._began)
                self._made_first, self._parts_nanos = True, None
        words[_STEP] = step
        self._enter(Phase.BETWEEN)

    def set_step(self, step: int) -> None:
        """The last step that was made, where none was made here: it was restored."""
        self._words[_STEP], self._parts_nanos = step, None

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, began = self.phase, self._began
        self._enter(phase)
        entered = self._began
        try:
            yield
        finally:
            self._enter(before)
            self._began = began + self._began - entered  # what it took is not the step's
            self._clock.leave_out(time.monotonic_ns() - entered)

    def _enter(self, phase: Phase) -> None:
        words, now = self._words, time.monotonic_ns()
        longest = _LONGEST_OF.get(Phase(words[_PHASE]))
        if longest is not None:
            words[longest] = max(words[longest], now - self._began)
        self._began = now
        words[_PHASE] = phase
        words[_INSTRUCTION] = 0
        words[_NANOS] = now

    def set_stack_signal(self, number: int) -> None:
        self._words[_SIGNAL] = number

    def set_place(self, place: tuple[int, int, int]) -> None:
        pp, dp, tp = place
        self._words[_PLACE] = 1 + (((pp << _PLACE_BITS) + dp) << _PLACE_BITS) + tp

    def set_samples(self, per_step: int) -> None:
        """Samples that the whole job trains on in a step."""
        self._words[_SAMPLES] = per_step

    def set_flops(self, per_token: int) -> None:
        """Operations that the whole model takes for a token."""
        self._words[_FLOPS] = per_token

    def set_tokens(self, per_sample: int) -> None:
        """Tokens of a sample."""
        self._words[_TOKENS] = per_sample

    def set_device(self, use: DeviceUse) -> None:
        self._words[_DEVICE:_HANG_TIMEOUT] = _words(*astuple(use))

    def close(self) -> None:
        self._enter(Phase.ENDED)
        self._clock.close()
        self._path.unlink(missing_ok=True)


def _make(path: Path) -> mmap.mmap:
    try:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Written to: a full tmpfs is an error here, not a SIGBUS later.
            os.posix_fallocate(fd, 0, _FILE_BYTES)
            return mmap.mmap(fd, _FILE_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("%s cannot be made (%s): this trainer trains without hang detection", path, error)
        return mmap.mmap(-1, _FILE_BYTES)


# -- who reads -----------------------------------------------------------------------------------------


def read_pages(job_dir: Path) -> list[Seen]:
    """The trainers of this node, by local rank; files that are no such pages are left out."""
    return _each(job_dir, _seen)


def read_times(job_dir: Path) -> list[RankSteps]:
    """The last steps of the trainers of this node whose place is known."""
    return _each(job_dir, _timed)


def _each(job_dir: Path, told: Callable[[Path, bytes, tuple[int, ...]], _T | None]) -> list[_T]:
    found = []
    for path in sorted(job_dir.glob(f"*{PROGRESS_SUFFIX}")):
        with suppress(OSError, ValueError, struct.error):
            found.append(told(path, *_words_of(path)))
    return [one for one in found if one is not None]


def _words_of(path: Path) -> tuple[bytes, tuple[int, ...]]:
    """A page's bytes and numbers. Raises OSError, ValueError, struct.error: it is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        page = os.pread(fd, _FILE_BYTES, 0)
    finally:
        os.close(fd)
    words = struct.unpack(f"={_WORDS}q", page[: _WORDS * 8])
    if words[_IS] != _MAGIC:
        raise ValueError(f"{path} is no page of a trainer")
    return page, words


def _seen(path: Path, page: bytes, words: tuple[int, ...]) -> Seen:
    phase = Phase(words[_PHASE])
    at = _NAMES_AT + (words[_INSTRUCTION] % _MOST_NAMES) * _NAME_BYTES
    device = DeviceUse(*words[_DEVICE:_HANG_TIMEOUT])
    return Seen(
        local_rank=int(path.name.removesuffix(PROGRESS_SUFFIX)),
        rank=words[_RANK],
        pid=words[_PID],
        phase=phase,
        step=words[_STEP],
        position=words[_POSITION],
        instruction=page[at : at + _NAME_BYTES].rstrip(b"\0").decode(errors="replace"),
        nanos=words[_NANOS],
        hang_factor=words[_HANG_FACTOR] / 1000,
        hang_timeout_secs=words[_HANG_TIMEOUT] / 1000,
        step_secs=max((s.whole for s in _records(page[_PAGE_BYTES:])), default=0.0),
        phase_secs=words[_LONGEST_OF[phase]] / _PER_SEC if phase in _LONGEST_OF else 0.0,
        stack_signal=words[_SIGNAL],
        state=process_state(words[_PID]),
        samples_per_step=words[_SAMPLES],
        flops_per_token=words[_FLOPS],
        tokens_per_sample=words[_TOKENS],
        device=device if device.total > 0 else None,
    )


def _timed(_: Path, page: bytes, words: tuple[int, ...]) -> RankSteps | None:
    if words[_PLACE] <= 0:
        return None
    place, mask = words[_PLACE] - 1, (1 << _PLACE_BITS) - 1
    at = (place >> 2 * _PLACE_BITS, place >> _PLACE_BITS & mask, place & mask)
    return RankSteps(words[_RANK], words[_PID], at, tuple(sorted(_records(page[_PAGE_BYTES:]))))


def _records(ring: bytes) -> Iterator[StepTimes]:
    """One that is being written is left out."""
    for words in struct.iter_unpack(f"={_RECORD_WORDS}q", ring):
        if words[0] > 0 and words[0] == words[-1]:
            secs = (round(n / _PER_SEC, 6) if n < _NEVER else 0.0 for n in words[1:9])
            yield StepTimes._make((words[0], *secs, words[9]))


def process_state(pid: int) -> str:
    """A letter as in ``/proc/PID/stat``: R runs, S sleeps, D waits in the kernel, T is stopped, t is traced,
    Z has ended; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


_STACK_SIGNAL = signal.SIGRTMAX - 2
"""One that nobody uses; its handler is C, and writes where Python's would not be run."""
_pages: WeakSet[ProgressPage] = WeakSet()


def open_page(
    job_dir: Path, local_rank: int, rank: int, hang_factor: float, hang_timeout_secs: float
) -> ProgressPage:
    """The page of this process's newest session; see :class:`ProgressPage`."""
    page = ProgressPage(job_dir, local_rank, rank, hang_factor, hang_timeout_secs)
    _pages.add(page)
    if signal.getsignal(_STACK_SIGNAL) is signal.SIG_DFL:
        with suppress(OSError, RuntimeError, ValueError):
            # Kept open for as long as the process lives.
            file = (job_dir / f"{local_rank}{STACKS_SUFFIX}").open("w")
            faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
            page.set_stack_signal(_STACK_SIGNAL)
    return page


def at_instruction(page: ProgressPage, name: str) -> Callable[..., Any]:
    """Goes around an engine's method that is an instruction by itself."""
    number = page.number_of(name)

    def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        page.instruction(number)
        return original(*args, **kwargs)

    return noted


@contextmanager
def pause_watch() -> Iterator[None]:
    """Have this trainer not watched for hangs while the block lasts, and the others wait for it:

        with reft.pause_watch():
            evaluate_for_an_hour()

    Without reft it does nothing.
    """
    with ExitStack() as pauses:
        for page in list(_pages):
            pauses.enter_context(page.during(Phase.PAUSED))
        yield
