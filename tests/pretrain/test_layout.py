"""Where the ranks go, and which layouts are refused."""

from __future__ import annotations

import pytest

from examples.llama.model_config import check_model, degrees_for, load_model
from reft.errors import ConfigError
from reft.grid import Degrees
from reft.tools.planning.job import (
    AXES,
    ORDERS,
    JobLayout,
    choose_order,
    parse_order,
)


def nodes(count: int, per_node: int) -> list[int]:
    return [rank // per_node for rank in range(count * per_node)]


@pytest.mark.parametrize("order", ORDERS)
def test_coordinates_are_those_of_deepspeeds_topology(order: tuple[str, ...]) -> None:
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology").ProcessTopology
    layout = JobLayout(Degrees(2, 3, 4), order)
    theirs = topology(axes=list(order), dims=list(layout.dims))
    for rank in range(24):
        at, coord = layout.coordinate(rank), theirs.get_coord(rank)
        assert (at.pp, at.dp, at.tp) == (coord.pipe, coord.data, coord.model)
    for axis in AXES:
        assert sorted(map(sorted, layout.groups(axis))) == sorted(
            map(sorted, theirs.get_axis_comm_lists(axis))
        )


@pytest.mark.parametrize(
    ("degrees", "places"),
    [
        (Degrees(2, 2, 1), nodes(4, 1)),
        (Degrees(2, 2, 1), nodes(2, 2)),
        (Degrees(4, 2, 1), nodes(4, 2)),
        (Degrees(1, 4, 2), nodes(4, 2)),
        (Degrees(2, 4, 8), nodes(8, 8)),
        (Degrees(4, 16, 8), nodes(64, 8)),
    ],
)
def test_replicas_sit_on_different_nodes_and_slices_on_one(
    degrees: Degrees, places: list[int]
) -> None:
    layout = JobLayout(degrees, choose_order(degrees, places))
    for group in layout.groups("data"):
        assert len({places[rank] for rank in group}) == degrees.dp
    for group in layout.groups("model"):
        assert len({places[rank] for rank in group}) == 1


def test_impossible_layouts_say_what_to_change() -> None:
    assert degrees_for(12, 2, 2) == Degrees(2, 3, 2)
    with pytest.raises(
        ConfigError, match=r"found 6 processes; --pp 2 x --tp 2 needs a multiple of 4"
    ):
        degrees_for(6, 2, 2)
    with pytest.raises(ConfigError, match=r"found 8 processes; .*--dp 3 needs exactly 6"):
        degrees_for(8, 2, 1, 3)
    with pytest.raises(ConfigError, match=r"found 2 processes; --pp 4"):
        degrees_for(2, 4, 1)
    with pytest.raises(ConfigError, match="--pp is 0"):
        degrees_for(2, 0, 1)
    with pytest.raises(ConfigError, match="4 layers, but --pp 5"):
        check_model(load_model("tiny"), Degrees(5, 1, 1))
    with pytest.raises(ConfigError, match="2 key-value heads, not divisible by --tp 4"):
        check_model(load_model("tiny"), Degrees(1, 1, 4))
    with pytest.raises(ConfigError, match="321 vocabulary rows"):
        check_model(load_model("tiny", {"vocab_size": 321}), Degrees(1, 1, 2))
    with pytest.raises(ConfigError, match="--rank-order is 'data-pipe'"):
        parse_order("data-pipe")
    check_model(load_model("34b"), Degrees(4, 16, 8))
