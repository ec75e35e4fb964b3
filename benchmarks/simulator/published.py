"""What the REFT paper prints, and the model's answer to the same question. Nothing here was fitted.

Only figures that a publication prints are called published; what follows from the paper's formulas,
such as bytes per device, is derived (:mod:`.settings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from reft.config import Variant
from reft.policy.loads import GRADIENT_BYTES, MODEL_BYTES, OPTIMIZER_BYTES
from reft.tools.planning.model import Training

from .costs import Costs
from .pipeline import simulate
from .schedules import one_f_one_b
from .settings import MI250X, V100
from .variants import Predictions, simulate_copying

DEVICES = 512
"""Of the paper's large testbeds."""
FRONTIER_MODEL = "34b"


class Comparison(NamedTuple):
    """A published value and what the model says of the same."""

    what: str
    published: str
    simulated: str


def comparisons(results: Sequence[Predictions]) -> tuple[Comparison, ...]:
    """Every published value that these jobs speak to; none are known for H100."""
    return (*_on_v100(results), *_on_frontier(results))


def _on_v100(results: Sequence[Predictions]) -> Iterator[Comparison]:
    v100 = [r for r in results if r.training.machine is V100]
    large = [r for r in v100 if r.training.devices == DEVICES]
    if v100:
        worst = max(r.of(Variant.HAS).overhead for r in v100)
        yield Comparison("overhead of HAS in weak scaling", "below 3 %", f"at most {worst:.1%}")
    for variant in (Variant.HOST, Variant.HOST_DEVICE) if large else ():
        equal, whole = (
            _range([r.has_is_better_by(r.of(variant, unsharded)) for r in large])
            for unsharded in (False, True)
        )
        yield Comparison(
            f"iteration time that HAS saves against {variant}, {DEVICES} V100",
            "more than 17 %",
            f"{equal} with equal bytes, {whole} if the other copies the whole state",
        )
    if large:
        longest = max(sending_share(r) for r in large)
        what = "traffic of protection between nodes: its time over that of the iteration"
        yield Comparison(what, "up to 6.63 times", f"up to {longest:.2f} times")


def sending_share(result: Predictions) -> float:
    """Time in which the whole state goes over a device's share of the network, over that of an
    iteration."""
    sent = result.of(Variant.INTER_NODE).nbytes
    return sent / result.training.machine.network_share_bytes_per_sec / result.step_secs


def _on_frontier(results: Sequence[Predictions]) -> Iterator[Comparison]:
    """34B on 512 GCDs: iterations without and with protection, plain and under ZeRO-1."""
    for result in results:
        training = result.training
        if (training.machine, training.shape.name, training.devices) != (
            MI250X,
            FRONTIER_MODEL,
            DEVICES,
        ):
            continue
        has = result.of(Variant.HAS)
        yield Comparison(f"{training.name}: an iteration", "6.26 s", f"{result.step_secs:.2f} s")
        yield Comparison(
            "  with ARC", "6.32 s (0.96 %)", f"{has.step_secs:.2f} s ({has.overhead:.2%})"
        )
        plain, protected = zero_1_secs(training)
        yield Comparison("  under ZeRO-1", "6.59 s", f"{plain:.2f} s")
        yield Comparison(
            "  under ZeRO-1 with AOR",
            "6.63 s (0.61 %)",
            f"{protected:.2f} s ({protected / plain - 1:.2%})",
        )


def zero_1_secs(training: Training) -> tuple[float, float]:
    """Iterations under ZeRO-1, without snapshots and with HAS of what AOR copies: model shard and
    its copy, own partition, and the gradients of the neighbour's."""
    zero_1 = replace(training, zero_1=True)
    pipeline = one_f_one_b(training.stages, training.micro_batches)
    plain = simulate(pipeline, Costs.of(zero_1))
    part = (2 * MODEL_BYTES + OPTIMIZER_BYTES + GRADIENT_BYTES) / training.data
    copied = [part * training.stage_parameters(p) for p in range(training.stages)]
    protected = simulate_copying(Variant.HAS, zero_1, plain, copied, pipeline)
    return plain.makespan_secs, protected.makespan_secs


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1%} to {max(values):.1%}"
