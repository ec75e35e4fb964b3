"""Profiles a running job: collects the traces of some warm steps, then gathers and writes the result.

Nothing is sent, waited for or written within a measured step. All ranks end at the same step, one after
the last that is measured: a device may report the copies of a step a step later.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from reft.config import ProfileConfig
from reft.env import ENV_PROFILE
from reft.grid import Coordinate, Degrees
from reft.profile.analysis import JobFacts, analyse
from reft.profile.clock import DeviceClock, Mark
from reft.profile.result import PROFILE_FILE, ProfileResult
from reft.profile.traces import (
    ClockOffset,
    RankTraces,
    clock_id,
    gather,
    measure_offsets,
    only_group_calls,
    settled,
)
from reft.snapshot.scheduling.trace import StepTrace

logger = logging.getLogger(__name__)

_DRAW_SECS = 120.0
_MOST_CHARACTERS = 400
_TAKEN = ".taken-"
_PROBE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class RankFacts:
    """Who is profiled.

    Attributes:
        job_id: name of the job.
        coordinate: of this rank.
        degrees: of the job.
        secret: of the job, for what crosses processes.
        snapshot_bytes: tells the bytes that this rank copies per snapshot; 0 before the first.
    """

    job_id: str
    coordinate: Coordinate
    degrees: Degrees
    secret: bytes
    snapshot_bytes: Callable[[], int]


class Profiler:
    """A trace sink that makes a profile of the steps after a warm-up, once. Made collectively.

    Args:
        config: the ``profile`` part of the ``reft`` block.
        facts: about this rank.
        clock: where the times of instructions come from when they are given as marks; None: traces hold
            host times.
    """

    def __init__(self, config: ProfileConfig, facts: RankFacts, clock: DeviceClock | None = None) -> None:
        self._config = config
        self._facts = facts
        self.clock = clock
        self._group = dist.new_group(backend="gloo")
        self._clock_id = clock_id()
        self._offsets = measure_offsets(self._group, self._clock_id)
        self._first_step: int | None = None
        self._traces: list[StepTrace] = []
        self._marks: list[Sequence[tuple[Mark, Mark]]] = []
        self.done = False
        """Whether the profile was taken, or given up."""

    @property
    def measuring(self) -> bool:
        """Whether traces are still wanted."""
        return not self.done

    def add(self, trace: StepTrace, marks: Sequence[tuple[Mark, Mark]] = ()) -> None:
        """Take the trace of a step; the last one ends the profile, which is collective.

        Args:
            trace: of the step that has just ended.
            marks: begin and end of each instruction by ``clock``, if there is one.

        Raises:
            SystemExit: the profile is done and the job was started for it only.
        """
        if self.done:
            return
        if self._first_step is None:
            self._first_step = trace.step
        number = trace.step - self._first_step
        if number >= self._config.warmup_steps:
            self._traces.append(trace)
            self._marks.append(marks)
        elif number == self._config.warmup_steps - 1 and self.clock is not None:
            self.clock.begin()
        if number >= self._config.warmup_steps + self._config.steps:
            self._end()

    def _end(self) -> None:
        self.done = True
        try:
            self._finish()
        except Exception:
            # P6: a profile that fails is no reason to stop training.
            logger.exception("the profile failed; training goes on")
        self._traces, self._marks = [], []
        if self._config.then == "exit":
            logger.info("the profile is done; the job was started for it and ends here")
            raise SystemExit(0)

    def _finish(self) -> None:
        mine = self._mine()
        after = measure_offsets(self._group, self._clock_id)
        gathered = gather(mine, self._facts.secret, self._group)
        try:
            if gathered is not None:
                offsets = [before.until(now) for before, now in zip(self._offsets, after, strict=True)]
                ranks = [replace(rank, offset=offset) for rank, offset in zip(gathered, offsets, strict=True)]
                write(analyse(ranks, self._job_facts()), self._config.dir)
        finally:
            # Nobody goes on to its end, which may take rank 0 along, before the files are there.
            dist.barrier(self._group)
        note_taken(self._config.dir, dist.get_rank())

    def _mine(self) -> RankTraces:
        at, degrees = self._facts.coordinate, self._facts.degrees
        complete = at.dp * degrees.tp + at.tp < self._config.pipelines
        traces = settled(
            [
                trace if self.clock is None else with_times(trace, self.clock, marks)
                for trace, marks in zip(self._traces, self._marks, strict=True)
            ]
        )
        return RankTraces(
            rank=dist.get_rank(),
            pp=at.pp,
            dp=at.dp,
            tp=at.tp,
            offset=ClockOffset(),
            snapshot_bytes=self._facts.snapshot_bytes(),
            complete=complete,
            traces=tuple(trace if complete else only_group_calls(trace) for trace in traces),
        )

    def _job_facts(self) -> JobFacts:
        degrees = self._facts.degrees
        return JobFacts(
            job_id=self._facts.job_id,
            world_size=dist.get_world_size(),
            degrees=(degrees.pp, degrees.dp, degrees.tp),
            created_unix_secs=time.time(),
            clock="host" if self.clock is None else "device",
            bandwidth_bytes_per_sec=probe_bandwidth(),
        )


def with_times(trace: StepTrace, clock: DeviceClock, marks: Sequence[tuple[Mark, Mark]]) -> StepTrace:
    """The trace with the times of its instructions by another clock.

    Raises:
        ValueError: there are not as many marks as instructions.
    """
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
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        source = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=device)
        target = torch.ones(_PROBE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - began)
    except (RuntimeError, MemoryError):
        return None
    return _PROBE_BYTES / best


def note_taken(folder: Path, rank: int) -> None:
    """Tell this node's ``reft profile`` that a rank of it has been measured; only rank 0 writes more."""
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
    """Write the profile, its trace and, where matplotlib is installed, its figure into ``folder``."""
    path = (folder / PROFILE_FILE).absolute()
    result.save(path)
    # Another process draws: no training process imports what draws.
    command = [sys.executable, "-m", "reft.cli", "profile", "--from", str(path)]
    command += ["--trace", str(folder / "trace.json")]
    if find_spec("matplotlib") is not None:
        command += ["--figure", str(folder / "profile.png")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRAW_SECS, check=False)
        failed = done.stderr.strip()[-_MOST_CHARACTERS:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:
        logger.warning("the profile is written, but could not be drawn: %s", failed)
    # A warning, so that it is seen: somebody asked for it.
    logger.warning(
        "profile of %d steps written to %s (reft profile --from %s)", len(result.steps), path, path
    )
