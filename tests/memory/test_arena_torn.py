"""A header that is torn, or a process killed in the middle of writing, leaves the older version readable."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from arena_tools import SECRET, answer, fill, header, holder, make, read_back, write_version

from reft.errors import ArenaError
from reft.memory.arena import Arena
from reft.memory.header import MAGIC, ArenaState


class PowerLossError(Exception):
    """The process is gone."""


class DyingArena(Arena):
    """Stops after so many header bytes; what lies behind them is left, or is garbage."""

    bytes_left: int | None = None
    garbage: random.Random | None = None
    stored: list[tuple[int, bytes]]

    def _store(self, offset: int, data: bytes) -> None:
        if self.bytes_left is None:
            super()._store(offset, data)
            self.stored.append((offset, data))
            return
        part = data[: self.bytes_left]
        super()._store(offset, part)
        self.bytes_left -= len(part)
        if len(part) < len(data):
            if self.garbage is not None:
                super()._store(offset + len(part), self.garbage.randbytes(len(data) - len(part)))
            raise PowerLossError


TRANSITIONS: dict[str, Callable[[Arena], None]] = {
    "first begin": lambda a: a.begin(header(1)),
    "begin": lambda a: a.begin(header(3)),
    "seal": lambda a: a.seal(fill(a, 4), sealed_unix_secs=3.0),
    "commit": lambda a: a.commit(),
    "clear": lambda a: a.clear(),
}


PREPARATIONS: dict[str, Callable[[Arena], None]] = {
    "first begin": lambda a: None,
    "begin": lambda a: write_version(a, 1),
    "seal": lambda a: (write_version(a, 1), a.begin(header(3)))[0],
    "commit": lambda a: write_version(a, 3, ArenaState.SEALED),
    "clear": lambda a: write_version(a, 3),
}


@pytest.mark.parametrize("tail", ["old tail", "garbage tail"])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_header_torn_at_any_byte_reads_as_the_older_state(tmp_path: Path, name: str, tail: str) -> None:
    origin, path = tmp_path / "origin", tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        PREPARATIONS[name](arena)
    shutil.copyfile(path, origin)
    before = read_back(origin)
    with DyingArena.open(path, SECRET, writable=True) as arena:
        arena.stored = []
        TRANSITIONS[name](arena)
        (record_at, record), *wipes = arena.stored
    after = read_back(path)
    assert after != before
    assert len(record) > 50
    assert [len(data) for _, data in wipes] == ([len(MAGIC)] if "begin" in name or name == "clear" else [])

    for length in range(len(record) + sum(len(data) for _, data in wipes)):
        path.write_bytes(origin.read_bytes())
        with DyingArena.open(path, SECRET, writable=True) as arena:
            arena.bytes_left = length
            arena.garbage = random.Random(length) if tail == "garbage tail" else None
            with pytest.raises(PowerLossError):
                TRANSITIONS[name](arena)
        # Whole means: the last bytes are there, or what was there before happens to be the same.
        whole = path.read_bytes()[record_at : record_at + len(record)] == record
        assert whole >= (length >= len(record))
        assert read_back(path) == (after if whole else before)


def test_begin_is_on_record_before_any_data_byte_changes(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena, Arena.open(path, SECRET) as reader:
        write_version(arena, 1)
        data = bytes(reader.data)
        arena.begin(header(2))
        found = reader.header()
        assert (found.state, found.label.step, found.entries) == (ArenaState.WRITING, 2, ())
        assert bytes(reader.data) == data


def test_damage_to_the_header_never_brings_back_a_version_that_is_being_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
        arena.begin(header(2))
    raw = bytearray(path.read_bytes())
    starts = [i for i in range(4096, 4096 * 8) if raw[i : i + 8] == MAGIC]
    assert len(starts) == 1
    raw[starts[0] + 70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArenaError, match="header"):
        Arena.open(path, SECRET)


THROUGH_EVERY_TRANSITION = (
    "[(arena.begin(header(step)), arena.seal(fill(arena, 4)), arena.commit(), "
    "step == 3 and print('on', flush=True)) for step in range(2, 10**9)]"
)


@pytest.mark.process
@pytest.mark.timeout(60)
def test_sigkill_in_the_middle_of_writing_leaves_a_version_readable(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    with holder(path, THROUGH_EVERY_TRANSITION) as process:
        assert answer(process) == "on"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    found = read_back(path)
    assert found is not None
    with Arena.open(path, SECRET) as arena:
        assert all(arena.verify(e) for e in found.entries)
