"""Arena files of two ranks that are removed, replaced, cut off, torn or exchanged: noticed at the next version (P3)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from reft.memory.arena import scan
from reft.memory.header import Geometry
from reft.naming import Label
from reft.snapshot import arenas
from tests.faults.memory import exchange
from tests.snapshot.ranks import PAIR, SECRET, Rank, Results

pytestmark = pytest.mark.process


def _damage(me: Rank, kind: str, which: str) -> None:
    newest = max(me.commits)
    for path, arena in scan(me.job_dir, SECRET):
        with arena:
            header, geometry = arena.header(), Geometry.of(arena.data_bytes, arena.max_entries)
        holds_newest = header is not None and header.label.step == newest
        if which == "all" or (which == "newest") == holds_newest:
            if kind == "remove":
                path.unlink()
            elif kind == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            elif kind == "replace":
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content)
                path.chmod(0o600)
            elif kind == "tear":
                with path.open("r+b") as file:
                    for copy in (0, 1):
                        file.seek(geometry.copy_offset(copy))
                        file.write(b"\xff" * 64)


ATTACKS = [
    *(("remove", which) for which in ("newest", "other", "all")),
    *(("truncate", which) for which in ("newest", "other")),
    *(("replace", which) for which in ("newest", "other", "all")),
    *(("tear", which) for which in ("newest", "other", "all")),
    ("root", "all"),
]


def files(rank: int, root: Path) -> dict[str, Any]:
    me, found = Rank(rank, root, PAIR), {}
    me.take_next(3)
    for kind, which in ATTACKS:
        dist.barrier()
        if rank == 1:
            if kind == "root":
                while me.job_dir.exists():  # its worker may make a file there meanwhile
                    shutil.rmtree(me.job_dir, ignore_errors=True)
            else:
                _damage(me, kind, which)
        dist.barrier()
        with mock.patch.object(arenas.logger, "error") as error:
            last = me.take_next(3)[-1]
        found[f"{kind} {which}"] = {
            **{"last": last, "in_files": me.steps_in_files(), "step": me.now},
            "said": [call.args[0] % call.args[1:] for call in error.mock_calls],
        }
    me.worker.close(10)
    return found


def swap(rank: int, root: Path) -> dict[str, Any]:
    """The files of two local ranks are exchanged under a running job: nobody overwrites what is the other's."""
    me, found = Rank(rank, root, PAIR, together=True), {}
    for slots in ((0, 0), (0, 1), (1, 1)):
        me.take_next(3)
        dist.barrier()
        if rank == 0:
            exchange(*(me.job_dir / f"rank{r}-slot{s}.arena" for r, s in enumerate(slots)))
        dist.barrier()
        last = me.take_next(4)[-1]
        dist.barrier()
        found[str(slots)] = {"last": last, "in_files": me.steps_in_files(), "step": me.now}
        found["names"] = sorted(path.name for path in me.job_dir.glob("*.arena"))
        dist.barrier()  # both have read before either writes on
    me.worker.close(10)
    return found


def swapped_before(rank: int, root: Path) -> dict[str, Any]:
    me = Rank(rank, root, PAIR, together=True)
    assert me.take_next(2) == [True, True]
    me.worker.close(10)
    dist.barrier()
    if rank == 0:
        names = {}
        for path, arena in scan(me.job_dir, SECRET):
            with arena:
                header = arena.header()
                names[header.coordinate.dp, header.label.step] = path
        # Rank 1's newest version lies where rank 0's older one was.
        exchange(names[0, 1], names[1, 2])
    dist.barrier()
    frozen = {0: Label(1, 2), 1: Label(1, 2)} if rank == 0 else {}
    me = Rank(rank, root, PAIR, together=True, frozen=frozen)
    dist.barrier()
    before = me.steps_in_files()
    dist.barrier()
    committed = [me.take(step) for step in (3, 4)]
    dist.barrier()
    me.worker.close(10)
    return {"before": before, "committed": committed}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("files"), files, swap, swapped_before)


def test_p3_damaged_files_are_noticed_and_made_anew(results: Results) -> None:
    for rank, result in enumerate(results.of(files)):
        for kind, which in ATTACKS:
            found = result[f"{kind} {which}"]
            assert found["last"], (rank, kind, which)
            # What is told to be committed lies in files that a restart finds.
            assert found["in_files"] == [found["step"]], (rank, kind, which)
            # On the node that was attacked it was said why, at the next version.
            assert bool(found["said"]) == (rank == 1), (rank, kind, which)


def test_p3_files_exchanged_between_local_ranks_are_told_apart(results: Results) -> None:
    for result in results.of(swap):
        assert result.pop("names") == [f"rank{r}-slot{s}.arena" for r in (0, 1) for s in (0, 1)]
        for slots, found in result.items():
            assert found["last"], slots
            assert found["in_files"] == [found["step"]] * 2, slots


def test_p3_a_recovered_version_in_all_slots_of_a_rank_leaves_room_for_the_next(results: Results) -> None:
    for result in results.of(swapped_before):
        assert result["before"] == [2, 2], "nothing of the recovered version is given up"
        assert result["committed"] == [True, True]
