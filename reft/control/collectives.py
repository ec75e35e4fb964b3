"""Collectives on bytes over a gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from reft.errors import PeerLostError


@contextmanager
def network_errors(doing: str) -> Iterator[None]:
    """Turn gloo's ``RuntimeError`` into a typed error that says what was going on."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"{doing} failed: a peer died, is silent or cannot be reached ({error}). Nothing was committed; "
            f"restart the job and recovery starts over from the same memory"
        ) from error


def allgather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Bytes of every rank, in rank order, on every rank. Lengths may differ; empty ones cost nothing. Raises
    TransferError: if a peer is gone."""
    with network_errors("an all-gather"):
        me, world_size = dist.get_rank(group), dist.get_world_size(group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=group)
        lengths = [int(size) for size in sizes]
        return [
            _broadcast(data if member == me else bytes(length), member, group) if length else b""
            for member, length in enumerate(lengths)
        ]


def _broadcast(data: bytes, member: int, group: dist.ProcessGroup | None) -> bytes:
    """The bytes of group rank ``member``; elsewhere ``data`` gives the length only."""
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, src=member if group is None else dist.get_global_rank(group, member), group=group)
    return buffer.numpy().tobytes()
