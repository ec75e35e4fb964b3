"""The steps of a solution as one compiled loop, ``packets.cpp``, where the installation has built it.

Why no library: ``benchmarks/decoders.py`` compares what PyPI has (docs/measurements, 2026-11-22). Two lost
blocks of a stripe of eight come back at 51 % of a copy's speed by this loop, at 43 % by NumPy, and at 8 %
and less by zfec, pyeclib (with ISA-L inside), galois and reedsolo, which take and return whole objects or
compute in Python. Only ISA-L's own loop, without a Python package around it, is faster (90 %, on a
processor with GFNI). It would be a library of the system that every node needs, where a recovery on a quick
network has a core of every rank to decode on; and its field elements are bytes, while packets let every
device encode by XOR alone.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reft.native import compiled
from reft.protect.rs import CELL_BYTES
from reft.protect.solve import Step

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Run = Callable[[tuple[Step, ...], Sequence[Bytes], Sequence[Bytes]], None]


@lru_cache(maxsize=1)
def compiled_run() -> Run | None:
    """What carries out steps on sources and targets, contiguous and of one length; lets go of the interpreter
    meanwhile. None where it was not built: NumPy does the same, at some two thirds of the speed."""
    try:
        run_steps = compiled("reft.protect._packets", "reft_run_steps")
    except OSError as error:
        logger.info("parities are decoded with NumPy, without the compiled loop: %s", error)
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    run_steps.argtypes = [pointer, size, pointer, size, size, size, size]

    def run(steps: tuple[Step, ...], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
        table = _table(steps)
        buffers = np.array([b.ctypes.data for b in (*sources, *targets)], np.uintp)
        counts = len(sources), len(targets), len(targets[0])
        if run_steps(table.ctypes.data, len(table), buffers.ctypes.data, *counts, CELL_BYTES):
            raise MemoryError(f"no memory for a column of {len(targets)} blocks that are decoded")

    return run


@lru_cache(maxsize=256)
def _table(steps: tuple[Step, ...]) -> NDArray[np.int64]:
    """The struct ``Step`` of ``packets.cpp``, one row each."""
    return np.array([(*s.target, s.count, *s.left, *(s.right or (-1, 0))) for s in steps], np.int64)
