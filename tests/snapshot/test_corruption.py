"""What is wrong before it is copied is not committed: replicas that differ, and numbers that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reft.config import VerifyConfig
from reft.control.control import Ballot
from reft.errors import TransferError
from reft.grid import Degrees, Topology
from reft.naming import Label
from reft.snapshot.copying.copier import TURNS, Copier, PeerCheck, differing
from reft.snapshot.copying.engine import CpuCopyEngine
from reft.snapshot.plan import LiveImages
from reft.state.catalogue import SectionImage
from tests.snapshot.ranks import Rank, Results

BLOCK = 4096


def images_of(tensors: list[torch.Tensor]) -> LiveImages:
    empty = SectionImage([])
    return LiveImages(SectionImage([(f"t{i}", t) for i, t in enumerate(tensors)]), empty, "signature")


def sums_of(check: PeerCheck, images: LiveImages, step: int, nbytes: int = 1000) -> dict[int, int]:
    check.memory = torch.zeros(check.choose(images, step), dtype=torch.int64)
    for part in check.parts(images, nbytes):
        for source, target in part():
            target.copy_(source)
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
    check, other = (PeerCheck(True, BLOCK) for _ in range(2))
    steps = range(7, 7 + every * TURNS, every)
    images, theirs = images_of(mine), images_of(peers)
    assert all(sums_of(check, images, s) == sums_of(other, theirs, s, 64) for s in steps[:3])
    wrong = peers[max(range(len(sizes)), key=sizes.__getitem__)].view(torch.uint8)
    at = int(flip[0] * len(wrong))
    wrong[at] ^= 1 << flip[1]
    different: list[int] = []
    for step in steps:
        pair = sums_of(check, images, step), sums_of(other, theirs, step)
        for one in (check, other):
            one.sealed(step)
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
        check = None if peers == "off" else PeerCheck(peers == "rotate", 65536)
        verify = VerifyConfig(peers=peers, on_difference="rollback", suspects=2)
        (folder := root / peers).mkdir(exist_ok=True)
        me = Rank(rank, folder, THREE, Copier(CpuCopyEngine(), 2**18, peers=check), verify=verify)
        seen: list[Any] = []
        for step in range(1, 9):
            me.step(step)
            if rank == WRONG and step in (3, 4):
                me.replicated[0][40_000] = -1.0
            if rank == WRONG and step in (6, 7):
                me.owned[-1] = torch.nan
            request = me.snapshot(step, must=True)
            seen.append(me.wait_for(request) or str(request.given_up))
            if (halt := me.worker.votes.halt) is not None:
                seen.append([halt.why, halt.restarts])
                me.worker.votes.halt = None
        me.worker.close(10)
        out[peers] = seen
    return out


def poisoned(rank: int, root: Path) -> list[Any]:
    me = Rank(rank, root, THREE, verify=VerifyConfig(suspects=2))
    me.replicated, halts = [torch.full((9,), torch.inf)], []
    for step in (1, 2, 3):
        assert not me.wait_for(me.snapshot(step, must=True))
        halts.append(me.worker.votes.halt and me.worker.votes.halt.restarts)
        me.worker.fence()
    me.worker.close(10)
    return halts


def far_apart(rank: int, root: Path) -> list[bool]:
    """A version every 61 steps. One rank does not hear what came of a vote; later its replica is wrong."""
    me = Rank(rank, root, THREE, Copier(CpuCopyEngine(), 2**18, peers=PeerCheck(True, 65536)))
    votes, heard = me.worker.votes, list[int]()
    cast, committed = votes.cast, list[bool]()

    def deaf(label: Label, *said: Any) -> Ballot:
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
        committed.append(me.wait_for(me.snapshot(step, must=True)))
    me.worker.close(10)
    return committed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("corruption"), corrupted, poisoned, far_apart, world=3)


@pytest.mark.process
def test_what_differs_or_is_not_finite_is_not_committed_and_named_by_all(results: Results) -> None:
    differs = ["r0 of rank 1 on B differs from other ranks of its group", True]
    nan = ["weights or optimizer state held NaN or infinity in 2 versions in a row", True]
    for rank, result in enumerate(results.of(corrupted)):
        unequal = "a peer could not seal it" if rank == 2 else "peers differ"  # its successor is right
        poison = "not finite: NaN or infinity in o" if rank == WRONG else "a peer could not seal it"
        behind = [True, poison, poison, nan, True]
        assert result["full"] == [True, True, unequal, differs, unequal, differs, *behind]
        assert result["rotate"] == result["off"] == [True, True, True, True, *behind]  # not that block's turn


@pytest.mark.process
def test_a_start_that_has_committed_nothing_does_not_go_back_to_what_it_came_from(results: Results) -> None:
    assert results.of(poisoned) == [[None, False, False]] * 3


@pytest.mark.process
def test_turns_go_by_versions_and_all_ranks_agree_on_them_after_a_lost_vote(results: Results) -> None:
    for rank, (first, second, *others) in enumerate(results.of(far_apart)):
        assert (first, second) == (True, rank != WRONG)
        alike = others.index(True)
        assert others[alike:][:3] == [True, True, False]  # blocks 0, 1 and 2
        assert not any(others[alike + 2 :]), "what differs is looked at until it does not"
