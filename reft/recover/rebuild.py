"""What a recovery writes into memory: decoded blocks, and a newcomer's arena.

Lost blocks are decoded and stored, so that the rest of a recovery finds every block somewhere.

One member of the group decodes a lost block, from blocks that reach it verified, checks the result
against its owner's checksum (P5) and seals what it decoded in an arena of its own. That arena is
further redundancy of its version: a recovery that is killed and starts again uses it.
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
from reft.recover.inventory import ArenaRecord, ArenaSet, ArenaStore, matches, stored_bytes
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
    """Buffers for blocks; no more than ``most_bytes`` of them exist.

    They are used again: the first touch of fresh memory costs several times as much as the block
    itself."""

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

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
            except MemoryError:  # slower, but nobody else waits in vain
                return None
            self._room -= nbytes
            return buffer

    def give_back(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.setdefault(len(buffer), []).append(buffer)


class Stripe:
    """Lost blocks that are decoded from the same others. Several threads may bring terms at once.
    ``out``: where, one after the other at their padded length, which is the same for all; uint8.
    ``pool``: for terms that do not stay where they are."""

    def __init__(self, blocks: Sequence[LostBlock], out: Bytes, pool: Pool) -> None:
        self.blocks = tuple(blocks)
        self._targets = tuple(out.reshape(len(blocks), -1))
        self._pool = pool
        self._coefficients = [dict(lost.terms) for lost in blocks]
        self._missing = {key for lost in blocks for key, _ in lost.terms}
        self._kept: dict[BlockKey, Bytes] = {}
        self._rooms: dict[BlockKey, Bytes] = {}
        self._adds_up = False
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[BlockKey]:
        return frozenset(self._missing)

    @property
    def complete(self) -> bool:
        return not self._missing

    def room_for(self, key: BlockKey, nbytes: int) -> Bytes | None:
        """Where to receive a term, so that it can stay there; None where the pool has no room."""
        with self._lock:
            room = None if self._adds_up or key in self._rooms else self._pool.take(nbytes)
            if room is not None:
                self._rooms[key] = room
            return room

    def add(self, key: BlockKey, data: Bytes, *, stays: bool) -> None:
        """Take one term's bytes. The last one decodes. ``data``: its bytes, shorter than the
        stripe's where the section ends. ``stays``: whether ``data`` may be read until all terms are
        there. What is in its room does."""
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
        """A copy in the pool; if there is no room, all that was kept is added up and let go."""
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
        """The blocks' bytes, true lengths; only once complete."""
        assert self.complete
        return tuple(t[: lost.nbytes] for lost, t in zip(self.blocks, self._targets, strict=True))


def equations(
    blocks: Sequence[LostBlock],
) -> tuple[tuple[BlockKey, ...], tuple[Row, ...], tuple[Row, ...]]:
    """The system behind the blocks of a stripe, as sparse and plain as the parities have it:
    ``matrix · blocks = rows · terms``. Returns the keys of the terms, ``rows`` and ``matrix``."""
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
    """Every equation gets a parity, of the first columns, of its own: with that go the coefficients
    that finished combinations have."""
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
    # A cell at a time, so that the product stays in the cache.
    product = np.empty(min(CELL_BYTES, len(target)), np.uint8)
    for start in range(0, len(data), CELL_BYTES):
        part = target[start : start + CELL_BYTES]
        cell = data[start : start + len(part)]
        combine_ragged(NumpyBackend(), ((coefficient,),), [cell], (product[: len(part)],))
        np.bitwise_xor(part, product[: len(part)], out=part)


_NOTHING = Rebuild((), 0, "", ())


