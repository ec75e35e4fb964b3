"""Alignment of the clocks of processes.

``perf_counter`` has another zero on every host. Rank 0 asks each rank for its time and halves the round
trip (Cristian's method): with the request sent at t0, answered at t and received at t1 on rank 0,

    offset = (t0 + t1) / 2 - t,    |error| <= (t1 - t0) / 2,

whatever the two ways take each. Of many rounds the shortest counts. Clocks drift (parts per million), so
this is done before and after the profiled steps and interpolated to their middle; the bound of the error
grows by half of what changed in between.

Processes of one host share the clock (``CLOCK_MONOTONIC``), and one of them is asked for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from reft.control.collectives import allgather_bytes, network_errors
from reft.profile.traces import ClockOffset

ROUNDS = 20


class Round(NamedTuple):
    """One question and its answer."""

    asked_secs: float
    answered_secs: float
    received_secs: float


def estimate(rounds: Sequence[Round], clock: int = 0) -> ClockOffset:
    """The offset of a peer's clock from the rounds with it; the shortest round decides."""
    best = min(rounds, key=lambda r: r.received_secs - r.asked_secs)
    return ClockOffset(
        (best.asked_secs + best.received_secs) / 2 - best.answered_secs,
        (best.received_secs - best.asked_secs) / 2,
        clock,
    )


def between(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """The offset in the middle of two measurements, with the drift as part of the error."""
    drift = abs(after.secs - before.secs) / 2
    error = max(before.error_secs, after.error_secs) + drift
    return ClockOffset((before.secs + after.secs) / 2, error, before.clock)


def clock_id() -> str:
    """Equal on processes that read the same clock: one boot of a host, one time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} {time.time_ns()}"


def measure(group: dist.ProcessGroup, my_clock: str, rounds: int = ROUNDS) -> list[ClockOffset]:
    """What turns the clock of each rank into that of group rank 0, in rank order; collective.

    Args:
        group: a gloo group.
        my_clock: :func:`clock_id` of this rank.
        rounds: questions per host.

    Returns:
        On group rank 0 the offsets; elsewhere zeros.

    Raises:
        TransferError: a peer is gone.
    """
    clocks = [text.decode() for text in allgather_bytes(my_clock.encode(), group)]
    me = dist.get_rank(group)
    known = {clocks[0]: ClockOffset()}
    with network_errors("the alignment of clocks"):
        for peer, clock in enumerate(clocks):
            if clock in known:
                continue
            known[clock] = ClockOffset(clock=len(known))
            if me == 0:
                known[clock] = estimate([_ask(group, peer) for _ in range(rounds)], known[clock].clock)
            elif me == peer:
                for _ in range(rounds):
                    _answer(group)
    return [known[clock] for clock in clocks]


def _ask(group: dist.ProcessGroup, peer: int) -> Round:
    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    to = dist.get_global_rank(group, peer)
    asked = time.perf_counter()
    dist.send(question, to, group=group)
    dist.recv(answer, to, group=group)
    return Round(asked, float(answer), time.perf_counter())


def _answer(group: dist.ProcessGroup) -> None:
    zero = dist.get_global_rank(group, 0)
    dist.recv(torch.zeros(1), zero, group=group)
    dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), zero, group=group)
