"""Progress under failures: reft, DeepSpeed's checkpoints every N steps, and no checkpoints.

    .venv/bin/python benchmarks/goodput.py --json --figure goodput.png > goodput.json

The same job, PP2 x DP2, every rank on a node of its own, runs in turns in each way under the same
drawn trace of failures, and once undisturbed:

- ``reft``: under ``reft launch``, a version every step and a checkpoint on disk every 100 steps;
- ``reft-auto``: the same with ``"interval_steps": "auto"``: as many steps between two versions as
  keep their cost within 3 % of a step;
- ``deepspeed-N``: under ``torchrun``, with a DeepSpeed checkpoint every N steps;
- ``none``: under ``torchrun``, without checkpoints; it begins again at step 0.

A failure kills one trainer, or a node with its memory. A spare node waits and takes its place, and
another node is started as the next spare. The trace begins ``--settle-secs`` after the first step.
Two shares of ideal progress are computed, from
the steps by which the job is ahead at the end of the trace:

- ``share``: over the steps of the undisturbed job of the same round. Other work on the machine
  changes between two runs, and changes this share.
- ``time_share``: over the steps that the run itself would have done without failures and saves, by
  its own mean step. It leaves out what reft adds to a step (benchmarks/has.py measures that).

Every loss that a run computed, repeated steps included, is compared with the undisturbed job's loss
of that step. ``simulator/failures.py`` replays each trace with the costs that the runs of the
*other* traces had.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common import parser, progress, scratch
from job_events import EventReader
from local_cluster import KillKind, LocalClusterError
from mttr import job_facts, trainer_arguments
from mttr_jobs import Job
from results import run_lines

from benchmarks.simulator.failures import (
    Failure,
    Recovery,
    draw_trace,
    replay,
    simulate_preemptions,
    simulate_scale,
)
from reft.profile.figure import new_figure, save_figure

UNDISTURBED = "undisturbed"
REFT = ("reft", "reft-auto")
_PERSIST_STEPS = 100
_KINDS = {"trainer": KillKind.PROCESS, "node": KillKind.NODE}
_CURVE_SECS = 3.0
_INTERVALS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)
_TRAINER_SECS = 120.0


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One job under one trace.

    Attributes:
        way: how it saves.
        seed: of the trace.
        secs: length of the trace.
        failures: those of the trace, at the seconds at which they happened.
        steps: (seconds since the trace began, step, process) of each step of the first rank.
        losses: every loss that was computed, as ``float.hex``, by step.
        load_average: of the machine, mean over the run.
    """

    way: str
    seed: int
    secs: float
    failures: list[Failure]
    steps: list[tuple[float, int, int]]
    losses: dict[int, list[str]]
    load_average: float

    @classmethod
    def from_json(cls, text: str) -> Run:
        data = json.loads(text)
        data["failures"] = [Failure(**failure) for failure in data["failures"]]
        data["losses"] = {int(step): found for step, found in data["losses"].items()}
        return cls(**data)

    @property
    def save_interval(self) -> int:
        return save_interval(self.way)

    def progress_at(self, secs: float) -> int:
        """Steps by which the job is ahead of the step with which the trace began, at least 0."""
        return max(0, self._step_at(secs) - self._step_at(0.0))

    def kept_steps(self) -> int:
        """Progress at the end of the trace; without unsaved steps if the job is down then."""
        last = self.failures[-1:]
        if not last or last[0] in [failure for failure, _, _ in self.restarts()]:
            return self.progress_at(self.secs)
        step = self._step_at(self.secs)
        saved = step - step % self.save_interval if self.save_interval else 0
        return max(0, saved - self._step_at(0.0))

    def _step_at(self, secs: float) -> int:
        return [step for at, step, _ in self.steps if at <= secs][-1]

    def step_secs(self) -> tuple[list[float], list[float]]:
        """Seconds of the trace's steps without and with a DeepSpeed checkpoint before them."""
        plain: list[float] = []
        after_save: list[float] = []
        for (before, step, pid), (after, following, same) in pairwise(self.steps):
            if before >= 0.0 and pid == same and following == step + 1:
                saved = self.save_interval > 1 and step % self.save_interval == 0
                (after_save if saved else plain).append(after - before)
        return plain, after_save

    def restarts(self) -> Iterator[tuple[Failure, float, int]]:
        """Failures after which the job trained before the next one, the seconds from the failure
        to the end of the first step, and the number of steps that were lost.

        A process that a failure ends may still complete one step, so a restart counts from the
        second step of a process on.
        """
        # One end more than failures if there are none.
        ends = [*(failure.secs for failure in self.failures[1:]), self.secs]
        for failure, end in zip(self.failures, ends, strict=False):
            ended = [pid for secs, _, pid in self.steps if secs <= failure.secs][-1]
            after = [r for r in self.steps if failure.secs < r[0] < end and r[2] != ended]
            steps_of = Counter(pid for _, _, pid in after)
            trained = [row for row in after if steps_of[row[2]] > 1]
            if trained:
                secs, step, _ = trained[0]
                reached = self._step_at(secs - 1e-6)
                yield failure, secs - failure.secs, reached - step + 1


