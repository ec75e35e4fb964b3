"""Which rank holds which (pipeline stage, replica, tensor slice). Pure.

DeepSpeed numbers the ranks row-major over an order of axes. The order decides which ranks are
data-parallel peers; when they sit on one node, a lost node takes a shard and its copy together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from reft.errors import ConfigError
from reft.grid import Coordinate, Degrees

# DeepSpeed's own order first, tensor slices adjacent (they talk most) before the rest.
AXES = ("pipe", "data", "model")
ORDERS: tuple[tuple[str, ...], ...] = tuple(
    sorted(permutations(AXES), key=lambda order: (order[-1] != "model", order != AXES, order))
)


@dataclass(frozen=True)
class Layout:
    """Degrees of a job and the order in which DeepSpeed numbers its ranks."""

    degrees: Degrees
    order: tuple[str, ...] = AXES

    @property
    def dims(self) -> tuple[int, ...]:
        sizes = {"pipe": self.degrees.pp, "data": self.degrees.dp, "model": self.degrees.tp}
        return tuple(sizes[axis] for axis in self.order)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a global rank (row-major over ``order``)."""
        at = dict(zip(self.order, map(int, np.unravel_index(rank, self.dims)), strict=True))
        return Coordinate(at["pipe"], at["data"], at["model"])

    def groups(self, axis: str) -> list[list[int]]:
        """Global ranks of every group along ``axis``, members in the order of that axis."""
        ranks = np.arange(self.degrees.world_size).reshape(self.dims)
        last = np.moveaxis(ranks, self.order.index(axis), -1)
        return [[int(rank) for rank in group] for group in last.reshape(-1, last.shape[-1])]

    def __str__(self) -> str:
        return f"{self.degrees}, rank order {'-'.join(self.order)}"


def choose_order(degrees: Degrees, nodes: Sequence[object]) -> tuple[str, ...]:
    """The axis order whose data-parallel groups spread over the most nodes.

    Ties go to tensor groups within a node, then to DeepSpeed's own order. Every rank computes the
    same from the same ``nodes``.
    """

    def quality(order: tuple[str, ...]) -> tuple[int, int]:
        layout = Layout(degrees, order)
        spread = min(len({nodes[rank] for rank in group}) for group in layout.groups("data"))
        split = sum(len({nodes[rank] for rank in group}) > 1 for group in layout.groups("model"))
        return -spread, split

    return min(ORDERS, key=quality)


def parse_order(text: str) -> tuple[str, ...]:
    order = tuple(text.replace(",", "-").split("-"))
    if sorted(order) != sorted(AXES):
        raise ConfigError(
            f"--rank-order is {text!r}; write 'auto' or pipe, data and model in some order, such as "
            "data-pipe-model"
        )
    return order
