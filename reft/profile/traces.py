"""The traces of all ranks, brought to rank 0 and laid on one clock. Never within a measured step.

Messages are msgpack under the job's secret, never pickle (P11). Only some pipelines are sent in full: of the
others rank 0 needs to know when they met in reductions.

``perf_counter`` has another zero on every host. Rank 0 asks one process of each host for its time and halves
the round trip (Cristian's method): with the request sent at t0, answered at t and received at t1 on rank 0,

    offset = (t0 + t1) / 2 - t,    |error| <= (t1 - t0) / 2,

whatever the two ways take each. Of many rounds the shortest counts. Clocks drift (parts per million), so
this is done before and after the profiled steps.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from reft.control.wire import authenticate, check_authentic
from reft.errors import PeerLostError
from reft.naming import kernel_id
from reft.profile.result import Activity, ProfileError, activity_of
from reft.snapshot.schedule import ChunkRecord, StepTrace

_ROUNDS = 20
_PURPOSE = b"reft-profile-1"


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What turns a rank's clock into rank 0's: seconds to be added, and a bound of the error of the sum.
    Ranks of equal ``clock`` read the same one; between them there is no error."""

    secs: float = 0.0
    error_secs: float = 0.0
    clock: int = 0

    def error_to(self, other: ClockOffset) -> float:
        """Bound of the error when a time of this rank is compared with one of another's."""
        return 0.0 if self.clock == other.clock else self.error_secs + other.error_secs

    def until(self, after: ClockOffset) -> ClockOffset:
        """The offset in the middle of two measurements, with the drift as part of the error."""
        error = max(self.error_secs, after.error_secs) + abs(after.secs - self.secs) / 2
        return ClockOffset((self.secs + after.secs) / 2, error, self.clock)


@dataclass(frozen=True, slots=True)
class RankTraces:
    """All profiled steps of one rank, its coordinate, the alignment of its clock, and the bytes that it
    copies per snapshot (0 if unknown). ``complete`` is False if :func:`only_group_calls` were kept."""

    rank: int
    pp: int
    dp: int
    tp: int
    offset: ClockOffset
    snapshot_bytes: int
    complete: bool
    traces: tuple[StepTrace, ...]

    @property
    def pipeline(self) -> tuple[int, int]:
        """Ranks of equal (dp, tp) pass activations to each other."""
        return self.dp, self.tp

    def aligned(self, steps: Sequence[int]) -> RankTraces:
        """These steps alone, on the clock of rank 0."""

        def moved(record: Any, **parts: Any) -> Any:
            begin, end = record.begin_secs + self.offset.secs, record.end_secs + self.offset.secs
            return replace(record, begin_secs=begin, end_secs=end, **parts)

        by_step = {trace.step: trace for trace in self.traces}
        traces = tuple(
            moved(t, instructions=tuple(map(moved, t.instructions)), chunks=tuple(map(moved, t.chunks)))
            for t in (by_step[step] for step in steps)
        )
        return replace(self, traces=traces, offset=replace(self.offset, secs=0.0))


def assign_chunks(traces: Sequence[StepTrace]) -> tuple[StepTrace, ...]:
    """All but the last trace, with every chunk in the step during which it was copied.

    A device reports its copies late: they may come with the trace of the step after.
    """
    begins = [trace.begin_secs for trace in traces]
    chunks: list[list[ChunkRecord]] = [[] for _ in traces]
    for chunk in (chunk for trace in traces for chunk in trace.chunks):
        number = bisect_right(begins, chunk.begin_secs) - 1
        if number >= 0:
            chunks[number].append(chunk)
    return tuple(
        replace(trace, chunks=tuple(sorted(mine, key=lambda c: c.begin_secs)))
        for trace, mine in zip(traces[:-1], chunks[:-1], strict=True)
    )


def only_group_calls(trace: StepTrace) -> StepTrace:
    """What the ranks of one pipeline need to know of another one."""
    group = (Activity.REDUCE, Activity.OPTIMIZER)
    kept = tuple(i for i in trace.instructions if activity_of(i.name) in group)
    return replace(trace, instructions=kept, chunks=())


# -- to rank 0 ------------------------------------------------------------------------------------------


def gather(mine: RankTraces, secret: bytes, group: dist.ProcessGroup) -> list[RankTraces] | None:
    """Traces of all ranks, in rank order, on group rank 0; None elsewhere. Collective."""
    messages = allgather_bytes(authenticate(encode(mine), secret, _PURPOSE), group)
    if dist.get_rank(group) != 0:
        return None
    return [decode(check_authentic(message, secret, _PURPOSE)) for message in messages]


def encode(rank: RankTraces) -> bytes:
    """Traces of a rank as msgpack; times stay exact."""
    packed: bytes = msgpack.packb(asdict(rank))
    return packed


def decode(data: bytes) -> RankTraces:
    """The inverse of :func:`encode`; a ProfileError where the bytes are something else."""
    try:
        return TypeAdapter(RankTraces).validate_python(msgpack.unpackb(data))
    except (ValueError, msgpack.UnpackException) as error:
        raise ProfileError(f"a rank sent traces that cannot be read: {error}") from error


# -- clocks ---------------------------------------------------------------------------------------------


def clock_id() -> str:
    """Equal on processes that read the same clock: one boot of a host, one time namespace."""
    try:
        return f"{kernel_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


def measure_offsets(group: dist.ProcessGroup, my_clock: str) -> list[ClockOffset]:
    """What turns the clock of each rank into that of group rank 0, in rank order, on group rank 0; elsewhere
    zeros. Collective; ``my_clock`` is :func:`clock_id` of this rank."""
    clocks = [text.decode() for text in allgather_bytes(my_clock.encode(), group)]
    me, zero = dist.get_rank(group), dist.get_global_rank(group, 0)
    known = {clocks[0]: ClockOffset()}
    answer = torch.zeros(1, dtype=torch.float64)
    with network_errors("the alignment of clocks"):
        for peer, clock in enumerate(clocks):
            if clock in known:
                continue
            known[clock] = ClockOffset(clock=len(known))
            rounds = []
            for _ in range(_ROUNDS):
                if me == 0:
                    to, asked = dist.get_global_rank(group, peer), time.perf_counter()
                    dist.send(torch.zeros(1), to, group=group)
                    dist.recv(answer, to, group=group)
                    rounds.append((asked, float(answer), time.perf_counter()))
                elif me == peer:
                    dist.recv(torch.zeros(1), zero, group=group)
                    dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), zero, group=group)
            if rounds:
                known[clock] = estimate(rounds, known[clock].clock)
    return [known[clock] for clock in clocks]


def estimate(rounds: Sequence[tuple[float, float, float]], clock: int = 0) -> ClockOffset:
    """The offset of a peer's clock from rounds (asked, answered, received); the shortest decides."""
    asked, answered, received = min(rounds, key=lambda r: r[2] - r[0])
    return ClockOffset((asked + received) / 2 - answered, (received - asked) / 2, clock)


# -- collectives on bytes over a gloo group ---------------------------------------------------------------


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
