"""What the members of a new group take from the old one's partitions: every byte once, or zero where it pads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

import numpy as np
import pytest

from reft.errors import LayoutError
from reft.grid import Degrees, Section, Topology
from reft.protect.placement import tolerance
from reft.recover.decide import Verdict, decide, judge, plan_decided
from reft.recover.inventory import put_together, summarize
from reft.recover.plan import NotRecoverable
from reft.recover.sources import OwnedTensor, Resize, cut, padding
from reft.snapshot.plan import SectionSizes

from .fleet import JOB, NEW, OLD, Fleet, inventories, oracle, place

ALIGNMENT = 64
MOST = 6
LENGTHS = (1, 2, 3, 5, 12, 23, 24, 61, 128)


def padded_part(length: int, dp: int) -> int:
    """Elements of each member's part as DeepSpeed makes them: the whole is padded to a multiple of 2 dp."""
    return -(-length // (2 * dp)) * 2


@dataclass(frozen=True)
class Owned:
    """Owned images of a group: tensors of these ``(length, itemsize)`` in parts; ``None`` for the length: one of
    three elements that is equal on all members."""

    tensors: tuple[tuple[int | None, int], ...]

    def numels(self, dp: int) -> list[int]:
        return [3 if length is None else padded_part(length, dp) for length, _ in self.tensors]

    def starts(self, dp: int) -> tuple[list[int], int]:
        starts, end = [], 0
        for numel, (_, itemsize) in zip(self.numels(dp), self.tensors, strict=True):
            starts.append(end)
            end += -(-numel * itemsize // ALIGNMENT) * ALIGNMENT
        return starts, end

    def image(self, dp: int, member: int) -> np.ndarray:
        starts, nbytes = self.starts(dp)
        image = np.full(nbytes, 255, np.uint8)
        for number, (start, numel, (length, itemsize)) in enumerate(
            zip(starts, self.numels(dp), self.tensors, strict=True)
        ):
            rng = np.random.default_rng(number)
            if length is None:
                part = rng.integers(1, 255, numel * itemsize, dtype=np.uint8)
            else:
                whole = np.zeros(numel * dp * itemsize, np.uint8)
                whole[: length * itemsize] = rng.integers(1, 255, length * itemsize, dtype=np.uint8)
                part = whole[member * numel * itemsize :][: numel * itemsize]
            image[start : start + numel * itemsize] = part
        return image

    def described(self, resize: Resize) -> list[OwnedTensor]:
        (old, _), (new, _) = self.starts(resize.old), self.starts(resize.new)
        rows = zip(self.tensors, old, self.numels(resize.old), new, self.numels(resize.new), strict=True)
        return [
            OwnedTensor(f"t{number}", itemsize, *places, length)
            for number, ((length, itemsize), *places) in enumerate(rows)
        ]


def check_cover(owned: Owned, resize: Resize) -> None:
    old = [owned.image(resize.old, member) for member in range(resize.old)]
    tensors = owned.described(resize)
    for dp in range(resize.new):
        wanted = owned.image(resize.new, dp)
        made = np.full(wanted.size, 255, np.uint8)
        times = np.zeros(wanted.size, int)
        pieces = cut(tensors, resize, dp)
        for piece in pieces:
            target = slice(piece.target_bytes, piece.target_bytes + piece.nbytes)
            made[target] = old[piece.member][piece.start_bytes : piece.start_bytes + piece.nbytes]
            times[target] += 1
        for start, nbytes in padding(tensors, dp):
            made[start : start + nbytes] = 0
            times[start : start + nbytes] += 1
        np.testing.assert_array_equal(made, wanted)
        np.testing.assert_array_equal(times, wanted != 255)


@pytest.mark.parametrize("old", range(1, MOST + 1))
def test_every_byte_comes_from_one_place_or_pads(old: int) -> None:
    for new, length in product(range(1, MOST + 1), LENGTHS):
        check_cover(Owned(((length, 4),)), Resize(old, new))
    rng = random.Random(old)
    for new, _ in product(range(1, MOST + 1), range(12)):
        kinds = [(rng.choice([*LENGTHS, None]), rng.choice([1, 2, 4, 8])) for _ in range(rng.randint(1, 7))]
        check_cover(Owned(tuple(kinds)), Resize(old, new))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (OwnedTensor("short", 4, 0, 10, 0, 10, 61), "parts of 61 elements"),
        (OwnedTensor("other", 4, 0, 10, 0, 12, None), "equal on all members"),
    ],
)
def test_p7_another_model_is_refused(tensor: OwnedTensor, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        cut([tensor], Resize(2, 3), 0)


OWNED = Owned(((61, 4), (61, 4), (None, 4)))


@dataclass(frozen=True)
class Partitioned(Fleet):
    def sizes(self, pp: int, tp: int) -> SectionSizes:
        dp = self.topology.degrees.dp
        sizes = super().sizes(pp, tp)
        return replace(sizes, owned_bytes=(OWNED.starts(dp)[1],) * dp)


def resized(fleet: Fleet, records, lost, topology: Topology):
    findings = found_in(records, topology, lost, also=topology.nodes)
    records = [record for record in records if record.node not in lost]
    tables = {
        group: [r for r in records if (r.header.coordinate.pp, r.header.coordinate.tp) == group]
        for group in topology.groups()
    }
    sources = {group: judge(group, table, findings.sizes) for group, table in tables.items()}
    verdicts = {g: {label: Verdict.of(s) for label, s in of.items()} for g, of in sources.items()}
    decision = decide(findings, verdicts)
    if isinstance(decision, NotRecoverable):
        return decision
    resize = Resize(fleet.topology.degrees.dp, topology.degrees.dp)
    tensors = OWNED.described(resize)
    wanted = {dp: cut(tensors, resize, dp) for dp in range(resize.new)}
    plans = []
    for group in topology.groups():
        of_group = decision, findings, group, sources[group][decision.label], tables[group]
        plans.append((plan_decided(*of_group, wanted=wanted), wanted))
    return plans


def found_in(records, topology: Topology, lost: tuple[str, ...] = (), also: tuple[str, ...] = ()):
    summaries = [summarize(i.node, i.arenas) for i in inventories(records, lost, also)]
    return put_together(summaries, topology, job_id=JOB, any_dp=True)


def one_stage(dp: int) -> Topology:
    degrees = Degrees(1, dp, 1)
    return Topology(degrees, degrees.coordinates(), tuple(f"n{d}" for d in range(dp)))


FOUR, TWO = (Partitioned(place(Degrees(1, dp, 1), "single")) for dp in (4, 2))


def check_resized(plans, fleet: Fleet, topology: Topology, records, lost) -> None:
    stored = {(r.node, r.path, e.key): e for r in records for e in r.header.entries if r.node not in lost}
    old, new = fleet.topology.degrees.dp, topology.degrees.dp
    decodes = any(plan.rebuilds for plan, _ in plans)
    for plan, wanted in plans:
        assert plan.resized == (old != new)
        for at, fetches in plan.fetches.items():
            assert all(f.checksum == stored[f.source].checksum for f in fetches)
            assert {f.key.member for f in fetches if f.key.section is Section.HOST} == {at.dp % old}
            replicated = sum(f.nbytes for f in fetches if f.key.section is Section.REPLICATED)
            written = replace(at, dp=at.dp % old)
            assert decodes or replicated == fleet.image_bytes(written, Section.REPLICATED)
            owned = [f for f in fetches if f.key.section is Section.OWNED]
            assert len({f.source for f in owned}) == len(owned)
            for piece in wanted[at.dp]:
                held = np.zeros(piece.nbytes, bool)
                for f in owned:
                    if f.key.member == piece.member:
                        begin = f.start_bytes - piece.start_bytes
                        held[max(0, begin) : max(0, begin + f.nbytes)] = True
                assert held.all()


@pytest.mark.parametrize(("copies", "parities"), [(0, 0), (1, 0), (2, 0), (0, 1)])
@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_p4_a_loss_is_survived_at_another_degree_as_at_the_same(old: int, copies: int, parities: int) -> None:
    if old <= max(copies, parities):
        pytest.skip("the group is too small for the scheme")
    done = refused = 0
    for pp, tp, kind, new in product((1, 2), (1, 2), ("replica", "single"), range(1, 6)):
        fleet = Partitioned(place(Degrees(pp, old, tp), kind), copies=copies, parities=parities)
        records = fleet.records(NEW)
        survives = tolerance(fleet.topology, copies) if not parities else 1
        nodes = sorted(set(fleet.topology.nodes))
        losses = list(chain.from_iterable(combinations(nodes, n) for n in range(min(3, len(nodes)))))
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
        assert found_in(records, one_stage(3), ("n3",)).sizes[NEW] == expected
        plans = resized(second, records, ("n3",), one_stage(3))
        assert {plan.label for plan, _ in plans} == {NEW}
        assert {plan.written_dp for plan, _ in plans} == {expected}


def test_p7_two_degrees_under_one_name_are_not_mixed() -> None:
    records = [*FOUR.records(NEW), *TWO.records(NEW, slot=1)]
    for dp, expected in ((2, 2), (3, 4), (4, 4)):
        findings = found_in(records, one_stage(dp))
        assert findings.sizes == {NEW: expected}
        assert any("another data-parallel degree under the same name" in note for note in findings.notes)
        (table,) = judge((0, 0), records, findings.sizes).values()
        assert not table.gaps


def test_p7_other_stages_are_refused_by_name() -> None:
    fleet = Partitioned(place(Degrees(2, 2, 1), "single"))
    refused = resized(fleet, fleet.records(NEW), (), one_stage(4))
    assert isinstance(refused, NotRecoverable)
    assert isinstance(refused.error(), LayoutError)
    assert not refused.empty
    assert "PP2xDP2xTP1 instead of PP1xDP4xTP1" in str(refused)
    assert f"reft persist --job {JOB}" in str(refused)
    assert "ds_to_universal" in str(refused)
    assert "reft clean" in str(refused)
