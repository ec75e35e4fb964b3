"""The fault matrix: ``python -m tests.faults.matrix``, or ``make faults``.

Real jobs, real kills. Every run is compared, step by step and bit by bit, with an undisturbed run
without reft, and no recovery may go back behind the newest commit. Covers every pair of moment, node, layout,
optimizer, snapshot variant and protection; with ``--full`` every combination (days: restrict it). Exit code 1 if anything was not as promised.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reft.config import Variant
from reft.tools.demo.cluster import LocalClusterError
from tests.faults.cases import (
    OPTIMIZERS,
    PROTECTIONS,
    VARIANTS,
    PlannedJob,
    pairwise_cases,
    plan_jobs,
    product,
    reference_steps,
    setups,
)
from tests.faults.job import Losses, Outcome, Scratch, run_planned
from tests.machine import FP16_MISSING

console = Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else 120)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the result is the exit code."""
    args = _parser().parse_args(argv)
    reason = FP16_MISSING
    optimizers = [o for o in OPTIMIZERS if not (o.needs_fp16 and reason)]
    if reason:
        console.print(f"[yellow]left out: fp16, because {reason}[/]")
    possible = setups(
        optimizers=optimizers,
        variants=[Variant(name) for name in args.variant],
        protections=args.protection,
    )
    cases = product(possible)
    jobs = plan_jobs(cases if args.full else pairwise_cases(possible))
    wanted = [job for job in jobs if not args.only or any(text in str(job) for text in args.only)]
    lives = sum(job.lives for job in wanted)
    console.print(
        f"{sum(len(job.cases) for job in wanted)} of {len(cases)} combinations in {len(wanted)} jobs, "
        f"{lives} starts of a job"
    )
    if args.list:
        for job in wanted:
            console.print(f"  {job}")
        return 0
    root = args.keep_logs or Path(tempfile.mkdtemp(prefix="reft-faults-"))
    root.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcomes = run_jobs(Scratch(root, root / "references"), wanted)
    summary = summarise(outcomes, full=args.full, left_out=reason, secs=time.monotonic() - began)
    console.print(table(outcomes))
    verdict = "[green]all as promised[/]" if summary["good"] else "[bold red]NOT as promised[/]"
    console.print(f"{verdict}, {summary['secs']:.0f} s")
    if args.json:
        text = json.dumps(summary, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text)
    if args.keep_logs is None and summary["good"]:
        shutil.rmtree(root, ignore_errors=True)
    else:
        console.print(f"logs: {root}")
    return 0 if summary["good"] else 1


def run_jobs(scratch: Scratch, jobs: Sequence[PlannedJob]) -> list[Outcome]:
    """Run the jobs one after the other, each after the undisturbed run it is compared with."""
    steps = reference_steps(jobs)
    outcomes = []
    for number, job in enumerate(jobs):
        console.print(f"[bold]{number + 1}/{len(jobs)}[/] {job}")
        outcome = _run(scratch, job, f"job{number:03d}", steps[job.shape.name, job.optimizer.name])
        outcomes.append(outcome)
        lags = ", ".join(f"{r.lost_steps} lost, lag {r.commit_lag}" for r in outcome.recoveries)
        said = "[green]good[/]" if outcome.good else "[bold red]BAD[/]"
        console.print(f"    {said} in {outcome.secs:.0f} s; {lags or 'no recovery'}")
        for problem in outcome.problems:
            console.print(f"    {problem}", style="red", markup=False)
    return outcomes


def _run(scratch: Scratch, job: PlannedJob, name: str, reference_steps: int) -> Outcome:
    began = time.monotonic()
    try:
        reference: Losses = scratch.reference(job.shape, job.optimizer, reference_steps)
        return run_planned(scratch, job, name, reference)
    except LocalClusterError as error:
        return Outcome(job, (str(error),), (), time.monotonic() - began, scratch.root / name)


def summarise(
    outcomes: Sequence[Outcome], *, full: bool, left_out: str | None, secs: float
) -> dict[str, Any]:
    """What ``--json`` writes."""
    return {
        "good": all(outcome.good for outcome in outcomes),
        "full": full,
        "fp16_left_out_because": left_out,
        "combinations": sum(len(outcome.job.cases) for outcome in outcomes),
        "recoveries": sum(len(outcome.recoveries) for outcome in outcomes),
        "most_lost_steps": max((r.lost_steps for o in outcomes for r in o.recoveries), default=0),
        "secs": round(secs, 1),
        "jobs": [outcome.to_json() for outcome in outcomes],
    }


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line per combination."""
    result = Table(
        *("moment", "layout", "node", "optimizer", "variant", "protection", "how", "job"),
        title="fault matrix",
    )
    for outcome in outcomes:
        for fault in outcome.job.faults:
            if fault.case is None:
                continue
            said = "[green]equal[/]" if outcome.good else "[bold red]BAD[/]"
            result.add_row(
                str(fault.moment),
                outcome.job.shape.name,
                f"{fault.case.node} ({fault.coordinate})",
                outcome.job.optimizer.name,
                str(outcome.job.setup.variant),
                outcome.job.setup.protection,
                fault.action,
                said,
            )
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every combination, not every pair")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is standard output")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="jobs whose line in --list holds one of these"
    )
    parser.add_argument(
        "--variant",
        nargs="+",
        choices=[v.value for v in VARIANTS],
        default=[v.value for v in VARIANTS],
        help="only these ways to copy bytes (default all)",
    )
    parser.add_argument(
        "--protection",
        nargs="+",
        choices=PROTECTIONS,
        default=PROTECTIONS,
        help="only these schemes (default all)",
    )
    parser.add_argument("--list", action="store_true", help="show the jobs, run nothing")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep logs and events there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
