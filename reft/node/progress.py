"""What a trainer does, on a page of shared memory: its node's daemon and launcher read it without
its help.

The page lies in the job's memory, one per trainer. A trainer writes numbers of eight bytes each,
which are never seen half written: a few memory accesses per instruction, no system call. At its end
is a ring of what the last steps consisted of: computing, waiting, the quickest transfer. Readers
copy the page.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ctypes import Array, Structure, c_char, c_double, c_int64, sizeof
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
_NEVER = 2**62
_MAGIC = 0x72656674_70616734
_NAME_BYTES, _MOST_NAMES = 32, 96
_PER_SEC = 10**9
_REPORT_BYTES = 16 * 1024


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


_MEASURED = (Phase.EVALUATION, Phase.SAVING, Phase.BETWEEN)
"""Whose longest time is on the page; the records of steps hold the steps'."""


@dataclass(frozen=True)
class DeviceUse:
    """A trainer's device memory, as its allocator counts it; bytes."""

    total: int  # that the trainer may have: the device's, without what others take
    allocated: int  # allocated, peak_allocated: in tensors, now and at most
    peak_allocated: int


@dataclass(frozen=True)
class TrainerView:
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


_NUMBERS = (
    *("rank", "pid", "step", "position", "nanos", "stack_signal"),
    *("samples_per_step", "flops_per_token", "tokens_per_sample"),
)
"""Of :class:`TrainerView`, that are on a page as they are."""


class StepPhase(IntEnum):
    """What a rank is at between two instructions."""

    COMPUTE = 0
    """By itself; with tensor parallelism, together with its tensor-parallel peers."""
    PREVIOUS = 1
    """Sends to, or receives from, the stage before it."""
    NEXT = 2
    COLLECTIVE = 3
    """Reduces, or may."""
    OPTIMIZER = 4
    """The optimizer's step, in which it may ask for the norm of all gradients, and gather
    weights."""
    OTHER = 5
    """The data's loader, the script's own, reft's."""


_PARTS = {
    "RecvActivation": StepPhase.PREVIOUS,
    "SendGrad": StepPhase.PREVIOUS,
    "SendActivation": StepPhase.NEXT,
    "RecvGrad": StepPhase.NEXT,
    "LoadMicroBatch": StepPhase.OTHER,
    # A plain engine's: it reduces within.
    "Backward": StepPhase.COLLECTIVE,
    "Step": StepPhase.OPTIMIZER,
    "OptimizerStep": StepPhase.OPTIMIZER,
}
_COMPUTING = ("Forward", "Backward", "Weight")
_COLLECTIVES = ("Reduce", "AggregateTotalLoss", "Recv", "Send", "CommitP2P")


def find_phase(name: str) -> StepPhase:
    """What an instruction of that name is; "" stands for what lies before the first one."""
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith(_COMPUTING):
        return StepPhase.COMPUTE
    return StepPhase.COLLECTIVE if name.startswith(_COLLECTIVES) else StepPhase.OTHER


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
    """The last steps of one rank, by number; ``at``: its pipeline stage, replica and tensor
    slice."""

    rank: int
    pid: int
    at: tuple[int, int, int]
    steps: tuple[StepTimes, ...]


class _Record(Structure):
    """As :class:`StepTimes`, in nanoseconds; a reader takes one whose ends are equal."""

    _fields_ = [(name, c_int64) for name in (*StepTimes._fields, "end")]


class _Page(Structure):
    _fields_ = [
        ("magic", c_int64),
        ("phase", c_int64),
        ("instruction", c_int64),
        *((name, c_int64) for name in _NUMBERS),
        ("hang_factor", c_double),
        ("hang_timeout_secs", c_double),
        ("place", c_int64 * 3),
        ("device", c_int64 * 3),
        ("longest", c_int64 * (1 + max(Phase))),
        ("names", c_char * _NAME_BYTES * _MOST_NAMES),
        ("steps", _Record * STEPS),
        ("report", c_char * _REPORT_BYTES),
        ("report_crc", c_int64),
    ]


