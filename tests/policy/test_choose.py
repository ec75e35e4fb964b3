"""The choice of a protection: what it claims holds, and nothing cheaper would do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.config import parse_block
from reft.errors import ConfigError
from reft.grid import Degrees, Topology
from reft.memory.arena import reserved_bytes
from reft.policy import choice
from reft.policy.choose import Alternative, ChoiceInputs, choose
from reft.policy.loads import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    LinkRates,
    PartitionSurvival,
    RankSections,
    group_loads,
)
from reft.policy.switching import MemoryGuard
from reft.protect.codes import Scheme
from reft.protect.placement import ladder, place_group, tolerance
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state.adapters import StateAdapter
from tests.protect.backends import schemes_for

MIB = 2**20


def job(
    nodes: list[str],
    replicated: int = 64 * MIB,
    owned: int = 0,
    *,
    stages: int = 1,
    memory: int | None = None,
) -> ChoiceInputs:
    """``stages`` stages of one sharding group each, member d of every group on ``nodes[d]``."""
    degrees = Degrees(stages, len(nodes), 1)
    where = tuple(nodes[c.dp] for c in degrees.coordinates())
    return ChoiceInputs(
        Topology(degrees, degrees.coordinates(), where),
        (RankSections(replicated, owned, 2**16),) * degrees.world_size,
        memory_bytes=None if memory is None else dict.fromkeys(nodes, memory),
    )


def apart(count: int) -> list[str]:
    return [f"n{d}" for d in range(count)]


class OffloadedAdapter(StateAdapter):
    """Masters and moments in host memory; the first step is yet to be made."""

    steps_exactly = False

    def __init__(self) -> None:
        pass

    def expected_bytes(self) -> tuple[int, int]:
        return 64 * MIB, 96 * MIB

    def coming_host_bytes(self) -> int:
        return 100 * MIB


@pytest.mark.parametrize(("limit", "usable"), [(None, 700), (300, 300), (900, 700)])
def test_memory_that_training_will_take_is_not_for_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, usable: int
) -> None:
    """Both ranks of the node make their moments there with the first step."""
    monkeypatch.setattr(choice, "free_bytes", lambda directory: 1000 * MIB)
    block: dict[str, Any] = {"enabled": True, "memory_margin_bytes": 100 * MIB}
    config = parse_block(block | ({} if limit is None else {"memory_limit_bytes": limit * MIB}))
    control: Any = SimpleNamespace(gather_ints=lambda row: [row, row])
    copies: Any = SimpleNamespace(asynchronous=True)
    where = job(["n0", "n0"]).topology
    facts = choice.JobFacts(config, where, control, OffloadedAdapter(), copies, tmp_path, ())
    assert choice.choice_inputs(facts).memory_bytes == {"n0": usable * MIB}


# ---- what an alternative costs ----


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["none", "arc", "aec", "arc:2", "rs:2", "arc+aec", "rs:3"]),
    st.integers(4, 8),
    st.builds(
        RankSections, st.integers(0, 40 * MIB), st.integers(0, 9 * MIB), st.integers(0, 2**18)
    ),
    st.sampled_from(PartitionSurvival),
    st.integers(0, 20),
)
def test_p9_no_rank_reserves_more_than_was_predicted(
    text: str, size: int, sections: RankSections, owned_by: PartitionSurvival, groups: int
) -> None:
    """Against the real plan of the snapshots; and hardly less, or the prediction would refuse what fits."""
    scheme, block_bytes, arenas = Scheme.parse(text), MIB, 2
    placement = place_group(apart(size), scheme.copies, scheme.parities)
    owned, host = sections.owned_bytes, sections.host_bytes
    gradients = owned // OPTIMIZER_BYTES * GRADIENT_BYTES + 64 * groups
    captured = (gradients,) * size if owned_by is PartitionSurvival.AOR and owned else ()
    sizes = SectionSizes(sections.replicated_bytes, (owned,) * size, (host,) * size, captured)
    real = make_shard_plan(sizes, placement, block_bytes)
    ranks = [sections] * size
    loads = group_loads(
        ranks, placement.ring, scheme, owned_by, arenas=arenas, block_bytes=block_bytes
    )
    for member, load in zip(real.members, loads, strict=True):
        reserved = arenas * reserved_bytes(member.data_bytes, len(member.blocks))
        assert reserved <= load.memory_bytes
        assert load.memory_bytes <= 1.05 * reserved + arenas * 2**16
        parity = sum(b.block.nbytes for b in member.parity)
        copies = sum(b.block.nbytes for b in member.redundant if b.key.section == "replicated")
        assert parity + copies <= load.redundant_bytes
        assert sum(b.block.nbytes for b in member.gradients) <= load.gradient_bytes


def test_aor_moves_gradients_of_the_peer_instead_of_sending_partitions() -> None:
    parameters = 10**6
    sections = [RankSections(0, OPTIMIZER_BYTES * parameters, 0)] * 4
    peer, aor = (
        group_loads(sections, range(4), Scheme(1), way, arenas=2, block_bytes=MIB)[0]
        for way in (PartitionSurvival.PEER, PartitionSurvival.AOR)
    )
    assert aor.gradient_bytes == pytest.approx(GRADIENT_BYTES * parameters, abs=2**13)
    assert aor.sent_bytes == 0
    # The peer's partition is in both arenas either way, and what it is made from beside it.
    more = aor.memory_bytes - peer.memory_bytes
    assert more == pytest.approx(2 * GRADIENT_BYTES * parameters, abs=2**16)


# ---- the choice ----

situations = st.builds(
    job,
    st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=6),
    st.integers(0, 64 * MIB),
    st.sampled_from([0, 0, 12 * 2**18]),
    stages=st.integers(1, 2),
    memory=st.sampled_from([None, 10 * MIB, 60 * MIB, 200 * MIB, 2000 * MIB]),
)


def protects(situation: ChoiceInputs, alternative: Alternative) -> int:
    """The tolerance of what a job would really keep, from the code that the hook uses."""
    return tolerance(situation.topology, alternative.scheme.copies, alternative.scheme.parities)


@settings(max_examples=80, deadline=None)
@given(situations, st.integers(0, 3), st.booleans())
def test_p4_the_choice_fits_survives_what_any_alternative_does_and_is_the_cheapest(
    situation: ChoiceInputs, wanted: int, aor: bool
) -> None:
    choice = choose(situation, wanted, recompute=aor)
    chosen = choice.chosen
    assert chosen.available
    assert all(a.tolerance == protects(situation, a) for a in choice.alternatives)
    usable = [a for a in choice.alternatives if a.available and a.fits_memory]
    if not usable:
        assert not choice.reached
        assert "more of host memory" in " ".join(choice.needed)
        return
    assert chosen.fits_memory
    reachable = max(a.tolerance for a in usable)
    assert chosen.tolerance >= min(wanted, reachable)
    for other in usable:
        if other.tolerance >= min(wanted, reachable):
            assert chosen.busiest.moved_bytes <= other.busiest.moved_bytes
    assert choice.reached == (reachable >= wanted)
    assert bool(choice.needed) == (not choice.reached)


@pytest.mark.parametrize("size", range(2, 7))
def test_nothing_of_the_family_is_forgotten(size: int) -> None:
    evaluated = {a.scheme for a in choose(job(apart(size)), 2, beyond=1).alternatives}
    assert evaluated == {Scheme(), *schemes_for(size, 3)}


@pytest.mark.parametrize(
    ("size", "wanted", "name"),
    [(2, 1, "arc"), (4, 0, "none"), (4, 1, "aec"), (8, 1, "aec"), (8, 2, "rs:2"), (8, 3, "rs:3")],
)
def test_with_a_node_each_the_smallest_code_is_chosen(size: int, wanted: int, name: str) -> None:
    choice = choose(job(apart(size)), wanted)
    assert choice.chosen.name == name
    assert choice.reached


def test_members_of_a_node_are_lost_together_and_that_takes_more_than_one_parity() -> None:
    choice = choose(job(["a", "a", "b", "b", "c", "c", "d", "d"]), 1)
    assert choice.of("aec").tolerance == 0
    assert choice.chosen.name == "rs:2"
    assert "the loss of a is fatal" in choice.why_not_chosen(choice.of("aec"))


def test_co_located_members_survive_nothing_and_the_message_says_what_to_do() -> None:
    choice = choose(job(["a"] * 4, stages=2), 1)
    assert choice.chosen.tolerance == 0
    assert not choice.reached
    text = str(choice)
    assert "sit on 1 node(s); put them on at least 2" in text
    assert "--rank-order across-nodes" in text


def test_too_few_replicas_are_told_how_many_are_needed() -> None:
    assert "at least 2 are needed" in str(choose(job(apart(1)), 1))
    choice = choose(job(apart(3)), 3)
    assert choice.chosen.tolerance == 2
    assert "at least 4 are needed" in str(choice)


def test_memory_decides_and_what_is_missing_is_named() -> None:
    """Of 64 MiB on four members AEC keeps two times 21.4 MiB, ARC two times 32."""
    assert choose(job(apart(4), memory=46 * MIB), 1).chosen.name == "aec"
    tight = choose(job(apart(4), memory=36 * MIB), 1)
    assert tight.chosen.name == "none"
    assert not tight.reached
    assert "aec would survive 1 node, with 7." in str(tight)
    assert "than the 36.0 MiB that reft may use there" in str(tight)
    hopeless = choose(job(apart(4), memory=MIB), 1)
    assert not hopeless.chosen.fits_memory
    assert "aec would survive 1 node, with 42." in str(hopeless)


def test_partitions_are_recomputed_where_it_was_asked_for_and_only_there() -> None:
    situation = job(apart(4), replicated=2 * MIB, owned=12 * MIB)
    without, with_aor = (choose(situation, 1, recompute=aor) for aor in (False, True))
    assert (without.chosen.name, with_aor.chosen.name) == ("aec", "aec+aor")
    why = without.why_not_chosen(without.of("aec+aor"))
    assert 'only where "+aor" asks for it, or where it is exact' in why
    assert '"+aor" asks for recomputing' in with_aor.why_not_chosen(with_aor.of("aec"))
    assert "ZeRO partitions are sent to peers" in without.reason
    assert "ZeRO partitions are recomputed by peers" in with_aor.reason
    assert choose(situation, 2, recompute=True).chosen.name == "rs:2+aor"
    # To ask is to want it, even where sending moves less.
    small = choose(job(["a", "b"], owned=12), 1, recompute=True)
    assert small.chosen.name == "arc+aor"
    assert small.chosen.busiest.moved_bytes > small.of("arc").busiest.moved_bytes


RATES = LinkRates(
    copy_bytes_per_sec=25e9, peer_bytes_per_sec=3e9, adam_parameters_per_sec=1e8, free_cores=1
)


@pytest.mark.parametrize(
    ("exact", "rates", "chosen"),
    [
        (True, RATES, "aec+aor"),
        (False, RATES, "aec"),
        (True, None, "aec"),
        (True, replace(RATES, free_cores=0), "aec"),
        (True, replace(RATES, free_cores=0, adam_parameters_per_sec=1e9), "aec+aor"),
        # a second and more: it would not end in time
        (True, replace(RATES, adam_parameters_per_sec=1e6), "aec"),
        (True, replace(RATES, peer_bytes_per_sec=1e11), "aec"),
        (True, replace(RATES, copy_bytes_per_sec=5e8), "aec"),
    ],
)
def test_auto_recomputes_where_it_is_exact_and_costs_a_step_less(
    exact: bool, rates: LinkRates | None, chosen: str
) -> None:
    situation = replace(job(apart(4), owned=12 * 2**21), exact=exact, rates=rates)
    choice = choose(situation, 1)
    assert choice.chosen.name == chosen
    assert choice.of("aec+aor").available == (chosen == "aec+aor")
    assert (rates is None) == ("sending costs a step" not in choice.reason)
    assert choice.of("arc").partition_secs == (
        None if rates is None else rates.partition_secs(2**21)
    )
    # Twice as much where two losses are survived; to ask is to want it.
    assert choose(situation, 1, recompute=True).chosen.name == "aec+aor"
    if rates is not None:
        assert choose(situation, 2).of("rs:2").partition_secs == rates.partition_secs(2**22)


def test_what_partitions_cost_a_step() -> None:
    assert RATES.partition_secs(1e8) == (0.4, 0.016)
    assert RATES.partition_secs(2e8) == (0.8, 0.032 + 2.0), "a core is free, and not fast enough"
    assert replace(RATES, free_cores=0).partition_secs(1e8) == (0.4, 0.016 + 1.0)


def test_a_protection_without_room_is_refused_with_the_reason() -> None:
    choice = choose(job(apart(2)), 2)
    with pytest.raises(ConfigError, match="needs at least 3 data-parallel members"):
        choice.of("rs:2")
    with pytest.raises(ConfigError, match="known: none"):
        choice.of("rs:9")


def test_only_what_takes_too_long_to_test_is_left_out() -> None:
    """Combinations where members share nodes; copies alone and parities alone need no test."""
    assert choose(job(apart(256)), 3).chosen.name == "rs:3"
    for size, left_out in ((62, False), (64, True)):
        choice = choose(job([f"n{d // 2}" for d in range(size)]), 1)
        assert choice.chosen.name == "rs:2"
        assert ("arc+aec" in dict(choice.excluded)) == left_out


def test_a_wish_beyond_all_replicas_evaluates_no_more_than_these_could_hold() -> None:
    choice = choose(job(apart(4)), 1000)
    assert not choice.reached
    assert "at least 1001 are needed" in str(choice)
    assert len(choice.alternatives) + len(choice.excluded) == 1 + (2 + 3 + 4 + 5)


def survived(scheme: Scheme) -> int:
    return scheme.copies + scheme.parities


@pytest.mark.parametrize("members", range(1, 10))
def test_every_level_costs_less_and_promises_no_more(members: int) -> None:
    for scheme in (Scheme(), *schemes_for(members, 4)):
        levels = ladder(scheme, 4, members)
        assert (levels[0].scheme, levels[0].arenas) == (scheme, 4)
        assert [(r.scheme, r.arenas) for r in levels[1:3]] == [(scheme, 3), (scheme, 2)]
        assert (levels[-1].scheme, levels[-1].arenas) == (Scheme(), 2)
        for above, below in pairwise(levels[2:]):
            assert below.arenas == 2
            assert below.scheme.why_no_room(members) is None
            assert below.scheme.share(members) < above.scheme.share(members)
            # Owned state is copied to as many peers as losses are survived.
            assert survived(below.scheme) <= survived(above.scheme)


@pytest.mark.parametrize(
    ("scheme", "arenas", "members", "expected"),
    [
        ("arc:2", 2, 3, ["arc:2", "arc", "aec", "none"]),
        ("arc", 2, 3, ["arc", "aec", "none"]),
        ("arc", 2, 2, ["arc", "none"]),
        ("arc:2", 2, 8, ["arc:2", "arc+aec", "rs:2", "aec", "none"]),
        ("none", 3, 1, ["none", "none"]),
        # Above the size of the field several parities are no level.
        ("arc:2", 2, 256, ["arc:2", "arc+aec", "rs:2", "aec", "none"]),
        ("arc:2", 2, 300, ["arc:2", "arc+aec", "arc", "aec", "none"]),
    ],
)
def test_tolerance_is_given_up_last(
    scheme: str, arenas: int, members: int, expected: list[str]
) -> None:
    assert [
        str(level.scheme) for level in ladder(Scheme.parse(scheme), arenas, members)
    ] == expected


class _Node:
    """A node whose versions take 30 more bytes for every level up, and neighbours that take what they like."""

    levels = 4

    def __init__(self) -> None:
        self.watch = MemoryGuard(20)
        self.level, self.others, self.now = 0, 0, 0.0
        self.changes: list[tuple[float, int]] = []

    def run(self, secs: int, others: int) -> None:
        self.others = others
        for _ in range(secs):
            self.now += 1.0
            free = 200 - self.others - 30 * (self.levels - self.level)
            request = self.watch.wanted_level(self.level, self.levels, free, lambda: 30, self.now)
            assert abs(request - self.level) <= 1
            if request != self.level:
                self.watch.moved(self.level, request, self.now)
                self.level = request
                self.changes.append((self.now, request))


def test_down_at_once_a_level_at_a_time_and_up_after_a_calm() -> None:
    node = _Node()
    node.run(10, others=60)  # leaves just the margin
    assert node.changes == []
    node.run(10, others=61)
    assert node.changes == [(11.0, 1)]
    node.run(10, others=150)
    assert [level for _, level in node.changes] == [
        1,
        2,
        3,
    ]  # the last is not enough, but all there is
    node.changes.clear()
    node.run(60, others=55)
    # all of it would leave less than half as much again
    assert [level for _, level in node.changes] == [2, 1]
    assert node.changes[0][0] - 31.0 >= 10.0
    assert node.changes[1][0] - node.changes[0][0] >= 10.0
    node.run(60, others=0)
    assert node.level == 0


def test_what_comes_and_goes_comes_back_ever_later() -> None:
    node = _Node()
    waits = []
    for _ in range(5):
        node.run(2, others=80)
        assert node.level == 1
        began = node.now
        while node.level:
            node.run(1, others=0)
        waits.append(node.now - began)
    assert waits == sorted(waits)
    assert waits[-1] >= 8 * waits[0]
