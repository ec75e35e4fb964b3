"""Copies the chunks of one version into its arena, when the gate lets them, and hashes them on the
way; stages what there is no time for; takes the checksums that data-parallel peers compare."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from reft.config import FaultPoint
from reft.errors import CopyOrderError
from reft.grid import ALIGNMENT_BYTES, BlockKey, Section
from reft.memory.stream import (
    EXPONENTS,
    CutRanges,
    Range,
    find_ranges,
    hashing_copier,
)
from reft.protect.backend import backend_for, combine_ragged
from reft.protect.rs import CELL_BYTES, needs_packets
from reft.snapshot.arenas import ArenaWriter
from reft.snapshot.copy_engine import (
    CheckedPieces,
    CopyEngine,
    CopyTicket,
    CpuCopyEngine,
    Encode,
    Piece,
    host_bytes,
    own_pages,
)
from reft.snapshot.extension import VersionFeature
from reft.snapshot.gate import UNLIMITED, ChunkRecord, Gate, Permit
from reft.snapshot.plan import Block, LiveImages, PlacedBlock
from reft.snapshot.stats import ByteKind, find_byte_kind
from reft.state.catalogue import SectionImage

logger = logging.getLogger(__name__)


class ParityEncoder:
    """Encodes the parity blocks of one rank. ``image``: the replicated section as it lies in the
    engine's memory. ``blocks``: every replicated block of the group by key. ``chunk_bytes``: bytes
    to read for a chunk, of all sources together."""

    def __init__(
        self, image: SectionImage, blocks: Mapping[BlockKey, Block], chunk_bytes: int
    ) -> None:
        self._image = image
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._device = image.device
        self._most_bytes = 0  # of a chunk of one source
        self._scratch: dict[int, torch.Tensor] = {}

    def cut(
        self, placed: PlacedBlock, terms: tuple[tuple[BlockKey, int], ...], target: torch.Tensor
    ) -> Iterator[tuple[int, int, Encode]]:
        """The chunks of one parity block. ``placed``: the block. ``terms``: replicated blocks and
        coefficients. ``target``: its bytes in the arena, 1-D uint8. Yields ``(start, stop,
        encode)`` within the block; ``encode`` encodes, on the current stream of a device, and
        returns what is to be copied to the host."""
        row = tuple(coefficient for _, coefficient in terms)
        unit = CELL_BYTES if needs_packets([row]) else ALIGNMENT_BYTES
        step = max(1, self._chunk_bytes // max(1, len(terms)) // unit) * unit
        total = placed.block.nbytes
        self._most_bytes = max(self._most_bytes, min(step, total))
        for at in range(0, total, step):
            stop = min(at + step, total)
            ranges = []
            for key, _ in terms:
                block = self._blocks[key]
                begin, end = (block.start_bytes + min(x, block.nbytes) for x in (at, stop))
                ranges.append((begin, end))
            yield at, stop, partial(self._encode, row, ranges, target[at:stop])

    def _room(self, number: int, nbytes: int) -> torch.Tensor:
        """Where a source that does not lie together is gathered, and, at -1, what is computed;
        chunks share
        it: they run one by one."""
        scratch = self._scratch.get(number)
        if scratch is None or len(scratch) < nbytes:
            scratch = self._scratch[number] = self._memory(self._most_bytes)
        return scratch[:nbytes]

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _source(self, number: int, begin: int, end: int) -> torch.Tensor:
        """``image[begin:end]``: in place where it lies together, else gathered."""
        out = self._room(number, end - begin)
        pieces = self._image.pieces_into(begin, out)
        if len(pieces) == 1 and pieces[0][0].numel() == end - begin:
            return pieces[0][0]
        for live, part in pieces:
            part.copy_(live)
        return out

    def _encode(
        self, row: tuple[int, ...], ranges: Sequence[tuple[int, int]], target: torch.Tensor
    ) -> Sequence[Piece]:
        """Write the combination of those ranges of the image to ``target``, or queue it; shorter
        ones count as padded with zeros."""
        sources: list[Any] = [self._source(n, begin, end) for n, (begin, end) in enumerate(ranges)]
        if self._device.type == "cpu":
            out: Any = target.numpy()
            combine_ragged(
                backend_for(out), [row], [np.asarray(host_bytes(s)) for s in sources], [out]
            )
            return ()
        out = self._room(-1, len(target))
        combine_ragged(backend_for(out), [row], sources, [out])
        return [(out, target)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one block."""

    placed: PlacedBlock  # the block
    kind: ByteKind  # what its bytes are to this rank
    pieces: CheckedPieces  # sources and targets; several where small tensors lie side by side
    stored: Range  # the chunk's place in the arena, padding included, as a range to be hashed only
    last: bool  # whether it ends the block
    # for a parity what to do instead of copying; returns what is then to be copied
    encode: Encode | None = None
    # for sources in host memory all chunks of the block, as ranges to be copied and hashed
    cut: CutRanges | None = None
    number: int = 0  # the chunk's own among them

    @property
    def nbytes(self) -> int:
        return self.stored[2]

    @property
    def section(self) -> Section:
        return self.placed.key.section


