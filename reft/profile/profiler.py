"""Profiles a running job: collects the traces of some warm steps, then gathers and writes the
result.

Nothing is sent, waited for or written within a measured step. All ranks end at the same step, one
after the last that is measured: a device may report the copies of a step a step later.

Only some pipelines are sent in full: of the others rank 0 needs to know when they met in
reductions.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import torch
from pydantic import TypeAdapter

from reft.config import ProfileConfig
from reft.control.control import ControlGroup
from reft.device import Vendor, find_local_vendor
from reft.env import ENV_PROFILE
from reft.grid import Coordinate, Degrees
from reft.naming import kernel_id
from reft.pacing.schedule import StepTrace
from reft.profile.analysis import ClockOffset, RankTraces, analyse, only_group_calls
from reft.profile.result import PROFILE_FILE, ProfileError, ProfileResult
from reft.snapshot.gate import ChunkRecord

logger = logging.getLogger(__name__)

_DRAW_SECS = 120.0
_MOST_CHARACTERS = 400
_TAKEN = ".taken-"
_PROBE_BYTES = 32 * 2**20
_ROUNDS = 20
_ANCHORS = 5

Mark = Any  # what `DeviceClock.mark` returned: opaque until it is resolved

Span = tuple[float, float]  # begin and end by ``time.perf_counter``
Marks = Sequence[tuple[Mark, Mark]]
"""Begin and end of each instruction of a step by the device's clock; empty: traces hold host
times."""


class Profiler:
    """A trace sink that makes a profile of the steps after a warm-up, once. Made collectively.
    ``clock``: where the times of instructions come from when they are given as marks."""

    def __init__(
        self,
        config: ProfileConfig,
        clock: DeviceClock | None,
        *,
        job_id: str,
        at: Coordinate,
        degrees: Degrees,
        control: ControlGroup,
        snapshot_bytes: Callable[[], int],
    ) -> None:
        self._config, self.clock = config, clock
        self._job_id, self._at, self._degrees, self._control = job_id, at, degrees, control
        self._snapshot_bytes = snapshot_bytes
        self._offsets = measure_offsets(control, clock_id())
        self._first_step: int | None = None
        self._steps: list[tuple[StepTrace, Marks]] = []
        self.measuring = True  # whether traces are still wanted

    def add(self, trace: StepTrace, marks: Marks = ()) -> None:
        """Take the trace of the step that has just ended; the last one ends the profile, which is
        collective, and the job that was started for it only."""
        if not self.measuring:
            return
        if self._first_step is None:
            self._first_step = trace.step
        number = trace.step - self._first_step
        if number >= self._config.warmup_steps:
            self._steps.append((trace, marks))
        elif number == self._config.warmup_steps - 1 and self.clock is not None:
            self.clock.begin()
        if number >= self._config.warmup_steps + self._config.steps:
            self.measuring = False
            try:
                self._finish()
            except Exception:
                # P6: a profile that fails is no reason to stop training.
                logger.exception("the profile failed; training goes on")
            self._steps.clear()
            if self._config.then == "exit":
                logger.info("the profile is done; the job was started for it and ends here")
                raise SystemExit(0)

    def _finish(self) -> None:
        mine = self._mine()
        after = measure_offsets(self._control, clock_id())
        gathered = self._control.gather_bytes(encode(mine))
        try:
            if self._control.rank == 0:
                ranks = [
                    replace(rank, offset=before.until(now))
                    for rank, before, now in zip(
                        map(decode, gathered), self._offsets, after, strict=True
                    )
                ]
                degrees = self._degrees
                result = analyse(
                    ranks,
                    self._job_id,
                    (degrees.pp, degrees.dp, degrees.tp),
                    clock="host" if self.clock is None else "device",
                    bandwidth_bytes_per_sec=probe_bandwidth(),
                )
                write(result, self._config.dir)
        finally:
            # Nobody goes on to its end, which may take rank 0 along, before the files are there.
            self._control.any_of(False)
        note_taken(self._config.dir, self._control.rank)

    def _mine(self) -> RankTraces:
        at, clock = self._at, self.clock
        complete = at.dp * self._degrees.tp + at.tp < self._config.pipelines
        traces = assign_chunks(
            [t if clock is None else with_times(t, clock, m) for t, m in self._steps]
        )
        return RankTraces(
            *(self._control.rank, at.pp, at.dp, at.tp),
            offset=ClockOffset(),
            snapshot_bytes=self._snapshot_bytes(),
            complete=complete,
            traces=traces if complete else tuple(map(only_group_calls, traces)),
        )


def with_times(trace: StepTrace, clock: DeviceClock, marks: Marks) -> StepTrace:
    """The trace with the times of its instructions by another clock, of which there are as many
    marks."""
    if not marks:
        return trace
    flat = clock.resolve([mark for pair in marks for mark in pair])
    times = zip(flat[::2], flat[1::2], strict=True)
    instructions = tuple(
        replace(i, begin_secs=begin, end_secs=end)
        for i, (begin, end) in zip(trace.instructions, times, strict=True)
    )
    begin = min(trace.begin_secs, instructions[0].begin_secs)
    end = max(trace.end_secs, instructions[-1].end_secs)
    return replace(trace, begin_secs=begin, end_secs=end, instructions=instructions)


def probe_bandwidth() -> float | None:
    """Bytes per second of one copy into host memory; for jobs whose snapshots left no chunks."""
    took = []
    with suppress(RuntimeError, MemoryError):
        vendor = find_local_vendor()
        source = torch.ones(
            _PROBE_BYTES, dtype=torch.uint8, device=vendor.type if vendor else "cpu"
        )
        target = torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=vendor is not None)
        for _ in range(3):
            began = time.perf_counter()
            target.copy_(source)
            took.append(time.perf_counter() - began)
    return _PROBE_BYTES / min(took) if took else None


def note_taken(folder: Path, rank: int) -> None:
    """Tell this node's ``reft profile`` that a rank of it has been measured; only rank 0 writes
    more."""
    if ENV_PROFILE in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_TAKEN}{rank}").touch()


def forget_taken(folder: Path) -> set[int]:
    """Ranks of this node that have been measured; their notes are removed."""
    paths = list(folder.glob(f"{_TAKEN}*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return {int(path.name.removeprefix(_TAKEN)) for path in paths}


def write(result: ProfileResult, folder: Path) -> None:
    """Write the profile, its trace and, where matplotlib is installed, its figure into
    ``folder``."""
    path = (folder / PROFILE_FILE).absolute()
    result.save(path)
    # Another process draws: no training process imports what draws.
    command = [sys.executable, "-P", "-m", "reft.cli", "profile", "--from", str(path)]
    command += ["--trace", str(folder / "trace.json")]
    if find_spec("matplotlib") is not None:
        command += ["--figure", str(folder / "profile.png")]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRAW_SECS, check=False
        )
        failed = done.stderr.strip()[-_MOST_CHARACTERS:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:
        logger.warning("the profile is written, but could not be drawn: %s", failed)
    # A warning, so that it is seen: somebody asked for it.
    logger.warning(
        "profile of %d steps written to %s (reft profile --from %s)", len(result.steps), path, path
    )


# -- traces ----------------------------------------------------------------------------------------


def encode(rank: RankTraces) -> bytes:
    """Traces of a rank as msgpack; times stay exact."""
    packed: bytes = msgpack.packb(asdict(rank))
    return packed


def decode(data: bytes) -> RankTraces:
    """The inverse of :func:`encode`; a ProfileError where the bytes are something else."""
    try:
        return TypeAdapter(RankTraces).validate_python(msgpack.unpackb(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProfileError(f"a rank sent traces that cannot be read: {error}") from error


def assign_chunks(traces: Sequence[StepTrace]) -> tuple[StepTrace, ...]:
    """All but the last trace, with every chunk in the step during which it was copied.

    A device reports its copies late: they may come with the trace of the step after.
    """
    begins = [trace.begin_secs for trace in traces]
    chunks: list[list[ChunkRecord]] = [[] for _ in traces]
    for chunk in (chunk for trace in traces for chunk in trace.chunks):
        number = bisect_right(begins, chunk.begin_secs) - 1
        if number >= 0:
            chunks[number].append(chunk)
    return tuple(
        replace(trace, chunks=tuple(sorted(mine, key=lambda c: c.begin_secs)))
        for trace, mine in zip(traces[:-1], chunks[:-1], strict=True)
    )


# -- clocks ----------------------------------------------------------------------------------------
#
# ``perf_counter`` has another zero on every host. Rank 0 swaps bytes with one process of each host.
# What either has received when its call ends was sent after the other's call began: with calls from
# t0 to t1 by rank 0's clock and from s0 to s1 by the peer's,
#
#     t0 - s1 <= offset <= t1 - s0.
#
# Of many calls the narrowest bounds count. Clocks drift (parts per million), so this is done before
# and after the profiled steps.


def clock_id() -> str:
    """Equal on processes that read the same clock: one boot of a host, one time namespace."""
    try:
        return f"{kernel_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


def measure_offsets(control: ControlGroup, my_clock: str) -> list[ClockOffset]:
    """What turns the clock of each rank into that of rank 0, in rank order. Collective;
    ``my_clock`` is :func:`clock_id` of this rank."""
    clocks = [text.decode() for text in control.gather_bytes(my_clock.encode())]
    known = [*dict.fromkeys(clocks)]
    peers = [clocks.index(clock) for clock in known[1:]]
    calls: dict[int, list[Span]] = {peer: [] for peer in peers if control.rank in (0, peer)}
    sent, received = torch.zeros(1), torch.zeros(1)
    for peer, mine in calls.items():
        other = peer if control.rank == 0 else 0
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            control.exchange({other: [sent]}, {other: [received]})
            mine.append((began, time.perf_counter()))
    told = [
        msgpack.unpackb(data, strict_map_key=False)
        for data in control.gather_bytes(msgpack.packb(calls))
    ]
    found = [ClockOffset()]
    found += [estimate(told[0][peer], told[peer][peer], n) for n, peer in enumerate(peers, 1)]
    return [found[known.index(clock)] for clock in clocks]


def estimate(ours: Sequence[Span], theirs: Sequence[Span], clock: int = 0) -> ClockOffset:
    """The offset of a peer's clock from the begins and ends of calls in which both have swapped
    bytes."""
    low = max(t0 - s1 for (t0, _), (_, s1) in zip(ours, theirs, strict=True))
    high = min(t1 - s0 for (_, t1), (s0, _) in zip(ours, theirs, strict=True))
    return ClockOffset((low + high) / 2, max(0.0, high - low) / 2, clock)


_Anchor = tuple[float, float, Any]  # error of its time, its time in seconds, and the event


class DeviceClock:
    """The device's clock for the instructions of a step, without synchronisation.

    On a CPU an instruction is over when its call returns. On CUDA and ROCm the call only queues
    work; what counts is when the device gets there. An event is recorded on the current stream at
    each mark, and turned into host seconds after the profiled steps, when they have all completed:

        t = anchor_secs - elapsed(event, anchor event)

    The anchor is an event whose host time is known, because the host waited for it; that wait
    happens outside of the steps that are measured. Two anchors, before and after, bound the drift
    between the two clocks. Adding events costs about a microsecond of host time each and nothing on
    the device; the host never waits.
    """

    def __init__(self, vendor: Vendor) -> None:
        self._module = vendor.module
        self._free: list[Any] = []
        self._anchor: _Anchor | None = None
        self.error_secs = 0.0
        """Of the last resolution: half the wait for its anchor, and the drift since the first
        one."""

    def begin(self) -> None:
        """Before the first mark of a profile; waits for the device."""
        self._anchor = self._take_anchor()

    def mark(self) -> Mark:
        """Now, as the compute stream sees it. Never waits."""
        event = self._free.pop() if self._free else self._module.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: Sequence[Mark]) -> list[float]:
        """``time.perf_counter()`` seconds of marks of completed steps; waits for the device."""
        if not marks:
            return []
        first, (self.error_secs, last_secs, last) = self._anchor, self._take_anchor()
        if first is not None:
            passed = float(first[2].elapsed_time(last)) / 1e3
            self.error_secs += abs(last_secs - first[1] - passed)
        # Elapsed times are 32-bit milliseconds: exact to a microsecond over some ten seconds only,
        # so that one long stretch to the anchor is followed by short ones within the step.
        origin = last_secs - float(marks[0].elapsed_time(last)) / 1e3
        times = [origin + float(marks[0].elapsed_time(mark)) / 1e3 for mark in marks]
        self._free.extend(marks)
        return times

    def _take_anchor(self) -> _Anchor:
        """Of a few, the one with the shortest wait is the most exact."""
        self._module.synchronize()
        anchors = []
        for _ in range(_ANCHORS):
            event = self._module.Event(enable_timing=True)
            asked = time.perf_counter()
            event.record()
            event.synchronize()
            reached = time.perf_counter()
            anchors.append(((reached - asked) / 2, (asked + reached) / 2, event))
        return min(anchors, key=lambda anchor: anchor[0])