class StepClock:
    """Adds up the parts of the step that runs. Used by the training thread.

    A call that sends or receives returns when both sides were there and the bytes have passed.
    Which part of it was waiting one rank cannot tell; its neighbour can: for each message one of
    the two came last and waited for nothing, so that the smaller of both times is the transfer.
    Hence the quickest of a step is noted, by link.
    """

    def __init__(self, ring: Array[_Record]) -> None:
        self._ring = ring
        # since when the present part lasts, in nanoseconds; what is none of the step is added
        self.at = 0
        self._part = StepPhase.OTHER
        self._spent = [0] * len(StepPhase)
        self._least = [_NEVER, _NEVER]
        self._transfers = 0
        self._delayed = self._delay_at = 0
        self._delays: int | None = None
        self._count = 0

    def begin(self, now: int) -> None:
        """A step begins. ``now``: nanoseconds of the monotonic clock."""
        if self._delays is None:
            self._delays, flags = 0, os.O_RDONLY | os.O_CLOEXEC
            with suppress(OSError):
                self._delays = os.open(
                    f"/proc/self/task/{threading.get_native_id()}/schedstat", flags
                )
        self.at, self._part = now, StepPhase.OTHER
        self._spent = [0] * len(StepPhase)
        self._least = [_NEVER, _NEVER]
        self._transfers = self._delayed = 0

    def enter(self, part: StepPhase) -> int:
        """Another part begins, or another instruction of the same. Returns the time, in
        nanoseconds."""
        before = self._part
        if before == StepPhase.COMPUTE and part != before:
            # Before the time is taken: no delay is counted that lies outside of what was timed.
            self._delayed += self._delay() - self._delay_at
        now = time.monotonic_ns()
        secs = now - self.at
        self.at = now
        self._spent[before] += secs
        if before in (StepPhase.PREVIOUS, StepPhase.NEXT):
            self._transfers += 1
            self._least[before - 1] = min(self._least[before - 1], secs)
        if part != before:
            self._part = part
            if part == StepPhase.COMPUTE:
                self._delay_at = self._delay()
        return now

    def end(self, step: int, began: int) -> None:
        """The step has ended, which began at ``began``: write its record."""
        whole, spent = self.enter(StepPhase.OTHER) - began, self._spent
        record = self._ring[self._count % STEPS]
        self._count += 1
        record.step = step
        record.whole = whole
        record.compute, record.busy = (
            max(0, spent[StepPhase.COMPUTE] - self._delayed),
            self._delayed,
        )
        record.linked = spent[StepPhase.PREVIOUS] + spent[StepPhase.NEXT]
        record.collective, record.optimizer = (
            spent[StepPhase.COLLECTIVE],
            spent[StepPhase.OPTIMIZER],
        )
        record.previous, record.next = self._least
        record.transfers = self._transfers
        record.end = step

    def _delay(self) -> int:
        """Nanoseconds that this thread has waited for a core in its life; 0 where the kernel does
        not say."""
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


class ProgressPage:
    """A trainer's page, for writing. Where it cannot be made, which is said, it is not watched
    (P6)."""

    def __init__(
        self,
        job_dir: Path,
        local_rank: int,
        rank: int,
        hang_factor: float,
        hang_timeout_secs: float,
    ) -> None:
        self._path = job_dir / f"{local_rank}{PROGRESS_SUFFIX}"
        self._page = page = _Page.from_buffer(_make(self._path))
        self._names: dict[str, int] = {}
        self._position = 0
        self._began = time.monotonic_ns()
        self._made_first = False
        self._parts_nanos: int | None = None
        self._clock = StepClock(page.steps)
        self._parts = [StepPhase.OTHER] * _MOST_NAMES
        page.pid, page.rank = os.getpid(), rank
        page.hang_factor, page.hang_timeout_secs = hang_factor, hang_timeout_secs
        page.place = (-1, -1, -1)
        page.phase, page.nanos = Phase.LOADING, self._began
        page.magic = _MAGIC

    # -- every instruction -------------------------------------------------------------------------

    def instruction(self, number: int) -> None:
        """An instruction begins; ``number`` is what :meth:`number_of` gave for its name."""
        page = self._page
        self._position = position = self._position + 1
        page.position = position
        page.instruction = number
        page.nanos = self._clock.enter(self._parts[number])

    def number_of(self, name: str) -> int:
        """The number for a name; 0 where the page has no room for another."""
        if name not in self._names and len(self._names) + 1 < _MOST_NAMES:
            number = len(self._names) + 1
            self._page.names[number].value = name.encode()[: _NAME_BYTES - 1]
            self._names[name] = number
            self._parts[number] = find_phase(name)
        return self._names.get(name, 0)

    # -- every step --------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return Phase(self._page.phase)

    def begin_step(self) -> None:
        """A step begins, or its next micro-batch, if it has not begun."""
        if self._page.phase in (Phase.STEP, Phase.FIRST_STEP):
            return
        self._enter(Phase.STEP if self._made_first else Phase.FIRST_STEP)
        if self._parts_nanos is None:
            self._position = 0
            self._clock.begin(self._began)
        else:
            self._clock.at = self._began  # what lies between is none of the step
            self._began -= self._parts_nanos

    def end_step(self, step: int) -> None:
        """The step, or one of its micro-batches, has returned. ``step``: the last one that was
        made."""
        page = self._page
        if page.phase in (Phase.STEP, Phase.FIRST_STEP):
            if step == page.step:
                self._parts_nanos = self._clock.enter(StepPhase.OTHER) - self._began
            else:
                if self._made_first:
                    self._clock.end(step, self._began)
                self._made_first, self._parts_nanos = True, None
        page.step = step
        self._enter(Phase.BETWEEN)

    def set_step(self, step: int) -> None:
        """The last step that was made, where none was made here: it was restored."""
        self._page.step, self._parts_nanos = step, None

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
            self._clock.at += time.monotonic_ns() - entered

    def _enter(self, phase: Phase) -> None:
        page, now = self._page, time.monotonic_ns()
        if page.phase in _MEASURED:
            page.longest[page.phase] = max(page.longest[page.phase], now - self._began)
        self._began = now
        page.phase = phase
        page.instruction = 0
        page.nanos = now

    def set_stack_signal(self, number: int) -> None:
        self._page.stack_signal = number

    def set_place(self, place: tuple[int, int, int]) -> None:
        """Its pipeline stage, replica and tensor slice."""
        self._page.place = place

    def set_samples(self, per_step: int) -> None:
        """Samples that the whole job trains on in a step."""
        self._page.samples_per_step = per_step

    def set_flops(self, per_token: int) -> None:
        """Operations that the whole model takes for a token."""
        self._page.flops_per_token = per_token

    def set_tokens(self, per_sample: int) -> None:
        """Tokens of a sample."""
        self._page.tokens_per_sample = per_sample

    def set_device(self, use: DeviceUse) -> None:
        self._page.device = astuple(use)

    def write_report(self, fields: Mapping[str, Any]) -> None:
        """Replace the page's report, a JSON object of at most 16 KiB. Called by one thread.

        Raises:
            ValueError: the report is larger.
        """
        data = json.dumps(fields, default=str).encode()
        if len(data) >= _REPORT_BYTES:
            raise ValueError(f"a report of {len(data)} bytes; at most {_REPORT_BYTES - 1} fit")
        # Readers take no lock: the checksum, which is written last, tells them of a torn report.
        self._page.report = data
        self._page.report_crc = zlib.crc32(data)

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
            os.posix_fallocate(fd, 0, sizeof(_Page))
            return mmap.mmap(fd, sizeof(_Page))
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s): this trainer trains without hang detection", path, error
        )
        return mmap.mmap(-1, sizeof(_Page))


