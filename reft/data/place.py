"""Which replica this process trains: said by the engine, once there is one; and where it meets the others."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reft.data.ledger import Store
from reft.errors import ConfigError

_alone = HashStore()
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
    return _said[-1]() if _said else process()


def process() -> tuple[int, int]:
    """torch.distributed's rank and world."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def store(replicas: int) -> Store:
    """Where the ranks of the job find each other: torch.distributed's store.

    Raises:
        ConfigError: there is none, and more than one replica.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if replicas > 1:
        raise ConfigError(
            f"found {replicas} replicas and no torch.distributed; expected its store, through which they "
            f'share out the data: call deepspeed.init_distributed() first, or leave order="dynamic" out'
        )
    return _alone
