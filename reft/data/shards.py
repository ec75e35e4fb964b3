"""Shards of samples in files: tar as webdataset writes it, and lines of JSON.

A sample of a tar is the files that follow each other under one name up to the first dot: a dict of the rest
of their names to bytes, with ``__key__``. A sample of ``.jsonl`` and ``.jsonl.gz`` is what is on one line;
empty lines are none.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from reft.durable import write_durably
from reft.errors import ConfigError
from reft.json_file import read_object

_NAME = re.compile(r"^((?:.*/)?[^./][^/.]*)\.([^/]+)$")
_OPEN_SHARDS = 16
"""Of one process: files, and the offsets of their samples."""
_COUNTING = 8
"""Threads; they read, and decompress without the interpreter's lock."""


class Shard(Protocol):
    """One file, open."""

    def __getitem__(self, offset: int) -> Any:
        """The sample at ``offset``, counted from 0."""

    def close(self) -> None: ...


class TarShard:
    """Reads each sample at its place in the file; nothing before it is read but headers, once.

    Args:
        path: of a tar that is not compressed.
    """

    def __init__(self, path: Path) -> None:
        self._members: list[tuple[str, list[tuple[str, int, int]]]] = []
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                match = _NAME.match(member.name) if member.isreg() else None
                if match is None:
                    continue
                key, kind = match.groups()
                if not self._members or self._members[-1][0] != key:
                    self._members.append((key, []))
                self._members[-1][1].append((kind, member.offset_data, member.size))
        self._fd = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, offset: int) -> dict[str, Any]:
        key, files = self._members[offset]
        # With an offset of its own: a worker that was forked shares the file's.
        return {"__key__": key, **{kind: os.pread(self._fd, size, at) for kind, at, size in files}}

    def close(self) -> None:
        os.close(self._fd)


class LinesShard:
    """Reads forward; going back begins the file anew.

    Args:
        path: of ``.jsonl`` or ``.jsonl.gz``.
        block: lines that are kept at a time, whose samples may be asked for in any order.
    """

    def __init__(self, path: Path, block: int = 1) -> None:
        self._path = path
        self._block = block
        self._begin()

    def _begin(self) -> None:
        self._file = _open(self._path)
        self._lines = _filled(self._file)
        self._next = 0
        self._kept: list[bytes] = []

    def __getitem__(self, offset: int) -> Any:
        first = offset - offset % self._block
        if first != self._next - len(self._kept) or not self._kept:
            if first < self._next:
                self.close()
                self._begin()
            for _ in islice(self._lines, first - self._next):
                pass
            self._kept = list(islice(self._lines, self._block))
            self._next = first + len(self._kept)
        if offset - first >= len(self._kept):
            raise ConfigError(
                f"the shard {self._path} ends before sample {offset}, which was counted at the start; leave "
                f"the shards of a running job as they are"
            )
        return json.loads(self._kept[offset - first])

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _filled(lines: BinaryIO) -> Iterator[bytes]:
    return (line for line in lines if not line.isspace())


def _is_lines(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def check_kinds(paths: Sequence[Path]) -> None:
    """
    Raises:
        ConfigError: there are none, one is not there, or its kind is unknown.
    """
    if not paths:
        raise ConfigError(
            "found no shard; expected paths of .tar, .jsonl or .jsonl.gz files, or a pattern of them"
        )
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; reft.data.stream reads files that every node can open")
        if not _is_lines(path) and not path.name.endswith(".tar"):
            raise ConfigError(
                f"{path} is of no known kind; expected .tar, .jsonl or .jsonl.gz. A tar that is compressed "
                f"has no places to go to: decompress it"
            )


def count_samples(path: Path) -> int:
    """Samples of one shard. A tar's headers are read, of lines the whole file.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        if _is_lines(path):
            with _open(path) as file:
                return sum(1 for _ in _filled(file))
        shard = TarShard(path)
        shard.close()
        return len(shard)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(
            f"the shard {path} cannot be read: {error}; write it again or leave it out"
        ) from error


def counts_of(paths: Sequence[Path], index: Path | None) -> list[int]:
    """Samples of each shard.

    Args:
        paths: of the shards.
        index: a file that keeps what was counted; shards whose size and time of change are as they were then
            are not counted again. Size alone does not tell: tars are filled up to whole blocks.

    Raises:
        ConfigError: a shard or the index cannot be read.
    """
    stats = {str(path): path.stat() for path in paths}
    marks = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}
    known: dict[str, list[int]] = {}
    if index is not None and index.exists():
        known = read_object(index, "the index of the shards", "an object of path to [bytes, ns, samples]")
    missing = [path for path in paths if known.get(str(path), [])[:2] != marks[str(path)]]
    with ThreadPoolExecutor(_COUNTING) as pool:
        for path, count in zip(missing, pool.map(count_samples, missing), strict=True):
            known[str(path)] = [*marks[str(path)], count]
    if index is not None and missing:
        write_durably(index, json.dumps(known, indent=1).encode())
    return [known[str(path)][2] for path in paths]


class ShardSamples:
    """The samples of all shards, numbered through.

    Args:
        paths: of the shards.
        counts: samples of each.
        block: lines kept of a shard at a time.
        decode: makes a sample of what a shard gives; None: leave it.
    """

    def __init__(
        self, paths: Sequence[Path], counts: Sequence[int], block: int, decode: Callable[[Any], Any] | None
    ) -> None:
        self._paths = paths
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._block = block
        self._decode = decode
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, sample: int) -> Any:
        shard = int(np.searchsorted(self._starts, sample, side="right")) - 1
        found = self._shard(shard)[sample - int(self._starts[shard])]
        return found if self._decode is None else self._decode(found)

    def _shard(self, number: int) -> Shard:
        if self._pid != os.getpid():  # forked: the files and their offsets are another process's
            self._open, self._pid = OrderedDict(), os.getpid()
        if number not in self._open:
            path = self._paths[number]
            self._open[number] = LinesShard(path, self._block) if _is_lines(path) else self._tar(number)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _tar(self, number: int) -> TarShard:
        shard, counted = TarShard(self._paths[number]), int(np.diff(self._starts)[number])
        if len(shard) != counted:
            shard.close()
            raise ConfigError(
                f"the shard {self._paths[number]} holds {len(shard)} samples; {counted} were counted at the "
                f"start. Leave the shards of a running job as they are"
            )
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}
