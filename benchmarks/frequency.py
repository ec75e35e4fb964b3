"""How often to write to storage: the interval that reft chooses against every other one, simulated.

    .venv/bin/python benchmarks/frequency.py --json
    .venv/bin/python benchmarks/frequency.py --real --json      # a job on a disk that others load;
    minutes .venv/bin/python benchmarks/frequency.py --step-secs 2.5 --write-gb 40 --cost-part 0.1
    # as measured

For mean times between failures from 10 minutes to 10 days and storage from 10 MB/s to 10 GB/s a
node: lives of a job are drawn, and for every interval of a search the training that lasts is
counted: what is not on storage when the job fails is made again. The chosen interval is counted in
the same lives, so that luck falls on all alike. Twice: where the failures alone decide, and where
an allowed overhead is kept, against the best of the intervals that keep it.

As a baseline, a checkpoint at the end of every epoch is counted as well, with which CheckFreq
compares: training waits until it is on storage.

Failures in this table are those that memory does not survive. How often these are follows from the
lost nodes, the placement and the time of a repair; that formula is held against nodes that fail one
by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from results import machine, run_lines

from reft.policy.rate import best_interval, memory_losses_per_sec
from reft.protect.placement import losses_within

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
MTBF_SECS = (10 * MINUTE, 30 * MINUTE, 2 * HOUR, 8 * HOUR, DAY, 3 * DAY, 10 * DAY)
WRITE_BYTES_PER_SEC = tuple(10 ** (7 + i / 2) for i in range(7))
"""10 MB/s to 10 GB/s."""
_LONGEST = 8
"""Times the mean time between failures: the longest interval of the search."""

Lives = npt.NDArray[np.float64]


class Costs(NamedTuple):
    """Of a step without a checkpoint; by what one makes training longer; until it is on storage."""

    step_secs: float
    cost_secs: float
    write_secs: float


def effective_training(costs: Costs, steps: int, lives: Lives, restart_secs: float) -> float:
    """Training that lasts over all time, counted over drawn lives.

    A life begins with the restart. A checkpoint is taken behind every ``steps`` steps and is on
    storage ``write_secs`` later; at the end of the life what is on storage stays.

    Args:
        costs: of a step and a checkpoint.
        steps: between two checkpoints; a multiple of them where the writer is not done by then.
        lives: seconds from the beginning of a restart to the next failure.
        restart_secs: until training goes on.
    """
    cycle = steps * costs.step_secs + costs.cost_secs
    written = np.floor((lives - restart_secs + costs.cost_secs - costs.write_secs) / cycle)
    return float(np.maximum(written, 0.0).sum() * steps * costs.step_secs / lives.sum())


def lost_secs(costs: Costs, steps: int, lives: Lives, restart_secs: float) -> float:
    """Mean seconds since the last checkpoint on storage when the job fails, which are made again.

    Args:
        costs: of a step and a checkpoint.
        steps: between two checkpoints.
        lives: seconds from the beginning of a restart to the next failure.
        restart_secs: until training goes on.
    """
    trained = np.maximum(lives - restart_secs, 0.0)
    cycle = steps * costs.step_secs + costs.cost_secs
    written = np.floor((trained + costs.cost_secs - costs.write_secs) / cycle)
    return float((trained - np.maximum(written, 0.0) * cycle).mean())


def every_interval(costs: Costs, mtbf_secs: float, tried: int) -> list[int]:
    """Intervals from the shortest that storage can take to one far too long, in equal ratios."""
    least = max(1, ceil((costs.write_secs - costs.cost_secs) / costs.step_secs - 1e-9))
    most = max(2 * least, ceil(_LONGEST * mtbf_secs / costs.step_secs))
    return sorted({round(steps) for steps in np.geomspace(least, most, tried)})


@dataclass(frozen=True)
class Point:
    """One mean time between failures and one speed of storage.

    Attributes:
        mtbf_secs, write_bytes_per_sec: of the point.
        write_secs, cost_secs: of a checkpoint.
        chosen_steps, why: what reft chooses.
        best_steps: the best of the search.
        effective, best_effective: training that lasts, as a part of all time.
        lost_secs: training that is made again after a failure, at the chosen interval.
        epoch_effective, epoch_lost_secs: the same with one synchronous checkpoint for each epoch.
        allowed_steps, allowed_best_steps, allowed_effective, allowed_best_effective: the same where
            the allowed overhead is kept.
    """

    mtbf_secs: float
    write_bytes_per_sec: float
    write_secs: float
    cost_secs: float
    chosen_steps: int
    why: str
    best_steps: int
    effective: float
    best_effective: float
    lost_secs: float
    epoch_effective: float
    epoch_lost_secs: float
    allowed_steps: int
    allowed_best_steps: int
    allowed_effective: float
    allowed_best_effective: float

    @property
    def missed(self) -> float:
        """By which part the chosen interval is worse than the best, at least 0."""
        return _missed(self.effective, self.best_effective)

    @property
    def allowed_missed(self) -> float:
        """The same where the overhead is kept."""
        return _missed(self.allowed_effective, self.allowed_best_effective)

    @property
    def price(self) -> float:
        """By which part the allowed overhead makes the best interval worse."""
        return _missed(self.allowed_best_effective, self.best_effective)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "missed": self.missed,
            "allowed_missed": self.allowed_missed,
            "price_of_the_allowed_overhead": self.price,
        }


def _missed(found: float, best: float) -> float:
    return max(0.0, 1 - found / best) if best else 0.0


def search(options: argparse.Namespace) -> Iterator[Point]:
    """Every point, by brute force."""
    unit_lives = np.random.default_rng(options.seed).exponential(1.0, options.lives)
    for mtbf in MTBF_SECS:
        for rate in WRITE_BYTES_PER_SEC:
            write = options.write_gb * 1e9 / rate
            costs = Costs(options.step_secs, options.cost_part * write, write)
            lives = unit_lives * mtbf
            chosen, why = best_interval(*costs, mtbf_secs=mtbf)
            allowed, _ = best_interval(*costs, max_overhead=options.max_overhead, mtbf_secs=mtbf)
            tried = {*every_interval(costs, mtbf, options.intervals), chosen, allowed}
            found = {
                k: effective_training(costs, k, lives, options.restart_secs) for k in sorted(tried)
            }
            least = costs.cost_secs / (options.max_overhead * costs.step_secs) * (1 - 1e-9)
            keeping = [k for k in found if k >= least]
            synchronous = Costs(options.step_secs, write, write)
            epoch = synchronous, options.epoch_steps, lives, options.restart_secs
            best, allowed_best = (
                max(found, key=found.__getitem__),
                max(keeping, key=found.__getitem__),
            )
            yield Point(
                mtbf,
                rate,
                write,
                costs.cost_secs,
                chosen,
                why.name.lower(),
                best,
                found[chosen],
                found[best],
                lost_secs(costs, chosen, lives, options.restart_secs),
                effective_training(*epoch),
                lost_secs(*epoch),
                allowed,
                allowed_best,
                found[allowed],
                found[allowed_best],
            )


# -- how often memory fails ------------------------------------------------------------------------


def seen_memory_losses_per_sec(
    node_mtbf_secs: float,
    group: int,
    tolerance: int,
    repair_secs: float,
    options: argparse.Namespace,
) -> float:
    """Of one group: nodes are lost one by one, each is back after ``repair_secs``; when more than
    ``tolerance`` are away at once the job goes back to storage, with all nodes there."""
    rng, losses = np.random.default_rng(options.seed), options.losses
    away: list[float] = []
    now, fatal = 0.0, 0
    for gap, where in zip(
        rng.exponential(node_mtbf_secs / group, losses), rng.random(losses), strict=True
    ):
        now += gap
        away = [until for until in away if until > now]
        if where * group < len(away):
            continue  # it fell on one that is not there
        away.append(now + repair_secs)
        if len(away) > tolerance:
            fatal, away = fatal + 1, []
    return fatal / now


def memory_losses(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The formula beside nodes that fail one by one."""
    made = []
    for group, tolerance, mtbf, repair in (
        (4, 0, DAY, 600.0),
        (4, 1, DAY, 600.0),
        (8, 1, DAY, 60.0),
        (8, 2, DAY, 900.0),
    ):
        formula = memory_losses_per_sec(1 / mtbf, group, losses_within(group, tolerance), repair)
        seen = seen_memory_losses_per_sec(mtbf, group, tolerance, repair, options)
        made.append(
            {
                "nodes": group,
                "tolerance": tolerance,
                "node_mtbf_secs": mtbf,
                "repair_secs": repair,
                "formula_per_day": formula * DAY,
                "simulated_per_day": seen * DAY,
            }
        )
    return made


