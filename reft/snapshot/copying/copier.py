"""Copies the chunks of one version into its arena, when the gate lets them, and hashes them on the way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from reft.config import FaultPoint
from reft.errors import CopyOrderError
from reft.memory.stream import CutRanges, hashing_copier, ranges_of
from reft.protect.blocks import Section
from reft.snapshot.copying.chunks import Chunk, ChunkCache
from reft.snapshot.copying.cpu import CpuCopyEngine
from reft.snapshot.copying.engine import CheckedPieces, CopyEngine, CopyTicket, Mark, Piece
from reft.snapshot.copying.gate import UNLIMITED, Gate, Permit
from reft.snapshot.copying.peers import PeerCheck
from reft.snapshot.copying.staging import StagedChunk, StagingArea
from reft.snapshot.filling import Filling
from reft.snapshot.plan import LiveImages
from reft.snapshot.scheduling.trace import ChunkRecord
from reft.snapshot.stats import Kind

_KEPT_CHUNKS = 2**16
_BATCH_BYTES = 32 * 2**20
"""Most that is handed to a device at once, and timed: a millisecond of the link. More would hide that the
rate is another one behind a window's end."""
_Batch = Sequence[tuple[int, Chunk]]
_Queued = list[tuple[_Batch, Permit, CopyTicket]]


