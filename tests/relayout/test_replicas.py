"""What the members of a new group take from the old one's partitions: every byte once, or zero where it pads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import ceil

import numpy as np
import pytest

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees, Resize, Section, Topology
from reft.protect.placement import tolerance
from reft.recover.decide import GroupStatus, ImageRange, decide, judge, plan_decided, plan_recovery
from reft.recover.inventory import merge_summaries, summarize
from reft.recover.plan import NotRecoverable
from reft.relayout.element_map import Part, RankImages, plan_replica
from reft.snapshot.plan import SectionSizes
from tests.recover.fleet import JOB, NEW, OLD, Fleet, inventories, oracle, place

MOST = 6
LENGTHS = (1, 2, 3, 5, 12, 23, 24, 61, 128)
AT = Coordinate(0, 0, 0)


def padded_part(length: int, dp: int) -> int:
    """Elements of each member's part as DeepSpeed makes them: the whole is padded to a multiple of 2 dp."""
    return -(-length // (2 * dp)) * 2


@dataclass(frozen=True)
class Owned:
    """Tensors of these lengths in parts; ``None``: one of three elements that is equal on all members."""

    lengths: tuple[int | None, ...]

    def held(self, dp: int) -> RankImages:
        named = {f"t{number}": length for number, length in enumerate(self.lengths)}
        whole = {name: 3 for name, length in named.items() if length is None}
        parts = {
            n: (Part(n, padded_part(length, dp), length),) for n, length in named.items() if length
        }
        return RankImages(whole, parts)

    def tensors(self, dp: int, member: int) -> dict[str, np.ndarray]:
        return {
            f"t{number}": elements(number, 3)
            if length is None
            else part_of(elements(number, length), padded_part(length, dp), dp, member)
            for number, length in enumerate(self.lengths)
        }


@dataclass(frozen=True)
class SubGroups:
    """Parameters of these lengths as ZeRO-3 cuts them: each for itself, into parts that are put together to
    sub-groups until their size is reached."""

    lengths: tuple[int, ...]
    sub_group_size: int

    def grouped(self, dp: int) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        for number in range(len(self.lengths)):
            if sum(ceil(self.lengths[n] / dp) for n in groups[-1]) >= self.sub_group_size:
                groups.append([])
            groups[-1].append(number)
        return groups

    def held(self, dp: int) -> RankImages:
        parts = [Part(f"p{n}", ceil(length / dp), length) for n, length in enumerate(self.lengths)]
        tensors = {
            f"t{i}": tuple(parts[n] for n in numbers) for i, numbers in enumerate(self.grouped(dp))
        }
        return RankImages({}, tensors)

    def tensors(self, dp: int, member: int) -> dict[str, np.ndarray]:
        def part(number: int) -> np.ndarray:
            length = self.lengths[number]
            return part_of(elements(number, length), ceil(length / dp), dp, member)

        return {
            f"t{i}": np.concatenate([part(n) for n in numbers])
            for i, numbers in enumerate(self.grouped(dp))
        }


def elements(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**30, length)


def part_of(values: np.ndarray, size: int, dp: int, member: int) -> np.ndarray:
    return np.pad(values, (0, size * dp - len(values)))[member * size :][:size]


def check_cover(owned: Owned | SubGroups, resize: Resize) -> None:
    old = [owned.tensors(resize.old, member) for member in range(resize.old)]
    before, after = owned.held(resize.old), owned.held(resize.new)
    for dp in range(resize.new):
        wanted = owned.tensors(resize.new, dp)
        made = {name: np.full(values.size, -1) for name, values in wanted.items()}
        times = {name: np.zeros(values.size, int) for name, values in wanted.items()}
        for move in plan_replica(before, after, resize, replace(AT, dp=dp)):
            target = slice(move.at, move.at + move.numel)
            made[move.target][target] = old[move.source.dp][move.tensor][move.start :][: move.numel]
            times[move.target][target] += 1
        for zeros in after.paddings(dp):
            made[zeros.target][zeros.at : zeros.at + zeros.numel] = 0
            times[zeros.target][zeros.at : zeros.at + zeros.numel] += 1
        for name, values in wanted.items():
            np.testing.assert_array_equal(made[name], values)
            assert (times[name] == 1).all()


@pytest.mark.parametrize("old", range(1, MOST + 1))
def test_every_byte_comes_from_one_place_or_pads(old: int) -> None:
    for new, length in product(range(1, MOST + 1), LENGTHS):
        check_cover(Owned((length,)), Resize(old, new))
    rng = random.Random(old)
    for new, _ in product(range(1, MOST + 1), range(12)):
        lengths = tuple(rng.choice([*LENGTHS, None]) for _ in range(rng.randint(1, 7)))
        check_cover(Owned(lengths), Resize(old, new))


@pytest.mark.parametrize("old", range(1, MOST + 1))
def test_parameters_that_are_cut_one_by_one_change_their_sub_groups(old: int) -> None:
    """The shortest have fewer elements than there are members."""
    rng = random.Random(old)
    for new, size in product(range(1, MOST + 1), (1, 5, 20, 1000)):
        lengths = tuple(rng.choice(LENGTHS) for _ in range(rng.randint(1, 9)))
        check_cover(SubGroups(lengths, size), Resize(old, new))


def test_a_tensor_without_elements_needs_none() -> None:
    empty = RankImages({"model.empty": 0}, {})
    assert plan_replica(empty, empty, Resize(2, 3), AT) == ()


def parts(name: str, size: int, numel: int) -> RankImages:
    return RankImages({}, {"master.0.0": (Part(name, size, numel),)})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (parts("short", 10, 61), parts("short", 30, 61), "parts of 61 elements"),
        (parts("short", 31, 61), parts("short", 20, 61), "parts of 61 elements"),
        (parts("longer", 31, 62), parts("longer", 21, 61), "parts of 61 elements"),
        (parts("gone", 31, 62), RankImages({}, {}), "parts of 0 elements"),
        (RankImages({"other": 10}, {}), RankImages({"other": 12}, {}), "equal on all replicas"),
        (RankImages({}, {}), RankImages({"new": 12}, {}), "equal on all replicas"),
    ],
)
def test_p7_another_model_is_refused(old: RankImages, new: RankImages, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        plan_replica(old, new, Resize(2, 3), AT)


LENGTH = 245  # of the one tensor of the partitions, in bytes


@dataclass(frozen=True)
class Partitioned(Fleet):
    def sizes(self, pp: int, tp: int) -> SectionSizes:
        dp = self.topology.degrees.dp
        return replace(super().sizes(pp, tp), owned_bytes=(padded_part(LENGTH, dp),) * dp)


def resized(fleet: Fleet, records, lost, topology: Topology):
    findings = found_in(records, topology, lost, also=topology.nodes)
    records = [record for record in records if record.node not in lost]
    tables = {
        group: [r for r in records if (r.header.coordinate.pp, r.header.coordinate.tp) == group]
        for group in topology.groups()
    }
    sources = {group: judge(group, table, findings.written) for group, table in tables.items()}
    verdicts = {
        g: {label: GroupStatus.of(s) for label, s in of.items()} for g, of in sources.items()
    }
    decision = decide(findings, verdicts)
    if isinstance(decision, NotRecoverable):
        return decision
    # What is lost is decoded before anything is asked for.
    wanted = (
        {}
        if decision.decodes
        else {at: wanted_by(fleet, topology, at) for at in topology.coordinates}
    )
    plans = []
    for group in topology.groups():
        of_group = decision, findings, group, sources[group][decision.label], tables[group]
        plans.append((plan_decided(*of_group, wanted=wanted), wanted))
    return plans


def wanted_by(fleet: Fleet, topology: Topology, at: Coordinate) -> list[ImageRange]:
    resize = Resize(fleet.topology.degrees.dp, topology.degrees.dp)
    whole = {"replicated": fleet.image_bytes(replace(at, dp=0), Section.REPLICATED)}
    old, new = (
        RankImages(whole, {"owned": (Part("owned", padded_part(LENGTH, n), LENGTH),)})
        for n in (resize.old, resize.new)
    )
    moves = plan_replica(old, new, resize, at)
    return [ImageRange(m.source, Section(m.tensor), m.start, m.numel) for m in moves]


def found_in(records, topology: Topology, lost: tuple[str, ...] = (), also: tuple[str, ...] = ()):
    summaries = [summarize(i.node, i.arenas) for i in inventories(records, lost, also)]
    return merge_summaries(summaries, topology, job_id=JOB, any_layout=True)


def one_stage(dp: int) -> Topology:
    degrees = Degrees(1, dp, 1)
    return Topology(degrees, degrees.coordinates(), tuple(f"n{d}" for d in range(dp)))


FOUR, TWO = (Partitioned(place(Degrees(1, dp, 1), "single")) for dp in (4, 2))


def check_resized(plans, fleet: Fleet, topology: Topology, records, lost) -> None:
    stored = {
        (r.node, r.path, e.key): e for r in records for e in r.header.entries if r.node not in lost
    }
    old, new = fleet.topology.degrees.dp, topology.degrees.dp
    decodes = any(plan.rebuilds for plan, _ in plans)
    for plan, wanted in plans:
        assert plan.other_layout == (old != new)
        for at, fetches in plan.fetches.items():
            assert all(f.checksum == stored[f.source].checksum for f in fetches)
            assert {f.key.member for f in fetches if f.key.section is Section.HOST} == {at.dp % old}
            replicated = sum(f.nbytes for f in fetches if f.key.section is Section.REPLICATED)
            written = replace(at, dp=at.dp % old)
            assert decodes or replicated == fleet.image_bytes(written, Section.REPLICATED)
            owned = [f for f in fetches if f.key.section is Section.OWNED]
            assert len({f.source for f in owned}) == len(owned)
            for piece in (
                p for p in wanted.get(at, ()) if p.section is Section.OWNED and old != new
            ):
                held = np.zeros(piece.nbytes, bool)
                for f in owned:
                    if f.key.member == piece.of.dp:
                        begin = f.start_bytes - piece.start_bytes
                        held[max(0, begin) : max(0, begin + f.nbytes)] = True
                assert held.all()


@pytest.mark.parametrize(("copies", "parities"), [(0, 0), (1, 0), (2, 0), (0, 1)])
@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_p4_a_loss_is_survived_at_another_degree_as_at_the_same(
    old: int, copies: int, parities: int
) -> None:
    if old <= max(copies, parities):
        pytest.skip("the group is too small for the scheme")
    done = refused = 0
    for pp, tp, kind, new in product((1, 2), (1, 2), ("replica", "single"), range(1, 6)):
        fleet = Partitioned(place(Degrees(pp, old, tp), kind), copies=copies, parities=parities)
        records = fleet.records(NEW)
        survives = tolerance(fleet.topology, copies) if not parities else 1
        nodes = sorted(set(fleet.topology.nodes))
        losses = list(
            chain.from_iterable(combinations(nodes, n) for n in range(min(3, len(nodes))))
        )
        for lost in random.Random(new).sample(losses, min(len(losses), 6)):
            # The new ranks run where memory is left, and on new nodes.
            left = [n for n in nodes if n not in lost] + ["spare"]
            degrees = Degrees(pp, new, tp)
            on = tuple(left[i % len(left)] for i in range(degrees.world_size))
            topology = Topology(degrees, degrees.coordinates(), on)
            kept = [r for r in records if r.node not in lost and r.node in on]
            plans = resized(fleet, kept, (), topology)
            whole = not isinstance(plans, NotRecoverable)
            if not parities:
                assert whole == oracle(fleet, kept, NEW), (degrees, lost)
            if len(lost) <= survives and len({*on} - {"spare"}) == len(nodes) - len(lost):
                assert whole, f"{lost} is within the tolerance {survives}"
            if whole:
                check_resized(plans, fleet, topology, kept, lost)
            done += whole
            refused += not whole
    assert done > 5
    assert refused or not copies


def test_p3_the_newest_version_counts_whatever_its_degree() -> None:
    for first, second, expected in ((FOUR, TWO, 2), (TWO, FOUR, 4)):
        records = [*first.records(OLD), *second.records(NEW, slot=1)]
        assert found_in(records, one_stage(3), ("n3",)).written[NEW].dp == expected
        plans = resized(second, records, ("n3",), one_stage(3))
        assert {plan.label for plan, _ in plans} == {NEW}
        assert {plan.written.dp for plan, _ in plans} == {expected}


def test_p7_two_degrees_under_one_name_are_not_mixed() -> None:
    records = [*FOUR.records(NEW), *TWO.records(NEW, slot=1)]
    for dp, expected in ((2, 2), (3, 4), (4, 4)):
        findings = found_in(records, one_stage(dp))
        assert findings.written == {NEW: Degrees(1, expected, 1)}
        assert any("another layout under the same name" in note for note in findings.notes)
        (table,) = judge((0, 0), records, findings.written).values()
        assert not table.gaps


def test_p7_other_stages_are_refused_by_name() -> None:
    fleet = Partitioned(place(Degrees(2, 2, 1), "single"))
    refused = plan_recovery(inventories(fleet.records(NEW)), one_stage(4), job_id=JOB)
    assert isinstance(refused, NotRecoverable)
    assert isinstance(refused.error(), LayoutError)
    assert not refused.empty
    assert "PP2xDP2xTP1 instead of PP1xDP4xTP1" in str(refused)
    assert f"reft persist --job {JOB}" in str(refused)
    assert "ds_to_universal" in str(refused)
    assert "reft clean" in str(refused)