def save_interval(way: str) -> int:
    """Steps between two saves; 0: none. reft's own choice counts as 1."""
    return 1 if way in REFT else int(way.partition("-")[2] or 0)


def reft_block(way: str, folder: Path) -> dict[str, Any]:
    persist = {"dir": str(folder / "disk"), "interval_steps": _PERSIST_STEPS}
    interval = "auto" if way == "reft-auto" else 1
    return {"interval_steps": interval, "persist": persist}


def run(
    way: str, seed: int, trace: Sequence[Failure], options: argparse.Namespace, space: Any
) -> Run:
    folder, shm = space.disk / f"{seed}-{way}", space.shm / f"{seed}-{way}"
    (folder / "events").mkdir(parents=True)
    shm.mkdir()
    job = Job(
        system="reft" if way in REFT else "torchrun",
        directory=folder,
        memory_root=shm,
        nodes=options.pp * options.dp,
        procs_per_node=1,
        spares=1,
        trainer=trainer_arguments(options),
        save_interval=save_interval(way),
        reft=reft_block(way, folder),
    )
    failures: list[Failure] = []
    loads: list[float] = []
    with job.cluster:
        job.start()
        train_until(job, time.time() + options.settle_secs)
        began = time.time()
        for failure in trace:
            loads += train_until(job, began + failure.secs)
            failures.append(replace(failure, secs=fail(job, failure) - began))
        loads += train_until(job, began + options.secs)
    events = [e for e in EventReader(folder / "events").poll() if e.kind == "step"]
    losses: dict[int, list[str]] = {}
    for event in events:
        if "loss_hex" in event.fields:
            losses.setdefault(event.fields["step"], []).append(event.fields["loss_hex"])
    return Run(
        way=way,
        seed=seed,
        secs=options.secs,
        failures=failures,
        steps=[(e.time - began, e.fields["step"], e.pid) for e in events if e.rank == 0],
        losses=losses,
        load_average=fmean(loads),
    )


def fail(job: Job, failure: Failure) -> float:
    """Kill what the failure names, and start another node for a lost one.

    A failure hits a node that trains: not the spare, and not before trainers have been started
    again.

    Returns:
        The time of the kill.
    """
    cluster = job.cluster
    killed: list[float] = []

    def kill() -> bool:
        training = [index for index in sorted(cluster.current) if cluster.trainers(index)]
        if not training:
            return False
        victim = training[failure.victim % len(training)]
        # Its trainer may have ended meanwhile; then another one is looked for.
        with suppress(LocalClusterError):
            killed.append(time.time())
            cluster.kill_node(victim, _KINDS[failure.kind])
            if failure.kind == "node":
                cluster.start_node(victim)
            return True
        return False

    cluster.wait_until(kill, _TRAINER_SECS, "a trainer to fail")
    return killed[-1]


def train_until(job: Job, deadline: float) -> list[float]:
    """Let the job train; returns load averages of the machine.

    A launcher that has given up is started again, as by a scheduler.
    """
    loads = [os.getloadavg()[0]]
    while (left := deadline - time.time()) > 0:
        time.sleep(min(left, 0.5))
        loads.append(os.getloadavg()[0])
        for index, node in job.cluster.current.items():
            if not node.running:
                progress(f"  the launcher of node {index} has ended; another one is started")
                job.cluster.start_node(index)
    return loads


def measure(options: argparse.Namespace, space: Any) -> list[Run]:
    """Make the runs that ``--runs`` does not have yet."""
    runs: list[Run] = []
    if options.runs and options.runs.exists():
        runs = [Run.from_json(line) for line in options.runs.read_text().splitlines()]
    known = {(found.seed, found.way) for found in runs}
    for seed in range(options.seed, options.seed + options.traces):
        trace = draw_trace(seed, options.mtbf_secs, options.secs, options.pp * options.dp)
        for way in (UNDISTURBED, *REFT, *(f"deepspeed-{n}" for n in options.intervals), "none"):
            if (seed, way) in known:
                continue
            found = run(way, seed, [] if way == UNDISTURBED else trace, options, space)
            runs.append(found)
            progress(f"trace {seed}, {way}: {found.kept_steps()} steps")
            if options.runs:
                with options.runs.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
    return runs