class Copier:
    """The copying half of the snapshot worker.

    ``begin`` and ``fence`` are called by the training thread, ``copy`` and ``drain`` by the worker's.
    ``engine``: moves the bytes. ``chunk_bytes``: bytes of a chunk; more where the engine copies such small
    ones below the speed of its link (nothing waits for the end of a chunk there). ``staging``: takes what is
    left at the fence; None: the fence waits for it. ``peers``: takes checksums that peers compare."""

    def __init__(
        self,
        engine: CopyEngine,
        chunk_bytes: int,
        staging: StagingArea | None = None,
        peers: PeerCheck | None = None,
    ) -> None:
        self.engine = engine
        self.staging, self.peers = staging, peers
        least = engine.least_chunk_bytes if engine.asynchronous else 0
        self.cache = ChunkCache(max(chunk_bytes, least))
        self.records: deque[ChunkRecord] = deque(maxlen=_KEPT_CHUNKS)
        """Of the newest versions; whoever traces takes them away."""
        self.staged: Sequence[StagedChunk] = ()
        """Of the version that was copied last: what is still to be drained."""
        self._begun = False
        self._hasher = hashing_copier()
        self._fault: Callable[[FaultPoint], None] = lambda point: None
        self._points: dict[int, list[FaultPoint]] = {}

    # -- training thread -----------------------------------------------------------------------------

    def begin(self) -> None:
        """The state is final; another version of the same state goes on under the first one's begin."""
        if not self._begun:
            self.engine.begin()
            self._begun = True

    def fence(self) -> None:
        """Whatever was copied is safe from what the training thread does next."""
        if self._begun:
            self._begun = False
            self.engine.fence()

    def close(self) -> None:
        """Wait for copies in flight and let go of the arenas."""
        self.engine.close()
        self.cache.clear()
        self.staged = ()

    # -- worker thread -------------------------------------------------------------------------------

    def copy(
        self,
        images: LiveImages,
        filling: Filling,
        gate: Gate,
        *,
        reach: Callable[[FaultPoint], None],
        handed_over: Callable[[], None],
        may_stage: Callable[[], bool] | None = None,
    ) -> list[ChunkRecord]:
        """Fill the arena from the live tensors; what there is no time for is staged, if there is room.

        Args:
            images: live tensors.
            filling: where to.
            gate: asked before every chunk.
            reach: called in the middle of the data, and before and in the middle of the parities.
            handed_over: called when the fence need not wait any longer.
            may_stage: asked when a chunk would be copied while training waits.

        Returns:
            What was copied when. Checksums of blocks that were hashed on the way are in ``filling``.
            What was staged is in :attr:`staged`; the version is whole after :meth:`drain`.
        """
        chunks = self.cache.chunks(images, filling)
        self.staged, self._hasher = (), hashing_copier()
        self._fault, self._points = reach, _fault_points(chunks)
        if not chunks:
            reach(FaultPoint.DURING_COPY)
        stages = self._stages(chunks, may_stage)
        if self.engine.asynchronous:

            def hand_over(batch: _Batch, mark: Mark | None) -> CopyTicket:
                pieces = CheckedPieces(piece for _, chunk in batch for piece in chunk.pieces)
                encodes = [chunk.encode for _, chunk in batch if chunk.encode is not None]
                encode = (lambda: (piece for encode in encodes for piece in encode())) if encodes else None
                return self.engine.copy(pieces, mark, encode)

            queued = self._queue(enumerate(chunks), filling, gate, hand_over, stages)
            if (count := sum(len(batch) for batch, _, _ in queued)) < len(chunks):
                self._stage(chunks, count)
            self._look(images, filling, gate)
            handed_over()
            self.engine.synchronize()
            records = _settled(queued)
        else:
            records = self._copy(chunks, filling, gate, stages)
            self._look(images, filling, gate)
            handed_over()
            self.engine.synchronize()
        self.records.extend(records)
        return records

    def _look(self, images: LiveImages, filling: Filling, gate: Gate) -> None:
        """Take what peers compare, while the tensors are those of the version (P2)."""
        if self.peers is None:
            return
        if (count := self.peers.choose(images, filling.label.step)) > len(self.peers.memory):
            if len(self.peers.memory):
                self.engine.unregister(self.peers.memory)
            self.peers.memory = torch.zeros(count, dtype=torch.int64)
            self.engine.register(self.peers.memory)
        for part in self.peers.parts(images, self.cache.chunk_bytes):
            if self.engine.asynchronous:
                self.engine.copy((), encode=part)
                continue
            permit, began = gate.admit(), time.perf_counter()
            try:
                self.engine.copy((), encode=part)
            finally:
                gate.release(permit, time.perf_counter() - began)

    def drain(self, filling: Filling, gate: Gate) -> list[ChunkRecord]:
        """Bring what was staged to the arena; training goes on meanwhile, whatever it does. Returns what was
        copied when."""
        staged, self.staged = self.staged, ()
        if self.engine.asynchronous:
            pieces = {item.number: item.pieces for item in staged}
            queued = self._queue(
                [(item.number, item.chunk) for item in staged],
                filling,
                gate,
                lambda batch, mark: self.engine.drain([p for n, _ in batch for p in pieces[n]], mark),
                lambda number, permit: False,
            )
            self.engine.synchronize()
            records = _settled(queued)
        else:
            records = []
            for item in staged:
                self._reach(item.number)
                records.append(self._some([item.chunk], filling, gate, gate.admit(), item.pieces)[0])
        self.records.extend(records)
        return records

    def settle(self) -> None:
        """Wait for what is under way of a version that is given up: it must not arrive in its arena when
        that holds another version (P5)."""
        with suppress(CopyOrderError, RuntimeError):  # closed, or failed: then nothing arrives any more
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

    def _stage(self, chunks: Sequence[Chunk], first: int) -> None:
        assert self.staging is not None
        self.staged = self.staging.stage(chunks, first)

    def _copy(
        self, chunks: Sequence[Chunk], filling: Filling, gate: Gate, stages: Callable[[int, Permit], bool]
    ) -> list[ChunkRecord]:
        """As much at a time as the gate lets through, and no more than the rest of a block."""
        records, number = [], 0
        while number < len(chunks):
            self._reach(number)
            permit = gate.admit()
            if stages(number, permit):
                gate.release(permit, 0.0)
                self._stage(chunks, number)
                break
            some = self._admitted(chunks, number, permit)
            record, copied = self._some(some, filling, gate, permit)
            records.append(record)
            number += copied
        return records

    def _admitted(self, chunks: Sequence[Chunk], first: int, permit: Permit) -> Sequence[Chunk]:
        """What is copied with one permit at most: chunks of one block, up to the next fault point."""
        stop, nbytes = first, 0
        goes_on = permit.until is not None and self._at_once(chunks[first]) is not None
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
        filling: Filling,
        gate: Gate,
        permit: Permit,
        staged: Sequence[Piece] | None = None,
    ) -> tuple[ChunkRecord, int]:
        """Chunks of one block, hashed on the way; ``staged``: other sources of the one. Returns what was
        copied when, and how many of the chunks: fewer where training did not wait for them."""
        began = ended = time.perf_counter()
        first, at_once = chunks[0], self._at_once(chunks[0])
        hashes = first.section is not Section.GRADIENTS
        copied = len(chunks)
        try:
            if staged is not None:
                self.engine.drain(staged)
                if hashes:
                    self._hasher.copy(ranges_of([first.stored]))
            elif at_once is not None:
                engine, cut = at_once
                part = first.number, chunks[-1].number + 1
                copied = engine.copy_hashed(cut, part, self._hasher, permit.until)
            else:
                for chunk in chunks:
                    self.engine.copy(chunk.pieces, encode=chunk.encode)
                    if hashes:
                        self._hasher.copy(ranges_of([chunk.stored]))
            if hashes and chunks[copied - 1].last:
                filling.take(first.placed, self._hasher)
            ended = time.perf_counter()
        finally:
            gate.release(permit, ended - began)
        nbytes = sum(chunk.nbytes for chunk in chunks[:copied])
        filling.traffic.to_host[first.kind] += nbytes
        record = ChunkRecord(permit.tier, nbytes, began, ended, permit.window, first.section.value)
        return record, copied

    def _at_once(self, chunk: Chunk) -> tuple[CpuCopyEngine, CutRanges] | None:
        """What copies chunks of its block by one call, which may end between any two of them, if anything."""
        engine, hashes = self.engine, chunk.section is not Section.GRADIENTS
        if chunk.cut is None or not hashes or not isinstance(engine, CpuCopyEngine):
            return None
        return engine, chunk.cut

    def _queue(
        self,
        chunks: Iterable[tuple[int, Chunk]],
        filling: Filling,
        gate: Gate,
        hand_over: Callable[[_Batch, Mark | None], CopyTicket],
        stages: Callable[[int, Permit], bool],
    ) -> _Queued:
        """Hand chunks to the device, a window's worth at a time, until the rest is staged; they are waited
        for behind the fence."""
        queued: _Queued = []
        batch: list[tuple[int, Chunk]] = []  # of one permit
        permit, left, nbytes = Permit(0), 0, 0

        def flush() -> None:
            nonlocal batch, nbytes
            if batch:
                follows = bool(queued) and queued[-1][1] is permit  # behind what waits for the mark already
                queued.append((batch, permit, hand_over(batch, None if follows else permit.mark)))
                for _, chunk in batch:
                    filling.traffic.to_host[chunk.kind] += chunk.nbytes
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

    def _reach(self, number: int) -> None:
        """Before a chunk, once."""
        for point in self._points.pop(number, ()):
            self._fault(point)


def _next(gate: Gate, left: int) -> tuple[Permit, int]:
    """The next permit and its bytes; beside computation those count by which the last chunk went too far."""
    permit = gate.admit()
    gate.release(permit, 0.0)
    return permit, permit.nbytes + (left if permit.tier == 2 else 0)


def _settled(queued: _Queued) -> list[ChunkRecord]:
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
            records.append(ChunkRecord(permit.tier, chunk.nbytes, begin, end, permit.window, section))
            begin = end
    return records


def _fault_points(chunks: Sequence[Chunk]) -> dict[int, list[FaultPoint]]:
    """What is reached before which chunk; parities come last."""
    data = sum(chunk.kind is not Kind.PARITY for chunk in chunks)
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
