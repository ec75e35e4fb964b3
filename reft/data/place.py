"""Which replica this process trains: said by the engine, once there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

_said: list[Callable[[], tuple[int, int]]] = []


def tell(replica: Callable[[], tuple[int, int]]) -> None:
    """An engine trains: whoever asks is told by it, until :func:`withdraw`."""
    _said.append(replica)


def withdraw(replica: Callable[[], tuple[int, int]]) -> None:
    if replica in _said:
        _said.remove(replica)


def replica() -> tuple[int, int]:
    """This rank's replica and the number of replicas: the engine's; before there is one, torch.distributed's
    rank and world."""
    if _said:
        return _said[-1]()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
