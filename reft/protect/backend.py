"""The backends that encode and decode: one protocol, one choice, one rule for short sources.

A backend computes linear combinations of byte buffers over GF(2^8); with coefficients 0 and 1 that is
XOR. It works on the bits of whatever it is given, so NaN payloads, infinities and signed zeros of every
dtype survive. Buffers are one-dimensional, contiguous and of unsigned bytes: ``numpy.ndarray``,
``torch.Tensor`` (any device) or ``cupy.ndarray``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Protocol

from reft.errors import ConfigError
from reft.protect.gf256 import Row
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, PACKETS, needs_packets, packet_program

logger = logging.getLogger(__name__)

Buffer = Any
"""A one-dimensional contiguous buffer of bytes; which class is the backend's business."""


class Backend(Protocol):
    """Linear combinations of buffers. All implementations give the same bytes."""

    @property
    def name(self) -> str:
        """Short name for people and results."""

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

    def zeros(self, nbytes: int, like: Buffer) -> Buffer:
        """A new buffer of zeros on the device of ``like``."""


def numpy_backend() -> Backend:
    """The backend of the host."""
    from reft.protect.xor_numpy import NumpyBackend

    return NumpyBackend()


def backend_for(buffer: Buffer) -> Backend:
    """The fastest backend at hand for a buffer: by its class and device.

    CUDA and ROCm tensors take CuPy where it is installed and its kernel was seen to make torch's bytes on the
    device, else torch. The first call for a device compiles that kernel.

    Raises:
        TypeError: for anything that is neither a NumPy array, a torch tensor nor a CuPy array.
    """
    kind = type(buffer).__module__.partition(".")[0]
    if kind == "numpy":
        return numpy_backend()
    if kind == "torch":
        from reft.protect.xor_torch import TorchBackend

        if buffer.device.type != "cuda":
            return TorchBackend()
        if buffer.device not in _tried:
            _tried[buffer.device] = _tried_cupy(buffer) or TorchBackend()
        return _tried[buffer.device]
    if kind == "cupy":
        return cupy_backend()
    raise TypeError(
        f"found a buffer of class {type(buffer).__name__}; expected a numpy.ndarray, torch.Tensor or "
        f"cupy.ndarray of bytes"
    )


_tried: dict[Any, Backend] = {}
"""By device: CuPy's library may be there and not its compiler, or one that does not know the device."""


def _tried_cupy(like: Buffer) -> Backend | None:
    """CuPy's backend if it works on the device of ``like``; else None, and a warning if it is installed."""
    from reft.protect.xor_torch import TorchBackend

    try:
        fused = cupy_backend()
    except ConfigError as error:
        if find_spec("cupy") is not None:
            logger.warning("torch encodes parities on %s: %s", like.device, error)
        return None
    plain, rows = TorchBackend(), [(1, 1), (1, 2)]
    try:
        sources = [like.new_zeros(CELL_BYTES) for _ in rows]
        for first, source in enumerate(sources, start=1):
            source[first::3] = 0x5A + first
        made = [[like.new_zeros(CELL_BYTES) for _ in rows] for _ in range(2)]
        for backend, targets in zip((plain, fused), made, strict=True):
            backend.combine(rows, sources, targets)
        if all(bool((a == b).all()) for a, b in zip(*made, strict=True)):
            return fused
        cause = "its kernel makes other bytes than torch"
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
    logger.warning(
        "torch encodes parities on %s, more slowly: CuPy is installed and does not work there (%s). Install "
        "the extra that fits the driver and the device, with its runtime compiler (NVRTC or hipRTC): "
        "reft-ckpt[cuda12], reft-ckpt[cuda13] (no V100) or reft-ckpt[rocm7]",
        like.device,
        cause,
    )
    return None


def cupy_backend() -> Backend:
    """The fused kernels.

    Raises:
        ConfigError: where CuPy is not installed or sees no device; says what to install.
    """
    from reft.protect.xor_cupy import CupyBackend

    return CupyBackend()


