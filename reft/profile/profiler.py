"""Profiles a running job: collects the traces of some steps, gathers them and writes the result.

Within a measured step the profiler sends no messages, waits for nothing and writes no files. All
ranks stop measuring one step after the last step of the profile, because a device may report the
copies of a step one step later. The ranks of some pipelines send their complete traces to rank
0; all others send only the calls in which pipelines communicate with each other.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from reft.config import ProfileConfig
from reft.control.control import ControlGroup
from reft.device import find_local_vendor, find_vendor
from reft.env import ENV_PROFILE
from reft.grid import Coordinate, Degrees
from reft.pacing.schedule import StepTrace
from reft.pacing.tracer import Tracer
from reft.profile.analysis import analyse
from reft.profile.clocks import ClockOffset, DeviceClock, Marks, clock_id, measure_offsets
from reft.profile.result import PROFILE_FILE, ProfileResult
from reft.profile.traces import (
    RankTraces,
    assign_chunks,
    decode,
    encode,
    only_group_calls,
    with_times,
)

logger = logging.getLogger(__name__)


_DRAW_SECS = 120.0
_MAX_ERROR_CHARS = 400
_TAKEN_PREFIX = ".taken-"  # Prefix of the marker files of ranks that have taken a profile
_PROBE_BYTES = 32 * 2**20


class Profiler:
    """Receives the traces of a rank's steps and makes one profile. Constructed collectively.

    Args:
        config: steps to measure, and where to write the profile.
        clock: the device's clock, which converts marks into times; None if traces hold the
            host's times.
        job_id: name of the job.
        at: coordinate of this rank.
        degrees: degrees of the job.
        control: control group of the ranks.
        snapshot_bytes: returns the number of bytes that this rank copies for a version.

    Attributes:
        measuring: whether the profile needs further traces.
    """

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
        self.measuring = True

    def add(self, trace: StepTrace, marks: Marks = ()) -> None:
        """Add the trace of the step that has just ended.

        The last trace completes the profile, which is collective. If the job was started only to
        be profiled, it also ends the job.

        Raises:
            SystemExit: the job was started only for the profile.
        """
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
                # P6: training continues without the profile.
                logger.exception("the profile failed; training continues")
            self._steps.clear()
            if self._config.then == "exit":
                logger.info("the profile is done; the job was started for it and ends here")
                raise SystemExit(0)

    def _finish(self) -> None:
        own_traces = self._own_traces()
        after = measure_offsets(self._control, clock_id())
        gathered = self._control.gather_bytes(encode(own_traces))
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
            # All ranks wait until rank 0 has written the files: the exit of a rank may make the
            # launcher end rank 0.
            self._control.any_of(False)
        note_taken(self._config.dir, self._control.rank)

    def _own_traces(self) -> RankTraces:
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


def probe_bandwidth() -> float | None:
    """Measure one copy into host memory and return its bytes per second, for jobs whose traces
    contain no copies."""
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
    """Write a marker file which tells this node's ``reft profile`` that a rank has taken the
    profile; only rank 0 writes the profile itself."""
    if ENV_PROFILE in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_TAKEN_PREFIX}{rank}").touch()


def forget_taken(folder: Path) -> set[int]:
    """Return the ranks of this node that have taken a profile, and delete the marker files that
    say so."""
    paths = list(folder.glob(f"{_TAKEN_PREFIX}*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return {int(path.name.removeprefix(_TAKEN_PREFIX)) for path in paths}


def write(result: ProfileResult, folder: Path) -> None:
    """Write the profile, its trace events and, if matplotlib is installed, its figure into
    ``folder``."""
    path = (folder / PROFILE_FILE).absolute()
    result.save(path)
    # Draw in another process, so that no trainer imports matplotlib.
    command = [sys.executable, "-P", "-m", "reft.cli", "profile", "--from", str(path)]
    command += ["--trace", str(folder / "trace.json")]
    if find_spec("matplotlib") is not None:
        command += ["--figure", str(folder / "profile.png")]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRAW_SECS, check=False
        )
        failed = done.stderr.strip()[-_MAX_ERROR_CHARS:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if failed:
        logger.warning("the profile is written, but could not be drawn: %s", failed)
    # Log as a warning: the user has requested the profile, and lower levels may be hidden.
    logger.warning(
        "profile of %d steps written to %s (reft profile --from %s)", len(result.steps), path, path
    )


def start_profile(
    tracer: Tracer,
    config: ProfileConfig,
    device: torch.device,
    *,
    job_id: str,
    at: Coordinate,
    degrees: Degrees,
    control: ControlGroup,
    snapshot_bytes: Callable[[], int],
) -> None:
    """Make a profiler receive a tracer's steps. Collective.

    Args:
        tracer: tracer of this rank; the profiler and the device's clock are attached to it.
        device: device on which this rank computes.
        config, job_id, at, degrees, control, snapshot_bytes: as for :class:`Profiler`.
    """
    # On a device calls return before their work is done, so times come from the device's clock,
    # which is read without waiting.
    vendor = find_vendor(device)
    clock = None if vendor is None else DeviceClock(vendor)
    tracer.mark = None if clock is None else clock.mark
    tracer.profiler = Profiler(
        config,
        clock,
        job_id=job_id,
        at=at,
        degrees=degrees,
        control=control,
        snapshot_bytes=snapshot_bytes,
    )
