"""Megatron's indexed dataset: ``prefix.bin`` holds token ids, ``prefix.idx`` where each text
begins.

Layout of ``prefix.idx``, little-endian: magic ``MMIDIDX\\0\\0`` (9 bytes), version 1 (uint64), type
code (uint8), number of sequences n (uint64), number of document indices m (uint64), n lengths in
tokens (int32), n byte offsets into ``.bin`` (int64), m document indices (int64; the sequence at
which each document begins, the last one n). Multimodal files append n modes (int8), which are
ignored.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_BY_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODE_BY_DTYPE = {dtype: code for code, dtype in _DTYPE_BY_CODE.items()}
_MAX_SEQUENCE = 2**31 - 1


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def is_indexed(prefix: Path) -> bool:
    """Whether ``prefix.bin`` and ``prefix.idx`` exist."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where Megatron would choose it, int32 otherwise."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedWriter:
    """Writes one dataset; each added array is one document.

    The files are complete, and on the disk, when the ``with`` block was left without an error.

    Args:
        prefix: path without suffix; existing files are replaced.
        dtype: type of a token id.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._code = _CODE_BY_DTYPE[self._dtype]
        self._lengths: list[int] = []
        self._documents = [0]
        self._digest = hashlib.blake2b(digest_size=16)
        self._bin = bin_path(prefix).open("wb")

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append one document; empty ones are left out, as Megatron does."""
        if not len(tokens):
            return
        data = np.ascontiguousarray(tokens, dtype=self._dtype).data.cast("B")
        self._bin.write(data)
        self._digest.update(data)
        for start in range(0, len(tokens), _MAX_SEQUENCE):
            self._lengths.append(min(_MAX_SEQUENCE, len(tokens) - start))
        self._documents.append(len(self._lengths))

    @property
    def digest(self) -> str:
        """Hash of every token written so far."""
        return self._digest.hexdigest()

    @property
    def tokens(self) -> int:
        return sum(self._lengths)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._bin as stream:
            stream.flush()
            os.fsync(stream.fileno())
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        with idx_path(self._prefix).open("wb") as stream:
            stream.write(
                _HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents))
            )
            stream.write(lengths.tobytes())
            stream.write(pointers.tobytes())
            stream.write(np.array(self._documents, dtype="<i8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())


class IndexedDataset:
    """A dataset of any producer, memory-mapped; nothing is read before it is used.

    Args:
        prefix: path without ``.bin`` or ``.idx``.

    Raises:
        ConfigError: missing, foreign, truncated or floating-point files.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        if not is_indexed(prefix):
            raise ConfigError(
                f"no indexed dataset at {prefix}: expected {prefix}.bin and {prefix}.idx"
            )
        self.dtype, self.lengths, self.pointers, self.documents = _read_index(idx_path(prefix))
        self.tokens = self._map_tokens()

    def _map_tokens(self) -> npt.NDArray[Any]:
        path = bin_path(self.prefix)
        found = path.stat().st_size
        expected = int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if found != expected:
            raise ConfigError(
                f"{path} has {found} bytes, but its index describes {expected}; the copy is "
                "incomplete or the two files belong to different datasets: copy both again"
            )
        if not expected:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one sequence."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]


def _read_index(
    path: Path,
) -> tuple[np.dtype[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:9] != MAGIC:
        raise ConfigError(
            f"{path} does not begin with {MAGIC!r}; expected an index in Megatron's MMIDIDX format "
            f"(the older TNTIDX format must be converted first)"
        )
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != VERSION:
        raise ConfigError(f"{path} has format version {version}; this reft reads version {VERSION}")
    if code not in _DTYPE_BY_CODE:
        known = ", ".join(f"{c} ({d.name})" for c, d in _DTYPE_BY_CODE.items())
        raise ConfigError(
            f"{path} has type code {code}, which is no integer type; expected one of {known}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):
        raise ConfigError(
            f"{path} has {size} bytes; {sequences} sequences and {documents} document indices need "
            f"{expected}; the file is truncated: copy it again"
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=_HEADER.size)
    pointers = np.frombuffer(raw, dtype="<i8", count=sequences, offset=_HEADER.size + 4 * sequences)
    starts = np.frombuffer(raw, dtype="<i8", count=documents, offset=_HEADER.size + 12 * sequences)
    return _DTYPE_BY_CODE[code], lengths, pointers, starts
