"""The progress page of a trainer: shared memory in which the node's daemon and launcher read.

Each trainer has one page, a file in the job's memory directory that the trainer has mapped. The
trainer writes into the page which instruction of its step it executes. These are numbers of eight
bytes, which no reader sees half written; a write takes a few memory accesses and no system call.
The page also has a ring with the times of the last steps, and a report on the trainer's versions.
Readers copy the page without any action of the trainer.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ctypes import Structure, c_char, c_double, c_int64, sizeof
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from reft.node.step_clock import (
    RECORDS,
    StepClock,
    StepPhase,
    StepRecord,
    StepTimes,
    find_phase,
    read_records,
)

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


# Suffixes of a trainer's page, and of the file for its stacks. The stem is the local rank.
PROGRESS_SUFFIX, STACKS_SUFFIX = ".progress", ".stacks"


_MAGIC = 0x72656674_70616734


_NAME_BYTES, _MAX_NAMES = 32, 96


_PER_SEC = 10**9


_REPORT_BYTES = 16 * 1024


class Phase(IntEnum):
    LOADING = 1  # The trainer has an engine and has not begun its first step
    FIRST_STEP = 2
    STEP = 3
    BETWEEN = 4  # The script's code between two steps
    EVALUATION = 5
    SAVING = 6
    PAUSED = 7  # The script has called pause_watch
    ENDED = 8


# Phases whose longest duration is kept on the page. The longest step is computed from the ring of
# step times.
_MEASURED = (Phase.EVALUATION, Phase.SAVING, Phase.BETWEEN)


@dataclass(frozen=True)
class DeviceUse:
    """A trainer's device memory in bytes, as counted by its allocator."""

    total: int  # Size of the device's memory minus what other processes use
    allocated: int  # Bytes in tensors now
    peak_allocated: int  # Most bytes in tensors so far


@dataclass(frozen=True)
class TrainerView:
    """A copy of the values on a trainer's page."""

    local_rank: int
    rank: int
    pid: int
    phase: Phase
    step: int  # Last step that the trainer completed
    position: int  # Number of the current instruction within the step
    instruction: str  # Name of the current instruction; empty if unknown
    nanos: int  # Time of the trainer's last write, by the host's monotonic clock
    hang_factor: float  # `hang_factor` of the reft block; 0: the trainer is not watched
    hang_timeout_secs: float  # `hang_timeout_secs` of the reft block
    # Time of the longest of the last 64 steps; the first step does not count; 0: none yet
    step_secs: float
    phase_secs: float  # Longest time in the current phase so far; 0: none yet
    stack_signal: int  # Signal on which the trainer writes its stacks; 0: none
    state: str  # State of the process, a letter as in /proc/PID/stat; empty if there is no process
    samples_per_step: int = 0  # Samples in a step of the whole job; 0 if unknown
    device: DeviceUse | None = None  # None if the trainer has no device
    flops_per_token: int = 0  # Operations of the whole model; 0 if unknown, negative with experts
    tokens_per_sample: int = 0  # 0 if unknown


_NUMBERS = (
    *("rank", "pid", "step", "position", "nanos", "stack_signal"),
    *("samples_per_step", "flops_per_token", "tokens_per_sample"),
)
"""Fields of :class:`TrainerView` that are copied from the page as they are."""


@dataclass(frozen=True)
class RankSteps:
    """Times of the last steps of one rank."""

    rank: int
    pid: int
    at: tuple[int, int, int]  # Pipeline stage, replica and tensor slice of the rank
    steps: tuple[StepTimes, ...]  # Times of the last steps, in the order of step numbers


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
        ("names", c_char * _NAME_BYTES * _MAX_NAMES),
        ("steps", StepRecord * RECORDS),
        ("report", c_char * _REPORT_BYTES),
        ("report_crc", c_int64),
    ]


