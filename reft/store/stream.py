"""Copies within host memory past the caches, ``stream.cpp``, where the installation has built it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from reft.native import compiled

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def copier() -> Callable[[int, int, int], object]:
    """What copies ``(target address, source address, bytes)``, ranges that do not overlap, on the calling
    thread; lets go of the interpreter meanwhile. Where the loop was not built, ``memmove`` does the same,
    at two thirds of the speed."""
    try:
        function = compiled("reft.store._stream", "reft_copy_past_caches")
    except OSError as error:
        logger.info("host memory is copied with memmove, without the compiled loop: %s", error)
        return ctypes.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    copy: Callable[[int, int, int], object] = function
    return copy


def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1-D uint8 tensors of equal size; between host memory in the way above, else as torch does."""
    if target.device.type == source.device.type == "cpu":
        copier()(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source)
