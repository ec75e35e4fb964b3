"""Failures on one rank's snapshot worker: peers hear of them at once, and versions come back (P6).

Two data-parallel ranks, of which rank 1 fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from reft.errors import ArenaError
from reft.grid import Section
from reft.memory.arena import Arena
from reft.memory.protection_record import write_request
from reft.memory.stream import HashingCopier
from reft.policy.agreed import AgreedRates
from reft.policy.switching import RetentionConfig, SchemeSwitch
from reft.snapshot import copy_engine as engine
from reft.snapshot import worker
from reft.snapshot.arenas import ArenaSet, ArenaWriter, RingExchange
from reft.snapshot.copier import Copier
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.version import OVERRUN
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, Votes
from tests.snapshot.ranks import PAIR, WAIT_SECS, Rank, Results, feature

pytestmark = pytest.mark.integration


def pair(rank: int, root: Path) -> Rank:
    return Rank(rank, root, PAIR, keeping=RetentionConfig(look_secs=0.0))


def _on_rank_1(me: Rank, patch: Callable[[Rank], Any]) -> Any:
    return patch(me) if me.rank == 1 else nullcontext()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raising(error: Exception) -> Callable[..., Any]:
    def act(*args: object, **options: object) -> None:
        raise type(error)(*error.args)

    return act


def _once(owner: Any, name: str, error: Exception, nth: int = 1) -> Callable[[Rank], Any]:
    original, calls = getattr(owner, name), [0]

    def act(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise type(error)(*error.args)
        return original(*args, **options)

    return lambda me: mock.patch.object(owner, name, act)


def _damaged(me: Rank) -> Any:
    """A patch under which the first version's blocks arrive, and a byte of them is another one."""
    blocks, calls = RingExchange.blocks, [0]

    def act(self: RingExchange, writer: ArenaWriter) -> Any:
        arrived = blocks(self, writer)
        calls[0] += 1
        if calls[0] == 1:
            came = next(b for b in writer.layout.mine.redundant if b.key.section is Section.OWNED)
            writer.arena.data[came.arena_offset] ^= 0xFF
        return arrived

    return mock.patch.object(RingExchange, "blocks", act)


def _removed(me: Rank) -> Any:
    """A patch under which somebody removes the files of versions behind the copy."""
    hash_rest = ArenaWriter.hash_rest

    def act(self: ArenaWriter) -> None:
        hash_rest(self)
        self.arena.path.unlink(missing_ok=True)

    return mock.patch.object(ArenaWriter, "hash_rest", act)


_LOST = KeyError("an error that nobody foresaw")

FAILURES: dict[str, Callable[[Rank], Any]] = {
    "begin": _once(SnapshotWorker, "_copy", _LOST),
    "look after the files": _once(ArenaSet, "look_after", OSError(24, "too many open files")),
    "look at free memory": lambda me: mock.patch.object(
        ArenaSet, "free_bytes", _raising(FileNotFoundError(2, "no such file"))
    ),
    "choose a slot": _once(ArenaSet, "begin", _LOST),
    "no slot": _once(ArenaSet, "begin", ArenaError("every slot is in use")),
    "copy": _once(Copier, "copy", _LOST),
    "what to vote": _once(SchemeSwitch, "wanted_level", _LOST),
    "which orders there are": _once(
        SchemeSwitch, "newest_order", OSError(24, "too many open files")
    ),
    "request a rate": lambda me: mock.patch.object(
        feature(me.worker, AgreedRates), "_wanted_interval", _raising(_LOST)
    ),
    "cast the first vote": _once(Votes, "cast", _LOST),
    "cast the second vote": _once(Votes, "cast", _LOST, nth=2),
    "hash": _once(ArenaWriter, "hash_rest", _LOST),
    "its file is gone": _removed,
    "facts": _once(ArenaWriter, "own_facts", _LOST),
    "hear facts": _once(ArenaWriter, "expect", _LOST),
    "what is wanted": _once(ArenaWriter, "wanted", _LOST),
    "choose what to send": _once(ArenaWriter, "selection", _LOST),
    "choose what to receive": _once(ArenaWriter, "selection", _LOST, nth=2),
    "after the exchange": _once(RingExchange, "blocks", _LOST),
    "what came is damaged": _damaged,
    "check what came": _once(ArenaWriter, "check_received", _LOST),
    "seal": _once(ArenaWriter, "seal", OSError(28, "no space left on device")),
    "note the commit": _once(Arena, "commit", ArenaError("both header copies are torn")),
    "after the commit": _once(SnapshotStats, "commit", _LOST),
    "tell of the commit": lambda me: mock.patch.object(
        me.worker.callbacks, "on_commit", _raising(_LOST)
    ),
    "reserve behind the commit": _once(
        ArenaSet, "reserve_rest", OSError(12, "cannot allocate memory")
    ),
    "switch": _once(SnapshotWorker, "_switch_layout", _LOST),
}


