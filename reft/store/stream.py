"""Copies within host memory past the caches, ``stream.cpp``, where the installation has built it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def copier() -> Callable[[int, int, int], object]:
    """What copies ``(target address, source address, bytes)``, ranges that do not overlap, on the calling
    thread; lets go of the interpreter meanwhile. Where the loop was not built, ``memmove`` does the same,
    at two thirds of the speed."""
    found = find_spec("reft.store._stream")
    try:
        if found is None or found.origin is None:
            raise OSError("it was not built when reft was installed; that takes a C++ compiler")
        copy = ctypes.CDLL(found.origin).reft_copy_past_caches
    except (OSError, AttributeError) as error:
        logger.info("host memory is copied with memmove, without the compiled loop: %s", error)
        return ctypes.memmove
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    copy.restype = None
    return copy


def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1-D uint8 tensors of equal size; between host memory in the way above, else as torch does."""
    if target.device.type == source.device.type == "cpu":
        copier()(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source)