class ProgressPage:
    """The writing side of a trainer's page.

    The training thread writes everything except the report, which another thread may write. If the
    file cannot be created, a warning is logged and the trainer is not watched (P6).

    Args:
        job_dir: the job's memory directory on this node.
        local_rank: local rank of the trainer.
        rank: global rank of the trainer.
        hang_factor: a trainer counts as hanging when a step takes this many times as long as its
            longest step; 0: the trainer is not watched.
        hang_timeout_secs: time after which a trainer counts as hanging outside of steps.
    """

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
        self._completed_first = False
        # Duration of the micro-batches so far, if the engine returns after each one; None at the
        # start of a step
        self._step_nanos: int | None = None
        self._clock = StepClock(page.steps)
        # Phase of each instruction, by the number of its name
        self._step_phases = [StepPhase.OTHER] * _MAX_NAMES
        page.pid, page.rank = os.getpid(), rank
        page.hang_factor, page.hang_timeout_secs = hang_factor, hang_timeout_secs
        page.place = (-1, -1, -1)
        page.phase, page.nanos = Phase.LOADING, self._began
        page.magic = _MAGIC

    # -- every instruction -------------------------------------------------------------------------

    def instruction(self, number: int) -> None:
        """Record that an instruction begins; :meth:`number_of` gives the number of its name."""
        page = self._page
        self._position = position = self._position + 1
        page.position = position
        page.instruction = number
        page.nanos = self._clock.enter(self._step_phases[number])

    def number_of(self, name: str) -> int:
        """Return the number of an instruction's name; 0 if the page has no room for more names."""
        if name not in self._names and len(self._names) + 1 < _MAX_NAMES:
            number = len(self._names) + 1
            self._page.names[number].value = name.encode()[: _NAME_BYTES - 1]
            self._names[name] = number
            self._step_phases[number] = find_phase(name)
        return self._names.get(name, 0)

    # -- every step --------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return Phase(self._page.phase)

    def begin_step(self) -> None:
        """Enter the step phase, for a new step or for the next micro-batch of the current one. Does
        nothing if the trainer is already in that phase."""
        if self._page.phase in (Phase.STEP, Phase.FIRST_STEP):
            return
        self._enter(Phase.STEP if self._completed_first else Phase.FIRST_STEP)
        if self._step_nanos is None:
            self._position = 0
            self._clock.begin(self._began)
        else:
            # Do not count the time between two micro-batches as part of the step.
            self._clock.phase_began = self._began
            self._began -= self._step_nanos

    def end_step(self, step: int) -> None:
        """End a step, or one of its micro-batches.

        Args:
            step: last completed step; unchanged after a micro-batch that is not the last one.
        """
        page = self._page
        if page.phase in (Phase.STEP, Phase.FIRST_STEP):
            if step == page.step:
                self._step_nanos = self._clock.enter(StepPhase.OTHER) - self._began
            else:
                if self._completed_first:
                    self._clock.end(step, self._began)
                self._completed_first, self._step_nanos = True, None
        page.step = step
        self._enter(Phase.BETWEEN)

    def set_step(self, step: int) -> None:
        """Set the step of the restored state, after which the job continues."""
        self._page.step, self._step_nanos = step, None

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Show ``phase`` on the page for the duration of the ``with`` block."""
        before, began = self.phase, self._began
        self._enter(phase)
        entered = self._began
        try:
            yield
        finally:
            self._enter(before)
            # Do not count the time of the block as part of the phase around it.
            self._began = began + self._began - entered
            self._clock.phase_began += time.monotonic_ns() - entered

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
        """Set the trainer's pipeline stage, replica and tensor slice."""
        self._page.place = place

    def set_samples(self, per_step: int) -> None:
        """Set the number of samples on which the whole job trains in a step."""
        self._page.samples_per_step = per_step

    def set_flops(self, per_token: int) -> None:
        """Set the operations of the whole model per token."""
        self._page.flops_per_token = per_token

    def set_tokens(self, per_sample: int) -> None:
        """Set the number of tokens per sample."""
        self._page.tokens_per_sample = per_sample

    def set_device(self, use: DeviceUse) -> None:
        self._page.device = astuple(use)

    def write_report(self, fields: Mapping[str, Any]) -> None:
        """Replace the report on the page, a JSON object. Called by one thread.

        Raises:
            ValueError: the report takes 16 KiB or more.
        """
        data = json.dumps(fields, default=str).encode()
        if len(data) >= _REPORT_BYTES:
            raise ValueError(f"a report of {len(data)} bytes; at most {_REPORT_BYTES - 1} fit")
        # Readers take no lock: they detect a half-written report by the checksum, written last.
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
            # Allocate now, so that a full tmpfs gives an error here rather than a SIGBUS later.
            os.posix_fallocate(fd, 0, sizeof(_Page))
            return mmap.mmap(fd, sizeof(_Page))
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s): this trainer trains without hang detection", path, error
        )
        return mmap.mmap(-1, sizeof(_Page))


# -- readers -----------------------------------------------------------------------------------