# -- who reads -------------------------------------------------------------------------------------


def read_pages(job_dir: Path) -> list[TrainerView]:
    """The trainers of this node, by local rank; files that are no such pages are left out."""
    return _each(job_dir, _seen)


def read_reports(job_dir: Path) -> dict[int, dict[str, Any]]:
    """The reports of this node's trainers, by local rank. A report that is being written is left
    out."""
    return dict(_each(job_dir, _read_report))


def read_times(job_dir: Path) -> list[RankSteps]:
    """The last steps of the trainers of this node whose place is known."""
    return _each(job_dir, _timed)


def _each(job_dir: Path, told: Callable[[Path, _Page], _T | None]) -> list[_T]:
    found = []
    for path in sorted(job_dir.glob(f"*{PROGRESS_SUFFIX}")):
        with suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                page = _Page.from_buffer_copy(os.pread(fd, sizeof(_Page), 0))
            finally:
                os.close(fd)
            if page.magic == _MAGIC:
                found.append(told(path, page))
    return [one for one in found if one is not None]


def _seen(path: Path, page: _Page) -> TrainerView:
    phase = Phase(page.phase)
    device = DeviceUse(*page.device)
    return TrainerView(
        local_rank=int(path.name.removesuffix(PROGRESS_SUFFIX)),
        phase=phase,
        instruction=page.names[page.instruction % _MOST_NAMES].value.decode(errors="replace"),
        hang_factor=page.hang_factor,
        hang_timeout_secs=page.hang_timeout_secs,
        step_secs=max((s.whole for s in _records(page)), default=0.0),
        phase_secs=page.longest[phase] / _PER_SEC,
        state=process_state(page.pid),
        device=device if device.total > 0 else None,
        **{name: getattr(page, name) for name in _NUMBERS},
    )


def _read_report(path: Path, page: _Page) -> tuple[int, dict[str, Any]] | None:
    data = page.report
    if not data or zlib.crc32(data) != page.report_crc:
        return None
    return int(path.name.removesuffix(PROGRESS_SUFFIX)), json.loads(data)


def _timed(_: Path, page: _Page) -> RankSteps | None:
    pp, dp, tp = page.place
    if min(pp, dp, tp) < 0:
        return None
    return RankSteps(page.rank, page.pid, (pp, dp, tp), tuple(sorted(_records(page))))


def _records(page: _Page) -> Iterator[StepTimes]:
    """One that is being written is left out."""
    for record in page.steps:
        if record.step > 0 and record.step == record.end:
            secs = (getattr(record, name) / _PER_SEC for name in StepTimes._fields[1:-1])
            least = (round(s, 6) if s < _NEVER / _PER_SEC else 0.0 for s in secs)
            yield StepTimes._make((record.step, *least, record.transfers))


def process_state(pid: int) -> str:
    """A letter as in ``/proc/PID/stat``: R runs, S sleeps, D waits in the kernel, T is stopped, t
    is traced, Z has ended; "" if there is no such process."""
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


def newest_step() -> int:
    """Last step that the sessions of this process have made; 0 if there was none."""
    return max((int(page._page.step) for page in _pages), default=0)


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
