"""P4: the tolerance is computed from the real placement; how likely a job survives follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.engine.nodes import NodeIdentity, declared_on_one_host, read_hosts, read_rack
from reft.errors import ConfigError, LayoutError
from reft.grid import ALIGNMENT_BYTES, Coordinate, Degrees, Section, Topology, ring_order
from reft.protect.codes import Scheme, survives
from reft.protect.placement import (
    Weibull,
    fatal_nodes,
    losses_within,
    node_survival,
    persist_interval_secs,
    place_group,
    protected_survival,
    surviving_schemes,
    tolerance,
    tolerance_left,
)
from reft.snapshot.plan import SectionSizes, make_shard_plan
from tests.protect.backends import schemes_for

node_lists = st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=7)


@given(node_lists)
def test_the_ring_visits_every_member_once(nodes: list[str]) -> None:
    assert sorted(ring_order(nodes)) == list(range(len(nodes)))


@given(node_lists)
def test_ring_neighbours_sit_on_distinct_nodes_where_that_is_possible(nodes: list[str]) -> None:
    ring = ring_order(nodes)
    most = max(nodes.count(n) for n in nodes)
    if len(nodes) > 1 and 2 * most <= len(nodes):
        for at, member in enumerate(ring):
            assert nodes[member] != nodes[ring[(at + 1) % len(ring)]]


def lose_everything(nodes: Sequence[str], scheme: Scheme) -> int:
    """The tolerance, by trying every loss of nodes."""
    placement = place_group(nodes, scheme.copies, scheme.parities)
    code = placement.code()
    holders = [set(placement.holders_of(m)) for m in range(len(nodes))]

    def survived(dead: tuple[str, ...]) -> bool:
        lost = {m for m, node in enumerate(nodes) if node in dead}
        return not any(h <= lost for h in holders) and survives(code, lost)

    distinct = sorted(set(nodes))
    counts = range(1, len(distinct) + 1)
    return next(n for n in counts if not all(map(survived, combinations(distinct, n)))) - 1


@pytest.mark.parametrize("size", range(2, 10))
def test_p4_what_is_known_without_trying_is_what_trying_finds(size: int) -> None:
    nodes = [f"n{d}" for d in range(size)]
    for scheme in schemes_for(size, size - 1):
        placement = place_group(nodes, scheme.copies, scheme.parities)
        assert (
            tolerance_left(nodes, placement)
            == lose_everything(nodes, scheme)
            == scheme.certain_losses
        )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=9), st.integers(0, 3), st.integers(0, 5)
)
def test_p4_members_that_share_nodes_are_judged_as_trying_judges_them(
    nodes: list[str], copies: int, parities: int
) -> None:
    scheme = Scheme(copies, parities)
    if scheme.why_no_room(len(nodes)) is None:
        found = fatal_nodes(nodes, place_group(nodes, copies, parities))
        assert len(found) - 1 == lose_everything(nodes, scheme)


def test_p4_large_groups_are_judged() -> None:
    """All 41,664 losses of three of 64 nodes, tried one by one, took ten seconds; six of 250 would take a year."""
    nodes = [f"n{d}" for d in range(250)]
    for parities in (1, 2, 3, 6):
        assert tolerance_left(nodes, place_group(nodes, 0, parities)) == parities
        assert tolerance_left(nodes, place_group(nodes, 1, parities)) == parities + 1
        assert tolerance_left([n[:-1] for n in nodes], place_group(nodes, 0, parities)) == 0


@given(node_lists, st.integers(0, 3))
def test_holders_and_kept_agree(nodes: list[str], copies: int) -> None:
    placement = place_group(nodes, copies)
    for member in range(len(nodes)):
        assert placement.kept_by(member)[0] == member
        for kept in placement.kept_by(member):
            assert member in placement.holders_of(kept)


def test_ranks_that_do_not_form_a_grid_are_refused() -> None:
    with pytest.raises(LayoutError, match="every coordinate"):
        Topology(Degrees(1, 2, 1), (Coordinate(0, 0, 0), Coordinate(0, 0, 0)), ("A", "B"))


def test_p4_what_survives_a_node_that_holds_several_members_is_found() -> None:
    """AEC restores one member, and a node of two takes two along: copies, or two parities, are needed."""

    def schemes(members: int, per_node: int) -> list[str]:
        degrees = Degrees(1, members, 1)
        nodes = tuple(f"n{i // per_node}" for i in range(members))
        return [str(s) for s in surviving_schemes(Topology(degrees, degrees.coordinates(), nodes))]

    assert schemes(4, 1) == ["arc", "arc+aec", "aec"]
    assert schemes(4, 2) == ["arc", "arc+aec", "rs:2"]
    assert schemes(6, 3) == ["arc", "arc+aec", "rs:3"]
    assert schemes(2, 1) == ["arc", "aec"]
    assert schemes(2, 2) == [], "one node: nothing survives it"
    assert schemes(300, 2) == ["arc", "arc+aec"], "two parities of so many members exceed the field"
    assert schemes(258, 1) == ["arc", "arc+aec", "aec"]


def test_p4_hosts_fail_not_launchers() -> None:
    places = [
        NodeIdentity("a-1", False, "a", "kernel-1"),
        NodeIdentity(
            "a-2", False, "a", "kernel-1"
        ),  # another launcher, or a container of the same name
        NodeIdentity("b-1", False, "b", "kernel-1"),  # a container with a name of its own
        NodeIdentity("a-1", False, "a", "kernel-2"),  # another host of the same name
        NodeIdentity("mine", True, "a", "kernel-1"),
        NodeIdentity("yours", True, "a", "kernel-1"),
    ]
    hosts = read_hosts(places)
    assert hosts == ("a", "a", "a", "a-kernel-2", "mine", "yours")
    assert declared_on_one_host(places) == ("mine", "yours")
    assert declared_on_one_host(places[:5]) == ()


@pytest.mark.parametrize(
    ("given", "pattern", "address", "rack"),
    [
        ("", "", "", ""),
        ("", "node", "node1", ""),
        ("", "switch.node", "leaf2.node1", "leaf2"),
        ("", "switch.switch.node", "core.leaf2.node1.example.org", "core.leaf2"),
        ("r12", "switch.node", "leaf2.node1", "r12"),
        ("r12", "", "", "r12"),
    ],
)
def test_the_rack_is_what_the_user_says_else_the_switches_that_slurm_knows(
    monkeypatch: pytest.MonkeyPatch, given: str, pattern: str, address: str, rack: str
) -> None:
    monkeypatch.setenv("REFT_RACK", given)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", address)
    assert read_rack() == rack


def test_p4_tolerance_counts_hosts() -> None:
    coordinates = tuple(Coordinate(0, dp, 0) for dp in range(2))
    apart = Topology(Degrees(1, 2, 1), coordinates, ("n0", "n1"))
    together = Topology(Degrees(1, 2, 1), coordinates, ("n0", "n1"), ("a", "a"))
    assert (tolerance(apart, 1, 0), tolerance(together, 1, 0)) == (1, 0)
    degrees = Degrees(2, 2, 1)
    packed = Topology(degrees, degrees.coordinates(), ("A", "B", "C", "C"))
    assert tolerance(packed, copies=1) == 0, "the job survives what its weakest group survives"
    assert together.local_ranks("n0") == (0,), "where memory lies is another matter"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=6), st.data())
def test_p4_what_is_left_is_tight(nodes: list[str], data: st.DataObject) -> None:
    """With members gone already: every further loss of that many nodes is survived, some loss of one more is not."""
    fitting = [Scheme(0, 0), *schemes_for(len(nodes), min(3, len(nodes) - 1))]
    scheme = data.draw(st.sampled_from(fitting))
    lost = data.draw(st.sets(st.integers(0, len(nodes) - 1)))
    placement = place_group(nodes, scheme.copies, scheme.parities)

    def recovers(more: Sequence[str]) -> bool:
        gone = lost | {m for m, node in enumerate(nodes) if node in more}
        held = all(any(h not in gone for h in placement.holders_of(m)) for m in range(len(nodes)))
        return held and survives(placement.code(), gone)

    left = sorted({node for m, node in enumerate(nodes) if m not in lost})
    claimed = tolerance_left(nodes, placement, lost)
    assert claimed >= -1
    for count in range(claimed + 1):
        assert all(recovers(more) for more in combinations(left, count))
    assert not left or not all(recovers(more) for more in combinations(left, claimed + 1))


HOUR = 3600.0


def test_published_values() -> None:
    one = {size: losses_within(size, 1) for size in (4, 8, 16)}
    assert protected_survival(0.97, 16, one[4]) == pytest.approx(0.9794, abs=5e-5)
    assert protected_survival(0.99, 64, one[8]) == pytest.approx(0.9787, abs=5e-5)
    assert protected_survival(0.999, 64, one[16]) == pytest.approx(0.99952, abs=5e-6)
    assert Weibull(5 * HOUR, 1.3).survival(HOUR) == pytest.approx(math.exp(-(0.2**1.3)))


@settings(max_examples=50)
@given(
    st.floats(0.5, 0.99999),
    st.floats(1e3, 1e9),
    st.floats(0.5, 3),
    st.tuples(st.integers(2, 8), st.integers(1, 30)),
    st.integers(0, 2),
)
def test_the_advised_interval_meets_the_target_and_no_longer_one_does(
    target: float, scale: float, shape: float, cluster: tuple[int, int], tolerance: int
) -> None:
    size, groups = cluster
    causes = (Weibull(scale, shape), Weibull(3 * scale))
    survived = losses_within(size, min(tolerance, size - 1))
    found = persist_interval_secs(target, causes, size * groups, survived)
    assert protected_survival(node_survival(found, causes), size * groups, survived) >= target
    later = protected_survival(node_survival(found * 1.001, causes), size * groups, survived)
    assert later < target


@pytest.mark.parametrize("target", [0.0, 1.0, -1, 2])
def test_an_impossible_target_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.999"):
        persist_interval_secs(target, (Weibull(HOUR),), 8, losses_within(4, 1))


@st.composite
def plans(draw: st.DrawFn):
    count = draw(st.integers(1, 6))
    sizes = SectionSizes(
        replicated_bytes=draw(st.integers(0, 100_000)),
        owned_bytes=tuple(draw(st.integers(0, 30_000)) for _ in range(count)),
        host_bytes=tuple(draw(st.integers(1, 9_000)) for _ in range(count)),
    )
    placement = place_group([f"n{i}" for i in range(count)], draw(st.integers(0, 3)))
    return make_shard_plan(sizes, placement, draw(st.sampled_from([64, 4096, 65536])))


@given(plans())
def test_own_blocks_cover_every_image_exactly(plan) -> None:
    replicated = sorted(
        (b.block.start_bytes, b.block.nbytes)
        for m in plan.members
        for b in m.own
        if b.key.section is Section.REPLICATED
    )
    position = 0
    for start, nbytes in replicated:
        assert start == position
        assert 0 < nbytes <= plan.block_bytes
        position += nbytes
    assert position == plan.sizes.replicated_bytes
    for member in plan.members:
        for section, total in (
            (Section.OWNED, plan.sizes.owned_bytes),
            (Section.HOST, plan.sizes.host_bytes),
        ):
            mine = [b.block for b in member.own if b.key.section is section]
            assert sum(b.nbytes for b in mine) == total[member.member]
            assert [b.start_bytes for b in mine] == [
                sum(x.nbytes for x in mine[:i]) for i in range(len(mine))
            ]


@given(plans())
def test_shards_are_equal_to_within_one_alignment_unit(plan) -> None:
    shards = [
        sum(b.block.nbytes for b in m.own if b.key.section is Section.REPLICATED)
        for m in plan.members
    ]
    assert max(shards) - min(shards) <= 2 * ALIGNMENT_BYTES


@given(plans())
def test_redundant_blocks_are_the_successors_own_blocks(plan) -> None:
    for member in plan.members:
        wanted = [
            b.block for k in plan.placement.kept_by(member.member)[1:] for b in plan.members[k].own
        ]
        assert [b.block for b in member.redundant] == wanted


@given(plans())
def test_blocks_lie_apart_in_the_arena(plan) -> None:
    for member in plan.members:
        end = 0
        for placed in sorted(member.blocks, key=lambda b: b.arena_offset):
            assert placed.arena_offset >= end
            assert placed.arena_offset % ALIGNMENT_BYTES == 0
            end = placed.arena_offset + placed.block.nbytes
        assert end <= member.data_bytes


@pytest.mark.parametrize("block_bytes", [0, -64, 100])
def test_odd_block_sizes_are_refused(block_bytes: int) -> None:
    sizes = SectionSizes(1, (0,), (1,))
    with pytest.raises(ValueError, match="multiple of 64"):
        make_shard_plan(sizes, place_group(["A"], 0), block_bytes)
