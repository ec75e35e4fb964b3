"""Backends that encode and decode parities.

A backend computes linear combinations of byte buffers over GF(2^8); with coefficients 0 and 1, this
is XOR. It works on raw bits, so NaN payloads, infinities and signed zeros of every dtype are
preserved. Buffers are one-dimensional and contiguous with dtype uint8: ``numpy.ndarray`` or
``torch.Tensor`` (any device).
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reft.device import compiled, find_vendor
from reft.errors import ConfigError
from reft.kernels import on_stream_of, processors, usable_cupy
from reft.protect.rs import (
    CELL_BYTES,
    GRAIN_BYTES,
    PACKET_BYTES,
    PACKETS,
    Operand,
    PacketStep,
    Row,
    bit_matrix,
    needs_packets,
    packet_program,
    ragged_ranges,
)

logger = logging.getLogger(__name__)

# One-dimensional contiguous buffer of bytes: a torch tensor or a NumPy array, as the backend
# requires
Buffer = Any


class Backend(ABC):
    """Computes linear combinations of buffers. All implementations give the same bytes."""

    name: str  # Name of the backend, for messages and results

    def combine(
        self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]
    ) -> None:
        """Compute ``targets[r] = sum over j of rows[r][j] · sources[j]`` over GF(2^8), for every
        r.

        On a device, the work is queued on the current stream; the call returns before it is
        done.

        Args:
            rows: coefficients 0..255, one row for each target and one column for each source. If
                any coefficient is above 1, the buffers' length must be a multiple of 128 bytes
                (:mod:`reft.protect.rs`).
            sources: buffers of dtype uint8 and the same length.
            targets: buffers of that length, which overlap neither the sources nor each other;
                overwritten.

        Raises:
            ValueError: lengths or counts do not match.
        """
        nbytes = _check(rows, sources, targets)
        for row, target in zip(rows, targets, strict=True):
            if not any(row):
                target[:] = 0
        kept = [r for r, row in enumerate(rows) if any(row)]
        if kept and nbytes:
            self._combine(
                tuple(tuple(rows[r]) for r in kept), sources, [targets[r] for r in kept], nbytes
            )

    @abstractmethod
    def _combine(
        self,
        rows: tuple[Row, ...],
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        nbytes: int,
    ) -> None:
        """Do the work of :meth:`combine`; every row has a non-zero coefficient, and buffers are
        not empty."""

    @abstractmethod
    def zeros(self, nbytes: int, like: Buffer) -> Buffer:
        """Return a new buffer of zeros on the device of ``like``."""


def backend_for(buffer: Buffer) -> Backend:
    """Return the fastest available backend for a buffer's class and device.

    For CUDA and ROCm tensors this is CuPy, if it is installed and a test on the device gave the
    same bytes as torch; otherwise torch. The first call for a device compiles a kernel for this
    test.

    Raises:
        TypeError: the buffer's class is not supported.
    """
    kind = type(buffer).__module__.partition(".")[0]
    if kind == "numpy":
        return NumpyBackend()
    if kind == "torch":
        vendor = find_vendor(buffer.device)
        if vendor is None or not vendor.has_cupy:
            return TorchBackend()
        if buffer.device not in _tried:
            _tried[buffer.device] = _tried_cupy(buffer) or TorchBackend()
        return _tried[buffer.device]
    raise TypeError(
        f"found a buffer of class {type(buffer).__name__}; expected a numpy.ndarray or "
        "torch.Tensor of bytes"
    )


_tried: dict[Any, Backend] = {}
"""Backend by device. CuPy must be tested on each device, because CuPy's compiler may be missing
or may not support the device."""


def _tried_cupy(like: Buffer) -> Backend | None:
    """Return CuPy's backend if it works on the device of ``like``; otherwise None.

    Logs a warning if CuPy is installed but does not work.
    """
    plain, rows = TorchBackend(), [(1, 1), (1, 2)]
    try:
        fused = CupyBackend()
        sources = [like.new_zeros(CELL_BYTES) for _ in rows]
        for first, source in enumerate(sources, start=1):
            source[first::3] = 0x5A + first
        made = [[like.new_zeros(CELL_BYTES) for _ in rows] for _ in range(2)]
        for backend, targets in zip((plain, fused), made, strict=True):
            backend.combine(rows, sources, targets)
        if all(bool((a == b).all()) for a, b in zip(*made, strict=True)):
            return fused
        cause = "its kernel makes other bytes than torch"
    except Exception as error:  # A broken library may raise any error, even when it is imported
        if isinstance(error, ConfigError) and find_spec("cupy") is None:
            return None
        cause = f"{type(error).__name__}: {error}"
    logger.warning(
        "torch encodes parities on %s, more slowly: CuPy is installed and does not work there "
        "(%s). Install the extra that fits the driver and the device, with its runtime compiler "
        "(NVRTC or hipRTC): reft-ckpt[cuda12], reft-ckpt[cuda13] (no V100) or reft-ckpt[rocm7]",
        like.device,
        cause,
    )
    return None


def _check(rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> int:
    """Check the arguments of :meth:`Backend.combine`, and return the length of the buffers."""
    if not targets or len(rows) != len(targets) or any(len(row) != len(sources) for row in rows):
        raise ValueError(
            f"found {len(rows)} rows of {sorted({len(row) for row in rows})} coefficients for "
            f"{len(sources)} sources and {len(targets)} targets; expected one row per target and "
            "one coefficient per source"
        )
    if any(not 0 <= c <= 255 for row in rows for c in row):
        raise ValueError(f"found coefficients {rows}; expected integers from 0 to 255")
    lengths = sorted({len(b) for b in (*sources, *targets)})
    if len(lengths) != 1:
        raise ValueError(
            f"found buffers of {lengths} bytes; expected one length (see combine_ragged)"
        )
    if needs_packets(rows) and lengths[0] % GRAIN_BYTES:
        raise ValueError(
            f"found buffers of {lengths[0]} bytes; coefficients above 1 need a multiple of "
            f"{GRAIN_BYTES}: pad the sub-blocks"
        )
    return lengths[0]


def combine_ragged(
    backend: Backend, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]
) -> None:
    """Do :meth:`Backend.combine` with sources that may be shorter than the targets and count as
    zero-padded.

    Only the cell (512 KiB unit) in which a source ends is copied and padded, and only if
    coefficients above 1 require complete cells.

    Raises:
        ValueError: a source is longer than the targets.
    """
    nbytes = len(targets[0])
    if any(len(s) > nbytes for s in sources):
        raise ValueError(
            f"found sources of {[len(s) for s in sources]} bytes, targets of {nbytes}; expected "
            "none longer"
        )
    step = CELL_BYTES if needs_packets(rows) else 1
    for place, columns, pieces in ragged_ranges(
        sources, nbytes, step, lambda n: backend.zeros(n, targets[0])
    ):
        chosen = [tuple(row[j] for j in columns) for row in rows]
        backend.combine(chosen, pieces, [target[place] for target in targets])


class ChunkedBackend(Backend):
    """Base class of backends that use a library of elementwise operations.

    Buffers are processed in chunks, so that a target's chunk stays in the cache from the first
    XOR to the last. Sources and targets are then read from memory only once.
    """

    def _combine(
        self,
        rows: tuple[Row, ...],
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        nbytes: int,
    ) -> None:
        if needs_packets(rows):
            self.run(packet_program(rows), sources, targets)
        else:
            self._combine_plain(rows, sources, targets, nbytes)

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

    def run(
        self, steps: tuple[PacketStep, ...], sources: Sequence[Buffer], targets: Sequence[Buffer]
    ) -> None:
        """Execute packet steps on buffers of equal length, a few cells at a time."""
        nbytes = len(targets[0])
        width, views = self._words([*sources, *targets], nbytes)
        cells = nbytes // CELL_BYTES
        split = cells * CELL_BYTES // width
        step = max(1, self._chunk_bytes(targets[0]) // CELL_BYTES)
        folded = [
            view[:split].reshape(cells, PACKETS, CELL_BYTES // PACKETS // width) for view in views
        ]
        for start in range(0, cells, step):
            self._run(steps, [view[start : min(start + step, cells)] for view in folded])
        if split * width < nbytes:
            self._run(steps, [view[split:].reshape(1, PACKETS, -1) for view in views])

    def _run(self, steps: Sequence[PacketStep], buffers: Sequence[Any]) -> None:
        """Execute steps on views of shape (cells, 8, words)."""

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
        """Choose the widest word that all buffers' alignment permits.

        Returns:
            Width of the word in bytes, and views of the buffers as words.
        """

    @abstractmethod
    def _chunk_bytes(self, target: Buffer) -> int:
        """Return the size of a target's chunk that stays in the cache while the sources are
        read."""

    @abstractmethod
    def _xor(self, left: Any, right: Any, out: Any) -> None: ...

    @abstractmethod
    def _copy(self, source: Any, out: Any) -> None: ...


# Threads of a block; with coefficients above 1, also the number of a cell's columns that a block
# processes. The kernels declare this number to the compiler: HIP's compilers otherwise assume
# blocks of 1,024 threads, which leaves 128 registers for each thread, and the accumulators of
# three or more targets are spilled.
THREADS = 256

NAME = "reft_combine"

_WORDS = {
    16: (
        "typedef uint4 Word;\nstatic __device__ __forceinline__ Word mix(Word a, Word b) { a.x ^= "
        "b.x; a.y ^= b.y; a.z ^= b.z; a.w ^= b.w; return a; }\nstatic __device__ __forceinline__ "
        "Word zero() { Word a; a.x = a.y = a.z = a.w = 0; return a; }\n"
    ),
    **{
        width: (
            f"typedef {name} Word;\nstatic __device__ __forceinline__ Word mix(Word a, Word b) {{ "
            "return a ^ b; }\nstatic __device__ __forceinline__ Word zero() { return 0; }\n"
        )
        for width, name in (
            (8, "unsigned long long"),
            (4, "unsigned int"),
            (2, "unsigned short"),
            (1, "unsigned char"),
        )
    },
}


def find_launch_shape(rows: Sequence[Row], width: int, nbytes: int) -> tuple[int, tuple[int, int]]:
    """Return the launch parameters of the kernel.

    Args:
        rows: coefficients.
        width: bytes of a word.
        nbytes: length of the buffers.

    Returns:
        Number of thread blocks for which there is work (if fewer are launched, each does the
        work of several), and the kernel's first two arguments, unsigned 64-bit integers.
    """
    words = nbytes // width
    if not needs_packets(rows):
        return max(1, -(-words // THREADS)), (words, nbytes)
    whole, rest = divmod(words, PACKETS * (PACKET_BYTES // width))
    return (whole + bool(rest)) * _tiles(width), (whole, rest // PACKETS)


def _tiles(width: int) -> int:
    """Return the number of thread blocks that share a cell."""
    return PACKET_BYTES // width // THREADS


@lru_cache(maxsize=256)
def kernel_source(rows: tuple[Row, ...], width: int) -> str:
    """Return the source of ``reft_combine`` for a coefficient matrix.

    The kernel's arguments are two numbers (see :func:`find_launch_shape`), then the sources and the
    targets as byte pointers.

    Args:
        rows: coefficients, one row for each target; no row is all zeros.
        width: size of a word in bytes: 16, 8, 4, 2 or 1; all pointers are aligned to it.
    """
    sources = range(len(rows[0]))
    pointers = [f"const unsigned char* __restrict__ s{j}" for j in sources]
    pointers += [f"unsigned char* __restrict__ t{r}" for r in range(len(rows))]
    body = _packet_body(rows, width) if needs_packets(rows) else _plain_body(rows)
    return (
        "typedef unsigned long long Count;\n"
        + _WORDS[width]
        + f'extern "C" __global__ void __launch_bounds__({THREADS}) '
        + f"{NAME}(Count m, Count n, {', '.join(pointers)}) {{\n{body}}}\n"
    )


def _plain_body(rows: Sequence[Row]) -> str:
    """Return the kernel's body for plain XOR: m words in n bytes; the bytes after the last word
    are combined singly."""

    def xor(row: Row, pattern: str, joint: str) -> str:
        terms = [pattern.format(j=j) for j, c in enumerate(row) if c]
        text = terms[0]
        for term in terms[1:]:
            text = joint.format(text, term)
        return text

    used = [j for j in range(len(rows[0])) if any(row[j] for row in rows)]
    lines = [
        "  const Count stride = (Count)gridDim.x * blockDim.x;",
        "  const Count first = (Count)blockIdx.x * blockDim.x + threadIdx.x;",
        "  for (Count i = first; i < m; i += stride) {",
        *(f"    const Word x{j} = ((const Word*)s{j})[i];" for j in used),
        *(
            f"    ((Word*)t{r})[i] = {xor(row, 'x{j}', 'mix({}, {})')};"
            for r, row in enumerate(rows)
        ),
        "  }",
        "  for (Count i = m * sizeof(Word) + first; i < n; i += stride) {",
        *(f"    t{r}[i] = {xor(row, 's{j}[i]', '{} ^ {}')};" for r, row in enumerate(rows)),
        "  }",
    ]
    return "\n".join(lines) + "\n"


def _packet_body(rows: Sequence[Row], width: int) -> str:
    """Return the kernel's body for packets: m complete cells and, if n is not 0, a last cell
    with packets of n words."""
    words = PACKET_BYTES // width
    bits = range(PACKETS)
    lines = [
        "  const Count cells = m + (n ? 1 : 0);",
        f"  for (Count tile = blockIdx.x; tile < cells * {_tiles(width)}; tile += gridDim.x) {{",
        f"    const Count c = tile / {_tiles(width)};",
        f"    const Count w = tile % {_tiles(width)} * {THREADS} + threadIdx.x;",
        f"    const Count words = c < m ? {words} : n;",
        "    if (w < words) {",
        f"      const Count at = c * {words * PACKETS} + w;",
        *(f"      Word a{r}_{i} = zero();" for r in range(len(rows)) for i in bits),
    ]
    for j in range(len(rows[0])):
        if not any(row[j] for row in rows):
            continue
        lines.append("      {")
        lines += [f"        const Word x{i} = ((const Word*)s{j})[at + {i} * words];" for i in bits]
        for r, row in enumerate(rows):
            lines += _accumulate(r, row[j])
        lines.append("      }")
    lines += [
        f"      ((Word*)t{r})[at + {i} * words] = a{r}_{i};" for r in range(len(rows)) for i in bits
    ]
    return "\n".join([*lines, "    }", "  }"]) + "\n"


def _accumulate(target: int, coefficient: int) -> list[str]:
    lines = []
    for i, factors in enumerate(bit_matrix(coefficient)):
        text = f"a{target}_{i}"
        for j in factors:
            text = f"mix({text}, x{j})"
        if factors:
            lines.append(f"        a{target}_{i} = {text};")
    return lines


_BLOCKS_PER_PROCESSOR = 8
# Largest number of buffers in one launch, because kernel arguments are limited to 4 KiB
_MOST_SOURCES = 200


class CupyBackend(Backend):
    """Backend for ``torch.Tensor`` of dtype uint8 on one CUDA or ROCm device.

    Raises:
        ConfigError: CuPy is not installed or finds no device.
    """

    name = "cupy"

    def __init__(self) -> None:
        usable_cupy()

    def zeros(self, nbytes: int, like: Buffer) -> Buffer:
        return like.new_zeros(nbytes)

    def _combine(
        self,
        rows: tuple[Row, ...],
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        nbytes: int,
    ) -> None:
        if len(sources) + len(targets) > _MOST_SOURCES:
            raise ValueError(
                f"found {len(sources)} sources and {len(targets)} targets; one kernel takes at "
                f"most {_MOST_SOURCES} buffers: use smaller sharding groups"
            )
        with on_stream_of(targets[0]):
            # Pass addresses instead of CuPy arrays: converting tensors by DLPack would run
            # Python code under the GIL for every buffer of every chunk.
            addresses = [buffer.data_ptr() for buffer in (*sources, *targets)]
            width = gcd(16, *addresses)
            items, numbers = find_launch_shape(rows, width, nbytes)
            device = targets[0].device.index
            grid = min(items, processors(device) * _BLOCKS_PER_PROCESSOR)
            arguments = tuple(map(np.uintp, (*numbers, *addresses)))  # All arguments have 64 bits
            _compiled(rows, width, device)((grid,), (THREADS,), arguments)


@cache
def _compiled(rows: tuple[Row, ...], width: int, device: int) -> Any:
    return usable_cupy().RawKernel(kernel_source(rows, width), NAME)


Bytes = npt.NDArray[np.uint8]

# Size of a chunk, such that the target's chunk stays in the second-level cache while the sources
# are read
CHUNK_BYTES = 512 * 2**10


class NumpyBackend(ChunkedBackend):
    """Backend for ``numpy.ndarray`` of dtype uint8."""

    name = "numpy"

    def zeros(self, nbytes: int, like: Bytes) -> Bytes:
        return np.zeros(nbytes, dtype=np.uint8)

    def _words(self, buffers: Sequence[Bytes], nbytes: int) -> tuple[int, list[Any]]:
        # Wider words were measured to be no faster, and NumPy copies them if they are unaligned.
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
"""Size of a chunk on a device: smaller than the second-level cache of every supported device,
and large enough to hide the latency of kernel launches."""


class TorchBackend(ChunkedBackend):
    """Backend for ``torch.Tensor`` of dtype uint8 on one device."""

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


# --- decoding of several unknown blocks of a stripe, on the host ----------------------------------


Run = Callable[[tuple[PacketStep, ...], Sequence[Bytes], Sequence[Bytes]], None]


@lru_cache(maxsize=1)
def compiled_run() -> Run | None:
    """Return the compiled function that executes steps on contiguous buffers of equal length.

    The function releases the GIL. Without it, NumPy's version is about two thirds as fast.

    Returns:
        The function; None if it was not compiled.
    """
    try:
        run_steps = compiled("reft.protect._packets", "reft_run_steps")
    except OSError as error:
        logger.info("parities are decoded with NumPy, without the compiled loop: %s", error)
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    run_steps.argtypes = [pointer, size, pointer, size, size, size, size]

    def run(
        steps: tuple[PacketStep, ...], sources: Sequence[Bytes], targets: Sequence[Bytes]
    ) -> None:
        table = _table(steps)
        buffers = np.array([b.ctypes.data for b in (*sources, *targets)], np.uintp)
        counts = len(sources), len(targets), len(targets[0])
        if run_steps(table.ctypes.data, len(table), buffers.ctypes.data, *counts, CELL_BYTES):
            raise MemoryError(f"no memory for a column of {len(targets)} blocks that are decoded")

    return run


@lru_cache(maxsize=256)
def _table(steps: tuple[PacketStep, ...]) -> npt.NDArray[np.int64]:
    """Return the steps as an array of ``struct Step`` of ``packets.cpp``, one row each."""
    return np.array([(*s.target, s.count, *s.left, *(s.right or (-1, 0))) for s in steps], np.int64)


def solve_ragged(
    rows: tuple[Row, ...],
    matrix: tuple[Row, ...],
    sources: Sequence[Bytes],
    targets: Sequence[Bytes],
) -> None:
    """Compute the targets X with ``matrix · X = rows · sources`` over GF(2^8).

    Args:
        rows: coefficients of the sources, one row for each equation.
        matrix: coefficients of the targets; square and invertible.
        sources: buffers that are at most as long as the targets; shorter ones count as
            zero-padded.
        targets: buffers of equal length, a multiple of 128 bytes; overwritten.

    Raises:
        ValueError: the lengths do not match.
        MemoryError: there is no memory for intermediate results.
    """
    nbytes = len(targets[0])
    lengths = {len(target) for target in targets}
    if lengths != {nbytes} or nbytes % GRAIN_BYTES or any(len(s) > nbytes for s in sources):
        raise ValueError(
            f"found sources of {[len(s) for s in sources]} bytes, targets of {sorted(lengths)}; "
            "expected "
            f"targets of one length, a multiple of {GRAIN_BYTES}, and no source longer than they"
        )
    numpy = NumpyBackend()
    run = compiled_run() or numpy.run
    for place, columns, pieces in ragged_ranges(
        sources, nbytes, CELL_BYTES, lambda n: numpy.zeros(n, targets[0])
    ):
        steps = packet_program(tuple(tuple(row[j] for j in columns) for row in rows), matrix)
        run(steps, pieces, [target[place] for target in targets])