# -- what they show --------------------------------------------------------------------------------


def costs_of(runs: Sequence[Run]) -> Recovery:
    """Mean costs of the runs of one way."""
    plain = [secs for found in runs for secs in found.step_secs()[0]]
    after_save = [secs for found in runs for secs in found.step_secs()[1]]
    restarts: dict[str, list[float]] = defaultdict(list)
    for found in runs:
        for failure, secs, _ in found.restarts():
            restarts[failure.kind].append(secs)
            restarts["any"].append(secs)
    return Recovery(
        step_secs=fmean(plain),
        save_interval=runs[0].save_interval,
        save_secs=max(0.0, fmean(after_save) - fmean(plain)) if after_save else 0.0,
        # A kind that did not happen takes as long as the others, and a job that never recovered
        # the whole trace.
        restart_secs={
            kind: fmean(restarts[kind] or restarts["any"] or [runs[0].secs]) for kind in _KINDS
        },
    )


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    by_trace: dict[int, dict[str, Run]] = defaultdict(dict)
    for found in runs:
        by_trace[found.seed][found.way] = found
    ways = [way for way in by_trace[runs[0].seed] if way != UNDISTURBED]
    traces = [
        {
            "seed": seed,
            "failures": [asdict(failure) for failure in made[ways[0]].failures],
            "undisturbed": describe(made[UNDISTURBED], made[UNDISTURBED], runs),
            "ways": {way: describe(made[way], made[UNDISTURBED], runs) for way in ways},
        }
        for seed, made in by_trace.items()
    ]
    means = {
        way: {
            key: fmean(trace["ways"][way][key] for trace in traces)
            for key in ("share", "time_share", "time_share_simulated")
        }
        for way in ways
    }
    best = max(
        (way for way in ways if way.startswith("deepspeed")), key=lambda w: means[w]["time_share"]
    )
    costs = {way: costs_of([found for found in runs if found.way == way]) for way in ways}
    return {
        "secs": runs[0].secs,
        "means": means,
        "best_deepspeed": best,
        "costs": {way: asdict(cost) for way, cost in costs.items()},
        "deepspeed_by_interval_simulated": simulate_intervals(
            [made[best].failures for made in by_trace.values()], costs[best], runs[0].secs
        ),
        "preemptions_simulated": {
            way: simulate_preemptions(costs[way]) for way in ("reft", best, "none")
        },
        "at_scale_simulated": simulate_scale(),
        "traces": traces,
    }


def simulate_intervals(
    traces: Sequence[Sequence[Failure]], costs: Recovery, secs: float
) -> dict[int, float]:
    """Mean time share of DeepSpeed's checkpoints by their interval, with the measured costs."""
    return {
        interval: fmean(
            replay(trace, replace(costs, save_interval=interval), secs)[-1][1] for trace in traces
        )
        * costs.step_secs
        / secs
        for interval in _INTERVALS
    }