def cut_chunks(images: LiveImages, writer: ArenaWriter, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut everything that is copied from this rank's own device; padding in the arena is zeroed
    here. ``images``: live tensors. ``writer``: any version in the arena. ``chunk_bytes``: most
    bytes of a chunk, a multiple of 64."""
    chunks: list[Chunk] = []
    for placed in writer.local_blocks:
        image = _find_image(images, placed)
        if image is not None:
            chunks += _cut_block(image, writer, placed, chunk_bytes)
    return (*chunks, *_cut_parity(images, writer, chunk_bytes))


def _cut_parity(images: LiveImages, writer: ArenaWriter, chunk_bytes: int) -> Iterator[Chunk]:
    mine, plan = writer.layout.mine, writer.layout.plan
    blocks = {b.key: b.block for m in plan.members for b in m.own} if mine.parity else {}
    encoder = ParityEncoder(images.replicated, blocks, chunk_bytes)
    for placed in mine.parity:
        total, target = placed.block.nbytes, writer.tensor(placed)
        for at, stop, encoding in encoder.cut(placed, mine.terms[placed.key].terms, target):
            stored = _hashed_only(target[at:stop])
            yield Chunk(placed, ByteKind.PARITY, CheckedPieces(), stored, stop == total, encoding)


def _find_image(images: LiveImages, placed: PlacedBlock) -> SectionImage | None:
    """What a block is copied from, as it is; None where it is made in another way."""
    section = placed.key.section
    if section is Section.GRADIENTS:
        # Of a peer that this rank keeps since a moment only there are none yet.
        return images.gradients.get(placed.key.member)
    return {Section.REPLICATED: images.replicated, Section.OWNED: images.owned}.get(section)


def _cut_block(
    image: SectionImage, writer: ArenaWriter, placed: PlacedBlock, chunk_bytes: int
) -> Iterator[Chunk]:
    target = writer.tensor(placed)
    total, begin = placed.block.nbytes, placed.block.start_bytes
    kind = find_byte_kind(placed.key, writer.layout.member)
    parts = [target[at : at + chunk_bytes] for at in range(0, total, chunk_bytes)]
    pieces = [
        CheckedPieces.of(image.pieces_into(begin + at, part))
        for at, part in zip(range(0, total, chunk_bytes), parts, strict=True)
    ]
    in_order = [
        [*_in_order(image, begin + at, of_part, part)]
        for at, of_part, part in zip(range(0, total, chunk_bytes), pieces, parts, strict=True)
    ]
    if all(p.elsewhere is None for p in pieces):
        cut = CutRanges.of(in_order)
    else:
        cut = None
        writer.scanned[placed] = find_ranges(
            (0, row[0] or row[1], *row[2:]) for rows in in_order for row in rows
        )
    for number, (part, of_part) in enumerate(zip(parts, pieces, strict=True)):
        yield Chunk(
            placed,
            kind,
            of_part,
            _hashed_only(part),
            last=number == len(parts) - 1,
            cut=cut,
            number=number,
        )


def _hashed_only(memory: torch.Tensor) -> Range:
    return 0, memory.data_ptr(), memory.numel()


def _in_order(
    image: SectionImage, at: int, pieces: CheckedPieces, part: torch.Tensor
) -> Iterator[Range]:
    """The bytes of a chunk, ``image[at : at + len(part)]``, in order: its pieces, and the padding
    between them, which is in the arena."""
    end = 0
    for target, source, nbytes in pieces.addresses:
        begin = target - part.data_ptr()
        if begin > end:
            yield _hashed_only(part[end:begin])
        (spec,) = image.tensors_at(at + begin, at + begin + nbytes)
        yield target, source, nbytes, EXPONENTS.get(spec.dtype, 0)
        end = begin + nbytes
    if end < part.numel():
        yield _hashed_only(part[end:])


_COPIED_AS_IT_IS = frozenset({Section.REPLICATED, Section.OWNED})


def shortened(names: Iterable[str]) -> str:
    """The first few."""
    found = [*dict.fromkeys(names)]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A chunk, its position in its version, and the pieces from the staging area to the arena."""

    number: int
    chunk: Chunk
    pieces: Sequence[Piece]


_KEPT_CHUNKS = 2**16
_BATCH_BYTES = 32 * 2**20
"""Most that is handed to a device at once, and timed: a millisecond of the link. More would hide
that the rate is another one behind a window's end."""
_Batch = Sequence[tuple[int, Chunk]]
_Queued = list[tuple[_Batch, Permit, CopyTicket]]


_MOST_HASHERS = 4
"""Threads that hash what arrives from a device. One hashes 8 to 15 GB/s, the link brings 25 to
55."""


def hashing_threads(ranks_here: int = 1) -> int:
    """How many threads of this rank hash: at most half of its share of the cores that it may
    use."""
    return max(1, min(_MOST_HASHERS, len(os.sched_getaffinity(0)) // ranks_here // 2))


class Hashers:
    """Threads that hash blocks as they arrive, without the interpreter while they do.

    They are daemons, unlike those of an executor: a device that hangs must not keep the process
    from ending.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="reft-hash", daemon=True).start()

    def submit(self, act: Callable[[], None]) -> Future[None]:
        """Have a thread do it, in the order of the calls."""
        future: Future[None] = Future()
        self._queue.put((future, act))
        return future

    def close(self) -> None:
        """The threads end after what was submitted."""
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, act = item
            try:
                act()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)


class Staging(Protocol):
    """Device memory for chunks that cannot reach the host before the fence."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be staged now."""

    def first_fitting(self, chunks: Sequence[Chunk]) -> int:
        """Number of the first chunk from which on all fit; ``len(chunks)`` if none does."""

    def stage(self, chunks: Sequence[Chunk], first: int) -> list[StagedChunk]:
        """Copy the chunks from ``first`` on into the staging memory, by the fence."""


class Copier:
    """The copying half of the snapshot worker.

    ``begin`` and ``fence`` are called by the training thread, ``copy`` and ``drain`` by the
    worker's. ``engine``: moves the bytes. ``chunk_bytes``: bytes of a chunk; more where the engine
    copies such small ones below the speed of its link (nothing waits for the end of a chunk there).
    ``staging``: takes what is left at the fence; None: the fence waits for it. ``hashers``: threads
    that hash what arrives from a device.

    Attributes:
        features: read more of the live tensors, after the chunks."""

    def __init__(
        self,
        engine: CopyEngine,
        chunk_bytes: int,
        staging: Staging | None = None,
        hashers: int | None = None,
    ) -> None:
        self.engine = engine
        count = hashing_threads() if hashers is None else hashers
        self._hashers = Hashers(count) if engine.asynchronous else None
        self.staging = staging
        self.features: Sequence[VersionFeature] = ()
        self._chunk_bytes = max(chunk_bytes, engine.least_chunk_bytes)
        self._cut: dict[int, tuple[ArenaWriter, LiveImages, tuple[Chunk, ...]]] = {}
        """The chunks of each slot's arena, with the first version that was copied there."""
        self.records: deque[ChunkRecord] = deque(maxlen=_KEPT_CHUNKS)
        """Of the newest versions; whoever traces takes them away."""
        self.staged: Sequence[StagedChunk] = ()
        """Of the version that was copied last: what is still to be drained."""
        self.written: Sequence[str] = ()
        """Of the version that was copied last: tensors of one block that changed while it was
        copied."""
        self._scratch = torch.zeros(0, dtype=torch.uint8)
        self._read_again_count = 0
        self._begun = False
        self.begun: Any = None
        """Stamp of the newest version's state. Of the training thread."""
        self._hasher = hashing_copier()
        self._fault: Callable[[FaultPoint], None] = lambda point: None
        self._points: dict[int, list[FaultPoint]] = {}

    # -- training thread ---------------------------------------------------------------------------

    def begin(self) -> None:
        """The state is final; another version of the same state goes on under the first one's
        begin."""
        if not self._begun:
            self.begun = self.engine.begin()
            self._begun = True

    def fence(self) -> None:
        """Whatever was copied is safe from what the training thread does next."""
        if self._begun:
            self._begun = False
            self.engine.fence()

    def close(self) -> None:
        """Wait for copies in flight and let go of the arenas."""
        self.engine.close()
        if self._hashers is not None:
            self._hashers.close()
        self.forget()
        self.staged = ()

    def forget(self) -> None:
        """Let go of the arenas: what is replaced must not stay mapped (P9)."""
        self._cut.clear()

    def _chunks(self, images: LiveImages, writer: ArenaWriter) -> tuple[Chunk, ...]:
        """Cut again when images, layout or arena have changed."""
        if (known := self._cut.get(writer.slot)) is not None:
            first, seen, chunks = known
            if first.arena is writer.arena and first.layout is writer.layout and seen is images:
                writer.scanned = first.scanned
                return chunks
        chunks = cut_chunks(images, writer, self._chunk_bytes)
        self._cut[writer.slot] = writer, images, chunks
        return chunks

    # -- worker thread -----------------------------------------------------------------------------

    def copy(
        self,
        images: LiveImages,
        writer: ArenaWriter,
        gate: Gate,
        *,
        reach: Callable[[FaultPoint], None],
        on_released: Callable[[], None],
        may_stage: Callable[[], bool] | None = None,
    ) -> list[ChunkRecord]:
        """Fill the arena from the live tensors; what there is no time for is staged, if there is
        room.

        Args:
            images: live tensors.
            writer: where to.
            gate: asked before every chunk.
            reach: called in the middle of the data, and before and in the middle of the parities.
            on_released: called when the fence need not wait any longer.
            may_stage: asked when a chunk would be copied while training waits.

        Returns:
            What was copied when. Checksums of blocks that were hashed on the way are in
            ``writer``. What was staged is in :attr:`staged`; the version is whole after
            :meth:`drain`.
        """
        chunks = self._chunks(images, writer)
        self.staged, self._hasher = (), hashing_copier()
        self._fault, self._points = reach, _fault_points(chunks)
        if not chunks:
            reach(FaultPoint.DURING_COPY)
        queued: _Queued = []
        records: list[ChunkRecord] = []
        if self.engine.asynchronous:

            def hand_over(batch: _Batch, mark: Any) -> CopyTicket:
                pieces = CheckedPieces(piece for _, chunk in batch for piece in chunk.pieces)
                encodes = [chunk.encode for _, chunk in batch if chunk.encode is not None]
                encode = (
                    (lambda: (piece for encode in encodes for piece in encode()))
                    if encodes
                    else None
                )
                return self.engine.copy(pieces, mark, encode)

            stages = self._stages(chunks, may_stage)
            queued = self._queue(enumerate(chunks), writer, gate, hand_over, stages)
            if (count := sum(len(batch) for batch, _, _ in queued)) < len(chunks):
                assert self.staging is not None
                self.staged = self.staging.stage(chunks, count)
        else:
            records = self._copy(chunks, writer, gate)
        for feature in self.features:
            feature.read(images, writer.label, self.engine, gate)
        again = self._read_again(images, writer, gate)
        # Training is released before the wait: on a device all copies are queued by now, and the
        # fence makes the device's next writes wait for them. The host need not.
        on_released()
        self.engine.synchronize()
        self.written = self._differing_tensors(images, writer, again)
        records += _records_of(queued)
        self.records.extend(records)
        return records

    def _read_again(
        self, images: LiveImages, writer: ArenaWriter, gate: Gate
    ) -> PlacedBlock | None:
        """Copy one block a second time, after all others: another one with each version, for ever.
        Writes that torch does not count (through ``.data``, by other libraries) show in the
        difference (P2). Returns the block; None where there is none to compare."""
        own = [
            b for b in writer.local_blocks if b.block.nbytes and b.key.section in _COPIED_AS_IT_IS
        ]
        if not own or self.staged:
            return None
        self._read_again_count += 1
        placed = own[self._read_again_count % len(own)]
        if placed.block.nbytes > len(self._scratch):
            if len(self._scratch):
                self.engine.unregister(self._scratch)
            self._scratch = own_pages(placed.block.nbytes)
            self.engine.register(self._scratch)  # into other memory a copy would hold up the caller
        image = _find_image(images, placed)
        assert image is not None
        pieces = image.pieces_into(placed.block.start_bytes, self._scratch[: placed.block.nbytes])
        copy_when_admitted(self.engine, gate, pieces)
        return placed

    def _differing_tensors(
        self, images: LiveImages, writer: ArenaWriter, placed: PlacedBlock | None
    ) -> Sequence[str]:
        """Names of the tensors in a block that was read twice, if it has changed in between."""
        if placed is None:
            return ()
        begin, nbytes = placed.block.start_bytes, placed.block.nbytes
        if torch.equal(self._scratch[:nbytes], writer.tensor(placed)[:nbytes]):
            return ()
        image = _find_image(images, placed)
        assert image is not None
        first = writer.tensor(placed)[:nbytes]
        differs = (self._scratch[:nbytes] != first).nonzero()
        at = [begin + int(differs[0]), begin + int(differs[-1])]
        return [spec.name for spec in image.tensors_at(at[0], at[1] + 1)]

    def drain(self, writer: ArenaWriter, gate: Gate) -> list[ChunkRecord]:
        """Bring what was staged to the arena; training goes on meanwhile, whatever it does. Returns
        what was copied when."""
        staged, self.staged = self.staged, ()
        pieces = {item.number: item.pieces for item in staged}
        queued = self._queue(
            [(item.number, item.chunk) for item in staged],
            writer,
            gate,
            lambda batch, mark: self.engine.drain([p for n, _ in batch for p in pieces[n]], mark),
            lambda number, permit: False,
        )
        self.engine.synchronize()
        records = _records_of(queued)
        self.records.extend(records)
        return records

    def wait_for_copies(self) -> None:
        """Wait for what is under way of a version that is given up: it must not arrive in its arena
        when that holds another version (P5)."""
        # closed, or failed: then nothing arrives any more
        with suppress(CopyOrderError, RuntimeError):
            self.engine.synchronize()

    def _stages(
        self, chunks: Sequence[Chunk], may_stage: Callable[[], bool] | None
    ) -> Callable[[int, Permit], bool]:
        """Whether all from a chunk on is staged now, instead of copied by that permit."""
        area = self.staging
        if may_stage is None or area is None or not area.capacity_bytes:
            return lambda number, permit: False
        first = area.first_fitting(chunks)
        return lambda number, permit: permit.tier == 0 and number >= first and may_stage()

    def _copy(self, chunks: Sequence[Chunk], writer: ArenaWriter, gate: Gate) -> list[ChunkRecord]:
        """As much at a time as the gate lets through, and no more than the rest of a block."""
        records, number = [], 0
        while number < len(chunks):
            self._reach(number)
            permit = gate.admit()
            some = self._admitted(chunks, number, permit)
            record, copied = self._some(some, writer, gate, permit)
            records.append(record)
            number += copied
        return records

    def _admitted(self, chunks: Sequence[Chunk], first: int, permit: Permit) -> Sequence[Chunk]:
        """What is copied with one permit at most: chunks of one block, up to the next fault
        point."""
        stop, nbytes = first, 0
        goes_on = permit.until is not None and _at_once(chunks[first]) is not None
        most = UNLIMITED if goes_on else permit.nbytes
        while nbytes < most:
            nbytes += chunks[stop].nbytes
            stop += 1
            if chunks[stop - 1].last or stop in self._points:
                break
        return chunks[first:stop]

    def _some(
        self,
        chunks: Sequence[Chunk],
        writer: ArenaWriter,
        gate: Gate,
        permit: Permit,
    ) -> tuple[ChunkRecord, int]:
        """Chunks of one block, hashed on the way. Returns what was copied when, and how many of the
        chunks: fewer where training did not wait for them."""
        began = ended = time.perf_counter()
        first, cut = chunks[0], _at_once(chunks[0])
        hashes = first.section is not Section.GRADIENTS
        copied = len(chunks)
        try:
            if cut is not None:
                assert isinstance(self.engine, CpuCopyEngine)
                part = first.number, chunks[-1].number + 1
                copied = self.engine.copy_hashed(cut, part, self._hasher, permit.until)
            else:
                for chunk in chunks:
                    self.engine.copy(chunk.pieces, encode=chunk.encode)
                    if hashes:
                        self._hasher.copy(find_ranges([chunk.stored]))
            if hashes and chunks[copied - 1].last:
                writer.take(first.placed, self._hasher)
            ended = time.perf_counter()
        finally:
            gate.release(permit, ended - began)
        nbytes = sum(chunk.nbytes for chunk in chunks[:copied])
        writer.traffic.to_host[first.kind] += nbytes
        record = ChunkRecord(permit.tier, nbytes, began, ended, permit.window, first.section.value)
        return record, copied

    def _queue(
        self,
        chunks: Iterable[tuple[int, Chunk]],
        writer: ArenaWriter,
        gate: Gate,
        hand_over: Callable[[_Batch, Any], CopyTicket],
        stages: Callable[[int, Permit], bool],
    ) -> _Queued:
        """Hand chunks to the device, a window's worth at a time, until the rest is staged; they are
        waited for behind the fence."""
        queued: _Queued = []
        batch: list[tuple[int, Chunk]] = []  # of one permit
        permit, left, nbytes = Permit(0), 0, 0

        def flush() -> None:
            nonlocal batch, nbytes
            if batch:
                # behind what waits for the mark already
                follows = bool(queued) and queued[-1][1] is permit
                ticket = hand_over(batch, None if follows else permit.mark)
                queued.append((batch, permit, ticket))
                self._hash_later(batch, ticket, writer)
                for _, chunk in batch:
                    writer.traffic.to_host[chunk.kind] += chunk.nbytes
                batch, nbytes = [], 0

        for number, chunk in chunks:
            if left <= 0 or nbytes + chunk.nbytes > _BATCH_BYTES or number in self._points:
                flush()
            self._reach(number)
            while left <= 0:
                permit, left = _next(gate, left)
            if stages(number, permit):
                break
            batch.append((number, chunk))
            left -= chunk.nbytes
            nbytes += chunk.nbytes
        flush()
        return queued

    def _hash_later(self, batch: _Batch, ticket: CopyTicket, writer: ArenaWriter) -> None:
        """Have the blocks that end in a batch hashed when it has arrived: what was queued before
        has, too."""
        ended = [c.placed for _, c in batch if c.last and c.section is not Section.GRADIENTS]
        if not ended:
            return

        def hash_blocks() -> None:
            self.engine.wait(ticket)
            for placed in ended:
                writer.hash(placed)

        assert self._hashers is not None  # the engine queues copies
        writer.hashing.append(self._hashers.submit(hash_blocks))

    def _reach(self, number: int) -> None:
        """Before a chunk, once."""
        for point in self._points.pop(number, ()):
            self._fault(point)


def copy_when_admitted(
    engine: CopyEngine, gate: Gate, pieces: Sequence[Piece] = (), encode: Encode | None = None
) -> None:
    """Copy pieces of the open version next to its chunks: queue them on a device, or wait for the
    gate where the copy is made at once."""
    if engine.asynchronous:
        engine.copy(pieces, encode=encode)
        return
    permit, began = gate.admit(), time.perf_counter()
    try:
        engine.copy(pieces, encode=encode)
    finally:
        gate.release(permit, time.perf_counter() - began)


def _at_once(chunk: Chunk) -> CutRanges | None:
    """Chunks of its block that are copied and hashed by one call, which may end between any two of
    them."""
    return None if chunk.section is Section.GRADIENTS else chunk.cut


def _next(gate: Gate, left: int) -> tuple[Permit, int]:
    """The next permit and its bytes; beside computation those count by which the last chunk went
    too far."""
    permit = gate.admit()
    gate.release(permit, 0.0)
    return permit, permit.nbytes + (left if permit.tier == 2 else 0)


def _records_of(queued: _Queued) -> list[ChunkRecord]:
    """Chunks that were handed over together share the time that they took by their bytes."""
    records = []
    for batch, permit, ticket in queued:
        if ticket.secs is None:
            continue
        begin, end = ticket.secs
        secs_of_byte = (end - begin) / max(1, sum(chunk.nbytes for _, chunk in batch))
        for _, chunk in batch:
            end = begin + chunk.nbytes * secs_of_byte
            section = chunk.section.value
            records.append(
                ChunkRecord(permit.tier, chunk.nbytes, begin, end, permit.window, section)
            )
            begin = end
    return records


def _fault_points(chunks: Sequence[Chunk]) -> dict[int, list[FaultPoint]]:
    """What is reached before which chunk; parities come last."""
    data = sum(chunk.kind is not ByteKind.PARITY for chunk in chunks)
    points = {data // 2: [FaultPoint.DURING_COPY]}
    if parities := len(chunks) - data:
        points.setdefault(data, []).append(FaultPoint.BEFORE_PARITY)
        points.setdefault(data + parities // 2, []).append(FaultPoint.DURING_PARITY)
    return points


def bytes_by_tier(records: Iterable[ChunkRecord]) -> Counter[int]:
    """Bytes copied in each tier."""
    found: Counter[int] = Counter()
    for record in records:
        found[record.tier] += record.nbytes
    return found
