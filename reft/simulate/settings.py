"""The jobs that ``reft simulate has`` predicts, and what was published about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from reft.simulate.footprint import Footprint, footprint
from reft.simulate.hardware import H100, MI250X, V100
from reft.simulate.training import Training
from reft.simulate.variants import Predictions, Variant

MICRO_BATCHES = 8
"""Per pipeline and step: twice the stages. Not published; it sets the part of idle time."""


@dataclass(frozen=True)
class Experiment:
    """Jobs that belong together."""

    title: str
    trainings: tuple[Training, ...]


def experiments(micro_batches: int = MICRO_BATCHES) -> tuple[Experiment, ...]:
    """The paper's scale, weak scaling, Frontier, and the scale of today's largest jobs.

    Published are the models, the number of devices and the degrees of 1.3B (TP4 PP4) and 34B (TP8
    PP4 DP16); the other degrees are chosen alike.
    """

    def job(model: str, machine: str, tensor: int, stages: int, data: int) -> Training:
        return Training(model, _MACHINES[machine], tensor, stages, data, micro_batches)

    return (
        Experiment(
            "Llama-2 on 512 V100",
            (
                job("1.3b", "v100", 4, 4, 32),
                job("2.7b", "v100", 4, 4, 32),
                job("6.7b", "v100", 4, 4, 32),
                job("34b", "v100", 8, 4, 16),
            ),
        ),
        Experiment("weak scaling", tuple(job("2.7b", "v100", 4, 4, data) for data in (4, 8, 16, 32))),
        Experiment(
            "512 devices of Frontier", (job("6.7b", "mi250x", 4, 4, 32), job("34b", "mi250x", 8, 4, 16))
        ),
        Experiment("larger than the paper", (job("34b", "h100", 8, 4, 128), job("34b", "h100", 8, 4, 512))),
    )


_MACHINES = {"v100": V100, "mi250x": MI250X, "h100": H100}


class Comparison(NamedTuple):
    """A published value and what the model says of the same."""

    what: str
    published: str
    simulated: str


def comparisons(results: Sequence[Predictions]) -> tuple[Comparison, ...]:
    """Every published value that these jobs speak to; none are known for MI250X and H100."""
    v100 = [r for r in results if r.training.machine is V100]
    large = [r for r in v100 if r.training.devices == PUBLISHED_DEVICES]
    found = []
    if v100:
        worst = max(r.of(Variant.HAS).overhead for r in v100)
        found.append(Comparison("overhead of HAS in weak scaling", "below 3 %", f"at most {worst:.1%}"))
    for variant in (Variant.HOST, Variant.HOST_DEVICE) if large else ():
        equal, whole = (
            _range([r.has_is_better_by(r.of(variant, unsharded)) for r in large])
            for unsharded in (False, True)
        )
        found.append(
            Comparison(
                f"iteration time that HAS saves against {variant}, {PUBLISHED_DEVICES} V100",
                "more than 17 %",
                f"{equal} with equal bytes, {whole} if the other copies the whole state",
            )
        )
    if large:
        longest = max(1.0 + r.of(Variant.INTER_NODE).overhead for r in large)
        what = "iteration with protection between nodes, against without"
        found.append(Comparison(what, "up to 6.63 times", f"up to {longest:.2f} times"))
    return tuple(found)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1%} to {max(values):.1%}"


PUBLISHED_DEVICES = 512


# ---- bytes ----


@dataclass(frozen=True)
class ByteRow:
    """Published gigabytes per device and snapshot, and the same computed.

    The published values count the model's nominal parameters, evenly over stages and tensor-parallel ranks.

    Attributes:
        model: nominal size. parameters: as a number. tensor, stages, data: degrees.
        published: by field of :class:`Footprint`, as printed.
    """

    model: str
    parameters: float
    tensor: int
    stages: int
    data: int
    published: dict[str, str]

    @property
    def computed(self) -> Footprint:
        return footprint(self.parameters, self.tensor, self.stages, self.data)

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """(what, computed with as many digits as published, published), all in GB."""
        for field in fields(Footprint):
            nbytes = getattr(self.computed, field.name)
            text = self.published.get(field.name, "")
            digits = len(text.partition(".")[2]) if text else 3
            # Half up, as people round: 1.1375 is printed as 1.138.
            unit = Decimal(1).scaleb(-digits)
            rounded = (Decimal(round(nbytes)) / 10**9).quantize(unit, ROUND_HALF_UP)
            yield field.name, str(rounded), text


BYTES = (
    ByteRow("1.3b", 1.3e9, 4, 4, 8, {"full": "1.138", "sharded": "0.142", "arc": "0.284", "aec": "0.1625"}),
    ByteRow(
        "34b",
        34e9,
        8,
        4,
        16,
        {
            "full": "14.88",
            "sharded": "0.930",
            "arc": "1.859",
            "aec": "0.992",
            "zero1_model": "0.133",
            "zero1_optimizer": "0.797",
            "aor_gradients": "0.266",
        },
    ),
)