def failures(rank: int, root: Path) -> dict[str, Any]:
    me, found = pair(rank, root), {}
    for place, patch in FAILURES.items():
        dist.barrier()
        with _on_rank_1(me, patch):
            (during,) = me.take_next(1)
        after = me.take_next(3)  # while the ranks come together again, versions are given up
        found[place] = {
            "during": during,
            "after": after,
            "in_files": me.steps_in_files(),
            "step": me.now,
        }
    found["skips"] = me.skips
    me.worker.close(10)
    return found


def went_back(rank: int, root: Path) -> dict[str, Any]:
    me = pair(rank, root)
    before = me.take_next(4)
    with _on_rank_1(me, _once(Votes, "cast", _LOST)):
        before += me.take_next(1)
    before += me.take_next(3)
    assert me.worker.drain(WAIT_SECS)
    me.incarnation += 1
    committed = [me.take(step) for step in (3, 4)]
    me.worker.close(10)
    return {
        "before": before,
        "committed": committed,
        "in_files": [str(label) for label in me.newest_in_files().values()],
    }


def rates_agreed(rank: int, root: Path) -> dict[str, Any]:
    """The job goes back while a rate is agreed for steps to come; later one rank alone hears of a rate."""
    me = pair(rank, root)
    assert me.take(100)
    rates = feature(me.worker, AgreedRates)
    rarely = mock.patch.object(rates, "_wanted_interval", return_value=3)
    with rarely:
        assert me.take(101)
        me.incarnation += 1
        assert me.take(3)
        back = rates.interval_steps(4)
    assert me.take(4)
    vote = me.worker.control.vote

    def unheard(*args: Any) -> Any:
        vote(*args)
        raise _LOST

    with rarely, _on_rank_1(me, lambda me: mock.patch.object(me.worker.control, "vote", unheard)):
        assert not me.take(5)
        _until(lambda: me.worker.votes.late)  # they have come together
    met = [rates.interval_steps(step) for step in (6, 7, 50)]
    me.worker.close(10)
    return {"back": back, "met": met}


def astray(rank: int, root: Path) -> dict[str, Any]:
    """What the ranks vote on is not the same version: rank 1 is a step further, or of a later start."""
    me = pair(rank, root)
    assert me.take(1)
    during = [me.take(2 + rank)]
    after = [[me.take(step) for step in range(4, 8)]]
    me.incarnation += rank
    during.append(me.take(8))
    me.incarnation = 2
    after.append([me.take(step) for step in range(9, 13)])
    me.worker.close(10)
    return {"during": during, "after": after, "in_files": me.steps_in_files()}


def complains(rank: int, root: Path) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reft").addHandler(handler)
    me = pair(rank, root)
    if rank == 1:
        me.worker.callbacks.peer_errors.record("a rate cannot be computed", _LOST)
    committed = me.take_next(3)
    me.worker.close(10)
    logging.getLogger("reft").removeHandler(handler)
    return {"committed": committed, "heard": [line for line in lines if line.startswith("rank")]}