def check_combine(rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> int:
    """Check the arguments of :meth:`Backend.combine`.

    Returns:
        The length of the buffers in bytes.

    Raises:
        ValueError: what was found, what was expected.
    """
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


def clear_zero_rows(rows: Sequence[Row], targets: Sequence[Buffer]) -> list[int]:
    """Zero the targets of rows without a coefficient; returns the indices of the others."""
    for row, target in zip(rows, targets, strict=True):
        if not any(row):
            target[:] = 0
    return [r for r, row in enumerate(rows) if any(row)]


def combine_ragged(
    backend: Backend, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]
) -> None:
    """:meth:`Backend.combine` where sources may be shorter than the targets, as if padded with zeros.

    Only the cell in which a source ends is copied, and only if coefficients above 1 need whole cells.

    Args:
        rows: as in :meth:`Backend.combine`.
        sources: buffers of at most the targets' length.
        targets: buffers of one length.
    """
    nbytes = len(targets[0])
    if any(len(s) > nbytes for s in sources):
        raise ValueError(
            f"found sources of {[len(s) for s in sources]} bytes, targets of {nbytes}; expected none longer"
        )
    step = CELL_BYTES if needs_packets(rows) else 1
    for start, stop in pairwise(ragged_cuts({len(s) for s in sources}, nbytes, step)):
        columns = [j for j, s in enumerate(sources) if len(s) > start]
        backend.combine(
            [tuple(row[j] for j in columns) for row in rows],
            [_padded(backend, sources[j], start, stop, targets[0]) for j in columns],
            [t[start:stop] for t in targets],
        )


def ragged_cuts(lengths: set[int], nbytes: int, step: int) -> list[int]:
    """Ends of ranges, ascending, in which no source of these lengths ends, but in ranges of one step."""
    cuts = {0, nbytes}
    for length in lengths - {nbytes}:
        cuts |= {length // step * step, min(nbytes, -(-length // step) * step)}
    return sorted(cuts)


def _padded(backend: Backend, source: Buffer, start: int, stop: int, like: Buffer) -> Buffer:
    if len(source) >= stop:
        return source[start:stop]
    piece = backend.zeros(stop - start, like)
    piece[: len(source) - start] = source[start:]
    return piece


class ChunkedBackend(ABC):
    """What libraries of elementwise operations share: cut into chunks that stay in the cache, then XOR.

    D-1 sources and one target stream through the processor once: the target's chunk is written to the
    cache by the first XOR and to memory after the last.
    """

    def combine(self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """See :meth:`Backend.combine`."""
        nbytes = check_combine(rows, sources, targets)
        kept = clear_zero_rows(rows, targets)
        if not kept or not nbytes:
            return
        rows, targets = [rows[r] for r in kept], [targets[r] for r in kept]
        if needs_packets(rows):
            self._combine_packets(rows, sources, targets, nbytes)
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

    def _combine_packets(
        self, rows: Sequence[Row], sources: Sequence[Buffer], targets: Sequence[Buffer], nbytes: int
    ) -> None:
        width, views = self._words([*sources, *targets], nbytes)
        programs = [packet_program(row) for row in rows]
        cells = nbytes // CELL_BYTES
        split = cells * CELL_BYTES // width
        step = max(1, self._chunk_bytes(targets[0]) // CELL_BYTES)
        folded = [view[:split].reshape(cells, PACKETS, CELL_BYTES // PACKETS // width) for view in views]
        for start in range(0, cells, step):
            cut = [view[start : min(start + step, cells)] for view in folded]
            self._run(programs, cut[: len(sources)], cut[len(sources) :])
        if split * width < nbytes:
            cut = [view[split:].reshape(1, PACKETS, -1) for view in views]
            self._run(programs, cut[: len(sources)], cut[len(sources) :])

    def _run(self, programs: Sequence[Any], sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Execute packet programs on views of shape (cells, 8, words)."""
        for program, target in zip(programs, targets, strict=True):
            buffers: dict[int | None, Any] = {None: target, **dict(enumerate(sources))}
            for step in program:
                out = target[:, step.first : step.first + step.count]
                source, at = step.left
                left = buffers[source][:, at : at + step.count]
                if step.right is None:
                    self._copy(left, out)
                else:
                    source, at = step.right
                    self._xor(left, buffers[source][:, at : at + step.count], out)

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
