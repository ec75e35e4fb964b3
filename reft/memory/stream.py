"""Copies within host memory that bypass the caches, optionally with a checksum of the bytes.

Uses ``stream.cpp`` if the installation compiled it, otherwise ``memmove`` and the xxhash package.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from reft.device import compiled

logger = logging.getLogger(__name__)

Range = tuple[int, int, int] | tuple[int, int, int, int]
"""One copy: ``(target address, source address, bytes)``. A fourth value, the :data:`EXPONENTS`
of a floating-point dtype, requests a check for NaN and infinity. With target 0, the bytes are
only hashed. The caller keeps the memory alive."""
Ranges = NDArray[np.uint64]  # One range per row: shape (ranges, 4)

EXPONENTS = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80_0000 * 0x0000_0001_0000_0001,
    "bfloat16": 0x7F80 * 0x0001_0001_0001_0001,
    "float16": 0x7C00 * 0x0001_0001_0001_0001,
}
"""Mask of the exponent bits in eight bytes of numbers, by dtype. A number whose exponent bits
are all 1 is a NaN or an infinity."""

# XXH3 uses other formulas for inputs up to this size; the xxhash package computes those
_SHORT_BYTES = 240
_LINE_BYTES = 64
# Size of the pieces in which data is copied and then hashed; small enough to stay in the CPU
# cache in between
_CACHED_BYTES = 256 * 2**10


@lru_cache(maxsize=1)
def choose_loop() -> int:
    """Measure the copy loops on this processor and select the fastest for all copies.

    Returns:
        Size in bytes of the pieces that the fastest loop hashes and then copies from the cache;
        0 if the fastest loop copies four pages in parallel.
    """
    choose = compiled("reft.memory._stream", "reft_choose_loop")
    choose.restype = ctypes.c_size_t
    piece_bytes: int = choose()
    logger.debug("host memory is copied in pieces of %d bytes (0: pages side by side)", piece_bytes)
    return piece_bytes


@lru_cache(maxsize=1)
def copier() -> Callable[[int, int, int], object]:
    """Return the function ``copy(target address, source address, bytes)`` for ranges that do not
    overlap.

    The function runs on the calling thread and releases the GIL. If the loop was not compiled,
    it is ``memmove``, which is a third slower.
    """
    try:
        function = compiled("reft.memory._stream", "reft_copy_past_caches")
    except OSError as error:
        logger.info("host memory is copied with memmove, without the compiled loop: %s", error)
        return ctypes.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    choose_loop()
    copy: Callable[[int, int, int], object] = function
    return copy


def find_ranges(rows: Iterable[Range]) -> Ranges:
    """Pack ranges into an array for :meth:`HashingCopier.copy`, uint64 of shape (ranges, 4)."""
    return np.array([(*row, 0)[:4] for row in rows], np.uint64).reshape(-1, 4)


@dataclass(frozen=True, eq=False)
class CutRanges:
    """Ranges in copy order, grouped into chunks."""

    ranges: Ranges  # Ranges of all chunks
    ends: NDArray[np.uint64]  # For each chunk, the index after its last range
    begins_bytes: Sequence[int]  # Bytes before each chunk; the last element is the total

    @classmethod
    def of(cls, chunks: Iterable[Iterable[Range]]) -> CutRanges:
        """Group ranges by chunk; every chunk has at least one range."""
        rows = [[*chunk] for chunk in chunks]
        sizes = (sum(row[2] for row in chunk) for chunk in rows)
        return cls(
            find_ranges(row for chunk in rows for row in chunk),
            np.fromiter(accumulate(map(len, rows)), np.uint64),
            [*accumulate(sizes, initial=0)],
        )

    @cached_property
    def hashed_only(self) -> CutRanges:
        """The same ranges, to be read without copying them."""
        ranges = self.ranges.copy()
        ranges[:, 0] = 0
        return replace(self, ranges=ranges)

    def nbytes(self, first: int, stop: int) -> int:
        """Return the number of bytes in the chunks ``[first, stop)``."""
        return self.begins_bytes[stop] - self.begins_bytes[first]


class _State(ctypes.Structure):
    """Mirrors ``struct Hash`` in ``stream.cpp``."""

    _fields_ = (
        ("sums", ctypes.c_uint64 * 8),
        ("total", ctypes.c_uint64),
        ("not_finite", ctypes.c_uint64),
        ("held", ctypes.c_uint8 * (_LINE_BYTES + 1024)),
    )


class HashingCopier:
    """Copies ranges that do not overlap and computes xxh3_64 of their bytes, in one pass.

    Every byte is read once, so the checksum fits the written bytes even if the source changes
    during the copy. A range of floating-point numbers must begin at a multiple of 8 hashed
    bytes.

    One thread may use it at a time; calls release the GIL. Made by :func:`hashing_copier`.
    """

    not_finite = False  # Whether the bytes of the last checksum contained a NaN or an infinity

    def __init__(self, reset: Any, copy: Any, copy_chunks: Any, digest: Any) -> None:
        self._state = _State()
        self._at = ctypes.addressof(self._state)
        self._reset, self._copy, self._copy_chunks, self._digest = reset, copy, copy_chunks, digest
        reset(self._at)

    def copy(self, ranges: Ranges) -> None:
        """Copy ranges and append their bytes to the hash."""
        self._copy(self._at, ranges.__array_interface__["data"][0], len(ranges))

    def copy_chunks(
        self, cut: CutRanges, first: int, stop: int, until: ctypes.c_int | None = None
    ) -> int:
        """Copy the chunks ``[first, stop)`` and append their bytes to the hash.

        Args:
            cut: all chunks.
            first: index of the first chunk.
            stop: index after the last chunk; at least one chunk is copied.
            until: flag shared with the C++ loop. Once another thread has set it to a value other
                than 0, no further chunk begins.

        Returns:
            The number of chunks that were copied, at least one.
        """
        ranges, ends = (a.__array_interface__["data"][0] for a in (cut.ranges, cut.ends))
        flag = 0 if until is None else ctypes.addressof(until)
        copied: int = self._copy_chunks(self._at, ranges, ends, first, stop, flag)
        return copied

    def take(self) -> int:
        """Return the checksum of all bytes since the last call, and reset it."""
        total, self.not_finite = self._state.total, bool(self._state.not_finite)
        if total > _SHORT_BYTES:
            value: int = self._digest(self._at)
        else:
            value = xxhash.xxh3_64_intdigest(
                bytes(self._state.held[_LINE_BYTES : _LINE_BYTES + total])
            )
        self._reset(self._at)
        return value


class PlainHashingCopier(HashingCopier):
    """:class:`HashingCopier` without the compiled loop: copies a piece, then hashes it from the
    cache."""

    def __init__(self) -> None:
        self._hash, self._not_finite = xxhash.xxh3_64(), False

    def copy(self, ranges: Ranges) -> None:
        copy = copier()
        for target, source, nbytes, exponents in ranges.tolist():
            for at in range(0, nbytes, _CACHED_BYTES):
                part = min(_CACHED_BYTES, nbytes - at)
                if target:
                    copy(target + at, source + at, part)
                data = (ctypes.c_ubyte * part).from_address(source + at)
                self._hash.update(data)
                self._not_finite |= bool(exponents) and _not_finite(bytes(data), exponents)

    def copy_chunks(
        self, cut: CutRanges, first: int, stop: int, until: ctypes.c_int | None = None
    ) -> int:
        for chunk in range(first, stop):
            self.copy(cut.ranges[int(cut.ends[chunk - 1]) if chunk else 0 : int(cut.ends[chunk])])
            if until is not None and until.value:
                return chunk + 1 - first
        return stop - first

    def take(self) -> int:
        value, self.not_finite, self._not_finite = self._hash.intdigest(), self._not_finite, False
        self._hash.reset()
        return value


def _not_finite(data: bytes, exponents: int) -> bool:
    words = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), np.uint64)
    lowest = exponents & ~(exponents << 1)
    return bool(
        ((words & np.uint64(exponents)) + np.uint64(lowest) & np.uint64(exponents + lowest)).any()
    )


@lru_cache(maxsize=1)
def compiled_hash() -> tuple[Any, Any, Any, Any] | None:
    """Return the compiled functions of :class:`HashingCopier`; None if they were not built."""
    try:
        names = ("reft_hash_reset", "reft_copy_and_hash", "reft_copy_chunks", "reft_hash_digest")
        reset, copy, copy_chunks, digest = (compiled("reft.memory._stream", name) for name in names)
    except OSError as error:
        logger.info("host memory is hashed after it was copied, not with it: %s", error)
        return None
    reset.argtypes = digest.argtypes = [ctypes.c_void_p]
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    copy_chunks.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_size_t] * 2, ctypes.c_void_p]
    reset.restype = copy.restype = None
    copy_chunks.restype = ctypes.c_size_t
    digest.restype = ctypes.c_uint64
    choose_loop()
    return reset, copy, copy_chunks, digest


def hashing_copier() -> HashingCopier:
    """Return a new copier: the compiled one if it was built, otherwise the plain one."""
    functions = compiled_hash()
    return PlainHashingCopier() if functions is None else HashingCopier(*functions)
