"""Writes arenas during a recovery: for decoded blocks, and on nodes that have no arena.

Lost blocks are decoded and stored first, so that the rest of the recovery finds a source for every
block. Each lost block is decoded by one member of the sharding group, from verified blocks. The
member compares the result with the checksum that the block's owner stored (P5), and seals all
blocks that it decoded in a separate arena. That arena is additional redundancy of the version: if
this recovery is killed, the next one uses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from reft.errors import ReftError
from reft.grid import BlockKey, Coordinate, Section, Topology
from reft.memory.arena import Arena, decoded_name, is_decoded
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum
from reft.protect.backend import NumpyBackend, combine_ragged, solve_ragged
from reft.protect.codes import Scheme, unpack_checksums
from reft.protect.placement import place_group
from reft.protect.rs import CELL_BYTES, Row, reduce_rows
from reft.recover.inventory import ArenaRecord, ArenaStore, OpenArenas, matches, stored_bytes
from reft.recover.plan import (
    BlockSource,
    Fetch,
    GroupSources,
    LostBlock,
    Rebuild,
    RecoveryPlan,
    find_stripes,
    plan_fetches,
)

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class Pool:
    """A pool of reusable buffers for blocks, with at most ``most_bytes`` in total. Thread-safe.

    Buffers are reused, because touching new memory for the first time takes several times as long
    as copying a block.
    """

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes  # Bytes that may still be allocated
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()  # Guards _room and _free

    def take(self, nbytes: int) -> Bytes | None:
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            while nbytes > self._room and any(self._free.values()):
                size = next(size for size, buffers in self._free.items() if buffers)
                self._room += len(self._free[size].pop())
            if nbytes > self._room:
                return None
            try:
                buffer = np.empty(nbytes, np.uint8)
            except MemoryError:  # The caller can continue without a buffer, only more slowly
                return None
            self._room -= nbytes
            return buffer

    def give_back(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.setdefault(len(buffer), []).append(buffer)


class Stripe:
    """Decodes lost blocks that share their terms, the stored blocks from which they are computed.

    Terms are kept until the last one arrives, and then all blocks are decoded together. If the pool
    has no space left, each term is instead added to the results when it arrives, which is slower.
    Thread-safe.

    Args:
        blocks: the lost blocks; all have the same padded length.
        out: memory for the results, one after another at their padded length, uint8.
        pool: buffers for terms that would otherwise be overwritten before the last one arrives.
    """

    def __init__(self, blocks: Sequence[LostBlock], out: Bytes, pool: Pool) -> None:
        self.blocks = tuple(blocks)
        self._targets = tuple(out.reshape(len(blocks), -1))
        self._pool = pool
        self._coefficients = [dict(lost.terms) for lost in blocks]
        self._missing = {key for lost in blocks for key, _ in lost.terms}
        self._kept: dict[BlockKey, Bytes] = {}
        self._rooms: dict[BlockKey, Bytes] = {}
        self._adds_up = False
        # Held while a term is added: two threads must not update the results at the same time, and
        # exactly one of them must find that its term is the last one.
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[BlockKey]:
        return frozenset(self._missing)

    @property
    def complete(self) -> bool:
        return not self._missing

    def room_for(self, key: BlockKey, nbytes: int) -> Bytes | None:
        """Return a buffer in which a term can be received and kept; None if the pool has none."""
        with self._lock:
            room = None if self._adds_up or key in self._rooms else self._pool.take(nbytes)
            if room is not None:
                self._rooms[key] = room
            return room

    def add(self, key: BlockKey, data: Bytes, *, stays: bool) -> None:
        """Add one term; with the last one, decode the blocks.

        Args:
            key: key of the term.
            data: bytes of the term, uint8; the last block of a section may be shorter than the
                padded length.
            stays: whether ``data`` remains valid until all terms have arrived. A buffer from
                :meth:`room_for` always does.
        """
        with self._lock:
            self._missing.remove(key)
            if not (self._adds_up or stays or key in self._rooms) and self._missing:
                data = self._copy(key, data)
            if self._adds_up:
                self._add_up(key, data)
                self._release(key)
                return
            self._kept[key] = data
            if not self._missing:
                keys, rows, matrix = equations(self.blocks)
                solve_ragged(rows, matrix, [self._kept[key] for key in keys], self._targets)
                self._release_all()

    def _copy(self, key: BlockKey, data: Bytes) -> Bytes:
        """Copy a term into the pool; if the pool is full, add all kept terms to the results now."""
        room = self._pool.take(len(data))
        if room is not None:
            self._rooms[key] = room
            room[:] = data
            return room
        self._adds_up = True
        for target in self._targets:
            target[:] = 0
        for known, kept in self._kept.items():
            self._add_up(known, kept)
        self._release_all()
        return data

    def _release_all(self) -> None:
        for key in self._kept:
            self._release(key)
        self._kept.clear()

    def _release(self, key: BlockKey) -> None:
        if key in self._rooms:
            self._pool.give_back(self._rooms.pop(key))

    def _add_up(self, key: BlockKey, data: Bytes) -> None:
        for coefficients, target in zip(self._coefficients, self._targets, strict=True):
            if coefficient := coefficients.get(key, 0):
                _add_multiple(target, coefficient, data[: len(target)])

    def results(self) -> tuple[Bytes, ...]:
        """Return the decoded blocks without padding; requires :attr:`complete`."""
        assert self.complete
        return tuple(t[: lost.nbytes] for lost, t in zip(self.blocks, self._targets, strict=True))


def equations(
    blocks: Sequence[LostBlock],
) -> tuple[tuple[BlockKey, ...], tuple[Row, ...], tuple[Row, ...]]:
    """Return the linear system of a stripe, ``matrix · blocks = rows · terms``.

    It has one equation for each parity, and is as sparse as the parities' definitions.

    Args:
        blocks: the lost blocks of the stripe.

    Returns:
        The keys of the terms; ``rows``; ``matrix``.
    """
    parities = sorted({key for lost in blocks for key in lost.parities})
    others = sorted({key for lost in blocks for key, _ in lost.terms} - set(parities))
    keys = (*parities, *others)
    coefficients = [dict(lost.terms) for lost in blocks]
    rows, matrix = _clear(
        tuple(tuple(c.get(key, 0) for key in keys) for c in coefficients), len(parities)
    )
    return keys, rows, matrix


@lru_cache(maxsize=256)
def _clear(combinations: tuple[Row, ...], parities: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Reduce the equations so that each contains exactly one parity (one of the first columns).

    The given equations are linear combinations of equations with one parity each. Reducing recovers
    these, without the coefficients that combining has added.
    """
    size = len(combinations)
    both = np.hstack([np.array(combinations, np.uint8), np.eye(size, dtype=np.uint8)])
    reduced, _ = reduce_rows(both, parities)
    rows = tuple(tuple(map(int, row[:-size])) for row in reduced)
    return rows, tuple(tuple(map(int, row[-size:])) for row in reduced)


