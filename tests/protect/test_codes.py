"""Every scheme, exhaustively: what it stores, what it survives, and that the bytes come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ConfigError, UnrecoverableError
from reft.grid import BlockKey, ring_order
from reft.protect.backend import compiled_run, solve_ragged
from reft.protect.codes import (
    BlockCode,
    Code,
    Scheme,
    fatal_loss,
    make_code,
    plan_decode,
    survives,
    tolerance,
)
from reft.protect.rs import (
    CELL_BYTES,
    PACKETS,
    Row,
    multiply,
    packet_program,
    parity_rows,
    power,
    rank,
)
from reft.recover.plan import find_lost, find_stripes
from reft.recover.rebuild import Pool, Stripe
from reft.snapshot.copier import ParityEncoder
from reft.snapshot.plan import Block, PlacedBlock
from reft.state.catalogue import SectionImage
from tests.protect.backends import schemes_for

from .backends import slow_combine

SIZES = range(2, 10)
BLOCK_BYTES = (
    4096  # Sub-blocks of small groups have several blocks, those of large ones less than one
)


def everything() -> Iterator[tuple[Scheme, int]]:
    for size in SIZES:
        for scheme in (
            Scheme(),
            *schemes_for(size, 3),
            Scheme(1, 1, designed=False),
            Scheme(0, size - 1),
        ):
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


Stored = dict[tuple[int, BlockKey], np.ndarray]  # bytes of every block by the member that stores it


def store(code: BlockCode, image: np.ndarray) -> Stored:
    """What all members hold after a snapshot, encoded as the snapshot encodes it."""
    data = [block for member in range(code.code.size) for block in code.data(member)]
    blocks = {b.key: Block(b.key, b.start_bytes, b.nbytes) for b in data}
    live = SectionImage([("state", torch.from_numpy(image))])
    stored: Stored = {}
    for member in range(code.code.size):
        for key, block in blocks.items():
            if key.member == member or code.stores_copy(member, key):
                stored[member, key] = image[
                    block.start_bytes : block.start_bytes + block.nbytes
                ].copy()
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
    for blocks in find_stripes(missing):
        stripe = Stripe(
            blocks, np.full(sum(b.padded_bytes for b in blocks), 0x33, np.uint8), Pool(0)
        )
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
            gone = [piece.index for piece in code.pieces if piece.member in lost]
            if fine:
                assert (
                    len(plan_decode(code, bad=gone, wanted=range(code.sub_blocks)))
                    == code.sub_blocks
                )
            else:
                with pytest.raises(UnrecoverableError, match=r"cannot recover B\d+ of member \d"):
                    plan_decode(code, bad=gone, wanted=range(code.sub_blocks))
    assert not survives(code, range(size))


@pytest.mark.parametrize(("scheme", "size"), ALL, ids=IDS)
def test_a_scheme_survives_what_it_is_meant_to_and_stores_what_the_formula_says(
    scheme: Scheme, size: int
) -> None:
    code = make_code(scheme, range(size))
    assert tolerance(code) == (scheme.copies + scheme.parities if scheme.designed else 1)
    blocks = BlockCode(code, code.sub_blocks * 128, BLOCK_BYTES)
    for member in range(size):
        assert Fraction(len(code.pieces_of(member)), code.sub_blocks) == scheme.share(size)
        stored = sum(map(blocks.piece_bytes, code.pieces_of(member)))
        assert stored == scheme.share(size) * blocks.nbytes
    if scheme.parities:
        held = [(b, p.member) for p in code.pieces if not p.is_data for b, _ in p.terms]
        assert all(code.owner_of(b) != m for b, m in held), "no parity beside its own data"


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
        with pytest.raises(
            ConfigError, match=f"protection {re.escape(text)} is not possible here: {why}"
        ):
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


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=7),
    st.sampled_from(["arc", "arc:2", "aec", "rs:2", "arc+aec", "naive:arc+aec", "rs:3"]),
)
def test_p4_members_of_one_node_are_lost_together(nodes: list[str], text: str) -> None:
    scheme = Scheme.parse(text)
    if scheme.least_members > len(nodes):
        return
    code = make_code(scheme, ring_order(nodes))
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
    ranges = [blocks.range_of(b) for b in range(blocks.code.sub_blocks)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == nbytes
    image = image_of(nbytes, seed=nbytes)
    stored = store(blocks, image)
    for lost in combinations(range(size), tolerance(blocks.code)):
        assert np.array_equal(restore(blocks, stored, lost), image)


def test_large_sections_of_many_cells_recover() -> None:
    for text, lost in (("aec", (1,)), ("rs:2", (0, 3)), ("arc+aec", (1, 2)), ("rs:3", (0, 1, 2))):
        blocks = BlockCode(code_of(text, 5), 40_000_017, 4 * 2**20)
        image = image_of(blocks.nbytes)
        assert np.array_equal(restore(blocks, store(blocks, image), lost), image), text


def test_lost_data_comes_from_a_copy_before_parity_and_from_xor_before_other_parities() -> None:
    code = code_of("arc+aec", 5)
    first, second = code.holders[4]
    assert plan_decode(code, bad=[first], wanted=[4]) == {4: ((second, 1),)}
    both = plan_decode(code, bad=[first, second], wanted=[4])[4]
    assert len(both) == code.splits, "the parity and the other blocks of the stripe"
    code = code_of("rs:3", 6)
    gone = [piece.index for piece in code.pieces if piece.member == 2]
    plan = plan_decode(code, bad=gone, wanted=range(2 * code.splits, 3 * code.splits))
    assert {c for terms in plan.values() for _, c in terms} == {1}


def test_three_parities_are_mds_for_the_widest_groups() -> None:
    """Regular minors of the rows 1, x, x² need distinct x and distinct x² only (Vandermonde)."""
    ones, once, twice = parity_rows(3, 253)
    assert set(ones) == {1}
    assert len(set(once)) == len(set(twice)) == 253
    assert all(t == multiply(x, x) for x, t in zip(once, twice, strict=True))


def buffers(count: int, nbytes: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, nbytes), dtype=np.uint8))


def solved(
    rows: tuple[Row, ...], matrix: tuple[Row, ...], sources: list[np.ndarray]
) -> list[np.ndarray]:
    """The targets, of the longest source's length; what they held before must not matter. By the compiled loop,
    where there is one, and with NumPy."""
    targets, others = (buffers(len(rows), max(map(len, sources)), seed=s) for s in (9, 10))
    solve_ragged(rows, matrix, sources, targets)
    with mock.patch("reft.protect.backend.compiled_run", return_value=None):
        solve_ragged(rows, matrix, sources, others)
    assert all(np.array_equal(one, other) for one, other in zip(targets, others, strict=True))
    return targets


def check(rows: tuple[Row, ...], matrix: tuple[Row, ...], sources: list[np.ndarray]) -> None:
    """Both sides of every equation, by arithmetic that anyone can follow."""
    targets = solved(rows, matrix, sources)
    nbytes = len(targets[0])
    padded = [np.pad(source, (0, nbytes - len(source))) for source in sources]
    for row, factors in zip(rows, matrix, strict=True):
        assert np.array_equal(slow_combine(factors, targets), slow_combine(row, padded))


coefficients = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 1, 2, 4, 8, 16]))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_regular_system_is_solved(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 5))
    matrix = tuple(tuple(data.draw(coefficients) for _ in range(size)) for _ in range(size))
    rows = tuple(tuple(data.draw(coefficients) for _ in range(count)) for _ in range(size))
    if not all(map(any, rows)):
        with pytest.raises(ValueError, match="without any source"):
            packet_program(rows, matrix)
    elif rank(np.array(matrix, np.uint8)) < size:
        with pytest.raises(ValueError, match="expected a regular matrix"):
            packet_program(rows, matrix)
    else:
        check(rows, matrix, buffers(count, 256))


@pytest.mark.parametrize("coefficient", range(1, 256))
def test_every_coefficient_scales_in_place(coefficient: int) -> None:
    check(((1,),), ((coefficient,),), buffers(1, 128))


@pytest.mark.parametrize("nbytes", [128, 4096, CELL_BYTES, 2 * CELL_BYTES + 128 * 5])
def test_short_last_cells_and_sources_that_end_within_a_cell(nbytes: int) -> None:
    rows = ((1, 0, 1, 1, 1), (0, 1, 1, 4, 32))
    matrix = ((1, 1), (2, 8))
    sources = buffers(5, nbytes)
    check(rows, matrix, sources)
    check(rows, matrix, [*sources[:3], sources[3][: nbytes // 3], sources[4][:0]])


def test_the_compiled_loop_writes_where_it_should_wherever_memory_lies() -> None:
    """Odd addresses take another way out of the cache; nothing beside the targets is touched."""
    if compiled_run() is None:
        pytest.skip("the compiled loop was not built")
    rows, matrix = ((1, 1, 1), (1, 2, 4)), ((1, 1), (1, 2))
    nbytes = CELL_BYTES + 128 * 37
    for shift in (0, 1, 16, 63):
        memory = [np.full(nbytes + 128, 0xA5, np.uint8) for _ in range(5)]
        pieces = [m[shift : shift + nbytes] for m in memory]
        for piece, random in zip(pieces, buffers(3, nbytes), strict=False):
            piece[:] = random
        solve_ragged(rows, matrix, pieces[:3], pieces[3:])
        for row, factors in zip(rows, matrix, strict=True):
            assert np.array_equal(slow_combine(factors, pieces[3:]), slow_combine(row, pieces[:3]))
        assert all(
            (m[:shift] == 0xA5).all() and (m[shift + nbytes :] == 0xA5).all() for m in memory
        )


def test_lengths_that_do_not_fit_are_refused() -> None:
    source, target = np.zeros(256, np.uint8), np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="no source longer"):
        solve_ragged(((1,),), ((1,),), [source], [target])
    with pytest.raises(ValueError, match="multiple of 128"):
        solve_ragged(((1,),), ((1,),), [target[:100]], [target[:100]])


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (0, 5), (3, 4)])
def test_two_losses_of_rs2_take_few_xors(lost: tuple[int, int]) -> None:
    """Eight members, four known blocks: both sums over five terms take eight XORs a byte, all the rest seven."""
    known = [j for j in range(6) if j not in lost]
    rows = ((1, 0, *(1 for _ in known)), (0, 1, *(power(j) for j in known)))
    program = packet_program(rows, ((1, 1), (power(lost[0]), power(lost[1]))))
    assert sum(step.count for step in program) <= 15 * PACKETS


def test_one_loss_is_plain_xor_of_whole_cells_and_doubling_costs_three_packets() -> None:
    """A parity of powers of two costs one XOR per source and three eighths per doubling, no tables."""
    assert [step.count for step in packet_program(((1, 1, 1, 1),), ((1,),))] == [PACKETS] * 3
    assert sum(step.count for step in packet_program(((1, 2, 4, 8),))) == 3 * PACKETS + 3 * 3
