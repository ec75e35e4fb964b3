"""The jobs that ``python -m benchmarks.simulator has`` predicts, and the bytes that they copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_UP, Decimal

from reft.tools.planning.model import CLUSTERS, SHAPES, Training

from .footprint import Footprint, footprint

_DEVICES = {"v100": "V100", "frontier": "MI250X", "a100": "A100", "h100": "H100"}
MACHINES = {
    name: CLUSTERS[name].model_copy(update={"name": device}) for name, device in _DEVICES.items()
}
"""The known clusters, by the names of their devices."""
V100, MI250X = MACHINES["v100"], MACHINES["frontier"]
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
        return Training(SHAPES[model], MACHINES[machine], tensor, stages, data, micro_batches)

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
        Experiment(
            "weak scaling", tuple(job("2.7b", "v100", 4, 4, data) for data in (4, 8, 16, 32))
        ),
        Experiment(
            "512 devices of Frontier",
            (job("6.7b", "frontier", 4, 4, 32), job("34b", "frontier", 8, 4, 16)),
        ),
        Experiment(
            "larger than the paper", (job("34b", "h100", 8, 4, 128), job("34b", "h100", 8, 4, 512))
        ),
    )


# ---- bytes ----


@dataclass(frozen=True)
class ByteRow:
    """Gigabytes per device and snapshot, derived by hand from the paper's formulas, and the same
    computed.

    No publication prints them. They count the model's nominal parameters, evenly over stages and
    tensor-parallel ranks.

    Attributes:
        model: nominal size. parameters: as a number. tensor, stages, data: degrees.
        derived: by field of :class:`Footprint`, with the digits of REFERENCE 1.10.
    """

    model: str
    parameters: float
    tensor: int
    stages: int
    data: int
    derived: dict[str, str]

    @property
    def computed(self) -> Footprint:
        return footprint(self.parameters, self.tensor, self.stages, self.data)

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """(what, computed with as many digits as derived, derived), all in GB."""
        for field in fields(Footprint):
            nbytes = getattr(self.computed, field.name)
            text = self.derived.get(field.name, "")
            digits = len(text.partition(".")[2]) if text else 3
            # Half up, as people round: 1.1375 is printed as 1.138.
            unit = Decimal(1).scaleb(-digits)
            rounded = (Decimal(round(nbytes)) / 10**9).quantize(unit, ROUND_HALF_UP)
            yield field.name, str(rounded), text


BYTES = (
    ByteRow(
        "1.3b",
        1.3e9,
        4,
        4,
        8,
        {"full": "1.138", "sharded": "0.142", "arc": "0.284", "aec": "0.1625"},
    ),
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
