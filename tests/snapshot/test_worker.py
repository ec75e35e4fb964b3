"""The snapshot protocol between real processes: P2, P3, P5, P6."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reft.config import FaultConfig, FaultPoint, VerifyConfig
from reft.control.control import Ballot
from reft.errors import TransferError
from reft.grid import STATE_SECTIONS, Degrees, Section, Topology, VersionId
from reft.memory.arena import Arena, scan
from reft.memory.header import ArenaState
from reft.policy.agreed import AgreedRates
from reft.recover.decide import plan_recovery
from reft.recover.inventory import ArenaStore
from reft.recover.plan import RecoveryPlan
from reft.snapshot.copy_engine import CpuCopyEngine
from reft.snapshot.extension import VoteResult
from reft.snapshot.gate import Gate
from reft.snapshot.plan import LiveImages
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotRequest
from reft.state.catalogue import SectionImage
from reft.verify.peers import TURNS, PeerCheck, differing
from tests.snapshot.ranks import FOUR, SECRET, Rank, Results, feature, host_blob


def protocol(rank: int, root: Path) -> dict[str, Any]:
    """Good versions, one that a rank cannot take, one that breaks off while a rank copies it, one that
    a rank cannot seal."""
    faults = (
        FaultConfig(point=FaultPoint.DURING_COPY, step=4, pp=1, dp=1, action="raise"),
        FaultConfig(point=FaultPoint.AFTER_SEAL, step=5, pp=0, dp=1, action="raise"),
    )
    (root / f"node{rank}").mkdir(mode=0o700)
    (root / f"node{rank}" / "rank0-slot5.arena").touch()  # left by a run that kept more versions
    me = Rank(rank, root, FOUR, faults=faults)
    outcome: dict[int, bool] = {}
    for step in range(1, 8):
        # Step 3: rank 2 says that it has nothing to show. Step 5: rank 1 fails after its seal.
        outcome[step] = me.take(
            step, cause=SkipCause("nothing to show") if step == 3 and rank == 2 else None
        )
    assert me.worker.drain(60)
    me.worker.close(10)
    return {"outcome": outcome, "stats": me.stats.to_json(), "skips": me.skips}


def memory(rank: int, root: Path) -> dict[str, Any]:
    me = Rank(rank, root, FOUR)
    if rank == 3:
        me.arenas.limit_bytes = 1000
    outcome, stale = {}, None
    for step in range(1, 12):
        if step == 4:
            me.arenas.limit_bytes = None
        outcome[step] = me.wait_for(me.begin(step))
        stale = me.stats.stale_since_step if step == 3 else stale
    me.worker.close(10)
    return {"outcome": outcome, "stale_at_3": stale, "stats": me.stats.to_json(), "skips": me.skips}


def fence(rank: int, root: Path) -> dict[str, Any]:
    me = Rank(rank, root, FOUR)
    me.take(1)
    gate, entered = threading.Event(), threading.Event()

    class Held(CpuCopyEngine):
        def copy_hashed(self, *args: Any, **kwargs: Any) -> int:
            entered.set()
            gate.wait(60)
            return super().copy_hashed(*args, **kwargs)

    me.step(2)
    me.worker.copier.engine = Held()
    held = me.snapshot(2)
    assert entered.wait(60)
    late = me.snapshot(3)  # cannot start: the worker is busy with version 2
    me.worker.near_fence()  # does not wait
    approached = late.given_up is not None and not held.copied.is_set()
    fenced = threading.Event()
    thread = threading.Thread(target=lambda: (me.worker.fence(), fenced.set()))
    thread.start()
    deadline = time.monotonic() + 30
    while late.given_up is None and time.monotonic() < deadline:
        time.sleep(0.001)
    waited = not fenced.wait(0.2)
    gate.set()
    thread.join(60)
    result = {
        "approached": approached,
        "waited": waited,
        "held": me.wait_for(held),
        "late": me.wait_for(late),
        "copied": fenced.is_set(),
    }
    me.worker.close(10)
    return result


def wants(rank: int, root: Path) -> dict[str, Any]:
    interval = [1]
    to_storage = {1: 10 + rank, 4: 30 - rank, 6: 7 if rank == 3 else 2}
    wanted, taken = [0], []
    me = Rank(
        rank,
        root,
        FOUR,
        wanted_interval=lambda: interval[0],
        wanted_persist_interval=lambda: wanted[0],
    )
    rates = feature(me.worker, AgreedRates)
    for step in range(1, 11):
        wanted[0] = to_storage.get(step, wanted[0])
        if (
            rank == 2 and step == 3
        ):  # what does not fit before its optimizer step makes versions rarer on all
            interval[0] = 3
        me.step(step)
        if step % rates.interval_steps(step) == 0:
            request = me.snapshot(step)
            taken.append(step)
        else:
            request = SnapshotRequest(VersionId(1, step), None, b"", vote_only=True)
            me.worker.submit(request)
        me.wait_for(request)
    me.worker.close(10)
    return {"taken": taken, "agreed": me.agreed}


def core(rank: int, root: Path) -> list[bool]:
    me = Rank(rank, root, FOUR, with_features=False)
    committed = me.take_next(3)
    me.worker.close(10)
    return committed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("worker")
    return Results(root, protocol, memory, fence, wants, core, world=4)


def versions_in(root: Path, rank: int) -> dict[int, Arena]:
    found = {}
    for _, arena in scan(root / f"node{rank}", SECRET):
        header = arena.header()
        if header is not None and header.state is ArenaState.COMMITTED:
            found[header.label.step] = arena
    return found


@pytest.mark.process
def test_p3_a_version_is_committed_by_all_ranks_or_by_none(results: Results) -> None:
    found = results.of(protocol)
    for result in found:
        assert result["outcome"] == {str(step): step not in (3, 4, 5) for step in range(1, 8)}
        assert result["stats"]["committed_step"] == 7
        assert result["stats"]["stale_since_step"] is None
        assert result["stats"]["taken"] == 5  # version 5 was copied by all, sealed by all but one
    for rank in range(4):
        versions = versions_in(results.root / "protocol", rank)
        assert set(versions) == {6, 7}
        assert not (results.root / "protocol" / f"node{rank}" / "rank0-slot5.arena").exists()
        _check_content(versions[7], rank, 7)


def _check_content(arena: Arena, rank: int, step: int) -> None:
    """Own and redundant blocks hold exactly the bytes of that step, the peer's included (P5)."""
    header = arena.header()
    assert header is not None
    at = FOUR.coordinates[rank]
    peer = FOUR.group(at.pp, at.tp)[1 - at.dp]
    seen = set()
    for entry in header.entries:
        assert arena.verify(entry)
        data = bytes(arena.read_block(entry))
        owner = rank if entry.key.member == at.dp else peer
        assert entry.owner == (owner == rank)
        seen.add((entry.key.section, entry.key.member))
        if entry.key.section is Section.HOST:
            assert data == host_blob(owner, step)
        elif entry.key.section is Section.OWNED:
            values = set(np.frombuffer(data[: len(data) // 4 * 4], np.float32).tolist())
            assert values <= {100_000 + 1000 * owner + step, 0.0}  # 0.0 is padding
        else:
            values = set(np.frombuffer(data[: len(data) // 4 * 4], np.float32).tolist())
            assert values <= {0.0, *(1000 * at.pp + 10 * step + i for i in (0, 1, 3))}
    assert seen == {(s, m) for s in STATE_SECTIONS for m in (0, 1)}


@pytest.mark.process
def test_p3_p4_the_core_protects_without_any_feature(results: Results) -> None:
    assert results.of(core) == [[True, True, True]] * 4
    for rank in range(4):
        versions = versions_in(results.root / "core", rank)
        assert set(versions) == {2, 3}
        _check_content(versions[3], rank, 3)


@pytest.mark.process
def test_p6_a_rank_without_memory_is_counted_and_recovers(results: Results) -> None:
    found = results.of(memory)
    for result in found:
        outcome = result["outcome"]
        assert not any(outcome[s] for s in ("1", "2", "3"))
        assert outcome["11"], "snapshots must come back when the cause is gone"
        assert result["stale_at_3"] == 1
        assert result["stats"]["stale_since_step"] is None
    assert any("OutOfMemoryError" in cause for _, cause in found[3]["skips"])


@pytest.mark.process
def test_p2_the_fence_waits_for_a_running_copy_and_cancels_one_not_started(
    results: Results,
) -> None:
    for result in results.of(fence):
        assert result == {
            "approached": True,
            "waited": True,
            "held": True,
            "late": False,
            "copied": True,
        }


@pytest.mark.process
def test_ranks_agree_in_their_votes_how_often_versions_are_taken_and_go_to_storage(
    results: Results,
) -> None:
    """The largest request wins, and every rank finds the same for the same version."""
    for result in results.of(wants):
        # Step 3 carries the request; it holds from step 5 on, everywhere.
        assert result["taken"] == [1, 2, 3, 4, 6, 9]
        assert result["agreed"] == [[1, 13], [2, 13], [3, 13], [4, 30], [6, 7], [9, 7]]


BLOCK = 4096


def images_of(tensors: list[torch.Tensor]) -> LiveImages:
    empty = SectionImage([])
    return LiveImages(
        SectionImage([(f"t{i}", t) for i, t in enumerate(tensors)]), empty, "signature"
    )


def sums_of(check: PeerCheck, images: LiveImages, step: int) -> dict[int, int]:
    engine = CpuCopyEngine()
    engine.begin()
    check.read(images, VersionId(1, step), engine, Gate())
    engine.close()
    return check.sums


@given(
    sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=6),
    flip=st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    every=st.integers(1, 200),
)
def test_a_flipped_bit_changes_the_sum_of_its_block_within_so_many_versions(
    sizes: list[int], flip: tuple[float, int], every: int
) -> None:
    mine = [torch.arange(n, dtype=torch.int32) for n in sizes]
    peers = [t.clone() for t in mine]
    if not sum(sizes):
        return
    check, other = (PeerCheck(by_turns=True, block_bytes=BLOCK, chunk_bytes=n) for n in (1000, 64))
    steps = range(7, 7 + every * TURNS, every)
    images, theirs = images_of(mine), images_of(peers)
    assert all(sums_of(check, images, s) == sums_of(other, theirs, s) for s in steps[:3])
    wrong = peers[max(range(len(sizes)), key=sizes.__getitem__)].view(torch.uint8)
    at = int(flip[0] * len(wrong))
    wrong[at] ^= 1 << flip[1]
    different: list[int] = []
    for step in steps:
        pair = sums_of(check, images, step), sums_of(other, theirs, step)
        for one in (check, other):
            one.voted(VoteResult(VersionId(1, step), True, True, True), (0,))
        different += [block for block in pair[0] if pair[0][block] != pair[1][block]]
    offset = theirs.replicated.locate(wrong[at:])
    assert different == [offset // BLOCK]  # in one block, in one turn


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([[1, 2], [1, 2]], {}),
        ([[1, 2], [1, 3]], {1: (0, 1)}),
        ([[1, 2], [9, 2], [1, 2]], {0: (1,)}),
        ([[1, 2], [9, 2], [1, 2], [9, 3]], {0: (0, 1, 2, 3), 1: (3,)}),
    ],
)
def test_who_differs_is_who_is_not_of_the_majority(
    sums: list[list[int]], expected: dict[int, tuple[int, ...]]
) -> None:
    assert differing({m: dict(enumerate(of)) for m, of in enumerate(sums)}) == expected


THREE = Topology(Degrees(1, 3, 1), Degrees(1, 3, 1).coordinates(), ("A", "B", "C"))
WRONG = 1  # of the ranks


def corrupted(rank: int, root: Path) -> dict[str, Any]:
    """One member's replica is wrong in steps 3 and 4, one number of its partition in steps 6 and 7."""
    out: dict[str, Any] = {}
    for peers in ("full", "rotate", "off"):
        verify = VerifyConfig(peers=peers, on_difference="rollback", suspects=2)
        (folder := root / peers).mkdir(exist_ok=True)
        me = Rank(rank, folder, THREE, verify=verify)
        seen: list[Any] = []
        for step in range(1, 9):
            me.step(step)
            if rank == WRONG and step in (3, 4):
                me.replicated[0][40_000] = -1.0
            if rank == WRONG and step in (6, 7):
                me.owned[-1] = torch.nan
            request = me.snapshot(step, required=True)
            seen.append(me.wait_for(request) or str(request.given_up))
            if (halt := me.worker.votes.halt) is not None:
                seen.append([halt.why, halt.restarts])
                me.worker.votes.halt = None
        me.worker.close(10)
        out[peers] = seen
    return out


def poisoned(rank: int, root: Path) -> list[Any]:
    me = Rank(rank, root, THREE, verify=VerifyConfig(peers="off", suspects=2))
    me.replicated, halts = [torch.full((9,), torch.inf)], []
    for step in (1, 2, 3):
        assert not me.wait_for(me.snapshot(step, required=True))
        halts.append(me.worker.votes.halt and me.worker.votes.halt.restarts)
        me.worker.fence()
    me.worker.close(10)
    return halts


def given_up_late(rank: int, root: Path) -> list[bool]:
    """One rank gives a version up when its peers have received its bytes: its script had written to
    its tensors, or they hold NaN."""
    committed = list[bool]()
    for what in ("written", "not finite"):
        (folder := root / what).mkdir(exist_ok=True)
        me = Rank(rank, folder, THREE, verify=VerifyConfig(peers="off", suspects=2))
        committed.append(me.take(1))
        me.step(2)
        if rank == WRONG:
            me.owned.fill_(torch.nan if what == "not finite" else -1.0)
        is_written = rank == WRONG and what == "written"
        request = me.snapshot(2, written=lambda found=is_written: ["o"] if found else [])
        while me.stats.taken < 2:  # until all ranks have voted that they have copied it
            time.sleep(0.001)
        me.worker.fence()
        committed.append(me.wait_for(request))
        me.worker.close(10)
    return committed


def far_apart(rank: int, root: Path) -> list[bool]:
    """A version every 61 steps. One rank does not hear what came of a vote; later its replica is wrong."""
    me = Rank(rank, root, THREE, verify=VerifyConfig(peers="rotate"))
    votes, heard = me.worker.votes, list[int]()
    cast, committed = votes.cast, list[bool]()

    def deaf(label: VersionId, *said: Any) -> Ballot:
        verdict = cast(label, *said)
        heard.append(label.step)
        if rank == WRONG and heard.count(2 * TURNS) == 2 and label.step == 2 * TURNS:
            raise TransferError("a connection is gone")
        return verdict

    votes.cast = deaf  # type: ignore[method-assign]
    for step in range(TURNS, 12 * TURNS, TURNS):
        me.step(step)
        if rank == WRONG and any(committed[2:]):
            me.replicated[0][40_000] = -1.0  # in block 2
        committed.append(me.wait_for(me.snapshot(step, required=True)))
    me.worker.close(10)
    return committed


@pytest.fixture(scope="module")
def corrupted_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(
        tmp_path_factory.mktemp("corruption"),
        corrupted,
        poisoned,
        given_up_late,
        far_apart,
        world=3,
    )


@pytest.mark.process
def test_what_differs_or_is_not_finite_is_not_committed_and_named_by_all(
    corrupted_results: Results,
) -> None:
    differs = ["r0 of rank 1 on B differs from other ranks of its group", True]
    nan = ["weights or optimizer state held NaN or infinity in 2 versions in a row", True]
    for rank, result in enumerate(corrupted_results.of(corrupted)):
        unequal = (
            "a peer could not seal it" if rank == 2 else "peers differ"
        )  # its successor is right
        poison = "not finite: NaN or infinity in o" if rank == WRONG else "a peer could not seal it"
        behind = [True, poison, poison, nan, True]
        assert result["full"] == [True, True, unequal, differs, unequal, differs, *behind]
        assert (
            result["rotate"] == result["off"] == [True, True, True, True, *behind]
        )  # not that block's turn


@pytest.mark.process
@pytest.mark.parametrize("what", ["written", "not finite"])
@pytest.mark.parametrize("lost", [None, *range(3)])
def test_p2_bytes_that_their_own_rank_gave_up_are_restored_from_no_peer(
    corrupted_results: Results, what: str, lost: int | None
) -> None:
    assert corrupted_results.of(given_up_late) == [[True, False, True, False]] * 3
    root = corrupted_results.root / given_up_late.__name__ / what
    nodes = [rank for rank in range(3) if rank != lost]
    found = [ArenaStore(root / f"node{n}", THREE.nodes[n], SECRET).inventory() for n in nodes]
    plan = plan_recovery(found, THREE, job_id="job")
    assert isinstance(plan, RecoveryPlan)
    assert plan.label.step == 1


@pytest.mark.process
def test_a_start_that_has_committed_nothing_does_not_go_back_to_what_it_came_from(
    corrupted_results: Results,
) -> None:
    assert corrupted_results.of(poisoned) == [[None, False, False]] * 3


@pytest.mark.process
def test_turns_go_by_versions_and_all_ranks_agree_on_them_after_a_lost_vote(
    corrupted_results: Results,
) -> None:
    for rank, (first, second, *others) in enumerate(corrupted_results.of(far_apart)):
        assert (first, second) == (True, rank != WRONG)
        alike = others.index(True)
        assert others[alike:][:3] == [True, True, False]  # blocks 0, 1 and 2
        assert not any(others[alike + 2 :]), "what differs is looked at until it does not"