def _add_multiple(target: Bytes, coefficient: int, data: Bytes) -> None:
    if coefficient == 1:
        part = target[: len(data)]
        np.bitwise_xor(part, data, out=part)
        return
    # Multiply one small piece (cell) at a time, so that the product stays in the CPU cache.
    product = np.empty(min(CELL_BYTES, len(target)), np.uint8)
    for start in range(0, len(data), CELL_BYTES):
        part = target[start : start + CELL_BYTES]
        cell = data[start : start + len(part)]
        combine_ragged(NumpyBackend(), ((coefficient,),), [cell], (product[: len(part)],))
        np.bitwise_xor(part, product[: len(part)], out=part)


_NOTHING = Rebuild((), 0, "", ())


class Decoder:
    """Decodes the lost blocks that a plan assigns to one rank.

    The blocks from which they are decoded may arrive in any order. Results are written directly to
    their place in a new arena, so there is no second copy of them (P9).

    Args:
        plan: plan of the sharding group.
        at: coordinate of this rank.
        place: directory of the new arena.
        kept_bytes: most memory for blocks from other nodes that are kept until the rest of their
            stripe arrives. Decoding is slow if this is less than the size of a few stripes.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        at: Coordinate,
        place: ArenaStore,
        *,
        kept_bytes: int = 0,
    ) -> None:
        self._plan = plan
        self._at = at
        self._place = place
        self._rebuild = plan.rebuilds.get(at, _NOTHING)
        self._arena: Arena | None = None
        self._pool = Pool(kept_bytes)
        self._stripes: list[tuple[int, Stripe]] = []
        self._uses: dict[BlockKey, Stripe] = {}
        self._checksums: dict[int, tuple[int, ...]] = {}
        self._sealed = False
        self._lock = threading.Lock()

    def reserve(self) -> None:
        """Create the arena; call this before the first block is added."""
        blocks = self._rebuild.blocks
        if not blocks:
            return
        stripes = find_stripes(blocks)
        # Padded lengths are multiples of the alignment, so every block begins at an aligned offset.
        offsets = list(
            accumulate((sum(b.padded_bytes for b in stripe) for stripe in stripes), initial=0)
        )
        # Use a new file: the file of an earlier attempt may be among the sources.
        paths = (self._place.directory / decoded_name(str(self._at), n) for n in count())
        path = next(path for path in paths if not path.exists())
        self._arena = Arena.create(path, offsets[-1], len(blocks), self._place.secret)
        # The arena becomes part of the stored version, so its header has the parallel degrees of
        # the job that wrote the version.
        of, written = self._rebuild.fetches[0], self._plan.written
        at = Coordinate(of.pp, self._at.dp % written.dp, of.tp)
        self._arena.begin(
            ArenaHeader(
                *(
                    self._plan.job_id,
                    self._place.node,
                    written,
                    at,
                    self._plan.label,
                    ArenaState.WRITING,
                ),
                layout=self._rebuild.layout,
            )
        )
        memory = np.frombuffer(self._arena.data, np.uint8)
        for lost, (start, stop) in zip(stripes, pairwise(offsets), strict=True):
            stripe = Stripe(lost, memory[start:stop], self._pool)
            self._stripes.append((start, stripe))
            self._uses.update(dict.fromkeys(stripe.keys, stripe))

    def room_for(self, fetch: Fetch) -> Bytes | None:
        """Return a buffer in which to receive a block, so that no copy is needed.

        If the result is None, any buffer will do.
        """
        stripe = self._uses.get(fetch.key)
        return None if stripe is None else stripe.room_for(fetch.key, fetch.nbytes)

    def take(self, fetch: Fetch, data: Bytes, *, stays: bool) -> None:
        """Add a verified block. Thread-safe.

        Args:
            fetch: the block.
            data: bytes of the block, uint8.
            stays: whether ``data`` remains valid until :meth:`close`; if not, the bytes are copied
                or used at once.
        """
        if fetch.key.section is Section.CHECKSUMS:
            # Lock, because several threads deliver blocks at the same time.
            with self._lock:
                self._checksums[fetch.key.member] = unpack_checksums(data.data)
        else:
            self._uses[fetch.key].add(fetch.key, data, stays=stays)

    def store(self) -> frozenset[BlockSource]:
        """Seal the decoded blocks in the arena.

        A block is left out if one of its terms, or its owner's checksums, did not arrive; the next
        plan fetches what is missing from another source.

        Returns:
            Parities that must not be used. Their own checksums are right, but a block decoded from
            them differs from its owner's checksum. The next plan avoids these parities (P5).
        """
        done: list[Entry] = []
        wrong: list[LostBlock] = []
        for lost, offset, data in self._decoded():
            known = self._checksums.get(lost.key.member)
            if known is None:
                continue
            digest = checksum(data.data)
            # A block for which the owner stored no checksum counts as wrong.
            if lost.position < len(known) and digest == known[lost.position]:
                place = lost.start_bytes, lost.nbytes, self._rebuild.image_bytes, offset
                done.append(Entry(lost.key, *place, digest, owner=False))
            else:
                wrong.append(lost)
        keys = {key for lost in wrong for key in lost.parities}
        refused = frozenset(f.source for f in self._rebuild.fetches if f.key in keys)
        if refused:
            logger.warning(
                "%d blocks of step %d decoded from verified blocks differ from their owner's "
                "checksums: the parity was computed from other data. It is not used; please "
                "report this",
                *(len(wrong), self._plan.label.step),
            )
        if done and self._arena is not None:
            self._arena.seal(done)
            self._sealed = True
            logger.warning(
                "decoded %d lost blocks of step %d of pp%d.tp%d from parity (%.1f MiB)",
                *(len(done), self._plan.label.step, self._at.pp, self._at.tp),
                sum(entry.nbytes for entry in done) / 2**20,
            )
        return refused

    def _decoded(self) -> Iterator[tuple[LostBlock, int, Bytes]]:
        """Yield each block whose terms have all arrived, with its arena offset and its bytes."""
        for start, stripe in self._stripes:
            if stripe.complete:
                for at, (lost, data) in enumerate(
                    zip(stripe.blocks, stripe.results(), strict=True)
                ):
                    yield lost, start + at * lost.padded_bytes, data

    def close(self) -> None:
        """Close the arena, and remove its file unless blocks were sealed in it."""
        self._stripes.clear()
        self._uses.clear()
        if self._arena is not None:
            self._arena.close()
            if not self._sealed:
                self._arena.path.unlink(missing_ok=True)


def rebuild_offline(
    plan: RecoveryPlan, arenas: OpenArenas, place: ArenaStore
) -> frozenset[BlockSource]:
    """Decode all lost blocks on one machine on which all arenas can be read.

    Returns:
        Corrupt sources, which the next plan has to avoid.
    """
    bad: set[BlockSource] = set()
    for coordinate, rebuild in sorted(plan.rebuilds.items()):
        with closing(Decoder(plan, coordinate, place)) as decoder:
            decoder.reserve()
            for fetch in rebuild.fetches:
                if (fetch.node, fetch.arena) not in arenas or not matches(fetch, arenas):
                    bad.add(fetch.source)
                    continue
                decoder.take(
                    fetch, np.frombuffer(stored_bytes(fetch, arenas), np.uint8), stays=True
                )
            bad |= decoder.store()
    return frozenset(bad)


# -- completing a recovered version on a node that has no arena of it ------------------------------
#
# The node is new, or has lost its memory. Arenas of the group's other members stay unchanged. In
# addition to the blocks that it restores, the member on this node receives the blocks that it has
# to store for its ring peers. Each block is verified in its receive buffer, and copied from there
# into the live tensors, if they need the block, and into the new arena. Once every block has
# arrived, the arena is sealed under the id of the recovered version, which is then protected as
# well as before the loss. Until then the arena is marked WRITING, and another recovery ignores it
# (P3).
#
# With an erasure code or recomputation, after a change of scheme or ring, or after an error, arenas
# are not filled this way; a new version of the restored state is taken instead.


@dataclass(frozen=True)
class BlockSlot:
    """The place that is reserved for a block in an arena."""

    start_bytes: int  # Offset in the section's image
    nbytes: int  # Length of the block; for host state, the largest length
    arena_offset: int  # Offset from the start of the arena's data region

    def fits(self, fetch: Fetch) -> bool:
        exact = fetch.key.section is not Section.HOST
        return fetch.start_bytes == self.start_bytes and (
            fetch.nbytes == self.nbytes if exact else fetch.nbytes <= self.nbytes
        )


@dataclass(frozen=True)
class ArenaLayout:
    """The places of all blocks in a member's arena."""

    rooms: Mapping[BlockKey, BlockSlot]  # Place of each block
    data_bytes: int  # Size of the arena's data region


