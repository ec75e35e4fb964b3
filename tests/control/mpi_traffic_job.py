"""What a rank sends, takes in and keeps, of sizes that the test knows.

mpiexec -n 4 python -m tests.control.mpi_traffic_job
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

from reft.control.mpi import Communicators, load_mpi
from reft.control.mpi_transport import MpiTransport
from reft.control.transport import Buffers, Limits

from .mpi_calls import Counted, refuse_pickling

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


def main() -> None:
    mpi: Any = load_mpi()
    refuse_pickling(mpi)
    world = mpi.COMM_WORLD
    counted = Counted(mpi, Communicators(world).fresh(JOIN_SECS, lambda: True))
    transport = MpiTransport(mpi, counted, Limits(JOIN_SECS))
    counts = {"kept": bounds(transport), **counted.bytes}
    told = transport.gather(json.dumps(counts).encode())
    if not world.rank:
        print("COUNTED", json.dumps([json.loads(each) for each in told]), flush=True)


if __name__ == "__main__":
    main()
