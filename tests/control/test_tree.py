"""Collectives along the tree: every rank gets the same, or hears that there is nothing to get."""

from __future__ import annotations

import socket

import pytest

from reft.control.overlay import Overlay
from reft.control.transport import Limits
from reft.control.tree import FANOUT, Tree, children_of, parent_of

from .ranks import DEADLINE_SECS, on_all, per_node

SHAPES = [["a"], per_node(1, 2), per_node(2, 1), per_node(3, 4), per_node(20, 2), per_node(1, 20)]


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 300, 2048])
def test_every_place_but_the_first_is_a_child_of_one(size: int) -> None:
    children = [child for place in range(size) for child in children_of(place, size)]
    assert children == list(range(1, size))
    assert all(child in children_of(parent_of(child), size) for child in children)
    assert max(len(children_of(place, size)) for place in range(size)) <= FANOUT


@pytest.mark.parametrize("overlays", SHAPES, indirect=True, ids=lambda nodes: f"{len(nodes)}")
def test_collectives_give_every_rank_the_same(overlays: list[Overlay]) -> None:
    world_size = len(overlays)
    for _ in range(3):
        found = on_all(lambda r: overlays[r].tree.reduce_min([r + 1, -r, 2**62]), world_size)
        assert found == [[1, 1 - world_size, 2**62]] * world_size
        found = on_all(lambda r: overlays[r].tree.gather(bytes([r]) * r), world_size)
        assert found == [[bytes([r]) * r for r in range(world_size)]] * world_size
    assert max(len(overlay.tree.links) for overlay in overlays) <= 1 + 2 * FANOUT


def test_a_tree_of_one_rank_has_nobody_to_ask() -> None:
    alone = Tree(0, 1, None, (), Limits(DEADLINE_SECS))
    assert alone.reduce_min([3, 4]) == [3, 4]
    assert alone.gather(b"x") == [b"x"]
    assert alone.links == ()
    assert socket.gethostname()