@dataclass(frozen=True)
class StoreConfig:
    """The way in which the running job stores versions."""

    scheme: str  # The active protection scheme
    # File for the new arena; None if all of this rank's slots (places for arenas) have a file
    # already
    path: Path | None
    # Function that lays out this rank's arena. Arguments: the size in bytes of the replicated image
    # and of each member's owned image
    blueprint: Callable[[int, tuple[int, ...]], ArenaLayout]


def plan_kept(
    group: tuple[int, int],
    sources: GroupSources,
    records: Sequence[ArenaRecord],
    topology: Topology,
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Plan which blocks members without an arena of the version store for their ring peers. Pure.

    Args:
        group: (pp, tp) of the sharding group.
        sources: usable blocks of the version.
        records: arenas of the group that hold the version.
        topology: placement of the running job.

    Returns:
        For each member without an arena, the blocks that it has to store in addition to those that
        it restores; empty if the version cannot be completed.
    """
    pp, tp = group
    at_home: dict[int, ArenaHeader] = {}
    for record in records:
        at = record.header.coordinate
        if topology.node_of(at) == record.node and not is_decoded(record.path):
            at_home[at.dp] = record.header
    schemes = {header.scheme for header in at_home.values()}
    if len(schemes) != 1 or not (name := schemes.pop()):
        return {}
    scheme = Scheme.parse(name)
    if not scheme.copies or scheme.parities:
        return {}
    placement = place_group(topology.group_nodes(pp, tp), scheme.copies, 0)
    for dp, header in at_home.items():
        kept = {entry.key.member for entry in header.entries if entry.key.section is Section.HOST}
        if kept != set(placement.kept_by(dp)):
            return {}
    needs = {
        Coordinate(pp, dp, tp): [
            block
            for member in placement.kept_by(dp)[1:]
            for section in (Section.OWNED, Section.HOST)
            for block in sources.images[section, member]
        ]
        for dp in range(topology.degrees.dp)
        if dp not in at_home
    }
    return plan_fetches(group, needs, topology)


class ArenaRebuilder:
    """Fills an arena for a member that has none of the version, while the blocks arrive.

    Args:
        plan: plan of the sharding group.
        at: coordinate of this rank.
        place: directory of the arena.
        how: how the running job stores versions; None: this object does nothing.
        stored: header of any arena of the group that holds the version.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        at: Coordinate,
        place: ArenaStore,
        how: StoreConfig | None,
        stored: ArenaHeader,
    ) -> None:
        self._plan = plan
        self._at = at
        self._place = place
        kept = how is not None and at in plan.kept and stored.scheme == how.scheme
        self._how = how if kept else None
        self._layout = stored.layout
        self._rooms: Mapping[BlockKey, BlockSlot] = {}
        self._arena: Arena | None = None
        self._arrived: dict[BlockKey, Fetch] = {}
        self._lock = threading.Lock()  # Guards _arrived; blocks are written without it, in parallel

    def begin(self) -> None:
        """Create the arena; its memory is allocated while blocks arrive.

        If that fails, the version is not completed on this node, and the recovery continues.
        """
        plan, how = self._plan, self._how
        if how is None or how.path is None:
            return
        header = ArenaHeader(
            job_id=plan.job_id,
            node=self._place.node,
            degrees=plan.degrees,
            coordinate=self._at,
            label=plan.label,
            state=ArenaState.WRITING,
            layout=self._layout,
            scheme=how.scheme,
        )
        owned = tuple(plan.image_bytes(at, Section.OWNED) for at in sorted(plan.fetches))
        try:
            drawn = how.blueprint(plan.image_bytes(self._at, Section.REPLICATED), owned)
            arena = Arena.create(
                how.path, drawn.data_bytes, len(drawn.rooms), self._place.secret, touch=False
            )
            self._arena = arena
            arena.begin(header)
        except (ReftError, OSError) as error:  # The state can be restored without this arena
            self._give_up(error)
            return
        self._rooms = drawn.rooms

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "%s cannot be completed here; the version is taken again: %s", self._plan.label, error
        )
        self._rooms = {}

    def take(self, fetch: Fetch, data: torch.Tensor) -> None:
        """Write a verified block (1-D uint8) to the arena if it belongs there. Thread-safe."""
        arena, room = self._arena, self._rooms.get(fetch.key)
        if arena is None or room is None or not room.fits(fetch):
            return
        try:
            arena.write(room.arena_offset, data.numpy().data)
        except (ReftError, OSError) as error:
            self._give_up(error)
            return
        with self._lock:
            self._arrived[fetch.key] = fetch

    def seal(self) -> None:
        """Seal the arena if it is complete; called once every rank has received all its blocks."""
        arena = self._arena
        if arena is None or not self._rooms:
            return
        if missing := [key for key in self._rooms if key not in self._arrived]:
            logger.warning(
                "%s cannot be completed here; the version is taken again: %d of its blocks "
                "have another place or size here, such as %s",
                *(self._plan.label, len(missing), missing[0]),
            )
            return
        image_bytes = {
            (section, at.dp): self._plan.image_bytes(at, section)
            for section in (Section.REPLICATED, Section.OWNED, Section.HOST)
            for at in self._plan.fetches
        }
        entries = [
            self._entry(key, room, image_bytes[key.section, key.member])
            for key, room in self._rooms.items()
        ]
        try:
            arena.allocate()
            arena.seal(entries)
            if self._plan.committed:
                arena.commit()
        except (ReftError, OSError) as error:
            self._give_up(error)

    def _entry(self, key: BlockKey, room: BlockSlot, image_bytes: int) -> Entry:
        fetch = self._arrived[key]
        return Entry(
            key=key,
            start_bytes=fetch.start_bytes,
            nbytes=fetch.nbytes,
            image_bytes=image_bytes,
            arena_offset=room.arena_offset,
            checksum=fetch.checksum,
            owner=key.member == self._at.dp,
        )

    def close(self) -> None:
        """Close the arena; its file stays, for later versions."""
        self._rooms = {}
        if self._arena is not None:
            self._arena.unlock()
            self._arena.close()
            self._arena = None