# -- command ---------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--step-secs", type=float, default=1.0, help="of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--write-gb", type=float, default=10.0, help="GB that a node writes (default: %(default)s)"
    )
    parser.add_argument(
        "--cost-part",
        type=float,
        default=0.05,
        help="by which a checkpoint makes training longer, per second of writing (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--restart-secs", type=float, default=60.0, help="after a failure (default: %(default)s)"
    )
    parser.add_argument(
        "--max-overhead", type=float, default=0.035, help="allowed (default: %(default)s)"
    )
    parser.add_argument(
        "--epoch-steps",
        type=int,
        default=3600,
        help="steps of an epoch, after which the baseline writes (default: %(default)s)",
    )
    parser.add_argument(
        "--lives", type=int, default=100_000, help="drawn per point (default: %(default)s)"
    )
    parser.add_argument(
        "--losses", type=int, default=400_000, help="of nodes, one by one (default: %(default)s)"
    )
    parser.add_argument(
        "--intervals", type=int, default=200, help="tried per point (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--real", action="store_true", help="measure a real job instead (frequency_real.py)"
    )
    parser.add_argument(
        "--disk", help="--real: a directory on it (default: where temporary files go)"
    )
    parser.add_argument(
        "--part-secs",
        type=float,
        default=90.0,
        help="--real: alone, loaded, alone (default: %(default)s each, at least)",
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=20,
        help="--real: on storage in each part; with fewer nothing is said of the goal (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--most-part-secs",
        type=float,
        default=1800.0,
        help="--real: a part ends, with however many (default: %(default)s)",
    )
    parser.add_argument(
        "--mtbf-secs",
        type=float,
        default=60.0,
        help="--real: between failures of memory, so short that the overhead decides (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few lives and intervals: for the tests"
    )
    options = parser.parse_args()
    if options.quick:
        options.lives, options.intervals, options.losses = 20_000, 60, 40_000
    return options


