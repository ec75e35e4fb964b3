"""What a recovery moves between nodes, against the fewest bytes possible, by the plans that it makes."""

from __future__ import annotations

import sys

import pytest

from reft.config import parse_block
from reft.grid import Section
from reft.protect.codes import Scheme
from reft.protect.placement import place_group
from reft.snapshot.plan import SectionSizes, make_shard_plan
from tests.test_wheel import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import moved_bytes
from moved_bytes import (
    OWNED_BYTES,
    REPLICATED_BYTES,
    SCHEMES,
    Memory,
    measure,
    node_names,
    place_ranks,
    recover,
)

STATE = REPLICATED_BYTES + OWNED_BYTES
CASES = [(name, dp) for name in SCHEMES for dp in (2, 3, 4, 7) if name != "rs:2" or dp > 2]


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the benchmark has, which plans for minutes."""
    monkeypatch.setattr(moved_bytes, "BLOCK_BYTES", 1 << 15)


@pytest.mark.parametrize(("name", "dp"), CASES)
def test_the_fewest_bytes_move_but_for_those_that_are_read_to_decode(name: str, dp: int) -> None:
    found = measure(dp, Scheme.parse(name))
    replaced, leaves = found["replaced"], found["the last leaves"]
    assert replaced["moved"] - replaced["decoding"] == pytest.approx(replaced["minimum"])
    assert replaced["decoding"] * STATE <= REPLICATED_BYTES
    # Partitions begin and end within blocks, which move whole.
    edges = 2 * dp * moved_bytes.BLOCK_BYTES / STATE
    assert leaves["moved"] - leaves["decoding"] <= leaves["minimum"] + edges
    assert found["joined"]["moved"] <= found["joined"]["minimum"] + edges
    assert all(each["moved"] >= each["minimum"] for each in found.values())
    by_name = found["replaced, ranks by name"]["moved"]
    assert by_name > replaced["moved"] or all_on_each(name, dp)


def all_on_each(name: str, dp: int) -> bool:
    """Whether every node holds the partitions of all members."""
    scheme = Scheme.parse(name)
    return dp <= scheme.copies + scheme.parities + 1


@pytest.mark.parametrize("dp", range(2, 17))
@pytest.mark.parametrize("name", SCHEMES)
def test_the_blocks_of_weights_are_spread_within_one(name: str, dp: int) -> None:
    """1.3 billion parameters, and blocks of the default size."""
    scheme = Scheme.parse(name)
    if scheme.why_no_room(dp):
        return
    sizes = SectionSizes(2_600_000_000, (0,) * dp, (64,) * dp)
    placement = place_group(node_names(dp), scheme.copies, scheme.parities)
    plan = make_shard_plan(sizes, placement, parse_block({}).block_bytes)
    counts = [sum(b.key.section is Section.REPLICATED for b in m.own) for m in plan.members]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", SCHEMES)
def test_a_block_comes_from_another_rack_only_where_the_own_one_has_none(name: str) -> None:
    nodes = (*node_names(5), "new")
    racks = {node: f"rack{number % 2}" for number, node in enumerate(nodes)}
    memory = Memory(6, Scheme.parse(name), frozenset({"n5"}))
    topology = place_ranks(nodes, racks)
    held = {
        (racks[record.node], entry.key)
        for record in memory.records()
        for entry in record.header.entries
    }
    near = far = 0
    for at, fetches in recover(memory, topology).fetches.items():
        own = racks[topology.node_of(at)]
        for fetch in fetches:
            if (own, fetch.key) in held:
                assert racks[fetch.node] == own
                near += 1
            elif fetch.key.section is not Section.HOST:
                far += 1
    assert near
    assert far
