"""Copies the chunks of one version into its arena when the gate admits them, and hashes them in the
same pass. Chunks that cannot be copied by the fence are staged on the device and drained later."""

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
    """Encodes the parity blocks of one rank.

    Args:
        image: live tensors of the replicated section.
        blocks: every replicated block of the group by key.
        chunk_bytes: bytes to read for a chunk, of all sources together.
    """

    def __init__(
        self, image: SectionImage, blocks: Mapping[BlockKey, Block], chunk_bytes: int
    ) -> None:
        self._image = image
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._device = image.device
        self._most_bytes = 0  # Largest chunk of one source
        self._scratch: dict[int, torch.Tensor] = {}

    def cut(
        self, placed: PlacedBlock, terms: tuple[tuple[BlockKey, int], ...], target: torch.Tensor
    ) -> Iterator[tuple[int, int, Encode]]:
        """Cut one parity block into chunks.

        Args:
            placed: the block.
            terms: replicated blocks and their coefficients.
            target: its bytes in the arena, 1-D uint8.

        Yields:
            ``(start, stop, encode)``: offsets within the block, and the function that encodes the
            chunk, on the current stream of a device, and returns the pieces to copy to the host.
        """
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
        """Scratch memory to gather source ``number``, or for the result (-1). All chunks share it,
        since they are encoded one at a time."""
        scratch = self._scratch.get(number)
        if scratch is None or len(scratch) < nbytes:
            scratch = self._scratch[number] = self._memory(self._most_bytes)
        return scratch[:nbytes]

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _source(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Return the bytes ``image[begin:end]``: a view if they are contiguous, otherwise
        gathered."""
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
        """Combine ranges of the image with the coefficients in ``row``. Shorter ranges count as
        padded with zeros.

        Returns:
            On a device, the pieces to copy to ``target``; none on a CPU, which writes it directly.
        """
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

    placed: PlacedBlock  # The block
    kind: ByteKind  # Kind by which its bytes are counted
    pieces: CheckedPieces  # Sources and targets; several if small tensors are adjacent
    stored: Range  # Its place in the arena with padding, as a range to be hashed without a copy
    last: bool  # Whether it ends the block
    # For parities: encodes the chunk, and returns the pieces to copy
    encode: Encode | None = None
    # For sources in host memory: all chunks of the block, as ranges to be copied and hashed
    cut: CutRanges | None = None
    number: int = 0  # Index of this chunk in ``cut``

    @property
    def nbytes(self) -> int:
        return self.stored[2]

    @property
    def section(self) -> Section:
        return self.placed.key.section


def cut_chunks(images: LiveImages, writer: ArenaWriter, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut all blocks that are copied from this rank's own device. Padding in the arena is zeroed.

    Args:
        images: live tensors.
        writer: writer of any version in the arena.
        chunk_bytes: most bytes of a chunk, a multiple of 64.
    """
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
    """Return the image that a block is copied from; None if its bytes are encoded or received."""
    section = placed.key.section
    if section is Section.GRADIENTS:
        # There are none yet for a peer whose partition this rank has just begun to store.
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
    """Yield the bytes ``image[at : at + len(part)]`` of a chunk, in order: its pieces, and between
    them padding, which is read from the arena.
    """
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
    """Return the first three names, and the number of the others."""
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
"""Most bytes that are handed to a device and timed at once: a millisecond of the link. Larger
batches would average the rates inside and outside of a window."""
_Batch = Sequence[tuple[int, Chunk]]
_Queued = list[tuple[_Batch, Permit, CopyTicket]]


_MOST_HASHERS = 4
"""Most threads that hash blocks from a device. One hashes 8 to 15 GB/s; the link copies 25 to 55
GB/s."""


def hashing_threads(ranks_here: int = 1) -> int:
    """Return the number of hashing threads of this rank: at most half of its share of the node's
    usable cores.

    Args:
        ranks_here: ranks on this node.
    """
    return max(1, min(_MOST_HASHERS, len(os.sched_getaffinity(0)) // ranks_here // 2))


class Hashers:
    """Threads that hash blocks as they arrive; hashing releases the GIL.

    They are daemon threads, unlike those of an executor: a device that hangs must not keep the
    process from ending.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="reft-hash", daemon=True).start()

    def submit(self, act: Callable[[], None]) -> Future[None]:
        """Run ``act`` on a thread. Calls start in the order in which they were submitted."""
        future: Future[None] = Future()
        self._queue.put((future, act))
        return future

    def close(self) -> None:
        """End the threads after all submitted calls."""
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
    """Device memory for chunks that cannot be copied to the host by the fence."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be staged now."""

    def first_fitting(self, chunks: Sequence[Chunk]) -> int:
        """Return the smallest index ``i`` for which ``chunks[i:]`` fits; ``len(chunks)`` if no
        chunk does.
        """

    def stage(self, chunks: Sequence[Chunk], first: int) -> list[StagedChunk]:
        """Copy ``chunks[first:]`` into the staging memory, by the fence."""


class Copier:
    """Copies the versions of one snapshot worker.

    ``begin`` and ``fence`` are called by the training thread, ``copy`` and ``drain`` by the worker
    thread.

    Args:
        engine: copies the bytes.
        chunk_bytes: bytes of a chunk, or the engine's minimum if that is more.
        staging: stages chunks that remain at the fence; None: the fence waits for them.
        hashers: number of threads that hash blocks from a device; None: :func:`hashing_threads`.

    Attributes:
        features: copy more of the live state, after the chunks.
    """

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
        """Chunks for each slot's arena, with the writer and images for which they were cut."""
        self.records: deque[ChunkRecord] = deque(maxlen=_KEPT_CHUNKS)
        """Chunks of the newest versions; a tracer removes those that it has read."""
        self.staged: Sequence[StagedChunk] = ()
        """Chunks of the last copied version that have to be drained."""
        self.written: Sequence[str] = ()
        """Tensors of the last copied version that changed while they were copied: names from the
        one block that was read twice."""
        self._scratch = torch.zeros(0, dtype=torch.uint8)
        self._read_again_count = 0
        self._begun = False
        self.begun: Any = None
        """Stamp at which the newest version's state was final; used by the training thread."""
        self._hasher = hashing_copier()
        self._fault: Callable[[FaultPoint], None] = lambda point: None
        self._points: dict[int, list[FaultPoint]] = {}

    # -- training thread ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a version: the state is final. A second version of the same state uses the same
        begin."""
        if not self._begun:
            self.begun = self.engine.begin()
            self._begun = True

    def fence(self) -> None:
        """Close the version: nothing that the training thread does next changes the copied
        bytes."""
        if self._begun:
            self._begun = False
            self.engine.fence()

    def close(self) -> None:
        """Wait for copies in flight and release the arenas."""
        self.engine.close()
        if self._hashers is not None:
            self._hashers.close()
        self.forget()
        self.staged = ()

    def forget(self) -> None:
        """Release the arenas: memory that is replaced must not stay mapped (P9)."""
        self._cut.clear()

    def _chunks(self, images: LiveImages, writer: ArenaWriter) -> tuple[Chunk, ...]:
        """Return chunks of the version; cut again only if images, layout or arena have changed."""
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
        """Copy the live tensors into the arena. Chunks for which training would wait are staged if
        they fit.

        Args:
            images: live tensors.
            writer: writer of the arena.
            gate: admits each chunk.
            reach: called at fault points: in the middle of the data, and before and in the middle
                of the parities.
            on_released: called when the fence need not wait any longer.
            may_stage: whether the rest may be staged; called when a chunk would be copied while
                training waits.

        Returns:
            Time and size of each copied chunk. Checksums of hashed blocks are in ``writer``. Staged
            chunks are in :attr:`staged`; the version is complete after :meth:`drain`.
        """
        chunks = self._chunks(images, writer)
        self.staged, self._hasher = (), hashing_copier()
        self._fault, self._points = reach, _fault_points(chunks)
        if not chunks:
            reach(FaultPoint.DURING_COPY)
        queued: _Queued = []
        records: list[ChunkRecord] = []
        if self.engine.asynchronous:
            for placed in writer.local_blocks:  # all are copied, whatever the arena holds
                writer.held.pop(placed, None)

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
        # Release training before waiting for the copies: on a device all copies are queued by now,
        # and the fence makes the device's next writes wait for them, so the host need not wait.
        on_released()
        self.engine.synchronize()
        self.written = self._differing_tensors(images, writer, again)
        records += _records_of(queued)
        self.records.extend(records)
        return records

    def _read_again(
        self, images: LiveImages, writer: ArenaWriter, gate: Gate
    ) -> PlacedBlock | None:
        """Copy one block a second time, after all others; each version takes the next block.

        A difference shows writes that torch does not count, through ``.data`` or by other libraries
        (P2). Returns the block; None if there is none to compare.
        """
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
            # Registered, since a copy to other memory would block this thread.
            self.engine.register(self._scratch)
        image = _find_image(images, placed)
        assert image is not None
        pieces = image.pieces_into(placed.block.start_bytes, self._scratch[: placed.block.nbytes])
        copy_when_admitted(self.engine, gate, pieces)
        return placed

    def _differing_tensors(
        self, images: LiveImages, writer: ArenaWriter, placed: PlacedBlock | None
    ) -> Sequence[str]:
        """Return the names of the tensors that changed between the two reads of a block."""
        if placed is None:
            return ()
        begin, nbytes = placed.block.start_bytes, placed.block.nbytes
        if torch.equal(self._scratch[:nbytes], writer.tensor(placed)[:nbytes]):
            return ()
        writer.held.pop(placed, None)  # if it was the arena that changed, it is written again
        image = _find_image(images, placed)
        assert image is not None
        first = writer.tensor(placed)[:nbytes]
        differs = (self._scratch[:nbytes] != first).nonzero()
        at = [begin + int(differs[0]), begin + int(differs[-1])]
        return [spec.name for spec in image.tensors_at(at[0], at[1] + 1)]

    def drain(self, writer: ArenaWriter, gate: Gate) -> list[ChunkRecord]:
        """Copy the staged chunks to the arena while training continues. Returns time and size of
        each chunk."""
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
        """Wait for the copies of a version that is given up: they must not arrive in the arena when
        it already holds another version (P5)."""
        # If the engine is closed or the device has failed, no copy arrives any more.
        with suppress(CopyOrderError, RuntimeError):
            self.engine.synchronize()

    def _stages(
        self, chunks: Sequence[Chunk], may_stage: Callable[[], bool] | None
    ) -> Callable[[int, Permit], bool]:
        """Return a function of chunk and permit: whether that chunk and all later ones are staged
        now instead of copied."""
        area = self.staging
        if may_stage is None or area is None or not area.capacity_bytes:
            return lambda number, permit: False
        first = area.first_fitting(chunks)
        return lambda number, permit: permit.tier == 0 and number >= first and may_stage()

    def _copy(self, chunks: Sequence[Chunk], writer: ArenaWriter, gate: Gate) -> list[ChunkRecord]:
        """Copy all chunks; each permit covers at most the rest of a block."""
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
        """Return the chunks that one permit may cover: of one block, up to the next fault point."""
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
        """Copy and hash chunks of one block with one permit. A block that the arena holds already,
        if it has not changed, is only hashed.

        Returns:
            Time and size of the copy, and the number of chunks to go on by: fewer than all if
            training set the stop flag; negative, back to the first one, if the block has changed.
        """
        began = ended = time.perf_counter()
        first, cut = chunks[0], _at_once(chunks[0])
        hashes = first.section is not Section.GRADIENTS
        copied = len(chunks)
        if cut is None:  # copied piece by piece, whatever the arena holds
            writer.held.pop(first.placed, None)
        held = writer.held.get(first.placed)
        try:
            if cut is not None:
                assert isinstance(self.engine, CpuCopyEngine)
                part = first.number, chunks[-1].number + 1
                ranges = cut if held is None else cut.hashed_only
                copied = self.engine.copy_hashed(ranges, part, self._hasher, permit.until)
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
        if held is None:
            writer.traffic.to_host[first.kind] += nbytes
        elif writer.checksums.get(first.placed, held) != held:
            # The block has changed, so it is copied after all, from its first chunk on.
            del writer.held[first.placed], writer.checksums[first.placed]
            copied = -first.number
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
        """Queue chunks on the device in batches of one permit, until the rest is to be staged. The
        caller waits for them after the fence.

        Args:
            chunks: chunks with their index.
            writer: writer of the arena.
            gate: admits the chunks.
            hand_over: queues a batch, no earlier than at a stamp.
            stages: whether a chunk and all later ones are staged instead.
        """
        queued: _Queued = []
        batch: list[tuple[int, Chunk]] = []  # Chunks of one permit that are not queued yet
        permit, left, nbytes = Permit(0), 0, 0

        def flush() -> None:
            nonlocal batch, nbytes
            if batch:
                # The previous batch of the permit waits for the mark already, and the stream runs
                # in order.
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
        """Submit the blocks that end in a batch to be hashed once the batch has arrived. Earlier
        batches have arrived by then, since the stream runs in order."""
        ended = [c.placed for _, c in batch if c.last and c.section is not Section.GRADIENTS]
        if not ended:
            return

        def hash_blocks() -> None:
            self.engine.wait(ticket)
            for placed in ended:
                writer.hash(placed)

        assert self._hashers is not None  # the engine is asynchronous
        writer.hashing.append(self._hashers.submit(hash_blocks))

    def _reach(self, number: int) -> None:
        """Trigger the fault points before a chunk, each once."""
        for point in self._points.pop(number, ()):
            self._fault(point)


def copy_when_admitted(
    engine: CopyEngine, gate: Gate, pieces: Sequence[Piece] = (), encode: Encode | None = None
) -> None:
    """Copy more pieces of the open version. An asynchronous engine queues them; with any other the
    call waits for the gate.

    Args:
        engine: copies the pieces.
        gate: admits the copy if the engine is synchronous.
        pieces: sources and targets.
        encode: encodes further pieces; see :data:`reft.snapshot.copy_engine.Encode`.
    """
    if engine.asynchronous:
        engine.copy(pieces, encode=encode)
        return
    permit, began = gate.admit(), time.perf_counter()
    try:
        engine.copy(pieces, encode=encode)
    finally:
        gate.release(permit, time.perf_counter() - began)


def _at_once(chunk: Chunk) -> CutRanges | None:
    """Return all chunks of the block if one call copies and hashes them; it may stop between any
    two. None if they are copied one by one.
    """
    return None if chunk.section is Section.GRADIENTS else chunk.cut


def _next(gate: Gate, left: int) -> tuple[Permit, int]:
    """Take the next permit.

    Args:
        gate: gives the permit.
        left: bytes left of the permit before; negative if its last chunk exceeded it.

    Returns:
        The permit and its bytes. During computation (tier 2) the excess is subtracted.
    """
    permit = gate.admit()
    gate.release(permit, 0.0)
    return permit, permit.nbytes + (left if permit.tier == 2 else 0)


def _records_of(queued: _Queued) -> list[ChunkRecord]:
    """Return records of all chunks; the time of a batch is divided among its chunks by their
    bytes."""
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
    """Return fault points by the index of the chunk before which they are triggered; parities come
    last.
    """
    data = sum(chunk.kind is not ByteKind.PARITY for chunk in chunks)
    points = {data // 2: [FaultPoint.DURING_COPY]}
    if parities := len(chunks) - data:
        points.setdefault(data, []).append(FaultPoint.BEFORE_PARITY)
        points.setdefault(data + parities // 2, []).append(FaultPoint.DURING_PARITY)
    return points


def bytes_by_tier(records: Iterable[ChunkRecord]) -> Counter[int]:
    """Return the number of bytes copied in each tier."""
    found: Counter[int] = Counter()
    for record in records:
        found[record.tier] += record.nbytes
    return found
