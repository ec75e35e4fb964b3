"""Locks on arenas: between processes, released by a crash, not kept by forked children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from arena_tools import SECRET, answer, fill, header, holder, make, write_version

from reft.errors import ArenaError
from reft.memory import arena as arena_lock
from reft.memory.arena import Arena
from reft.memory.header import ArenaState

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    return path


@pytest.mark.process
def test_a_writer_and_a_reader_keep_each_other_out_until_they_die(path: Path) -> None:
    with Arena.open(path, SECRET) as reader, holder(path, "arena.begin(header(2))") as process:
        answer(process)
        assert not reader.lock_shared()
        assert not reader.try_lock_exclusive()
        with pytest.raises(ArenaError, match="another process is writing it"):
            Arena.create(path, 1024, 4, SECRET)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert reader.lock_shared()
    with make(path) as arena:
        write_version(arena, 1)
    with Arena.open(path, SECRET, writable=True) as writer, holder(path, "arena.lock_shared()") as process:
        assert answer(process) == "True"
        assert not writer.try_lock_exclusive()
        with pytest.raises(ArenaError, match="pinned by a reader"):
            writer.begin(header(2))
        assert writer.state is ArenaState.COMMITTED
        process.kill()
        process.wait(timeout=30)
        writer.begin(header(2))
        assert writer.state is ArenaState.WRITING


def test_begin_locks_and_seal_unlocks_unless_the_caller_holds_the_lock(path: Path) -> None:
    with Arena.open(path, SECRET, writable=True) as writer, Arena.open(path, SECRET) as reader:
        writer.begin(header(2))
        assert not reader.lock_shared()
        writer.seal(fill(writer, 4))
        assert reader.lock_shared()
        reader.unlock()
        assert writer.try_lock_exclusive()
        writer.begin(header(3))
        writer.seal(fill(writer, 4))
        assert not reader.lock_shared()
        writer.unlock()
        assert reader.lock_shared()


@pytest.mark.process
def test_forked_children_do_not_keep_the_lock_of_a_dead_writer(path: Path) -> None:
    """Data loader workers are forked and may outlive the trainer by seconds."""
    how = "(arena.begin(header(2)), __import__('os').fork() or (__import__('time').sleep(60), None))[1]"
    with holder(path, how) as process, Arena.open(path, SECRET) as reader:
        child = int(answer(process))
        try:
            assert not reader.lock_shared()
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
            os.kill(child, 0)  # is still there
            # It lets go as its first act, for which a busy machine may take a while.
            deadline = time.monotonic() + 20
            while not reader.lock_shared():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.process
def test_a_child_forked_while_an_arena_is_closed_keeps_files_that_were_given_its_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recovery has read is closed on a thread of its own, beside whatever the script starts."""
    make(path).close()
    reader, found, close = Arena.open(path, SECRET), [], os.close

    def close_and_fork(fd: int) -> None:
        close(fd)
        monkeypatch.setattr(arena_lock.os, "close", close)
        with path.open("rb") as other:
            os.dup2(other.fileno(), fd)
        if (child := os.fork()) == 0:
            os._exit(0 if Path(f"/proc/self/fd/{fd}").exists() else 1)
        found.append(os.waitpid(child, 0)[1])
        close(fd)

    monkeypatch.setattr(arena_lock.os, "close", close_and_fork)
    reader.close()
    assert found == [0]


def test_a_closed_arena_locks_nothing(path: Path) -> None:
    arena = Arena.open(path, SECRET, writable=True)
    assert arena.try_lock_exclusive()
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.lock_shared()
    with Arena.open(path, SECRET) as other:
        assert other.lock_shared()
