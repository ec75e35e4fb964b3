"""Progress of a job under a trace of failures: what is lost, and when training continues.

Failures restart the whole job. It continues with its newest saved step, and repeats what it had
done since. A failure during a restart begins the restart again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import fmean
from typing import Any

from reft.config import Variant
from reft.policy.rate import DAY_SECS
from reft.tools.planning.model import SHAPES, Training

from .settings import MACHINES
from .variants import predict

SCALE_DAYS, SCALE_SEEDS = 10.0, 3
RESTARTS_SECS = (60.0, 600.0)
STORAGE_BYTES_PER_SEC = 100e9
_PREEMPTIONS_SECS = {"7 minutes": 420.0, "5 hours": 18_000.0}
_PREEMPTIONS = 20


@dataclass(frozen=True)
class Failure:
    """One failure.

    Attributes:
        secs: time since the trace began.
        kind: what fails: ``trainer`` (one process) or ``node`` (all its processes and its memory).
        victim: index of the node.
    """

    secs: float
    kind: str
    victim: int


def draw_trace(
    seed: int, mtbf_secs: float, secs: float, nodes: int, kinds: Sequence[str] = ("trainer", "node")
) -> list[Failure]:
    """Draw failures with exponential gaps, of equally frequent kinds on equally likely nodes.

    Args:
        seed: of the draws.
        mtbf_secs: mean time between two failures of the job.
        secs: length of the trace.
        nodes: number of nodes.
        kinds: kinds of failures.
    """
    rng = Random(seed)
    trace: list[Failure] = []
    now = rng.expovariate(1 / mtbf_secs)
    while now < secs:
        trace.append(Failure(now, rng.choice(kinds), rng.randrange(nodes)))
        now += rng.expovariate(1 / mtbf_secs)
    return trace


@dataclass(frozen=True)
class Recovery:
    """What a way of saving costs.

    Attributes:
        step_secs: one step.
        save_interval: steps between two saves; 0: it never saves and restarts at step 0.
        save_secs: time that training waits for a save.
        restart_secs: by kind of failure, from the failure to the end of the first step after it.
    """

    step_secs: float
    save_interval: int
    save_secs: float
    restart_secs: Mapping[str, float]

    def steps_after(self, first: int, secs: float) -> int:
        """Newest step after ``secs`` of training that begins after step ``first``."""
        if self.save_interval == 0:
            return first + int(secs / self.step_secs)
        # The next save is not a whole interval away if the first step is not a saved one.
        behind = first % self.save_interval
        secs += behind * self.step_secs
        cycle_secs = self.save_interval * self.step_secs + self.save_secs
        cycles, rest_secs = divmod(secs, cycle_secs)
        rest = min(self.save_interval, int(rest_secs / self.step_secs))
        return first - behind + int(cycles) * self.save_interval + rest

    def saved_step(self, step: int) -> int:
        """Step with which a job continues that had done ``step`` steps."""
        return step - step % self.save_interval if self.save_interval else 0


def replay(trace: Sequence[Failure], recovery: Recovery, secs: float) -> list[tuple[float, int]]:
    """Simulate a job under a trace.

    Args:
        trace: failures, in the order of time.
        recovery: costs of the way of saving.
        secs: length of the trace.

    Returns:
        Points of the curve of steps over seconds: where training begins, before and after each
        failure that meets it, and at the end.
    """
    points = [(0.0, 0)]
    since, first = 0.0, 0  # training begins at ``since`` with ``first`` steps done
    for failure in trace:
        if failure.secs > since:
            reached = recovery.steps_after(first, failure.secs - since)
            saved = recovery.saved_step(reached)
            points += [(since, first), (failure.secs, reached), (failure.secs, saved)]
            first = saved + 1  # the first step is part of the restart
        since = failure.secs + recovery.restart_secs[failure.kind]
    if secs > since:
        points += [(since, first), (secs, recovery.steps_after(first, secs - since))]
    else:
        points.append((secs, first - 1))
    return points


def simulate_preemptions(recovery: Recovery) -> dict[str, float]:
    """Total time over time without failures, if a node is lost at each of CheckFreq's intervals."""
    found = {}
    for name, gap_secs in _PREEMPTIONS_SECS.items():
        secs = _PREEMPTIONS * gap_secs
        trace = [Failure(number * gap_secs, "node", 0) for number in range(1, _PREEMPTIONS)]
        steps = replay(trace, recovery, secs)[-1][1]
        found[name] = secs / (steps * recovery.step_secs)
    return found


def simulate_scale(ranks: Sequence[int] = (256, 1024, 4096, 16_384)) -> list[dict[str, Any]]:
    """Progress of Llama-2 34B on H100 nodes over ten days, as shares of ideal progress.

    Nodes are lost at the published rate of Llama 3's training. Every way restarts in the same time;
    they differ in what is lost and in what saving costs. DeepSpeed writes the whole state while
    training waits, with the best interval of a search. An ideal asynchronous checkpoint costs no
    time, and is written as often as storage takes it. reft's cost of a step is that of ``has``.

    Args:
        ranks: numbers of devices, multiples of 32 (TP8 PP4).
    """
    cluster, secs = MACHINES["h100"], SCALE_DAYS * DAY_SECS
    rows = []
    for devices in ranks:
        training = Training(SHAPES["34b"], cluster, 8, 4, devices // 32, 8)
        prediction = predict(training)
        step_secs = prediction.step_secs
        nodes = devices // cluster.devices_per_node
        mtbf_secs = cluster.failures[0].mtbf_days * DAY_SECS / nodes
        traces = [
            draw_trace(seed, mtbf_secs, secs, nodes, ("node",)) for seed in range(SCALE_SEEDS)
        ]
        state_bytes = training.tensor * sum(map(training.state_bytes, range(training.stages)))
        save_secs = state_bytes / STORAGE_BYTES_PER_SEC
        reft_step_secs = step_secs * (1 + prediction.of(Variant.HAS).overhead)
        for restart_secs in RESTARTS_SECS:
            restart = {"node": restart_secs}
            ways = {
                "reft": Recovery(reft_step_secs, 1, 0.0, restart),
                "none": Recovery(step_secs, 0, 0.0, restart),
                "ideal_async": Recovery(step_secs, ceil(save_secs / step_secs), 0.0, restart),
                **{
                    f"deepspeed-{interval}": Recovery(step_secs, interval, save_secs, restart)
                    for interval in sorted({round(10 ** (power / 8)) for power in range(41)})
                },
            }
            shares = {
                way: fmean(replay(trace, recovery, secs)[-1][1] for trace in traces)
                * step_secs
                / secs
                for way, recovery in ways.items()
            }
            best = max(
                (way for way in shares if way.startswith("deepspeed")), key=shares.__getitem__
            )
            rows.append(
                {
                    "devices": devices,
                    "mtbf_secs": mtbf_secs,
                    "step_secs": step_secs,
                    "save_secs": save_secs,
                    "restart_secs": restart_secs,
                    "best_deepspeed": best,
                    "reft": shares["reft"],
                    "deepspeed": shares[best],
                    "ideal_async": shares["ideal_async"],
                    "none": shares["none"],
                }
            )
    return rows
