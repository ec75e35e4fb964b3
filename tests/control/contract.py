"""What every transport does, written once: each case runs on every rank, over sockets in threads and over MPI in
processes. Cases open transports of their own, one after the other, as ranks do that come together again."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from reft.control.transport import Buffers, Transport
from reft.errors import TransferError

from .ranks import DEADLINE_SECS


@dataclass
class Rank:
    rank: int  # rank, size: as usual
    size: int
    open: Callable[[], Transport]  # the next transport, collectively
    place: Path  # a directory that all ranks see, of this case alone: how they meet beside the transport

    def tell(self, name: str) -> None:
        (self.place / f"{name}-{self.rank}").touch()

    def hear(self, name: str, ranks: Sequence[int]) -> None:
        pause, waited = threading.Event(), 0.0
        while not all((self.place / f"{name}-{rank}").exists() for rank in ranks):
            assert waited < DEADLINE_SECS, f"{name}: not told by all of {ranks}"
            pause.wait(0.01)
            waited += 0.01

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def collectives_give_every_rank_the_same(me: Rank) -> None:
    transport = me.open()
    for _ in range(3):
        values = [me.rank + 1, -me.rank, 2**62, *range(40)]
        assert transport.reduce_min(values) == [1, 1 - me.size, 2**62, *range(40)]
        assert transport.gather(bytes([me.rank]) * me.rank) == [
            bytes([r]) * r for r in range(me.size)
        ]
        assert transport.gather(b"") == [b""] * me.size
    # The word of each rank counts.
    assert transport.reduce_min([-int(r == me.rank) for r in range(me.size)]) == [-1] * me.size
    assert transport.reduce_min([]) == []
    transport.close()


def long_messages_are_gathered(me: Rank) -> None:
    long = random.Random(1).randbytes(3_234_567)
    transport = me.open()
    found = transport.gather(long if me.rank == 1 else b"x" * me.rank)
    assert found == [long if r == 1 else b"x" * r for r in range(me.size)]
    transport.close()


def ranks_in_different_collectives_are_told_so(me: Rank) -> None:
    transport = me.open()
    with pytest.raises(TransferError) as heard:
        transport.gather(b"x") if me.rank else transport.reduce_min([1])
    me.tell("another" if "another collective" in str(heard.value) else "heard")
    # Its connections are of no use any more.
    with pytest.raises(TransferError):
        transport.reduce_min([1])
    me.tell("done")
    me.hear("done", range(me.size))
    assert list(me.place.glob("another-*"))


def bytes_are_exchanged_round_a_ring_in_both_directions(me: Rank) -> None:
    rng = random.Random(2)
    sizes = [0, 1, 5_000_000, 17, *[rng.randrange(2000) for _ in range(200)], 1_048_576, 3]

    def data(source: int, target: int, turn: int) -> list[bytes]:
        return [
            random.Random(f"{source} {target} {turn} {i}").randbytes(n) for i, n in enumerate(sizes)
        ]

    peers = {(me.rank + 1) % me.size, (me.rank - 1) % me.size}
    transport = me.open()
    for turn in range(2):
        into = {peer: [bytearray(n) for n in sizes] for peer in peers}
        transport.stream(
            {peer: [memoryview(b) for b in data(me.rank, peer, turn)] for peer in into},
            {peer: Buffers([memoryview(b) for b in buffers]) for peer, buffers in into.items()},
        )
        for peer, buffers in into.items():
            assert [bytes(b) for b in buffers] == data(peer, me.rank, turn)
    transport.gather(b"")
    transport.close()


def exchanges_follow_each_other_without_a_meeting(me: Rank) -> None:
    """A fast sender is in the next exchange while the receiver has no room for the last bytes of this one."""
    transport = me.open()
    for turn in range(20):
        sizes = [1 + (turn * 7919) % 70_000, 1 + turn]
        data = [bytes([turn + r]) * n for r, n in enumerate(sizes)]
        if me.rank == 0:
            transport.stream({1: [memoryview(d) for d in data]}, {})
        elif me.rank == 1:
            into = [bytearray(n) for n in sizes]
            transport.stream({}, {0: Buffers([memoryview(b) for b in into])})
            assert [bytes(b) for b in into] == data
    transport.gather(b"")
    transport.close()


class Reluctant:
    """Has room for one part at a time, when another thread says so."""

    def __init__(self, nbytes: int, part: int, wake: socket.socket) -> None:
        self.data = bytearray(nbytes)
        self.given = self.full = 0
        self._part, self._wake = part, wake
        self._allowed = threading.Semaphore(1)

    def room(self) -> list[memoryview]:
        if self.given == len(self.data) or not self._allowed.acquire(blocking=False):
            return []
        start, self.given = self.given, min(len(self.data), self.given + self._part)
        return [memoryview(self.data)[start : self.given]]

    def filled(self, count: int) -> None:
        self.full += count
        assert count == 1  # there was room for one

        def allow() -> None:
            self._allowed.release()
            with contextlib.suppress(OSError):  # all has arrived, and the exchange is over
                self._wake.send(b"1")

        threading.Timer(0.001, allow).start()

    @property
    def complete(self) -> bool:
        return self.full * self._part >= len(self.data)


def p9_what_there_is_no_room_for_waits_at_its_sender(me: Rank) -> None:
    """Nobody keeps it meanwhile, nor do short pieces pile up."""
    nbytes, part, short, most_kept = 30_000_000, 1_000_000, 1000, 8 * 2**20
    data = random.Random(3).randbytes(nbytes)
    pieces = [memoryview(data)[at : at + short] for at in range(0, nbytes, short)]
    wake, waker = socket.socketpair()
    into = Reluctant(nbytes, part, waker)
    transport = me.open()
    transport.gather(b"")
    tracemalloc.start()
    if me.rank == 0:
        transport.stream({1: pieces}, {})
    elif me.rank == 1:
        transport.stream({}, {0: into}, wake)
        assert bytes(memoryview(into.data)[:short]) == data[:short]
        assert into.data[-short:] == data[-short:]
    assert tracemalloc.get_traced_memory()[1] < most_kept
    transport.gather(b"")
    tracemalloc.stop()
    transport.close()


def wait_for_byte(transport: Transport, peer: int) -> None:
    """Which never comes."""
    transport.stream({}, {peer: Buffers([memoryview(bytearray(1))])})


def p6_a_rank_that_leaves_is_heard_by_all_that_wait_for_a_vote(me: Rank) -> None:
    for lost in range(me.size):
        transport = me.open()
        if me.rank == lost:
            transport.close()
        with pytest.raises(TransferError):
            transport.reduce_min([me.rank])


def p6_a_rank_that_leaves_is_heard_in_an_exchange_that_it_has_no_part_in(me: Rank) -> None:
    transport = me.open()
    last = me.size - 1
    if me.rank == last:
        transport.close()
        return
    with pytest.raises((OSError, EOFError)):  # a TransferError is an OSError
        wait_for_byte(transport, me.rank + 1) if me.rank in (0, 1) else transport.reduce_min([1])
    transport.close()


def p6_a_silent_rank_is_waited_for_only_so_long(me: Rank) -> None:
    for wait in ("vote", "exchange"):
        transport = me.open()
        transport.gather(b"")
        if me.rank:
            transport.limits.timeout_secs = 0.3
            with pytest.raises((OSError, EOFError)):
                transport.reduce_min([1]) if wait == "vote" else wait_for_byte(transport, 0)
            transport.close()
            me.tell(wait)
        else:
            me.hear(wait, me.others)
            transport.close()


def p6_who_lives_and_does_not_answer_is_named_to_all_and_the_vote_ends_well(me: Rank) -> None:
    for silent in (me.size - 1, 0):
        transport = me.open()
        transport.limits.patience_secs = 0.3

        def hear(missing: list[str], secs: float, silent: int = silent) -> None:
            if any(name.startswith(f"rank {silent} on node ") for name in missing):
                me.tell(f"named{silent}")

        transport.limits.on_silence = hear
        for _ in range(2):
            if me.rank == silent:
                me.hear(f"named{silent}", me.others)
            assert transport.reduce_min([me.rank]) == [0]
        transport.close()


def two_threads_use_transports_of_their_own_at_the_same_time(me: Rank) -> None:
    """Training meets on one while the snapshot worker votes and exchanges on another."""
    first, second = me.open(), me.open()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(100):
                assert second.reduce_min([turn, -me.rank]) == [turn, 1 - me.size]
                peer, data = me.rank ^ 1, bytes([turn]) * 100_000
                if peer < me.size:
                    into = bytearray(len(data))
                    second.stream({peer: [memoryview(data)]}, {peer: Buffers([memoryview(into)])})
                    assert into == data
            second.gather(b"")  # nobody leaves while others exchange
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for turn in range(100):
        assert first.gather(bytes([turn])) == [bytes([turn])] * me.size
    thread.join(DEADLINE_SECS)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
    first.close()
    second.close()


CASES = {
    case.__name__: case
    for case in (
        collectives_give_every_rank_the_same,
        long_messages_are_gathered,
        ranks_in_different_collectives_are_told_so,
        bytes_are_exchanged_round_a_ring_in_both_directions,
        exchanges_follow_each_other_without_a_meeting,
        p9_what_there_is_no_room_for_waits_at_its_sender,
        p6_a_rank_that_leaves_is_heard_by_all_that_wait_for_a_vote,
        p6_a_rank_that_leaves_is_heard_in_an_exchange_that_it_has_no_part_in,
        p6_a_silent_rank_is_waited_for_only_so_long,
        p6_who_lives_and_does_not_answer_is_named_to_all_and_the_vote_ends_well,
        two_threads_use_transports_of_their_own_at_the_same_time,
    )
}
