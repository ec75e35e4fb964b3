"""Attacks on the files of two ranks (DP2), whose snapshot workers go on: removed, cut, replaced, torn, exchanged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from reft.memory.arena import Arena, scan
from reft.memory.header import Geometry
from reft.naming import Label
from reft.snapshot.committing import arenas
from tests.attack.jobs import remove_all
from tests.attack.workers import Rank
from tests.snapshot.one_rank import SECRET


def _attack_files(me: Rank, kind: str, which: str) -> None:
    """Damage the arenas of this rank's node that hold the newest version, or the other ones."""
    newest = max(me.commits)
    for path, arena in scan(me.job_dir, SECRET):
        assert isinstance(arena, Arena), arena
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
    """Rank 1's files are attacked in every way, one after the other."""
    me, found = Rank(rank, root), {}
    me.take_next(3)
    for kind, which in ATTACKS:
        dist.barrier()
        if rank == 1:
            if kind == "root":
                remove_all(me.job_dir)
            else:
                _attack_files(me, kind, which)
        dist.barrier()
        with mock.patch.object(arenas.logger, "error") as error:
            last = me.take_next(3)[-1]
        found[f"{kind} {which}"] = {
            **{"last": last, "in_files": me.newest_in_files(), "step": me.at},
            "said": [call.args[0] % call.args[1:] for call in error.mock_calls],
        }
    me.worker.close(10)
    return found


def exchange(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap(rank: int, root: Path) -> dict[str, Any]:
    """The files of two local ranks are exchanged under a running job: nobody overwrites what is the other's."""
    me, found = Rank(rank, root, together=True), {}
    for slots in ((0, 0), (0, 1), (1, 1)):
        me.take_next(3)
        dist.barrier()
        if rank == 0:
            exchange(*(me.job_dir / f"rank{r}-slot{s}.arena" for r, s in enumerate(slots)))
        dist.barrier()
        last = me.take_next(4)[-1]
        dist.barrier()
        found[str(slots)] = {"last": last, "in_files": me.newest_in_files(), "step": me.at}
        found["names"] = sorted(path.name for path in me.job_dir.glob("*.arena"))
        dist.barrier()  # both have read before either writes on
    me.worker.close(10)
    return found


def swapped_before(rank: int, root: Path) -> dict[str, Any]:
    """Files exchanged between two starts: one rank finds the recovered version in all its slots."""
    me = Rank(rank, root, together=True)
    for step in (1, 2):
        assert me.take(step)
    me.worker.close(10)
    dist.barrier()
    if rank == 0:
        names = {}
        for path, arena in scan(me.job_dir, SECRET):
            assert isinstance(arena, Arena), arena
            with arena:
                header = arena.header()
                assert header is not None
                names[header.coordinate.dp, header.label.step] = path
        # Rank 1's newest version lies where rank 0's older one was.
        exchange(names[0, 1], names[1, 2])
    dist.barrier()
    frozen = {0: Label(1, 2), 1: Label(1, 2)} if rank == 0 else {}
    me = Rank(rank, root, together=True, frozen=frozen)
    dist.barrier()
    before = me.newest_in_files()
    dist.barrier()
    committed = [me.take(step) for step in (3, 4)]
    dist.barrier()
    me.worker.close(10)
    names_now = sorted(path.name for path in me.job_dir.glob("*.arena"))
    return {"before": before, "committed": committed, "names": names_now}
