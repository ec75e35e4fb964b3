"""What a rank sends, takes in and keeps, of sizes that the test knows.

mpiexec -n 4 python -m tests.control.mpi_traffic_job sums|streams|votes|bounds
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil

from reft.control.mpi import Communicators, load_mpi
from reft.control.mpi_transport import MpiTransport
from reft.control.transport import Buffers

from .mpi_calls import Counted, refuse_pickling

ROW_BYTES, SENT_BYTES, TIMES, VOTES = 8 * 2**18, 5_000_000, 5, 1000
SHORT_BYTES, SHORT_VIEWS = 2**10, 48 * 2**10
LOOKS = 1000
JOIN_SECS = 60.0


class Unwilling:
    """Has no room until it was asked :data:`LOOKS` times, and then for all."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._buffers = Buffers(views)
        self._asked = 0

    def room(self) -> Sequence[memoryview]:
        self._asked += 1
        return self._buffers.room() if self._asked > LOOKS else ()

    def filled(self, count: int) -> None:
        self._buffers.filled(count)

    @property
    def complete(self) -> bool:
        return self._buffers.complete


def sums(transport: MpiTransport) -> None:
    for _ in range(TIMES):
        rows = np.full((transport.world_size, ROW_BYTES), transport.rank, np.uint8)
        transport.xor(rows, range(transport.world_size))


def streams(transport: MpiTransport) -> None:
    after, before = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    for _ in range(TIMES):
        into = bytearray(SENT_BYTES)
        transport.stream({after: [memoryview(bytes(SENT_BYTES))]}, {before: Buffers([memoryview(into)])})


def votes(transport: MpiTransport) -> None:
    for _ in range(VOTES):
        transport.reduce_min([1])


def bounds(transport: MpiTransport) -> int:
    """Rank 0 sends short pieces, of which rank 1 has room for none at first; the most that was kept at a time."""
    short = [memoryview(bytes(SHORT_BYTES))] * SHORT_VIEWS
    into = bytearray(SHORT_BYTES * SHORT_VIEWS)
    transport.gather(b"")
    tracemalloc.start()
    if transport.rank == 0:
        transport.stream({1: short}, {})
    elif transport.rank == 1:
        transport.stream({}, {0: Unwilling([memoryview(into)])})
    return tracemalloc.get_traced_memory()[1]


KINDS: dict[str, Callable[[MpiTransport], int | None]] = {
    each.__name__: each for each in (sums, streams, votes, bounds)
}


def main(what: str) -> None:
    mpi: Any = load_mpi()
    refuse_pickling(mpi)
    world = mpi.COMM_WORLD
    counted = Counted(mpi, Communicators(world).fresh(JOIN_SECS, lambda: True))
    transport = MpiTransport(mpi, counted, JOIN_SECS)
    transport.gather(b"")  # who talks to whom at first exchanges more than that
    world.Barrier()
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    world.Barrier()
    kept = KINDS[what](transport)
    world.Barrier()
    counts = {
        "loopback": psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before,
        "sent": sum(transport.sent.values()),
        "kept": kept,
        **counted.bytes,
    }
    told = transport.gather(json.dumps(counts).encode())
    if not world.rank:
        print("COUNTED", json.dumps([json.loads(each) for each in told]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