def real(options: argparse.Namespace) -> None:
    """A real job on a real disk."""
    from frequency_real import measure, table

    result = {
        "benchmark": "frequency",
        "simulated": False,
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/frequency.py", *sys.argv[1:]]),
        "machine": machine(),
        "max_overhead": options.max_overhead,
        "mtbf_secs": options.mtbf_secs,
        **measure(options),
    }
    print(
        json.dumps(result, indent=2)
        if options.json
        else "\n".join([*run_lines(result), *table(result)])
    )


def main() -> None:
    options = parse()
    if options.real:
        real(options)
        return
    points = list(search(options))
    worst, allowed_worst = (
        max(points, key=lambda p: p.missed),
        max(points, key=lambda p: p.allowed_missed),
    )
    result = {
        "benchmark": "frequency",
        "simulated": True,
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/frequency.py", *sys.argv[1:]]),
        "machine": machine(),
        "costs": {
            key: getattr(options, key)
            for key in (
                *("step_secs", "write_gb", "cost_part", "restart_secs", "max_overhead"),
                "epoch_steps",
            )
        },
        "lives": options.lives,
        "worst": worst.to_json(),
        "allowed_worst": allowed_worst.to_json(),
        "memory_losses": memory_losses(options),
        "points": [point.to_json() for point in points],
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print("\n".join(run_lines(result)))
    print(
        f"simulated, {options.lives} lives a point: steps of {options.step_secs:g} s, "
        f"{options.write_gb:g} GB, {options.cost_part:.0%} of the writing time as cost; epochs of "
        f"{options.epoch_steps} steps, written while training waits"
    )
    head = f"{'MTBF':>8} {'GB/s':>6} {'chosen':>8} {'best':>8} {'lasting':>8} {'missed':>7}"
    head += f" {'lost':>7} {'by epoch':>8} {'lost':>7}"
    print(f"{head}   within the overhead")
    for p in points:
        print(
            f"{p.mtbf_secs / HOUR:7.2f}h {p.write_bytes_per_sec / 1e9:6.3f} "
            f"{p.chosen_steps:8} {p.best_steps:8} {p.effective:8.4f} {p.missed:7.2%} "
            f"{p.lost_secs:6.0f}s {p.epoch_effective:8.4f} {p.epoch_lost_secs:6.0f}s   "
            f"{p.allowed_steps:6} {p.allowed_missed:6.2%}, price {p.price:.2%}"
        )
    for name, point, missed in (
        ("worst", worst, worst.missed),
        (f"worst within {options.max_overhead:.1%}", allowed_worst, allowed_worst.allowed_missed),
    ):
        print(
            f"{name}: {missed:.2%} less than the best, at an MTBF of {point.mtbf_secs / HOUR:.2f} "
            f"h and {point.write_bytes_per_sec / 1e9:.3f} GB/s"
        )
    for m in result["memory_losses"]:
        print(
            f"groups of {m['nodes']}, {m['tolerance']} survived: storage is needed "
            f"{m['formula_per_day']:.4f} times a day by the formula, {m['simulated_per_day']:.4f} "
            "simulated"
        )


if __name__ == "__main__":
    main()