def read_pages(job_dir: Path) -> list[TrainerView]:
    """Read the pages of this node's trainers in the order of their files; skip invalid files."""
    return _read_each(job_dir, _view)


def read_reports(job_dir: Path) -> dict[int, dict[str, Any]]:
    """Read the reports of this node's trainers, by local rank; skip half-written reports."""
    return dict(_read_each(job_dir, _read_report))


def read_times(job_dir: Path) -> list[RankSteps]:
    """Read the last steps of this node's trainers; skip trainers whose coordinate is not set."""
    return _read_each(job_dir, _read_steps)


def _read_each(job_dir: Path, convert: Callable[[Path, _Page], _T | None]) -> list[_T]:
    results = []
    for path in sorted(job_dir.glob(f"*{PROGRESS_SUFFIX}")):
        with suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                page = _Page.from_buffer_copy(os.pread(fd, sizeof(_Page), 0))
            finally:
                os.close(fd)
            if page.magic == _MAGIC:
                results.append(convert(path, page))
    return [result for result in results if result is not None]


def _view(path: Path, page: _Page) -> TrainerView:
    phase = Phase(page.phase)
    device = DeviceUse(*page.device)
    return TrainerView(
        local_rank=_local_rank(path),
        phase=phase,
        instruction=page.names[page.instruction % _MAX_NAMES].value.decode(errors="replace"),
        hang_factor=page.hang_factor,
        hang_timeout_secs=page.hang_timeout_secs,
        step_secs=max((s.whole for s in read_records(page.steps)), default=0.0),
        phase_secs=page.longest[phase] / _PER_SEC,
        state=process_state(page.pid),
        device=device if device.total > 0 else None,
        **{name: getattr(page, name) for name in _NUMBERS},
    )


def _read_report(path: Path, page: _Page) -> tuple[int, dict[str, Any]] | None:
    data = page.report
    if not data or zlib.crc32(data) != page.report_crc:
        return None
    return _local_rank(path), json.loads(data)


def _read_steps(_: Path, page: _Page) -> RankSteps | None:
    pp, dp, tp = page.place
    if min(pp, dp, tp) < 0:
        return None
    return RankSteps(page.rank, page.pid, (pp, dp, tp), tuple(sorted(read_records(page.steps))))


def _local_rank(path: Path) -> int:
    return int(path.name.removesuffix(PROGRESS_SUFFIX))


def process_state(pid: int) -> str:
    """Return a process's state as in ``/proc/PID/stat``; empty if there is no such process.

    R: running, S: sleeping, D: waiting in the kernel, T: stopped, t: traced, Z: zombie.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


# -- the pages of this process -----------------------------------------------------------------

# A signal that is otherwise unused. Its handler is C code of faulthandler, which also works while
# the interpreter is stuck in a C call.
_STACK_SIGNAL = signal.SIGRTMAX - 2
_pages: WeakSet[ProgressPage] = WeakSet()


def open_page(
    job_dir: Path, local_rank: int, rank: int, hang_factor: float, hang_timeout_secs: float
) -> ProgressPage:
    """Make this process's progress page, and let a signal write the process's stacks to a file."""
    page = ProgressPage(job_dir, local_rank, rank, hang_factor, hang_timeout_secs)
    _pages.add(page)
    if signal.getsignal(_STACK_SIGNAL) is signal.SIG_DFL:
        with suppress(OSError, RuntimeError, ValueError):
            # faulthandler keeps the file open while the process lives.
            file = (job_dir / f"{local_rank}{STACKS_SUFFIX}").open("w")
            faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
            page.set_stack_signal(_STACK_SIGNAL)
    return page


def newest_step() -> int:
    """Return the last step that this process completed; 0 if there is none."""
    return max((int(page._page.step) for page in _pages), default=0)


def at_instruction(page: ProgressPage, name: str) -> Callable[..., Any]:
    """Make a wrapper for an engine's method that records each call as one instruction."""
    number = page.number_of(name)

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        page.instruction(number)
        return original(*args, **kwargs)

    return wrapper


@contextmanager
def pause_watch() -> Iterator[None]:
    """Exclude this trainer from hang detection in a ``with`` block; its peers wait for it:

        with reft.pause_watch():
            evaluate_for_an_hour()

    If reft does not protect this process, the call has no effect.
    """
    with ExitStack() as pauses:
        for page in list(_pages):
            pauses.enter_context(page.during(Phase.PAUSED))
        yield
