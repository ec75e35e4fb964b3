"""Every scheme, exhaustively: what it stores, what it survives, and that the bytes come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError, UnrecoverableError
from reft.grid import Degrees, Topology
from reft.protect.blocks import BlockKey
from reft.protect.coded_blocks import BlockCode, CodedSection
from reft.protect.codes import Code, Scheme, make_code, place_code, schemes_for
from reft.protect.decode import plan_decode, recoverable
from reft.protect.gf256 import rank
from reft.protect.placement import group_tolerance, place_group
from reft.protect.placement import tolerance as job_tolerance
from reft.protect.rs import parity_rows
from reft.protect.tolerance import fatal_loss, survives, tolerance
from reft.recover.plan import find_lost, stripes_of
from reft.recover.rebuild import Pool, Stripe
from reft.snapshot.copying.chunks import ParityEncoder
from reft.snapshot.plan import Block, PlacedBlock
from reft.state.catalogue import SectionImage

SIZES = range(2, 10)
BLOCK_BYTES = 4096
"""Sub-blocks of small groups have several blocks, those of large ones less than one."""


def everything() -> Iterator[tuple[Scheme, int]]:
    for size in SIZES:
        for scheme in (Scheme(), *schemes_for(size, 3), Scheme(1, 1, designed=False), Scheme(0, size - 1)):
            yield scheme, size


ALL = sorted(set(everything()), key=lambda case: (case[1], str(case[0])))
IDS = [f"{scheme}-D{size}" for scheme, size in ALL]


def code_of(text: str, size: int) -> Code:
    return make_code(Scheme.parse(text), range(size))


def whole_rank(code: Code, lost: tuple[int, ...]) -> int:
    """Rank of everything the survivors store, without any shortcut."""
    rows = [p.terms for p in code.pieces if p.member not in lost]
    matrix = np.zeros((len(rows), code.sub_blocks), np.uint8)
    for at, terms in enumerate(rows):
        for block, coefficient in terms:
            matrix[at, block] = coefficient
    return rank(matrix)


def image_of(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


Stored = dict[tuple[int, BlockKey], np.ndarray]
"""Bytes of every block by the member that stores it."""


def store(code: BlockCode, image: np.ndarray) -> Stored:
    """What all members hold after a snapshot, encoded as the snapshot encodes it."""
    data = [block for member in range(code.code.size) for block in code.data(member)]
    blocks = {b.key: Block(b.key, b.start_bytes, b.nbytes) for b in data}
    live = SectionImage([("state", torch.from_numpy(image))])
    stored: Stored = {}
    for member in range(code.code.size):
        for key, block in blocks.items():
            if key.member == member or code.stores_copy(member, key):
                stored[member, key] = image[block.start_bytes : block.start_bytes + block.nbytes].copy()
        encoder = ParityEncoder(live, blocks, chunk_bytes=2**18)
        for parity in code.parities(member):
            target = torch.full((parity.nbytes,), 0xAA, dtype=torch.uint8)
            placed = PlacedBlock(Block(parity.key, parity.start_bytes, parity.nbytes), 0)
            for _, _, encode in encoder.cut(placed, parity.terms, target):
                encode()
            stored[member, parity.key] = target.numpy()
    return stored


def restore(code: BlockCode, stored: Stored, lost: tuple[int, ...]) -> np.ndarray:
    """The image from what the survivors hold, decoded as a recovery decodes it."""
    left = {key: data for (member, key), data in stored.items() if member not in lost}
    missing, why = find_lost(code, left)
    if why is not None:
        raise UnrecoverableError(why)
    image = np.full(code.nbytes, 0x55, np.uint8)
    for member in range(code.code.size):
        for block in code.data(member):
            if block.key in left:
                image[block.start_bytes : block.start_bytes + block.nbytes] = left[block.key]
    for blocks in stripes_of(missing):
        stripe = Stripe(blocks, np.full(sum(b.padded_bytes for b in blocks), 0x33, np.uint8), Pool(0))
        for key in sorted(stripe.keys):
            stripe.add(key, left[key], stays=True)
        for block, data in zip(blocks, stripe.results(), strict=True):
            image[block.start_bytes : block.start_bytes + block.nbytes] = data
    return image


@pytest.mark.parametrize(("scheme", "size"), ALL, ids=IDS)
def test_every_loss_up_to_the_tolerance_recovers_to_the_bit(scheme: Scheme, size: int) -> None:
    code = make_code(scheme, range(size))
    claimed = tolerance(code)
    for nbytes in (40_011, code.sub_blocks * 128):
        blocks = BlockCode(code, nbytes, BLOCK_BYTES)
        image = image_of(nbytes)
        stored = store(blocks, image)
        for count in range(claimed + 1):
            for lost in combinations(range(size), count):
                assert np.array_equal(restore(blocks, stored, lost), image), lost


@pytest.mark.parametrize(("scheme", "size"), ALL, ids=IDS)
def test_p4_the_tolerance_is_tight_and_equals_the_rank(scheme: Scheme, size: int) -> None:
    code = make_code(scheme, range(size))
    claimed = tolerance(code)
    for count in range(min(size, claimed + 3)):
        losses = list(combinations(range(size), count))
        full = [whole_rank(code, lost) == code.sub_blocks for lost in losses]
        assert full == [survives(code, lost) for lost in losses]
        assert all(full) == (count <= claimed)
        for lost, fine in zip(losses, full, strict=True):
            assert (len(recoverable(code, code.surviving(lost))) == code.sub_blocks) == fine
            if not fine:
                with pytest.raises(UnrecoverableError, match=r"cannot recover B\d+ of member \d"):
                    plan_decode(code, lost)
    assert not survives(code, range(size))


@pytest.mark.parametrize(("scheme", "size"), ALL, ids=IDS)
def test_a_scheme_survives_what_it_is_meant_to(scheme: Scheme, size: int) -> None:
    expected = scheme.copies + scheme.parities if scheme.designed else 1
    assert tolerance(make_code(scheme, range(size))) == expected


@pytest.mark.parametrize(("scheme", "size"), ALL, ids=IDS)
def test_every_member_stores_what_the_formula_says(scheme: Scheme, size: int) -> None:
    code = make_code(scheme, range(size))
    section = CodedSection(code, code.sub_blocks * 128)
    for member in range(size):
        assert code.share_of(member) == scheme.share(size)
        assert section.member_bytes(member) == scheme.share(size) * section.nbytes
    if scheme.parities:
        held = [(b, p.member) for p in code.pieces if not p.is_data for b, _ in p.terms]
        assert all(code.owner_of(b) != m for b, m in held), "no parity beside its own data"


def test_formulas_of_the_schemes() -> None:
    for size in range(4, 10):
        part = Fraction(1, size)
        assert Scheme.parse("arc").share(size) == 2 * part
        assert Scheme.parse("arc:2").share(size) == 3 * part
        assert Scheme.parse("aec").share(size) == Fraction(1, size - 1)
        assert Scheme.parse("rs:2").share(size) == part + Fraction(2, size * (size - 2))
        assert Scheme.parse("arc+aec").share(size) == 2 * part + Fraction(1, size * (size - 2))


def test_derived_bytes_per_gpu() -> None:
    """2 B of model and 12 B of Adam per parameter; |P_i| per rank is the whole over PP and TP."""
    small, large = Fraction(13 * 10**8 * 14, 16), Fraction(34 * 10**9 * 14, 32)
    derived = [
        (small, 8, "none", 0.142),
        (small, 8, "arc", 0.284),
        (small, 8, "aec", 0.1625),
        (large, 16, "none", 0.930),
        (large, 16, "arc", 1.859),
        (large, 16, "aec", 0.992),
    ]
    assert float(small) / 1e9 == pytest.approx(1.138, abs=5e-4)
    assert float(large) / 1e9 == pytest.approx(14.88, abs=5.1e-3)
    for image, size, text, gigabytes in derived:
        share = code_of(text, size).share_of(0)
        assert float(image * share) / 1e9 == pytest.approx(gigabytes, abs=5.1e-4), text


def test_naive_arc_and_aec_survive_one_loss_not_two() -> None:
    for size in range(3, 10):
        code = code_of("naive:arc+aec", size)
        assert tolerance(code) == 1
        first, second = (int(n.removeprefix("member")) for n in fatal_loss(code))
        assert second - first in (1, size - 1), "ring neighbours"
        assert tolerance(code_of("arc+aec", size)) == 2


def test_two_members_are_a_mirror() -> None:
    for text in ("aec", "arc"):
        code = code_of(text, 2)
        assert code.splits == 1
        assert all(p.is_data for p in code.pieces)
        assert sorted(p.terms[0][0] for p in code.pieces_of(0)) == [0, 1]
        assert tolerance(code) == 1


def test_one_member_alone_survives_nothing() -> None:
    code = code_of("none", 1)
    assert tolerance(code) == 0
    assert fatal_loss(code, ["A"]) == ("A",)
    with pytest.raises(ConfigError, match="needs at least 2 data-parallel members, found 1"):
        code_of("aec", 1)


@pytest.mark.parametrize(
    ("text", "size", "why"),
    [
        ("arc:2", 3, None),
        ("arc:2", 2, "needs at least 3 data-parallel members, found 2"),
        ("arc+rs:2", 3, "needs at least 4 data-parallel members, found 3"),
        ("rs:2", 256, None),
        ("rs:2", 257, "a stripe has more than 256 members; use smaller sharding groups"),
        ("arc+rs:2", 257, None),
        ("arc+rs:2", 258, "a stripe has more than 256 members; use smaller sharding groups"),
        ("aec", 1000, None),
        ("arc:9", 1000, None),
    ],
)
def test_the_room_that_a_scheme_needs_is_the_room_that_its_code_takes(
    text: str, size: int, why: str | None
) -> None:
    scheme = Scheme.parse(text)
    assert scheme.why_no_room(size) == why
    if why is not None:
        with pytest.raises(ConfigError, match=f"protection {re.escape(text)} is not possible here: {why}"):
            make_code(scheme, range(size))
    elif scheme.parities > 1:
        assert parity_rows(scheme.parities, size - scheme.gap)


@pytest.mark.parametrize(
    "text", ["none", "arc", "arc:3", "aec", "rs:2", "arc+aec", "arc:2+rs:2", "naive:arc+aec"]
)
def test_names_are_read_and_written_alike(text: str) -> None:
    assert str(Scheme.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "raid", "rs", "rs:0", "arc+arc", "aec+rs:2", "none+arc", "arc:0", "AEC"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="expected none, arc, arc:K"):
        Scheme.parse(text)


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=7), st.integers(0, 3))
def test_copies_are_judged_as_the_placement_of_copies_judges_them(nodes: list[str], copies: int) -> None:
    if copies < len(nodes):
        expected = group_tolerance(nodes, place_group(nodes, copies))
        assert tolerance(place_code(Scheme(copies), nodes), nodes) == expected


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=7),
    st.sampled_from(["aec", "rs:2", "arc+aec", "naive:arc+aec", "rs:3"]),
)
def test_p4_members_of_one_node_are_lost_together(nodes: list[str], text: str) -> None:
    scheme = Scheme.parse(text)
    if scheme.least_members > len(nodes):
        return
    code = place_code(scheme, nodes)
    claimed = tolerance(code, nodes)
    distinct = sorted(set(nodes))

    def fine(dead: tuple[str, ...]) -> bool:
        lost = tuple(m for m, n in enumerate(nodes) if n in dead)
        return len(lost) < len(nodes) and whole_rank(code, lost) == code.sub_blocks

    assert all(fine(dead) for dead in combinations(distinct, claimed))
    assert not all(fine(dead) for dead in combinations(distinct, claimed + 1))


def test_p4_parity_beside_its_data_protects_nothing() -> None:
    assert tolerance(code_of("aec", 4), ["A", "A", "B", "C"]) == 0
    assert tolerance(code_of("rs:2", 4), ["A", "A", "B", "C"]) == 1
    assert fatal_loss(code_of("aec", 4), ["A", "B", "B", "C"]) == ("B",)
    with pytest.raises(ValueError, match="expected one per member"):
        tolerance(code_of("aec", 4), ["A"])


def test_p4_the_job_survives_what_its_weakest_group_survives() -> None:
    degrees = Degrees(2, 3, 1)
    spread = Topology(degrees, degrees.coordinates(), tuple("ABCDEF"))
    packed = Topology(degrees, degrees.coordinates(), tuple("ABCDDE"))
    assert job_tolerance(spread, 0, 1) == 1
    assert job_tolerance(packed, 0, 1) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5000),
    st.integers(2, 6),
    st.sampled_from(["arc", "aec", "rs:2", "arc+aec", "rs:4"]),
    st.permutations(range(6)),
)
def test_any_size_and_ring_recovers(nbytes: int, size: int, text: str, order: list[int]) -> None:
    """Sections smaller than their padding, empty sub-blocks and empty shards included."""
    scheme = Scheme.parse(text)
    if scheme.least_members > size:
        return
    blocks = BlockCode(make_code(scheme, [m for m in order if m < size]), nbytes, BLOCK_BYTES)
    section = blocks.section
    ranges = [section.range_of(b) for b in range(section.code.sub_blocks)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == nbytes
    assert section.padded_bytes - nbytes < section.code.sub_blocks * section.alignment_bytes
    image = image_of(nbytes, seed=nbytes)
    stored = store(blocks, image)
    for lost in combinations(range(size), tolerance(section.code)):
        assert np.array_equal(restore(blocks, stored, lost), image)


def test_large_sections_of_many_cells_recover() -> None:
    for text, lost in (("aec", (1,)), ("rs:2", (0, 3)), ("arc+aec", (1, 2)), ("rs:3", (0, 1, 2))):
        blocks = BlockCode(code_of(text, 5), 40_000_017, 4 * 2**20)
        image = image_of(blocks.nbytes)
        assert np.array_equal(restore(blocks, store(blocks, image), lost), image), text


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i8", "bf16"])
def test_nan_payloads_of_every_dtype_come_back(dtype: str) -> None:
    rng = np.random.default_rng(5)
    width = {"bf16": 2}.get(dtype) or np.dtype(dtype).itemsize
    exponent = {"f2": 0x7C00, "f4": 0x7F800000, "f8": 0x7FF0 << 48, "bf16": 0x7F80}.get(dtype, 0)
    values = rng.integers(0, 2 ** (8 * width), 3001, dtype=f"u{width}") | np.array(exponent, f"u{width}")
    image = values.view(np.uint8)
    for text in ("aec", "rs:2", "arc+aec"):
        blocks = BlockCode(code_of(text, 4), len(image), BLOCK_BYTES)
        for lost in combinations(range(4), tolerance(blocks.code)):
            assert restore(blocks, store(blocks, image), lost).tobytes() == values.tobytes()


def test_lost_data_comes_from_a_copy_before_parity_and_from_xor_before_other_parities() -> None:
    plan = plan_decode(code_of("arc+aec", 5), (2,))
    assert all(c.is_copy for c in plan.combinations)
    code = code_of("rs:3", 6)
    plan = plan_decode(code, (2,))
    assert all(c == 1 for combination in plan.combinations for _, c in combination.terms)
    two = plan_decode(code, (2, 3))
    assert len(two.combinations) == 2 * code.splits
    assert "6 sub-blocks (0 from copies, 6 from parity)" in str(two)


def test_a_corrupt_piece_is_planned_around() -> None:
    code = code_of("arc+aec", 5)
    first, second = code.holders[4]
    plan = plan_decode(code, (), bad=[first])
    assert [c.sub_block for c in plan.combinations] == [4]
    assert plan.needed == (second,)
    plan = plan_decode(code, (), bad=[first, second])
    assert len(plan.needed) == code.splits, "the parity and the other blocks of the stripe"
    only = plan_decode(code, (1,), wanted=[code.splits])
    assert [c.sub_block for c in only.combinations] == [code.splits]


def test_what_prints_is_worth_reading() -> None:
    code = code_of("rs:2", 4)
    assert (
        str(code)
        == "rs:2: D=4, ring (0, 1, 2, 3), 2 sub-blocks per shard, 16 pieces, 0.5000 of the image per member"
    )
    assert str(code.pieces_of(0)[2]) == "member 0: B4 ^ B7"
    assert "sub-blocks of 0.12 MiB" in str(CodedSection(code, 2**20))
