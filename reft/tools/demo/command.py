"""``reft demo``: the two runs, the verdict and what is left behind."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from reft.errors import ConfigError
from reft.node.history import describe_parts
from reft.tools.demo.cluster import LocalClusterError
from reft.tools.demo.display import Screen, make_screen
from reft.tools.demo.history import History
from reft.tools.demo.job import Job
from reft.tools.demo.options import DemoOptions, parse
from reft.tools.demo.report import Recovery, Report, make_report

EXIT_INTERRUPTED = 130
_LOG_LINES = 25


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft demo``.

    Returns:
        0: training finished and not one bit differs; 1: not so; 130: told to stop.

    Raises:
        ConfigError: the options do not fit together.
    """
    options = parse(argv)
    console = Console(stderr=options.json == "-", soft_wrap=True)
    with _interruptible():
        try:
            report = Demo(options, console).run()
        except KeyboardInterrupt:
            console.print("stopped; all processes are killed and their memory is removed", style="yellow")
            return EXIT_INTERRUPTED
    return 0 if report.good else 1


class Demo:
    """One demonstration.

    Args:
        options: the command line.
        console: for people.
    """

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._began = time.monotonic()
        self._deadline = self._began + options.timeout_secs

    def run(self) -> Report:
        """Run, compare and report. Memory and processes are gone afterwards, logs are kept if it
        failed or if that was asked for."""
        directory = self._log_directory()
        kept = self._options.keep_logs is not None
        try:
            with make_screen(self._console) as screen:
                report, job = self._run_both(directory, screen)
            _show_verdict(self._console, report)
            if not report.good:
                kept = True
                self._show_logs(job)
            if kept:
                self._console.print(f"logs and events: {directory}", highlight=False, markup=False)
            self._write(report)
            return report
        finally:
            if not kept:
                shutil.rmtree(directory, ignore_errors=True)

    def _log_directory(self) -> Path:
        if self._options.keep_logs is None:
            return Path(tempfile.mkdtemp(prefix="reft-demo-"))
        directory = self._options.keep_logs.absolute()
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"--keep-logs {directory} is not empty; give a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _run_both(self, directory: Path, screen: Screen) -> tuple[Report, Job]:
        options = self._options
        block = options.reft_block(directory / "persist")
        screen.say(describe(options))
        with _memory_root(options.memory_dir) as memory_root:
            job = self._job("training", directory, memory_root, screen, block=block)
            problem = _run(job)
        reference = job
        if problem is None:
            with _memory_root(options.memory_dir) as memory_root:
                reference = self._job("reference", directory, memory_root, screen)
                problem = _run(reference)
        report = make_report(
            options,
            History.of(job.directory / "events"),
            History.of(directory / "reference" / "events"),
            job.failures,
            problem=problem,
            total_secs=time.monotonic() - self._began,
        )
        return report, reference

    def _job(
        self,
        name: str,
        directory: Path,
        memory_root: Path,
        screen: Screen,
        *,
        block: dict[str, Any] | None = None,
    ) -> Job:
        """The job; disturbed where it is protected."""
        own = directory / name
        options = self._options.trainer_options(own / "checkpoints", block)
        return Job(
            name=name,
            options=self._options,
            command=["-m", "reft.tools.demo.train", json.dumps(options)],
            directory=own,
            memory_root=memory_root,
            screen=screen,
            deadline=self._deadline,
            kills=self._options.kills if block else (),
            persist_dir=directory / "persist",
        )

    def _show_logs(self, job: Job) -> None:
        """The end of one log that tells most; a failure of all is told alike by all."""
        for path in job.logs[:1]:
            self._console.print(f"\nthe end of {path}:", style="bold", highlight=False)
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            self._console.print("\n".join(lines), markup=False, highlight=False)

    def _write(self, report: Report) -> None:
        target = self._options.json
        if target == "-":
            sys.stdout.write(report.to_json() + "\n")
        elif target is not None:
            Path(target).write_text(report.to_json() + "\n")


def describe(options: DemoOptions) -> str:
    """One line: what is going to be run."""
    kills = ", ".join(f"node {kill.node} in step {kill.step + 1}" for kill in options.kills) or "none"
    return (
        f"a small transformer over {options.nodes} nodes x {options.procs_per_node}, {options.degrees}, ZeRO-"
        f"{options.zero}, {options.dtype}, {options.steps} steps; failures ({options.kill_kind}): {kills}"
    )


def _run(job: Job) -> str | None:
    try:
        return job.run()
    except LocalClusterError as error:
        return str(error)


def _show_verdict(console: Console, report: Report) -> None:
    console.print()
    for recovery in report.recoveries:
        console.print(Text(_recovery_text(recovery)))
    snapshots = report.snapshots
    stall = (
        "" if snapshots.stall_secs_median is None else f", {snapshots.stall_secs_median * 1e3:.1f} ms each"
    )
    console.print(
        f"snapshots: {snapshots.committed} committed, {snapshots.skipped} skipped{stall} of the training "
        f"thread, {snapshots.bytes_per_rank / 2**20:.1f} MiB per rank and version: it copies "
        f"{snapshots.to_host_bytes / 2**20:.1f} and sends {snapshots.sent_bytes / 2**20:.2f} to other nodes",
        highlight=False,
    )
    console.print(Text(_verdict(report), style="bold green" if report.good else "bold red"))


def _recovery_text(recovery: Recovery) -> str:
    after = (
        "" if recovery.failure_to_step_secs is None else f"{recovery.failure_to_step_secs:.1f} s after the "
    )
    resumed = f"resumed from {recovery.source} at step {recovery.version}"
    if recovery.source == "none":
        resumed = "began again: nothing had been committed"
    return (
        f"recovery: {resumed}, {recovery.lost_steps} step(s) lost, loaded in {recovery.load_secs:.2f} s"
        + (f"; the next step was done {after}failure" if after else "; NO failure had been made")
        + (f" ({describe_parts(recovery.failure_to_step)})" if recovery.failure_to_step else "")
    )


def _verdict(report: Report) -> str:
    if report.problem is not None:
        return f"FAILED: {report.problem}"
    difference = report.max_abs_loss_difference
    if difference is None:
        return "FAILED: some losses are missing"
    if difference:
        wrong = [
            step
            for step, (a, b) in enumerate(zip(report.losses, report.reference_losses, strict=True), 1)
            if a != b
        ]
        return f"FAILED: losses differ by up to {difference:.3g}; first at step {wrong[0] if wrong else '?'}"
    return (
        f"all {report.steps} losses equal those of the undisturbed run without reft, to the last bit "
        f"({len(report.failures)} failure(s), {report.total_secs:.0f} s in all)"
    )


@contextmanager
def _memory_root(parent: Path) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="reft-demo-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal to stop ends the demonstration; later ones do not disturb the tidying up."""
    stopped = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
