"""Brings the traces of all ranks to rank 0 when profiling ends. Never called within a measured step.

Messages are msgpack under the job's secret, never pickle (P11). Only some pipelines are sent in full: of
the others rank 0 needs to know when they met in reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from reft.control.collectives import network_errors
from reft.mac import authenticate, check_authentic
from reft.profile.result import ProfileError
from reft.profile.traces import ClockOffset, RankTraces
from reft.snapshot.scheduling.trace import ChunkRecord, InstructionRecord, StepTrace

_PURPOSE = b"reft-profile-1"


def gather(mine: RankTraces, secret: bytes, group: dist.ProcessGroup) -> list[RankTraces] | None:
    """Traces of all ranks, in rank order, on group rank 0; None elsewhere. Collective.

    Args:
        mine: this rank's.
        secret: the job's secret.
        group: gloo group of all ranks.

    Raises:
        AuthenticationError: a message does not carry the job's secret.
        TransferError: a peer is gone.
    """
    messages = _gather_bytes(authenticate(encode(mine), secret, _PURPOSE), group)
    if messages is None:
        return None
    return [decode(check_authentic(message, secret, _PURPOSE)) for message in messages]


def _gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes] | None:
    """One message at a time, so that rank 0 holds no more than what it keeps."""
    with network_errors("gathering the traces"):
        length = torch.tensor([len(data)], dtype=torch.int64)
        if dist.get_rank(group) != 0:
            zero = dist.get_global_rank(group, 0)
            dist.send(length, zero, group=group)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), zero, group=group)
            return None
        messages = [data]
        for peer in range(1, dist.get_world_size(group)):
            rank = dist.get_global_rank(group, peer)
            dist.recv(length, rank, group=group)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(buffer, rank, group=group)
            messages.append(buffer.numpy().tobytes())
        return messages


def encode(rank: RankTraces) -> bytes:
    """Traces of a rank as msgpack; times stay exact."""
    offset = [rank.offset.secs, rank.offset.error_secs, rank.offset.clock]
    head = [rank.rank, rank.pp, rank.dp, rank.tp, offset, rank.snapshot_bytes, rank.complete]
    packed: bytes = msgpack.packb([head, [_packed(trace) for trace in rank.traces]])
    return packed


def decode(data: bytes) -> RankTraces:
    """The inverse of :func:`encode`.

    Raises:
        ProfileError: the bytes are something else.
    """
    try:
        head, traces = msgpack.unpackb(data)
        rank, pp, dp, tp, offset, snapshot_bytes, complete = head
        return RankTraces(
            rank=rank,
            pp=pp,
            dp=dp,
            tp=tp,
            offset=ClockOffset(*offset),
            snapshot_bytes=snapshot_bytes,
            complete=complete,
            traces=tuple(_unpacked(trace) for trace in traces),
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProfileError(f"a rank sent traces that cannot be read: {error}") from error


def _packed(t: StepTrace) -> list[Any]:
    return [
        [t.step, t.rank, t.stage_id, t.begin_secs, t.end_secs, t.fence_secs],
        [[i.position, i.name, i.micro_batch, i.begin_secs, i.end_secs] for i in t.instructions],
        [[c.tier, c.nbytes, c.begin_secs, c.end_secs, c.window, c.section] for c in t.chunks],
    ]


def _unpacked(packed: Sequence[Any]) -> StepTrace:
    (step, rank, stage_id, begin, end, fence), instructions, chunks = packed
    return StepTrace(
        step=step,
        rank=rank,
        stage_id=stage_id,
        begin_secs=begin,
        end_secs=end,
        instructions=tuple(InstructionRecord(*i) for i in instructions),
        chunks=tuple(ChunkRecord(*c) for c in chunks),
        fence_secs=fence,
    )
