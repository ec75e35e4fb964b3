"""Arenas: damage is found, transitions have an order, and files that are not this job's are refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arena_tools import SECRET, fill, header, make, write_version

from reft.errors import ArenaError
from reft.grid import BlockKey, Section
from reft.memory.arena import Arena
from reft.memory.header import FORMAT_VERSION, MAGIC, TABLE, ArenaState, Entry, pack_entries


def test_p5_a_flipped_byte_in_any_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
        found = arena.header()
        assert all(arena.verify(e) for e in found.entries)
        for block in found.entries:
            for at in (0, block.nbytes // 2, block.nbytes - 1):
                arena.data[block.arena_offset + at] ^= 0x10
                assert [arena.verify(e) for e in found.entries] == [e is not block for e in found.entries]
                arena.data[block.arena_offset + at] ^= 0x10


def test_a_version_survives_its_process_with_everything_it_said(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        arena.begin(header(7, incarnation=3, node="n" * 255))
        entries = fill(arena, 4)
        arena.seal(entries, sealed_unix_secs=12.5)
        arena.commit()
        said = arena.header()
        data = bytes(arena.data)
    assert said.entries == tuple(entries)
    assert (said.label.incarnation, said.label.step, said.sealed_unix_secs) == (3, 7, 12.5)
    with Arena.open(path, SECRET) as arena:
        assert arena.header() == said
        assert bytes(arena.data) == data
        assert bytes(arena.read_block(entries[1])) == data[1024:2024]


def test_only_the_next_transition_is_allowed(tmp_path: Path) -> None:
    with make(tmp_path / "rank0-slot0.arena") as arena:
        with pytest.raises(ArenaError, match="is empty and cannot be sealed"):
            arena.seal([])
        with pytest.raises(ArenaError, match="is empty and cannot be committed"):
            arena.commit()
        arena.begin(header(1))
        with pytest.raises(ArenaError, match="is writing and cannot be committed"):
            arena.commit()
        arena.seal([])
        with pytest.raises(ArenaError, match="is sealed and cannot be sealed"):
            arena.seal([])
        arena.commit()
        arena.clear()
        assert arena.header() is None


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="not negative"):
        Arena.create(tmp_path / "x.arena", -1, 0, SECRET)
    with make(tmp_path / "rank0-slot0.arena", blocks=2) as arena:
        arena.begin(header(1))
        good = fill(arena, 2)
        with pytest.raises(ArenaError, match="3 blocks to seal, but room was reserved for 2"):
            arena.seal([*good, good[0]])
        outside = Entry(BlockKey(Section.OWNED, 0, 0), 0, 1000, 1000, 1500, 0, True)
        with pytest.raises(ArenaError, match="outside the data region"):
            arena.seal([outside])
        with pytest.raises(ArenaError, match="outside the data region"):
            arena.read_block(outside)
        with pytest.raises(ArenaError, match="shorten job_id or node"):
            arena.begin(header(1, node="n" * 9000))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(4096, 1), (4095, 2), (2**64 - 1, 2), (1, 2**64 - 1), (0, 4097)]
)
def test_packed_entries_that_do_not_fit_are_refused(tmp_path: Path, offset: int, nbytes: int) -> None:
    with make(tmp_path / "a.arena") as arena:
        arena.begin(header(1))
        table = np.frombuffer(pack_entries(fill(arena, 4)), TABLE).copy()
        table["arena_offset"][2], table["nbytes"][2] = offset, nbytes
        with pytest.raises(ArenaError, match=r"BlockKey.* outside the data region"):
            arena.seal(table)
        table["arena_offset"][2], table["nbytes"][2] = 4096, 0
        arena.seal(table)
        assert arena.state is ArenaState.SEALED


def corrupt(path: Path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: corrupt(path, 0, b"ELF"), "not an arena"),
        (lambda path: corrupt(path, 60, b"\x00\x01\x02"), "first page is damaged"),
        (
            lambda path: corrupt(path, len(MAGIC), struct.pack("<I", FORMAT_VERSION + 1)),
            f"format {FORMAT_VERSION + 1}; this reft reads format {FORMAT_VERSION}",
        ),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "truncated"),
        (lambda path: os.truncate(path, 0), "not an arena"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "cannot be opened"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    ],
)
def test_a_file_that_is_no_whole_arena_is_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    damage(path)
    with pytest.raises(ArenaError, match=says):
        Arena.open(path, SECRET)


def test_anothers_arena_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with pytest.raises(FileNotFoundError):
        Arena.open(path, SECRET)
    with make(path) as arena:
        write_version(arena, 1)
    with pytest.raises(ArenaError, match="MAC does not match"):
        Arena.open(path, bytes(32))
    with pytest.raises(ArenaError, match="version of job 'job'; expected job 'other'"):
        Arena.open(path, SECRET, job_id="other")
    with pytest.raises(ArenaError, match="without the job's secret"):
        Arena.open(path, None, writable=True)


def test_a_forged_header_with_right_hashes_is_refused(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "rank0-slot0.arena", tmp_path / "rank0-slot1.arena"
    with make(mine) as arena:
        write_version(arena, 1)
    with make(theirs, secret=b"s" * 32) as arena:
        write_version(arena, 9)
    raw = bytearray(mine.read_bytes())
    raw[4096:] = theirs.read_bytes()[4096:]
    mine.write_bytes(raw)
    with pytest.raises(ArenaError, match=r"header.*MAC does not match"):
        Arena.open(mine, SECRET)
    with Arena.open(theirs, None) as arena:  # looking without a secret is possible
        assert arena.state is ArenaState.COMMITTED
