"""Which replica this process trains: said by the engine, once there is one; and where it meets the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reft.data.ledger import Store
from reft.env import ENV_LAUNCHER_PID
from reft.errors import ConfigError

_ONE_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where the trainers of all restarts share its store."""
_alone = HashStore()


@dataclass(frozen=True)
class Said:
    """By an engine.

    Attributes:
        replica: says which replica this rank trains, and how many there are.
        why_equal: why all replicas have to train on equally many micro-batches of a step; None: they need
            not.
        step_samples: says how many samples a step of all replicas has; None: nobody knows.
    """

    replica: Callable[[], tuple[int, int]]
    why_equal: str | None = None
    step_samples: Callable[[], int] | None = None


_said: list[Said] = []


def tell(said: Said) -> None:
    """An engine trains: whoever asks is told by it, until :func:`withdraw`."""
    _said.append(said)


def withdraw(said: Said) -> None:
    if said in _said:
        _said.remove(said)


def replica() -> tuple[int, int]:
    """This rank's replica and the number of replicas: the engine's; before there is one, torch.distributed's
    rank and world."""
    return _said[-1].replica() if _said else process()


def why_equal() -> str | None:
    """See :class:`Said`."""
    return _said[-1].why_equal if _said else None


def step_samples() -> int | None:
    """See :class:`Said`."""
    asked = _said[-1].step_samples if _said else None
    return None if asked is None else int(asked())


def process() -> tuple[int, int]:
    """torch.distributed's rank and world."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def readers(replicas: int) -> int:
    """Processes that read what is dealt out to so many replicas: all of torch.distributed's."""
    return max(replicas, process()[1])


def shares_store() -> bool:
    """Whether torch.distributed's store is that of the starts before this one too: torchrun's is, that of
    ``reft launch`` is not."""
    return ENV_LAUNCHER_PID not in os.environ and os.environ.get(_ONE_STORE) == str(True)


def store(replicas: int) -> Store:
    """Where the ranks of the job find each other: torch.distributed's store, of this start alone.

    Raises:
        ConfigError: there is none, and more than one replica; or the starts share one.
    """
    if dist.is_available() and dist.is_initialized():
        if shares_store():
            raise ConfigError(
                "found torchrun's store, which holds what the starts before this one have taken; expected "
                "one for each start: start the script with `reft launch`, or set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        return dist.distributed_c10d._get_default_store()
    if replicas > 1:
        raise ConfigError(
            f"found {replicas} replicas and no torch.distributed; expected its store, through which they "
            f'share out the data: call deepspeed.init_distributed() first, or leave order="dynamic" out'
        )
    return _alone
