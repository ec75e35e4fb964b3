"""Huge pages for memory that a restore is about to fill.

The first touch of fresh pages costs more than the copy itself (trap 17): at 4 KiB a page, the moments of
Adam are touched at a third of the speed of copying. Asking for huge pages is a hint; where the system
does not give them (``transparent_hugepage/enabled`` is ``never``), nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

_SMALLEST_BYTES = 2**20
"""Smaller tensors come from memory that the allocator reuses."""


@cache
def _madvise() -> Any:
    """libc's ``madvise``, or None where the system has none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Hint that the pages of a large CPU tensor, not written yet, may be huge. Never fails.

    Args:
        tensor: any; on another device, or below 1 MiB, nothing is done.
    """
    nbytes = tensor.untyped_storage().nbytes()
    madvise = _madvise()
    if tensor.device.type != "cpu" or nbytes < _SMALLEST_BYTES or madvise is None:
        return
    # Outwards to whole pages: neighbours of one mapping are merged, so huge pages may span tensors.
    begin = tensor.untyped_storage().data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(tensor.untyped_storage().data_ptr() + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(begin, stop - begin, mmap.MADV_HUGEPAGE)