class Decoder:
    """Takes the blocks that one coordinate's rebuild reads, in any order, and decodes from them
    what was lost where it is to stay: there is no second copy of it (P9). ``kept_bytes``: most
    memory for blocks from other nodes that wait until all that are read together are there. With
    less than a few stripes' worth decoding is slower."""

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
        """Make the arena; before the first block is taken."""
        blocks = self._rebuild.blocks
        if not blocks:
            return
        stripes = find_stripes(blocks)
        # Padded lengths are multiples of the alignment.
        offsets = list(
            accumulate((sum(b.padded_bytes for b in stripe) for stripe in stripes), initial=0)
        )
        # A file that no earlier attempt has written: its blocks may be among the sources.
        paths = (self._place.directory / decoded_name(str(self._at), n) for n in count())
        path = next(path for path in paths if not path.exists())
        self._arena = Arena.create(path, offsets[-1], len(blocks), self._place.secret)
        # Further redundancy of the version, as the job that wrote it was laid out.
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
        """Where to receive a block, so that it need not be copied; None: anywhere."""
        stripe = self._uses.get(fetch.key)
        return None if stripe is None else stripe.room_for(fetch.key, fetch.nbytes)

    def take(self, fetch: Fetch, data: Bytes, *, stays: bool) -> None:
        """A verified block has arrived. Several threads may bring blocks at once. ``stays``:
        whether they may be read until :meth:`close`, as those received in their room do anyway; if
        not, they are copied, or used at once."""
        if fetch.key.section is Section.CHECKSUMS:
            with self._lock:
                self._checksums[fetch.key.member] = unpack_checksums(data.data)
        else:
            self._uses[fetch.key].add(fetch.key, data, stays=stays)

    def store(self) -> frozenset[BlockSource]:
        """Seal what was decoded. Left out are blocks with terms that never arrived, and those whose
        owner's checksums did not: nothing can be said about them before another holder was asked.
        Returns parities that cannot be used: what was decoded from them, with other verified
        blocks, is not what its owner copied. Planning again without them falls down the ladder
        (P5)."""
        done: list[Entry] = []
        wrong: list[LostBlock] = []
        for lost, offset, data in self._decoded():
            known = self._checksums.get(lost.key.member)
            if known is None:
                continue
            digest = checksum(data.data)
            # Beyond what the owner has told, no checksum is right.
            if lost.position < len(known) and digest == known[lost.position]:
                place = lost.start_bytes, lost.nbytes, self._rebuild.image_bytes, offset
                done.append(Entry(lost.key, *place, digest, owner=False))
            else:
                wrong.append(lost)
        keys = {key for lost in wrong for key in lost.parities}
        refused = frozenset(f.source for f in self._rebuild.fetches if f.key in keys)
        if refused:
            logger.warning(
                "%d blocks of step %d decoded from verified blocks are not what their owner "
                "copied: the parity is of other data. It is not used; please report this",
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
        """Blocks of which all terms arrived, where they lie in the arena, and their bytes."""
        for start, stripe in self._stripes:
            if stripe.complete:
                for at, (lost, data) in enumerate(
                    zip(stripe.blocks, stripe.results(), strict=True)
                ):
                    yield lost, start + at * lost.padded_bytes, data

    def close(self) -> None:
        """Let go of the arena, which stays if anything was sealed in it."""
        self._stripes.clear()
        self._uses.clear()
        if self._arena is not None:
            self._arena.close()
            if not self._sealed:
                self._arena.path.unlink(missing_ok=True)


def rebuild_offline(
    plan: RecoveryPlan, arenas: ArenaSet, place: ArenaStore
) -> frozenset[BlockSource]:
    """Decode everything on this machine, where all arenas can be read. Returns the corrupt sources
    met: plan again without them."""
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


# Completing a recovered version where a member has nothing of it: its node is new, or lost its
# memory.
#
# What the others hold stays where it lies. The newcomer gets, besides what it restores, the blocks
# that it has to keep for its ring peers. Each block is verified in the buffer in which it came, and
# copied from there into the tensors, if they need it, and into the newcomer's arena. Once every
# block is there the arena is sealed under the version's own label: the version is then as protected
# as before the loss, and who holds it has written nothing. Until then the arena says WRITING, and a
# recovery that starts over does not look at it (P3).
#
# Only for copies: where a code, recomputation, another scheme or another ring is in force, or
# anything is in the way, the restored state is taken again as a version of its own.


@dataclass(frozen=True)
class BlockSlot:
    start_bytes: int  # the block's offset in its section's image
    nbytes: int  # its length; of a host block the room for it
    arena_offset: int  # from the start of the arena's data region

    def fits(self, fetch: Fetch) -> bool:
        exact = fetch.key.section is not Section.HOST
        return fetch.start_bytes == self.start_bytes and (
            fetch.nbytes == self.nbytes if exact else fetch.nbytes <= self.nbytes
        )


@dataclass(frozen=True)
class ArenaLayout:
    """What a member's arena holds: the blocks' places in a data region of ``data_bytes``."""

    rooms: Mapping[BlockKey, BlockSlot]
    data_bytes: int


@dataclass(frozen=True)
class StoreConfig:
    """How this incarnation stores versions."""

    scheme: str  # the protection in force
    # the arena file to complete a version in; None if this rank has no slot without a file
    path: Path | None
    # lays out this rank's arena, from the bytes of the replicated image and of every member's owned
    # image
    blueprint: Callable[[int, tuple[int, ...]], ArenaLayout]


def plan_kept(
    group: tuple[int, int],
    sources: GroupSources,
    records: Sequence[ArenaRecord],
    topology: Topology,
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """What members that hold nothing of the version have to keep for their ring peers. Pure.
    Returns per newcomer the blocks that it does not restore itself; empty where the version cannot
    be completed."""
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
    """One newcomer's arena, filled as blocks arrive. ``stored``: of any arena of the group that
    holds the version."""

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
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Make the arena, whose memory is allocated as blocks arrive. Where there is no room the
        version is not completed here, and the job goes on."""
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
        except (ReftError, OSError) as error:  # the state is restored all the same
            self._give_up(error)
            return
        self._rooms = drawn.rooms

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "%s cannot be completed here; the version is taken again: %s", self._plan.label, error
        )
        self._rooms = {}

    def take(self, fetch: Fetch, data: torch.Tensor) -> None:
        """A verified block is here. Several threads may bring blocks at once."""
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
        """Every block of the version has arrived everywhere: record it, if none is missing here."""
        arena = self._arena
        if arena is None or not self._rooms:
            return
        if missing := [key for key in self._rooms if key not in self._arrived]:
            logger.warning(
                "%s cannot be completed here; the version is taken again: %d of its blocks are "
                "stored in another shape, %s among them",
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
        """Let go of the arena. The file stays, for the versions to come."""
        self._rooms = {}
        if self._arena is not None:
            self._arena.unlock()
            self._arena.close()
            self._arena = None