def layouts(rank: int, root: Path) -> dict[str, Any]:
    me, found = pair(rank, root), {}
    places = {
        "layout, at its begin": _once(SnapshotWorker, "_renew_layout", _LOST),
        "layout, before memory is counted": _once(SchemeSwitch, "fit", _LOST),
        "layout, reserving": _once(ArenaSet, "reserve", _LOST),
        "order, at its begin": _once(SchemeSwitch, "change", _LOST),
        "order, between ranks": _once(ArenaSet, "use", _LOST),
    }
    schemes = iter(("none", "arc"))
    for place, patch in places.items():
        dist.barrier()
        if place.startswith("order"):
            scheme = next(schemes)
            if rank == 0:
                write_request([me.job_dir], scheme)
        else:
            me.shape += 1
            me.owned = torch.zeros(20_001 + 64 * me.shape)
        dist.barrier()
        with _on_rank_1(me, patch):
            (during,) = me.take_next(1)
        after, record = me.take_next(4), feature(me.worker, SchemeSwitch).record
        found[place] = {"during": during, "after": after, "scheme": record.in_force}
    me.worker.close(10)
    return found


def dead(rank: int, root: Path) -> dict[str, Any]:
    """Rank 1's worker ends for good. Training goes on, on both; closing takes no time worth speaking of."""
    me = pair(rank, root)
    assert me.take(1)
    me.worker.control.timeout_secs = 1.0  # that the other one is waited for
    if rank == 1:
        me.worker.control.rejoin = _raising(_LOST)  # type: ignore[method-assign]
        me.worker.votes.cast = _raising(_LOST)  # type: ignore[method-assign]
    results = [me.take(step) for step in (2, 3)]
    dist.barrier()
    _until(lambda: me.worker.broken is not None)
    me.worker.await_vote(3, 3600)  # nothing is waited for any more
    late = me.take(4)
    drained = me.worker.drain(3600)
    me.worker.close(3600)
    return {"results": results, "late": late, "broken": bool(me.worker.broken), "drained": drained}


def slow(rank: int, root: Path) -> dict[str, Any]:
    """An exchange that takes as long as it likes: no step waits for its vote more than once."""
    me = pair(rank, root)
    assert me.take(1)
    release, facts = threading.Event(), RingExchange.facts

    def held(self: RingExchange, writer: ArenaWriter) -> None:
        assert release.wait(WAIT_SECS)
        facts(self, writer)

    waits = []
    with mock.patch.object(RingExchange, "facts", held):
        me.begin(2, required=True)
        for step in range(3, 9):
            me.begin(step)
            with mock.patch.object(
                SnapshotWorker, "_wait_for", autospec=True, side_effect=SnapshotWorker._wait_for
            ) as wait:
                me.worker.await_vote(step - 1, 0.05)
                waits.append(wait.call_count)
        release.set()
        drained = me.worker.drain(WAIT_SECS)
    committed = [me.take(step) for step in (9, 10)]
    me.worker.close(10)
    return {"waits": waits, "drained": drained, "committed": committed}


def stuck(rank: int, root: Path) -> dict[str, Any]:
    """A copy that does not end holds up neither an optimizer step nor the end of the job (P6), and is never
    committed (P2); nothing else is written to its slot meanwhile."""
    me = pair(rank, root)
    assert me.take(1)
    entered, release, copy = threading.Event(), threading.Event(), HashingCopier.copy_chunks
    found: dict[str, Any] = {"went on": [True, True], "slots": [True], "closed": True}

    def held(self: HashingCopier, *args: Any, **options: Any) -> Any:
        entered.set()
        assert release.wait(3 * WAIT_SECS)
        return copy(self, *args, **options)

    def returns(act: Callable[[], object]) -> bool:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(WAIT_SECS / 3)
        return not thread.is_alive()

    def hold(step: int) -> SnapshotRequest:
        entered.clear()
        release.clear()
        request = me.begin(step, required=True)
        if rank == 1:
            assert entered.wait(WAIT_SECS)
        return request

    bounds = (
        mock.patch.multiple(engine, STUCK_SECS=0.2),
        mock.patch.object(worker, "FENCE_SECS", 0.2),
    )
    with _on_rank_1(me, lambda me: mock.patch.object(HashingCopier, "copy_chunks", held)):
        request = hold(2)
        if rank == 1:
            with bounds[0], bounds[1]:
                slots = me.arenas.slots
                found["went on"] = [returns(lambda: me.step(3))]
                late = me.snapshot(3)
                found["went on"].append(found["went on"][0] and returns(lambda: me.step(4)))
                found["slots"] = [me.arenas.slots == slots]
        else:
            late = me.begin(3)
            me.step(4)
        release.set()
        assert request.done.wait(WAIT_SECS)
        assert late.done.wait(WAIT_SECS)
        found["committed"] = [request.committed, late.committed, me.take(5)]
        found["overrun"] = request.given_up == OVERRUN
        found["in_files"] = me.steps_in_files()
        dist.barrier()
        if rank == 1:
            hold(6)
            with bounds[0]:
                found["closed"] = returns(lambda: me.worker.close(0.1))
            release.set()
        else:
            me.worker.close(0.1)
    return found


