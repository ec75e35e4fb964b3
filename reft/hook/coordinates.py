"""Where this process sits in the job: parallel coordinate, node, local rank."""

from __future__ import annotations

import os
import socket
from typing import Any

from reft.config import ENV_NODE_ID
from reft.errors import LayoutError
from reft.topology import Coordinate, Degrees


def node_id() -> str:
    """Identity of the failure domain: what the launcher says, else the host's name."""
    return os.environ.get(ENV_NODE_ID) or socket.gethostname()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def coordinate_of(engine: Any) -> tuple[Coordinate, Degrees]:
    """Read the parallel coordinate of this rank from a DeepSpeed engine.

    Raises:
        LayoutError: the engine splits ranks in a way reft does not know (experts, sequences).
    """
    import torch.distributed as dist

    grid = getattr(engine, "grid", None)
    if grid is not None:
        at = Coordinate(grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank())
        degrees = Degrees(
            grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()
        )
    else:
        mpu = getattr(engine, "mpu", None)
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        tp_rank, tp_size = 0, 1
        if mpu is not None:
            dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            tp_rank, tp_size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        at, degrees = Coordinate(0, dp_rank, tp_rank), Degrees(1, dp_size, tp_size)
    if degrees.world_size != dist.get_world_size():
        raise LayoutError(
            f"the engine reports {degrees}, which is {degrees.world_size} ranks, but the job has "
            f"{dist.get_world_size()}. reft needs a plain pp x dp x tp grid without expert or "
            f"sequence parallel ranks"
        )
    return at, degrees
