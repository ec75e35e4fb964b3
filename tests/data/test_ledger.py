"""The ledger of shards: every shard is handed out once, whatever is slow or dies."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from reft.data.ledger import Kind, Ledger, Line, SharedLedger

SHARDS, REPLICAS = 3, 2


def frozen(ledger: Ledger) -> tuple[object, ...]:
    return tuple(ledger.todo), tuple(sorted(ledger.doing.items())), tuple(sorted(ledger.done))


def built(lines: tuple[Line, ...]) -> Ledger:
    ledger = Ledger(range(SHARDS))
    for line in lines:
        ledger.apply(line)
    return ledger


def every_line() -> Iterator[Line]:
    numbers = itertools.product(Kind, range(SHARDS), range(REPLICAS), range(4))
    return itertools.starmap(Line, numbers)


def test_every_shard_is_in_one_state_after_every_history() -> None:
    """All that can happen to three shards and two replicas with four takes each: breadth first."""
    seen, edge = {frozen(Ledger(range(SHARDS)))}, [()]
    takes_of_state: Counter[str] = Counter()
    while edge:
        following = []
        for lines in edge:
            for line in every_line():
                before, ledger = built(lines), built(lines)
                allowed = (
                    line.shard == before.next and before.taken_by(line.replica, line.number) is None
                    if line.kind is Kind.TAKE
                    else before.doing.get(line.shard) == (line.replica, line.number)
                )
                if not allowed:
                    with pytest.raises(ValueError, match="expected"):
                        ledger.apply(line)
                    assert frozen(ledger) == frozen(before)
                    continue
                ledger.apply(line)
                takes_of_state[line.kind] += 1
                parts = [ledger.todo, list(ledger.doing), list(ledger.done)]
                assert sorted(itertools.chain(*parts)) == list(range(SHARDS))
                assert ledger.done >= before.done, "what was read stays read"
                if line.kind is Kind.BACK:
                    assert line.shard in ledger.todo
                if (state := frozen(ledger)) not in seen:
                    seen.add(state)
                    following.append((*lines, line))
        edge = following
    assert len(seen) > 100
    assert set(takes_of_state) == set(Kind)


def test_lines_are_read_as_they_were_written() -> None:
    assert all(Line.decode(line.encode()) == line for line in every_line())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pair(
    timeout_secs: float | None = None, store: HashStore | None = None
) -> tuple[SharedLedger, SharedLedger, Clock]:
    store, clock = store or HashStore(), Clock()
    one, two = (
        SharedLedger(store, "ledger", range(SHARDS), timeout_secs=timeout_secs, clock=clock) for _ in range(2)
    )
    return one, two, clock


def test_each_shard_is_handed_out_once_and_ranks_of_one_replica_are_given_the_same() -> None:
    store = HashStore()
    one, two, _ = pair(store=store)
    sibling = SharedLedger(store, "ledger", range(SHARDS))
    assert [one.take(0, 0), two.take(1, 0), one.take(0, 1), two.take(1, 1)] == [0, 1, 2, None]
    assert [sibling.take(0, 0), sibling.take(0, 1), sibling.take(0, 2)] == [0, 2, None]


def test_what_a_dead_replica_had_is_handed_back_after_the_timeout_and_its_late_word_does_not_count() -> None:
    dead, other, clock = pair(10.0)
    assert dead.take(0, 0) == 0
    assert other.take(1, 0) == 1
    assert other.finish(1, 1, 0)
    clock.now = 9.0
    assert other.take(1, 1) == 2
    clock.now = 11.0
    assert other.take(1, 2) == 0, "handed back"
    assert not dead.finish(0, 0, 0), "another replica has it"
    assert other.finish(0, 1, 2)
    assert not other.finish(0, 1, 2), "once"
    assert other.finish(2, 1, 1)
    assert other.ledger.done == {0, 1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_each_shard_counts_once_whoever_is_late_or_dies_and_comes_back(seed: int) -> None:
    """Shards are handed back whose readers still live; a process that died comes back under its rank."""
    rng, store, clock = random.Random(seed), HashStore(), Clock()

    def begin() -> SharedLedger:
        return SharedLedger(store, "ledger", range(30), timeout_secs=10.0, clock=clock)

    processes = [begin() for _ in range(3)]
    hand: dict[int, tuple[int, int]] = {}
    counted: Counter[int] = Counter()
    late = 0
    for _ in range(2000):
        clock.now += rng.random() * 4
        rank = rng.randrange(3)
        if rng.random() < 0.05:
            hand.pop(rank, None)
            processes[rank] = begin()
        elif rank not in hand:
            processes[rank].catch_up()
            number = processes[rank].ledger.takes_of(rank)
            if (shard := processes[rank].take(rank, number)) is not None:
                hand[rank] = shard, number
        elif rng.random() < 0.3:
            shard, number = hand.pop(rank)
            counts = processes[rank].finish(shard, rank, number)
            counted[shard] += counts
            late += not counts
    assert counted == Counter(range(30))
    assert late > 0, "nothing was handed back"


def test_lines_that_nobody_reads_any_more_leave_the_store() -> None:
    store = HashStore()
    one, two, _ = pair(store=store)
    one.take(0, 0), two.take(1, 0)
    two.catch_up()
    two.remove()
    assert not store.check(["ledger/0"])
    assert not store.check(["ledger/1"])
