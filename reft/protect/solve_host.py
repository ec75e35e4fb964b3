"""Solving stripes on the host, on one core; others may use the interpreter meanwhile.

By a compiled loop (:mod:`reft.protect.packets`), or with NumPy where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from reft.protect.backend import ragged_cuts
from reft.protect.gf256 import Row
from reft.protect.packets import Bytes, compiled_run
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, PACKET_BYTES, PACKETS
from reft.protect.solve import Operand, Step, solve_program


def solve_ragged(
    rows: tuple[Row, ...], matrix: tuple[Row, ...], sources: Sequence[Bytes], targets: Sequence[Bytes]
) -> None:
    """Compute the targets X with ``matrix · X = rows · sources`` over GF(2^8).

    Args:
        rows: coefficients of the sources, one row per equation.
        matrix: coefficients of the targets, square and regular.
        sources: at most as long as the targets; shorter ones count as padded with zeros.
        targets: of one length, a multiple of 128 bytes; overwritten, whatever they hold.

    Raises:
        ValueError: where lengths do not fit.
    """
    nbytes = len(targets[0])
    lengths = {len(target) for target in targets}
    if lengths != {nbytes} or nbytes % GRAIN_BYTES or any(len(s) > nbytes for s in sources):
        raise ValueError(
            f"found sources of {[len(s) for s in sources]} bytes, targets of {sorted(lengths)}; expected "
            f"targets of one length, a multiple of {GRAIN_BYTES}, and no source longer than they"
        )
    run = compiled_run() or run_numpy
    for start, stop in pairwise(ragged_cuts({len(s) for s in sources}, nbytes, CELL_BYTES)):
        columns = [j for j, s in enumerate(sources) if len(s) > start]
        steps = solve_program(tuple(tuple(row[j] for j in columns) for row in rows), matrix)
        pieces = [_padded(sources[j], start, stop) for j in columns]
        run(steps, pieces, [target[start:stop] for target in targets])


def _padded(source: Bytes, start: int, stop: int) -> Bytes:
    if len(source) >= stop:
        return source[start:stop]
    piece = np.zeros(stop - start, np.uint8)
    piece[: len(source) - start] = source[start:]
    return piece


def run_numpy(steps: Sequence[Step], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    """Carry out a program on buffers of one length, a cell at a time: the targets' cells and that of the
    source that streams past them stay in the second-level cache."""
    buffers = (*sources, *targets)
    xor, copy = np.bitwise_xor, np.copyto
    nbytes = len(buffers[0])
    slices: list[_Slices] = []
    for at in range(0, nbytes, CELL_BYTES):
        packet = min(PACKET_BYTES, (nbytes - at) // PACKETS)
        if not at or packet < PACKET_BYTES:
            slices = [_slices(step, packet) for step in steps]
        cells = [buffer[at : at + CELL_BYTES] for buffer in buffers]
        for (t, into), left, right in slices:
            target = cells[t][into]
            first = target if left is None else cells[left[0]][left[1]]
            if right is None:
                copy(target, first)
            else:
                xor(first, cells[right[0]][right[1]], target)


_Place = tuple[int, slice]
_Slices = tuple[_Place, _Place | None, _Place | None]


def _slices(step: Step, packet_bytes: int) -> _Slices:
    """Where a step writes, and what it reads: the bytes in the cells; None for ``left`` means the target."""

    def place(operand: Operand) -> _Place:
        return operand[0], slice(operand[1] * packet_bytes, (operand[1] + step.count) * packet_bytes)

    left = None if step.left == step.target else place(step.left)
    return place(step.target), left, None if step.right is None else place(step.right)