# Places where the version is good, whatever fails there.
_COMMITTED = {
    "look at free memory",
    "request a rate",
    "note the commit",
    "after the commit",
    "tell of the commit",
    "reserve behind the commit",
    "switch",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("workers")
    return Results(
        root, failures, went_back, rates_agreed, astray, complains, layouts, slow, stuck, dead
    )


def test_p6_whatever_fails_on_one_worker_costs_its_version_and_no_later_one(
    results: Results,
) -> None:
    found_by = results.of(failures)
    for rank, result in enumerate(found_by):
        for place in FAILURES:
            found = result[place]
            assert found["during"] == (place in _COMMITTED), (rank, place)
            assert found["after"][-1], (rank, place, "versions must come back")
            assert set(found["in_files"]) == {found["step"]}, (rank, place)
    assert found_by[1]["skips"], "what is given up is counted"
    for place in FAILURES:
        assert found_by[0][place]["after"] == found_by[1][place]["after"], place


def test_p3_after_an_interruption_a_job_that_went_back_commits_its_steps_again(
    results: Results,
) -> None:
    for result in results.of(went_back):
        assert not result["before"][4]
        assert result["before"][-1]
        assert result["committed"] == [True, True]
        assert set(result["in_files"]) == {"step 4 (incarnation 2)"}


def test_p6_a_rate_is_the_same_everywhere_after_going_back_and_after_coming_together(
    results: Results,
) -> None:
    first, second = results.of(rates_agreed)
    assert first == second
    assert first["back"] == 3


def test_p3_ranks_that_vote_on_different_versions_commit_neither_and_come_together_again(
    results: Results,
) -> None:
    for result in results.of(astray):
        assert result["during"] == [False, False]
        assert [taken[-1] for taken in result["after"]] == [True, True]
        assert set(result["in_files"]) == {12}


def test_p6_peers_hear_with_the_next_vote_what_has_failed_on_a_rank(results: Results) -> None:
    first, second = results.of(complains)
    assert first["committed"] == second["committed"] == [True] * 3
    (said,) = first["heard"]
    assert said.startswith("rank 1 ")
    assert "a rate cannot be computed: KeyError" in said
    assert second["heard"] == []


def test_p6_a_failure_while_ranks_agree_on_a_layout_or_a_switch_leaves_them_agreed(
    results: Results,
) -> None:
    first, second = results.of(layouts)
    assert first == second
    for place, found in first.items():
        assert found["after"][-1], place
    assert first["order, between ranks"]["scheme"] == "arc"


def test_p6_a_worker_that_ends_for_good_holds_nobody_up(results: Results) -> None:
    for result in results.of(dead):
        assert result == {
            "results": [False, False],
            "late": False,
            "broken": True,
            "drained": False,
        }


def test_p6_a_slow_exchange_is_waited_for_once_and_then_no_more(results: Results) -> None:
    for result in results.of(slow):
        # The first vote has been cast before the exchange; the second is waited for in vain.
        assert sum(result["waits"]) <= 2
        assert result["drained"]
        assert result["committed"][-1]


def test_p2_p6_a_copy_that_does_not_end_costs_its_version_and_neither_a_step_nor_the_end(
    results: Results,
) -> None:
    assert [result["overrun"] for result in results.of(stuck)] == [False, True]
    for result in results.of(stuck):
        assert result["went on"] == [True, True]
        assert result["slots"] == [True], (
            "nothing else is written to a slot that is still written to"
        )
        assert result["closed"]
        assert not result["committed"][0]
        assert result["committed"][-1]
        assert set(result["in_files"]) == {5}
