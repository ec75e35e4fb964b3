"""Copies the chunks of one version into its arena, when the gate lets them, and hashes them on the way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from reft.config import FaultPoint
from reft.snapshot.arenas import Filling
from reft.snapshot.chunks import BlockHasher, Chunk, ChunkCache
from reft.snapshot.copying import CopyEngine, CopyTicket
from reft.snapshot.gate import Gate, Permit
from reft.snapshot.layout import LiveImages
from reft.snapshot.trace import ChunkRecord
from reft.snapshot.traffic import Kind

_KEPT_CHUNKS = 2**16


class Copier:
    """The copying half of the snapshot worker.

    ``begin`` and ``fence`` are called by the training thread, ``copy`` by the worker's.

    Args:
        engine: moves the bytes.
        chunk_bytes: bytes of a chunk; more where the engine copies such small ones below the speed of
            its link (nothing waits for the end of a chunk there).
    """

    def __init__(self, engine: CopyEngine, chunk_bytes: int) -> None:
        self.engine = engine
        least = engine.least_chunk_bytes if engine.asynchronous else 0
        self.cache = ChunkCache(max(chunk_bytes, least))
        self.records: deque[ChunkRecord] = deque(maxlen=_KEPT_CHUNKS)
        """Of the newest versions; whoever traces takes them away."""
        self._begun = False

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

    # -- worker thread -------------------------------------------------------------------------------

    def copy(
        self,
        images: LiveImages,
        filling: Filling,
        gate: Gate,
        *,
        reach: Callable[[FaultPoint], None],
        handed_over: Callable[[], None],
    ) -> list[ChunkRecord]:
        """Fill the arena from the live tensors.

        Args:
            images: live tensors.
            filling: where to.
            gate: asked before every chunk.
            reach: called in the middle of the data, and before and in the middle of the parities.
            handed_over: called when the fence need not wait any longer.

        Returns:
            What was copied when. Checksums of blocks that were hashed on the way are in ``filling``.
        """
        chunks = self.cache.chunks(images, filling)
        if not chunks:
            reach(FaultPoint.DURING_COPY)
        points = _fault_points(chunks)

        def before(number: int) -> None:
            for point in points.get(number, ()):
                reach(point)

        if self.engine.asynchronous:
            records = self._queue(chunks, filling, gate, before, handed_over)
        else:
            records = self._copy(chunks, filling, gate, before)
            handed_over()
            self.engine.synchronize()
        self.records.extend(records)
        return records

    def _copy(
        self,
        chunks: Sequence[Chunk],
        filling: Filling,
        gate: Gate,
        before: Callable[[int], None],
    ) -> list[ChunkRecord]:
        """Chunk by chunk; a chunk is hashed while it is in the cache, unless the fence waits."""
        records, hasher = [], BlockHasher()
        engine, clock, counted = self.engine, time.perf_counter, filling.traffic.to_host
        for number, chunk in enumerate(chunks):
            before(number)
            permit = gate.admit()
            began = ended = clock()
            try:
                engine.copy(chunk.pieces, encode=chunk.encode)
                counted[chunk.kind] += chunk.nbytes
                if permit.tier == 0:
                    hasher.leave_out()
                else:
                    checksum = hasher.add(chunk)
                    if checksum is not None:
                        filling.set_checksum(chunk.placed, checksum)
                ended = clock()
            finally:
                gate.release(permit, ended - began)
            records.append(_record(chunk, permit, began, ended))
        return records

    def _queue(
        self,
        chunks: Sequence[Chunk],
        filling: Filling,
        gate: Gate,
        before: Callable[[int], None],
        handed_over: Callable[[], None],
    ) -> list[ChunkRecord]:
        """Hand chunks to the device, a window's worth at a time; wait for them behind the fence."""
        queued: list[tuple[Chunk, Permit, CopyTicket]] = []
        left = 0
        permit = Permit(0)
        for number, chunk in enumerate(chunks):
            before(number)
            if left <= 0:
                permit = gate.admit()
                left = permit.nbytes
                gate.release(permit, 0.0)
            queued.append((chunk, permit, self.engine.copy(chunk.pieces, permit.mark, chunk.encode)))
            filling.traffic.to_host[chunk.kind] += chunk.nbytes
            left -= chunk.nbytes
        handed_over()
        self.engine.synchronize()
        return [_record(c, p, *ticket.secs) for c, p, ticket in queued if ticket.secs is not None]


def _fault_points(chunks: Sequence[Chunk]) -> dict[int, list[FaultPoint]]:
    """What is reached before which chunk; parities come last."""
    data = sum(chunk.kind is not Kind.PARITY for chunk in chunks)
    points = {data // 2: [FaultPoint.DURING_COPY]}
    if parities := len(chunks) - data:
        points.setdefault(data, []).append(FaultPoint.BEFORE_PARITY)
        points.setdefault(data + parities // 2, []).append(FaultPoint.DURING_PARITY)
    return points


def _record(chunk: Chunk, permit: Permit, began: float, ended: float) -> ChunkRecord:
    return ChunkRecord(permit.tier, chunk.nbytes, began, ended, permit.window, chunk.section.value)


def bytes_by_tier(records: Iterable[ChunkRecord]) -> Counter[int]:
    """Bytes copied in each tier."""
    found: Counter[int] = Counter()
    for record in records:
        found[record.tier] += record.nbytes
    return found
