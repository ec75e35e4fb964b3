"""The backends that encode and decode: one class, one choice, one rule for short sources.

A backend computes linear combinations of byte buffers over GF(2^8); with coefficients 0 and 1 that is
XOR. It works on the bits of whatever it is given, so NaN payloads, infinities and signed zeros of every
dtype survive. Buffers are one-dimensional, contiguous and of unsigned bytes: ``numpy.ndarray`` or
``torch.Tensor`` (any device).
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reft.builds import compiled
from reft.protect.gf256 import Row
from reft.protect.rs import (
    CELL_BYTES,
    GRAIN_BYTES,
    PACKETS,
    Operand,
    Step,
    needs_packets,
    packet_program,
    ragged_ranges,
)

logger = logging.getLogger(__name__)

Buffer = Any
"""A one-dimensional contiguous buffer of bytes; which class is the backend's business."""


class Backend(ABC):
    """Linear combinations of buffers by a library of elementwise operations. Both give the same bytes.

    Buffers are cut into chunks that stay in the cache: D-1 sources and one target stream through the
    processor once, since the target's chunk is written to the cache by the first XOR and to memory after the
    last.
    """

    name: str
    """For people and results."""

    def combine(self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """``targets[r] = sum over j of rows[r][j] · sources[j]`` over GF(2^8), for every r.

        On a device the work is queued on the current stream and the host does not wait for it.

        Args:
            rows: coefficients 0..255, one row per target and one column per source. With coefficients
                above 1 the length is a multiple of 128 bytes (:mod:`reft.protect.rs`).
            sources: buffers, uint8, all of one length.
            targets: buffers of that length, apart from the sources and from each other; overwritten.

        Raises:
            ValueError: where lengths or counts do not fit.
        """
        nbytes = _check(rows, sources, targets)
        for row, target in zip(rows, targets, strict=True):
            if not any(row):
                target[:] = 0
        kept = [r for r, row in enumerate(rows) if any(row)]
        if kept and nbytes:
            chosen, written = tuple(tuple(rows[r]) for r in kept), [targets[r] for r in kept]
            if needs_packets(chosen):
                self.run(packet_program(chosen), sources, written)
            else:
                self._combine_plain(chosen, sources, written, nbytes)

    @abstractmethod
    def zeros(self, nbytes: int, like: Buffer) -> Buffer:
        """A new buffer of zeros on the device of ``like``."""

    def _combine_plain(
        self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer], nbytes: int
    ) -> None:
        chosen = [[j for j, c in enumerate(row) if c] for row in rows]
        width, views = self._words([*sources, *targets], nbytes)
        whole = nbytes // width
        step = max(1, self._chunk_bytes(targets[0]) // width)
        xor = self._xor
        for start in range(0, whole, step):
            cut = [view[start : min(start + step, whole)] for view in views]
            for target, columns in zip(cut[len(sources) :], chosen, strict=True):
                if len(columns) == 1:
                    self._copy(cut[columns[0]], target)
                    continue
                xor(cut[columns[0]], cut[columns[1]], target)
                for column in columns[2:]:
                    xor(target, cut[column], target)
        if whole * width < nbytes:
            tails = [[b[whole * width :] for b in buffers] for buffers in (sources, targets)]
            self._combine_plain(rows, tails[0], tails[1], nbytes - whole * width)

    def run(self, steps: tuple[Step, ...], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """Carry out a program on buffers of one length, some cells at a time."""
        nbytes = len(targets[0])
        width, views = self._words([*sources, *targets], nbytes)
        cells = nbytes // CELL_BYTES
        split = cells * CELL_BYTES // width
        step = max(1, self._chunk_bytes(targets[0]) // CELL_BYTES)
        folded = [view[:split].reshape(cells, PACKETS, CELL_BYTES // PACKETS // width) for view in views]
        for start in range(0, cells, step):
            self._run(steps, [view[start : min(start + step, cells)] for view in folded])
        if split * width < nbytes:
            self._run(steps, [view[split:].reshape(1, PACKETS, -1) for view in views])

    def _run(self, steps: Sequence[Step], buffers: Sequence[Any]) -> None:
        """On views of shape (cells, 8, words)."""

        def packets(operand: Operand, count: int) -> Any:
            buffer, at = operand
            return buffers[buffer][:, at : at + count]

        for step in steps:
            out, left = packets(step.target, step.count), packets(step.left, step.count)
            if step.right is None:
                self._copy(left, out)
            else:
                self._xor(left, packets(step.right, step.count), out)

    @abstractmethod
    def _words(self, buffers: Sequence[Buffer], nbytes: int) -> tuple[int, list[Any]]:
        """Views of the widest word that suits all buffers, cut to whole words; and its width in bytes."""

    @abstractmethod
    def _chunk_bytes(self, target: Buffer) -> int:
        """Bytes of a target that stay in the cache while the sources stream past."""

    @abstractmethod
    def _xor(self, left: Any, right: Any, out: Any) -> None: ...

    @abstractmethod
    def _copy(self, source: Any, out: Any) -> None: ...


def backend_for(buffer: Buffer) -> Backend:
    """The backend for a buffer, by its class."""
    kind = type(buffer).__module__.partition(".")[0]
    if kind == "numpy":
        return NumpyBackend()
    if kind == "torch":
        return TorchBackend()
    raise TypeError(
        f"found a buffer of class {type(buffer).__name__}; expected a numpy.ndarray or torch.Tensor of bytes"
    )


def _check(rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> int:
    """The length of the buffers, if the arguments of :meth:`Backend.combine` fit."""
    if not targets or len(rows) != len(targets) or any(len(row) != len(sources) for row in rows):
        raise ValueError(
            f"found {len(rows)} rows of {sorted({len(row) for row in rows})} coefficients for "
            f"{len(sources)} sources and {len(targets)} targets; expected one row per target and one "
            f"coefficient per source"
        )
    if any(not 0 <= c <= 255 for row in rows for c in row):
        raise ValueError(f"found coefficients {rows}; expected integers from 0 to 255")
    lengths = sorted({len(b) for b in (*sources, *targets)})
    if len(lengths) != 1:
        raise ValueError(f"found buffers of {lengths} bytes; expected one length (see combine_ragged)")
    if needs_packets(rows) and lengths[0] % GRAIN_BYTES:
        raise ValueError(
            f"found buffers of {lengths[0]} bytes; coefficients above 1 need a multiple of {GRAIN_BYTES}: "
            f"pad the sub-blocks"
        )
    return lengths[0]


def combine_ragged(
    backend: Backend, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]
) -> None:
    """:meth:`Backend.combine` where sources may be shorter than the targets, as if padded with zeros.

    Only the cell in which a source ends is copied, and only if coefficients above 1 need whole cells.
    """
    nbytes = len(targets[0])
    if any(len(s) > nbytes for s in sources):
        raise ValueError(
            f"found sources of {[len(s) for s in sources]} bytes, targets of {nbytes}; expected none longer"
        )
    step = CELL_BYTES if needs_packets(rows) else 1
    for place, columns, pieces in ragged_ranges(
        sources, nbytes, step, lambda n: backend.zeros(n, targets[0])
    ):
        chosen = [tuple(row[j] for j in columns) for row in rows]
        backend.combine(chosen, pieces, [target[place] for target in targets])


Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 512 * 2**10
"""The target's chunk stays in the second-level cache; the sources stream past it."""


class NumpyBackend(Backend):
    """See :class:`~reft.protect.backend.Backend`. Buffers are ``numpy.ndarray`` of uint8."""

    name = "numpy"

    def zeros(self, nbytes: int, like: Bytes) -> Bytes:
        return np.zeros(nbytes, dtype=np.uint8)

    def _words(self, buffers: Sequence[Bytes], nbytes: int) -> tuple[int, list[Any]]:
        # Wider words gain nothing (measured), and unaligned ones go through NumPy's slow buffers.
        return 1, list(buffers)

    def _chunk_bytes(self, target: Bytes) -> int:
        return CHUNK_BYTES

    def _xor(self, left: Any, right: Any, out: Any) -> None:
        np.bitwise_xor(left, right, out=out)

    def _copy(self, source: Any, out: Any) -> None:
        np.copyto(out, source)


_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HOST_CHUNK_BYTES = 512 * 2**10
_DEVICE_CHUNK_BYTES = 4 * 2**20
"""Below the second-level cache of every supported device; long enough to hide a launch."""


class TorchBackend(Backend):
    """See :class:`~reft.protect.backend.Backend`. Buffers are ``torch.Tensor`` of uint8, one device."""

    name = "torch"

    def zeros(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def _words(self, buffers: Sequence[torch.Tensor], nbytes: int) -> tuple[int, list[Any]]:
        offsets = (b.storage_offset() for b in buffers)
        pointers = (b.data_ptr() for b in buffers)
        width = gcd(8, *offsets, *pointers)
        if nbytes < width:
            width = 1
        whole = nbytes // width * width
        return width, [b[:whole].view(_DTYPES[width]) for b in buffers]

    def _chunk_bytes(self, target: torch.Tensor) -> int:
        return _HOST_CHUNK_BYTES if target.device.type == "cpu" else _DEVICE_CHUNK_BYTES

    def _xor(self, left: Any, right: Any, out: Any) -> None:
        torch.bitwise_xor(left, right, out=out)

    def _copy(self, source: Any, out: Any) -> None:
        out.copy_(source)


# --- several unknown blocks of one stripe at once, on the host ------------------------------------------

Run = Callable[[tuple[Step, ...], Sequence[Bytes], Sequence[Bytes]], None]


@lru_cache(maxsize=1)
def compiled_run() -> Run | None:
    """What carries out steps on sources and targets, contiguous and of one length; lets go of the interpreter
    meanwhile. None where it was not built: NumPy does the same, at some two thirds of the speed."""
    try:
        run_steps = compiled("reft.protect._packets", "reft_run_steps")
    except OSError as error:
        logger.info("parities are decoded with NumPy, without the compiled loop: %s", error)
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    run_steps.argtypes = [pointer, size, pointer, size, size, size, size]

    def run(steps: tuple[Step, ...], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
        table = _table(steps)
        buffers = np.array([b.ctypes.data for b in (*sources, *targets)], np.uintp)
        counts = len(sources), len(targets), len(targets[0])
        if run_steps(table.ctypes.data, len(table), buffers.ctypes.data, *counts, CELL_BYTES):
            raise MemoryError(f"no memory for a column of {len(targets)} blocks that are decoded")

    return run


@lru_cache(maxsize=256)
def _table(steps: tuple[Step, ...]) -> npt.NDArray[np.int64]:
    """The struct ``Step`` of ``packets.cpp``, one row each."""
    return np.array([(*s.target, s.count, *s.left, *(s.right or (-1, 0))) for s in steps], np.int64)


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
    numpy = NumpyBackend()
    run = compiled_run() or numpy.run
    for place, columns, pieces in ragged_ranges(
        sources, nbytes, CELL_BYTES, lambda n: numpy.zeros(n, targets[0])
    ):
        steps = packet_program(tuple(tuple(row[j] for j in columns) for row in rows), matrix)
        run(steps, pieces, [target[place] for target in targets])
