"""The snapshot protocol between real processes: P2, P3, P5, P6."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reft.memory.arena import Arena, ArenaState, scan
from reft.protect.blocks import STATE_SECTIONS, Section
from tests.machine import free_port
from tests.snapshot.one_rank import SECRET
from tests.snapshot.worker_job import TOPOLOGY, host_blob, run
from tests.spawn import spawn

pytestmark = pytest.mark.process


def launch(root: Path, scenario: str) -> list[dict]:
    spawn(run, str(root), free_port(), scenario, nprocs=4)
    return [json.loads((root / f"result-{r}.json").read_text()) for r in range(4)]


def versions_in(root: Path, rank: int) -> dict[int, Arena]:
    found = {}
    for _, arena in scan(root / f"node{rank}", SECRET):
        assert isinstance(arena, Arena), arena
        header = arena.header()
        if header is not None and header.state is ArenaState.COMMITTED:
            found[header.label.step] = arena
    return found


def test_p3_a_version_is_committed_by_all_ranks_or_by_none(tmp_path: Path) -> None:
    results = launch(tmp_path, "protocol")
    for result in results:
        assert result["outcome"] == {
            "1": True,
            "2": True,
            "3": False,
            "4": False,
            "5": False,
            "6": True,
            "7": True,
        }
        assert result["stats"]["committed_step"] == 7
        assert result["stats"]["stale_since_step"] is None
        assert result["stats"]["taken"] == 5  # version 5 was copied by all, sealed by all but one
    for rank in range(4):
        versions = versions_in(tmp_path, rank)
        assert set(versions) == {6, 7}
        assert not (tmp_path / f"node{rank}" / "rank0-slot5.arena").exists()
        _check_content(versions[7], rank, 7)


def _check_content(arena: Arena, rank: int, step: int) -> None:
    """Own and redundant blocks hold exactly the bytes of that step, the peer's included (P5)."""
    header = arena.header()
    assert header is not None
    at = TOPOLOGY.coordinates[rank]
    peer = TOPOLOGY.group(at.pp, at.tp)[1 - at.dp]
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


def test_p6_a_rank_without_memory_is_counted_and_recovers(tmp_path: Path) -> None:
    results = launch(tmp_path, "memory")
    for result in results:
        outcome = result["outcome"]
        assert not any(outcome[s] for s in ("1", "2", "3"))
        assert outcome["11"], "snapshots must come back when the cause is gone"
        assert result["stale_at_3"] == 1
        assert result["stats"]["stale_since_step"] is None
    assert any("OutOfMemoryError" in cause for _, cause in results[3]["skips"])


def test_p2_the_fence_waits_for_a_running_copy_and_cancels_one_not_started(tmp_path: Path) -> None:
    for result in launch(tmp_path, "fence"):
        assert result == {"approached": True, "waited": True, "held": True, "late": False, "copied": True}


def test_ranks_agree_in_their_votes_how_often_versions_are_taken_and_go_to_storage(tmp_path: Path) -> None:
    """The largest request wins, and every rank finds the same for the same version."""
    for result in launch(tmp_path, "wants"):
        # Step 3 carries the request; it holds from step 5 on, everywhere.
        assert result["taken"] == [1, 2, 3, 4, 6, 9]
        assert result["agreed"] == [[1, 13], [2, 13], [3, 13], [4, 30], [6, 7], [9, 7]]


def test_p2_what_one_rank_stages_is_committed_by_all_later_and_holds_nobody_up(tmp_path: Path) -> None:
    for rank, result in enumerate(launch(tmp_path, "staging")):
        assert result == {
            "late": True,  # on every rank: votes may lag behind training
            "staged": int(rank == 2),
            "early": False,
            "outcome": [True, False, True],
            # Nobody can have passed step 6 when it hears of it, though step 4 was asked for.
            "stop": 6,
            "late_at_last": False,
        }
        versions = versions_in(tmp_path, rank)
        assert set(versions) == {2, 4}
        _check_content(versions[2], rank, 2)
        _check_content(versions[4], rank, 4)