def describe(run: Run, undisturbed: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """One run, and the same simulated with the costs of the other traces' runs."""
    steps, own_step_secs = run.kept_steps(), fmean(run.step_secs()[0])
    common = run.losses.keys() & undisturbed.losses.keys()
    found: dict[str, Any] = {
        "steps": steps,
        "share": steps / undisturbed.kept_steps(),
        "time_share": steps * own_step_secs / run.secs,
        "step_secs": own_step_secs,
        "load_average": round(run.load_average, 1),
        "losses_compared": sum(len(run.losses[step]) for step in common),
        "losses_differ": sum(
            loss != undisturbed.losses[step][0] for step in common for loss in run.losses[step]
        ),
        "losses_after_the_undisturbed": sum(
            len(run.losses[step]) for step in run.losses.keys() - common
        ),
        "restarts": [
            {"kind": failure.kind, "secs": round(secs, 2), "lost_steps": lost}
            for failure, secs, lost in run.restarts()
        ],
        "curve": [run.progress_at(_CURVE_SECS * n) for n in range(int(run.secs / _CURVE_SECS) + 1)],
    }
    if run.way != UNDISTURBED:
        alike = [other for other in runs if other.way == run.way]
        others = [other for other in alike if other.seed != run.seed] or alike
        costs = costs_of(others)
        points = replay(run.failures, costs, run.secs)
        found["time_share_simulated"] = points[-1][1] * costs.step_secs / run.secs
        found["points_simulated"] = [[round(secs, 1), step] for secs, step in points]
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the first trace, the shares of all traces, and the shares at scale.

    Args:
        result: as ``--json`` prints it.
        path: file to write; its suffix selects the format.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = new_figure(13.0, 4.0)
    over_time, shares, at_scale = figure.subplots(1, 3)
    ways = {
        "reft": "#238b45",
        "reft-auto": "#74c476",
        result["best_deepspeed"]: "#08519c",
        "none": "#d94801",
    }
    trace = result["traces"][0]
    _draw_curve(over_time, trace["undisturbed"], "undisturbed", "#888888")
    for number, (way, colour) in enumerate(ways.items()):
        _draw_curve(over_time, trace["ways"][way], way, colour)
        over_time.plot(*zip(*trace["ways"][way]["points_simulated"], strict=True), "--", c=colour)
        measured = [t["ways"][way]["time_share"] for t in result["traces"]]
        shares.bar(number, result["means"][way]["time_share"], color=colour, alpha=0.5)
        shares.plot([number] * len(measured), measured, "o", c=colour)
        shares.plot(number, result["means"][way]["time_share_simulated"], "kx")
    over_time.set(xlabel="s", ylabel="steps", title="one trace; dashed: simulated")
    over_time.legend(frameon=False, fontsize=8, loc="upper left")
    shares.set_xticks(range(len(ways)), ways)
    shares.set(ylim=(0, 1), title="share of ideal progress; x: simulated")
    _draw_scale(at_scale, result["at_scale_simulated"])
    for axes in (over_time, shares, at_scale):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _draw_scale(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    # The ideal checkpoint would hide reft's line: only its points are drawn.
    looks = {"reft": ("", "#238b45"), "deepspeed": ("", "#08519c"), "ideal_async": ("+", "#807dba")}
    styles = dict(zip(sorted({row["restart_secs"] for row in rows}), "-:", strict=True))
    for restart_secs, style in styles.items():
        chosen = [row for row in rows if row["restart_secs"] == restart_secs]
        for way, (marker, colour) in looks.items():
            axes.plot(
                [row["devices"] for row in chosen],
                [row[way] for row in chosen],
                marker or style,
                c=colour,
                label=f"{way}, restart {restart_secs:.0f} s",
            )
    devices = sorted({row["devices"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{count:,}" for count in devices])
    axes.set(xlabel="H100", title="34B, share of ideal progress: simulated")
    axes.legend(frameon=False, fontsize=7, loc="lower left")


def _draw_curve(axes: Any, run: Mapping[str, Any], name: str, colour: str) -> None:
    seconds = [_CURVE_SECS * point for point in range(len(run["curve"]))]
    axes.plot(seconds, run["curve"], c=colour, label=name)


def table(result: Mapping[str, Any]) -> str:
    lines = run_lines(result)
    for way, means in result["means"].items():
        runs = [trace["ways"][way] for trace in result["traces"]]
        restarts = [restart for found in runs for restart in found["restarts"]]
        lines.append(
            f"{way:14} {means['time_share']:6.1%} of its time (simulated "
            f"{means['time_share_simulated']:.1%}), {means['share']:.1%} of the undisturbed steps; "
            f"{len(restarts)} restarts of {fmean(r['secs'] for r in restarts):.1f} s, "
            f"{sum(r['lost_steps'] for r in restarts)} steps lost; "
            f"{sum(found['losses_differ'] for found in runs)} of "
            f"{sum(found['losses_compared'] for found in runs)} losses differ"
        )
    return "\n".join(lines)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--traces", type=int, default=3, help="failure traces (default 3)")
    made.add_argument("--seed", type=int, default=1, help="of the first trace (default 1)")
    made.add_argument("--secs", type=float, default=180.0, help="of a trace (default 180)")
    made.add_argument(
        "--mtbf-secs", type=float, default=50.0, help="mean between failures (default 50)"
    )
    made.add_argument(
        "--settle-secs", type=float, default=20.0, help="training before a trace (default 20)"
    )
    made.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=[5],
        help="steps between DeepSpeed's checkpoints; the best is taken (default 5)",
    )
    made.add_argument(
        "--runs", type=Path, help="file for the runs as they are; those in it are not made again"
    )
    made.add_argument("--figure", type=Path, help="draw the result (png, svg, pdf)")
    made.set_defaults(pp=2, seq=64, micro_batch=2, micro_batches=4)
    options = made.parse_args()
    if options.quick:
        options.traces, options.secs, options.mtbf_secs, options.intervals = 1, 60.0, 30.0, [5]
        options.settle_secs = 1.0
    with scratch(options) as space:
        runs = measure(options, space)
    result = {**job_facts("goodput", options), "mtbf_secs": options.mtbf_secs, **summarise(runs)}
    if options.figure:
        draw(result, options.figure)
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
