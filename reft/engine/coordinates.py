"""Where this process sits in the job: parallel coordinate, node, local rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.env import ENV_NODE_DECLARED, ENV_NODE_ID
from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        node: what the launcher calls the node, else the host's name.
        declared: somebody gave the node this name (``--node-id``), and thereby says that it fails by itself.
        host_name: name of the host.
        kernel: equal for all processes under one kernel, containers too.
    """

    node: str
    declared: bool
    host_name: str
    kernel: str

    @classmethod
    def here(cls) -> Place:
        host = socket.gethostname()
        given = os.environ.get(ENV_NODE_ID)
        return cls(given or host, bool(given) and os.environ.get(ENV_NODE_DECLARED) != "0", host, kernel_id())


def kernel_id() -> str:
    """The running kernel's own id, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def hosts_of(places: Sequence[Place]) -> tuple[str, ...]:
    """What fails as one (P4), for each place: the declared node, else the host, by the name that its first
    rank gives it. Pure."""
    names: dict[str, str] = {}
    for place in places:
        taken = place.host_name in names.values()
        names.setdefault(place.kernel, f"{place.host_name}-{place.kernel[:8]}" if taken else place.host_name)
    return tuple(place.node if place.declared else names[place.kernel] for place in places)


def declared_on_one_host(places: Sequence[Place]) -> tuple[str, ...]:
    """Declared nodes that share a host with another one: what the tolerance counts is then a claim. Pure."""
    nodes = {place.node: place.kernel for place in places if place.declared}
    kernels = list(nodes.values())
    return tuple(sorted(node for node, kernel in nodes.items() if kernels.count(kernel) > 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


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
