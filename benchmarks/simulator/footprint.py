"""How many bytes one device copies for a snapshot, by kind of protection (REFT; REFERENCE 1.4 to
1.6).

Mixed precision with Adam keeps 14 bytes a parameter: 2 of the model, 12 of master, momentum and
variance.
"""

from __future__ import annotations

from dataclasses import dataclass

from reft.errors import ConfigError
from reft.policy.loads import GRADIENT_BYTES, MODEL_BYTES, OPTIMIZER_BYTES


@dataclass(frozen=True)
class Footprint:
    """Bytes per device and snapshot. Stages are taken to be equal.

    Attributes:
        full: the device's whole state, unsharded.
        sharded: its 1/D of the state that is equal on all data-parallel peers.
        arc: shard and the copy of the next member's shard.
        aec: shard and parity.
        zero1_model: with ZeRO-1, its 1/D of the model.
        zero1_optimizer: and the optimizer partition that it alone holds.
        aor_gradients: and the gradients from which its neighbour's partition is recomputed.
    """

    full: float
    sharded: float
    arc: float
    aec: float
    zero1_model: float
    zero1_optimizer: float
    aor_gradients: float


def footprint(parameters: float, tensor: int, stages: int, data: int) -> Footprint:
    """Bytes for a model of ``parameters`` on TP x PP x DP devices.

    Raises:
        ConfigError: a degree below 1, or no data-parallel peer to protect with.
    """
    if min(tensor, stages) < 1 or data < 2:
        raise ConfigError(
            f"protection needs at least two data-parallel peers, and degrees are at least 1; "
            f"got TP {tensor}, PP {stages}, DP {data}"
        )
    here = parameters / (tensor * stages)
    full = (MODEL_BYTES + OPTIMIZER_BYTES) * here
    return Footprint(
        full=full,
        sharded=full / data,
        arc=2 * full / data,
        aec=full / (data - 1),
        zero1_model=MODEL_BYTES * here / data,
        zero1_optimizer=OPTIMIZER_BYTES * here / data,
        aor_gradients=GRADIENT_BYTES * here / data,
    )
