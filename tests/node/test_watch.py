"""The daemon looks at arenas after every commit, and reads only those that changed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from reft.memory.arena import Arena, ArenaState
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.observe import CommitWatch
from tests.memory.arena_tools import SECRET, make, write_version


def test_only_arenas_that_changed_are_read_again(tmp_path: Path) -> None:
    job = JobDir.open_or_create(tmp_path, "job", "node0", secret=SECRET)
    watch = CommitWatch(job)
    assert watch.newest() is None
    with make(job.path / "rank0-slot0.arena") as one, make(job.path / "rank0-slot1.arena") as other:
        write_version(one, 4)
        with mock.patch.object(Arena, "open", wraps=Arena.open) as opened:
            assert watch.newest() == Label(1, 4)
            assert opened.call_count == 2
            assert watch.newest() == Label(1, 4)
            assert opened.call_count == 2
            write_version(other, 5, ArenaState.SEALED)
            assert watch.newest() == Label(1, 4)
            assert opened.call_count == 3
            other.commit()
            assert watch.newest() == Label(1, 5)
            assert opened.call_count == 4
        other.path.unlink()
        assert watch.newest() == Label(1, 4)
        one.begin(one.header() or mock.Mock())  # the version is being overwritten
        assert watch.newest() is None
