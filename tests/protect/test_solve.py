"""Systems of equations over whole buffers, solved in place: right to the bit, and as cheap as they should be."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.protect.backend import compiled_run, solve_ragged
from reft.protect.rs import CELL_BYTES, PACKETS, Row, packet_program, power, rank

from .reference import slow_combine


def buffers(count: int, nbytes: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, nbytes), dtype=np.uint8))


def solved(rows: tuple[Row, ...], matrix: tuple[Row, ...], sources: list[np.ndarray]) -> list[np.ndarray]:
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
        assert all((m[:shift] == 0xA5).all() and (m[shift + nbytes :] == 0xA5).all() for m in memory)


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
