"""Streams of shards, read from front to back, whose position is (shard, offset) and part of the version.

The shards of an epoch, in an order that follows from (seed, epoch), are dealt to ``lanes`` in turns: lane l
gets the shards l, l + lanes, and so on. The samples of an epoch are taken from the lanes in turns, one of
each; a lane that has come to its end drops out. That order follows from the shards alone, not from replicas
or workers. A micro-batch's samples are sorted by lane before they are dealt out to the replicas, so that
where ``lanes`` is a multiple of the degree, and a micro-batch holds as many samples of every lane, each shard
is read by one replica.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reft.data.batches import StaticBatches
from reft.data.loading import Loader, check_batch_size, replica_of
from reft.data.order import Indices
from reft.data.permutation import Permutation
from reft.data.shards import ShardSamples, check_kinds, counts_of
from reft.errors import ConfigError


@dataclass(frozen=True)
class _Lane:
    """What one lane reads in an epoch.

    Attributes:
        shards: in its order.
        ends: samples of the lane up to the end of each.
    """

    shards: Indices
    ends: Indices

    @property
    def samples(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0


class StreamOrder:
    """The order of a stream. An :class:`~reft.data.order.Order`.

    Args:
        names: of the shards.
        counts: samples of each.
        seed: chooses the order.
        shuffle: whether there is another order than the shards'.
        lanes: shards that are read at a time.
        block: samples of a shard that follow each other and are shuffled among themselves.
    """

    def __init__(
        self, names: Sequence[str], counts: Sequence[int], *, seed: int, shuffle: bool, lanes: int, block: int
    ) -> None:
        self.size = sum(counts)
        self._names = names
        self._counts = np.asarray(counts, dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._seed, self._shuffle, self._lane_count, self._block = seed, shuffle, lanes, block
        self._tables = lru_cache(2)(self._table)

    def part(self, first: int, count: int, part: slice) -> list[tuple[int, int]]:
        found: list[tuple[int, int, int]] = []
        while count:
            epoch, place = divmod(first, self.size)
            here = min(count, self.size - place)
            lanes, places = self._in_lanes(epoch, place, here)
            found += [(epoch, lane, at) for lane, at in zip(lanes.tolist(), places.tolist(), strict=True)]
            first, count = first + here, count - here
        found.sort()
        return [(epoch, self._sample(epoch, lane, at)) for epoch, lane, at in found[part]]

    def where(self, position: int) -> tuple[str, int]:
        """Shard and offset of the sample at a position, counted through all epochs."""
        ((_, sample),) = self.part(position, 1, slice(None))
        shard = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return self._names[shard], sample - int(self._starts[shard])

    def facts(self) -> dict[str, Any]:
        shards = xxhash.xxh3_64_hexdigest(repr((list(self._names), self._counts.tolist())).encode())
        return {
            "samples": self.size,
            "shards": f"{len(self._names)} shards {shards}",
            "seed": self._seed,
            "shuffle": self._shuffle,
            "lanes": self._lane_count,
            "block": self._block,
        }

    def _table(self, epoch: int) -> tuple[list[_Lane], Indices, list[Indices]]:
        """The lanes; the rounds at which one or more come to their end, with 0; who is there from each on."""
        shards = np.arange(len(self._counts))
        if self._shuffle:
            shards = Permutation(len(shards), self._seed, epoch)(shards)
        dealt = [shards[lane :: self._lane_count] for lane in range(self._lane_count)]
        lanes = [_Lane(mine, np.cumsum(self._counts[mine])) for mine in dealt]
        samples = np.array([lane.samples for lane in lanes], dtype=np.int64)
        rounds = np.unique(np.concatenate([[0], samples]))
        return lanes, rounds, [np.flatnonzero(samples > begin) for begin in rounds]

    def _in_lanes(self, epoch: int, place: int, count: int) -> tuple[Indices, Indices]:
        """Lane, and place in it, of ``count`` samples from ``place`` of an epoch on."""
        _, rounds, present = self._tables(epoch)
        lengths = [len(here) * many for here, many in zip(present, np.diff(rounds), strict=False)]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        places = np.arange(place, place + count, dtype=np.int64)
        stretches = np.searchsorted(starts, places, side="right") - 1
        lanes, found = np.empty_like(places), np.empty_like(places)
        for stretch in np.unique(stretches):
            mine = stretches == stretch
            turns, who = np.divmod(places[mine] - starts[stretch], len(present[stretch]))
            lanes[mine], found[mine] = present[stretch][who], rounds[stretch] + turns
        return lanes, found

    def _sample(self, epoch: int, lane: int, place: int) -> int:
        table = self._tables(epoch)[0][lane]
        number = int(np.searchsorted(table.ends, place, side="right"))
        shard = int(table.shards[number])
        samples = int(self._counts[shard])
        offset = place - (int(table.ends[number]) - samples)
        if self._shuffle and self._block > 1:
            block, inside = divmod(offset, self._block)
            size = min(self._block, samples - block * self._block)
            order = Permutation(size, self._seed, epoch, shard, block)
            offset = block * self._block + int(order(np.array([inside]))[0])
        return int(self._starts[shard]) + offset


def stream(
    paths: str | Path | Sequence[str | Path],
    batch_size: int = 1,
    *,
    decode: Callable[[Any], Any] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    lanes: int = 1,
    block: int = 1,
    index: str | Path | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    name: str = "data",
    **options: Any,
) -> Loader:
    """A loader of samples in shards, which are read from front to back. Its position, (shard, offset), is
    part of the version: after a failure, and at another data-parallel degree, every sample of an epoch is
    trained on exactly once. The samples of all shards are counted at the start.

    Args:
        paths: files on every node, in one order: ``.tar`` as webdataset writes it, ``.jsonl`` or
            ``.jsonl.gz``; or a pattern of them, such as ``data/*.tar``.
        batch_size: samples of a replica in a micro-batch.
        decode: makes a sample of a tar's dict of bytes, or of a line's JSON; None: leave it.
        shuffle: read shards in an order that follows from (seed, epoch), and mix samples within a block.
        seed: of the order, and of the samples' random numbers.
        lanes: shards that are read at a time; a multiple of the data-parallel degrees has each shard read by
            one replica.
        block: samples of a shard that follow each other and are shuffled among themselves.
        index: a file for the numbers of samples, so that the next start does not count.
        drop_last: see :func:`reft.data.loader`; likewise all that follow.
        collate_fn: makes a batch of a list of samples; None: torch's.
        dp_rank: this rank's replica.
        dp_size: number of replicas.
        name: where a script has several, one for each.
        options: of ``DataLoader``.

    Raises:
        ConfigError: a shard is missing, damaged or of no known kind.
    """
    files = _files(paths)
    check_kinds(files)
    if lanes < 1 or block < 1:
        raise ConfigError(f"found lanes {lanes} and block {block}; expected 1 or more of each")
    check_batch_size(batch_size)
    counts = counts_of(files, None if index is None else Path(index))
    names = [file.name for file in files]
    order = StreamOrder(names, counts, seed=seed, shuffle=shuffle, lanes=lanes, block=block)
    return Loader(
        ShardSamples(files, counts, block, decode),
        order,
        StaticBatches(order, batch_size, drop_last=drop_last),
        seed=seed,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=collate_fn,
        replica=replica_of(dp_rank, dp_size),
        name=name,
        options=options,
    )


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    if isinstance(paths, str | Path):
        return [Path(path) for path in sorted(glob.glob(str(paths)))]
    return [Path(path) for path in paths]
