"""Arenas: a torn header reads as the older state, damage is found, memory is really there."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from arena_tools import SECRET, fill, header, make, write_version

from reft.blocks import BlockKey, Section
from reft.errors import ArenaError, OutOfMemoryError
from reft.store import files
from reft.store.arena import Arena, ArenaHeader, ArenaState, Entry, free_bytes, reserved_bytes, scan
from reft.store.header import FORMAT_VERSION, MAGIC


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


def read_back(path: Path) -> ArenaHeader | None:
    with Arena.open(path, SECRET) as arena:
        return arena.header()


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


def test_bytes_that_land_in_any_order_read_as_the_older_state(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1, ArenaState.SEALED)
    old = path.read_bytes()
    with Arena.open(path, SECRET, writable=True) as arena:
        arena.commit()
    new = path.read_bytes()
    changed = [i for i in range(len(old)) if old[i] != new[i]]
    dice = random.Random(1)
    for _ in range(300):
        mixed = bytearray(old)
        for i in dice.sample(changed, dice.randrange(len(changed))):
            mixed[i] = new[i]
        path.write_bytes(mixed)
        found = read_back(path)
        assert found is not None
        assert found.state is ArenaState.SEALED


def test_begin_is_on_record_before_any_data_byte_changes(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena, Arena.open(path, SECRET) as reader:
        write_version(arena, 1)
        data = bytes(reader.data)
        arena.begin(header(2))
        found = reader.header()
        assert found is not None
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


CHILD = """
    import sys
    from pathlib import Path
    from arena_tools import SECRET, header, fill, make
    from reft.store.arena import Arena
    fresh, old = (Arena.open(Path(p), SECRET, writable=True) for p in sys.argv[1:3])
    fresh.begin(header(2))
    fresh.data[:1024] = b"x" * 1024
    print("writing", flush=True)
    step = 3
    while True:   # goes through every transition until it is killed
        old.begin(header(step)); old.seal(fill(old, 4)); old.commit(); step += 1
"""


def spawn(code: str, *arguments: str) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = spawn(code, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.timeout(60)
def test_sigkill_in_the_middle_of_writing_leaves_the_older_version_readable(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank0-slot{i}.arena" for i in range(3)]
    for path in paths:
        with make(path) as arena:
            write_version(arena, 1)
    with child(CHILD, str(paths[0]), str(paths[1])) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    torn, busy, kept = (read_back(path) for path in paths)
    assert torn is not None
    assert (torn.state, torn.label.step) == (ArenaState.WRITING, 2)
    assert busy is not None  # whatever it was doing, the header is readable
    assert kept is not None
    assert kept.state is ArenaState.COMMITTED
    with Arena.open(paths[2], SECRET) as arena:
        assert all(arena.verify(e) for e in kept.entries)
    with Arena.open(paths[1], SECRET) as arena:
        assert all(arena.verify(e) for e in busy.entries)


def test_p5_a_flipped_byte_in_any_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
        found = arena.header()
        assert found is not None
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
    assert said is not None
    assert said.entries == tuple(entries)
    assert (said.label.incarnation, said.label.step, said.sealed_unix_secs) == (3, 7, 12.5)
    with Arena.open(path, SECRET) as arena:
        assert arena.header() == said
        assert bytes(arena.data) == data
        assert bytes(arena.read_block(entries[1])) == data[1024:2024]


def test_p9_all_memory_is_allocated_and_mapped_at_creation(tmp_path: Path) -> None:
    size = 32 * 2**20
    path = Path("/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) / f"reft-test-{os.getpid()}.arena"
    try:
        with Arena.create(path, size, 8, SECRET) as arena:
            assert path.stat().st_blocks * 512 >= size
            assert path.stat().st_size == reserved_bytes(size, 8) == arena.file_bytes
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            torch.frombuffer(arena.data, dtype=torch.uint8).fill_(1)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            assert faults < size // 4096 // 10
    finally:
        path.unlink(missing_ok=True)


def test_touching_by_hand_changes_nothing(tmp_path: Path) -> None:
    with make(tmp_path / "rank0-slot0.arena") as arena:
        write_version(arena, 1)
        mapping = arena._map
        assert mapping is not None
        before = bytes(mapping)
        files.touch_by_hand(mapping, 0, len(before))
        assert bytes(mapping) == before


def test_an_arena_of_the_same_size_keeps_its_content_and_any_other_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    with make(path) as arena:
        assert arena.state is ArenaState.COMMITTED
    for data_bytes in (1024 * 64, 1024 * 2):
        with Arena.create(path, data_bytes, 4, SECRET) as arena:
            assert arena.header() is None
            assert arena.state is ArenaState.EMPTY
            assert arena.data_bytes == data_bytes == len(arena.data)
    path.write_bytes(b"something else")
    with make(path) as arena:
        assert arena.header() is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reader_keeps_the_version_it_has_open_when_the_arena_is_resized(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    with Arena.open(path, SECRET) as reader:
        assert reader.lock_shared()
        found = reader.header()
        assert found is not None
        with Arena.create(path, 1024, 4, SECRET) as small:
            small.data[:] = b"\xff" * 1024
            assert reader.header() == found
            assert all(reader.verify(e) for e in found.entries)


def test_tensors_on_the_data_region_are_writable_and_outlive_close(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    arena = make(path)
    tensor = torch.frombuffer(arena.data, dtype=torch.uint8)
    tensor.fill_(7)
    arena.close()
    del arena
    tensor[0] = 9
    with Arena.open(path, SECRET) as reader:
        assert reader.data[0] == 9
        assert np.frombuffer(reader.data, np.uint8)[1:].tolist() == [7] * (len(tensor) - 1)


def test_closing_gives_the_memory_back_at_once(tmp_path: Path) -> None:
    """Not when the garbage collector happens to run: the next arena needs the room now."""
    path = tmp_path / "rank0-slot0.arena"

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    gc.disable()
    try:
        with make(path) as arena:
            write_version(arena, 1)
            assert mapped()
        assert not mapped()
        arena = make(path)
        assert arena.header() is not None
        del arena
        assert not mapped()
    finally:
        gc.enable()


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
    with make(tmp_path / "rank0-slot0.arena", blocks=2) as arena:
        arena.begin(header(1))
        room = arena.max_entries
        assert room == 2
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


def corrupt(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def test_a_file_that_is_not_this_jobs_arena_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"

    def fresh() -> None:
        path.unlink(missing_ok=True)
        with make(path) as arena:
            write_version(arena, 1)

    with pytest.raises(FileNotFoundError):
        Arena.open(path, SECRET)
    fresh()
    with pytest.raises(ArenaError, match="MAC does not match"):
        Arena.open(path, bytes(32))
    with pytest.raises(ArenaError, match="version of job 'job'; expected job 'other'"):
        Arena.open(path, SECRET, job_id="other")
    with pytest.raises(ArenaError, match="without the job's secret"):
        Arena.open(path, None, writable=True)
    corrupt(path, 0, b"ELF")
    with pytest.raises(ArenaError, match="not an arena"):
        Arena.open(path, SECRET)
    fresh()
    corrupt(path, 60, b"\x00\x01\x02")
    with pytest.raises(ArenaError, match="first page is damaged"):
        Arena.open(path, SECRET)
    fresh()
    corrupt(path, len(MAGIC), struct.pack("<I", FORMAT_VERSION + 1))
    with pytest.raises(
        ArenaError, match=f"format {FORMAT_VERSION + 1}; this reft reads format {FORMAT_VERSION}"
    ):
        Arena.open(path, SECRET)
    fresh()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ArenaError, match="truncated"):
        Arena.open(path, SECRET)
    os.truncate(path, 0)
    with pytest.raises(ArenaError, match="not an arena"):
        Arena.open(path, SECRET)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(ArenaError, match="cannot be opened"):
        Arena.open(path, SECRET)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArenaError, match="not a regular file"):
        Arena.open(path, SECRET)


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


def test_scan_opens_what_it_can_and_says_why_not(tmp_path: Path) -> None:
    for slot, state in enumerate(ArenaState):
        with make(tmp_path / f"rank0-slot{slot}.arena") as arena:
            write_version(arena, slot, state)
    (tmp_path / "rank1-slot0.arena").write_bytes(b"junk")
    (tmp_path / "status.json").write_text("{}")
    found = scan(tmp_path, SECRET)
    assert [path.name for path, _ in found] == [f"rank0-slot{i}.arena" for i in range(4)] + [
        "rank1-slot0.arena"
    ]
    arenas = [a for _, a in found if isinstance(a, Arena)]
    assert [a.state for a in arenas] == list(ArenaState)
    assert isinstance(found[-1][1], str)
    assert "not an arena" in found[-1][1]
    for arena in arenas:
        arena.close()
    assert scan(tmp_path / "nowhere", SECRET) == []


def test_more_than_the_machine_has_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    wanted = 2**60
    with pytest.raises(
        OutOfMemoryError, match=rf"rank0-slot0.arena: {reserved_bytes(wanted, 1)} bytes.*free"
    ) as info:
        Arena.create(path, wanted, 1, SECRET)
    assert "reft clean" in str(info.value)
    assert not path.exists()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(mount_point)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here: needs root")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


def test_p6_a_full_tmpfs_is_a_typed_error_and_leaves_no_file(small_tmpfs: Path) -> None:
    kept = small_tmpfs / "rank0-slot0.arena"
    with Arena.create(kept, 2**20, 4, SECRET) as arena:
        write_version(arena, 1)
    path = small_tmpfs / "rank0-slot1.arena"
    with pytest.raises(OutOfMemoryError, match=r"rank0-slot1\.arena"):
        Arena.create(path, 2**20, 4, SECRET)
    assert not path.exists()
    # Somebody else takes the memory between the look and the allocation: the kernel's answer counts.
    with path.open("wb") as stream, pytest.raises(OutOfMemoryError, match=r"rank0-slot1\.arena"):
        files.allocate(stream.fileno(), path, 2**20)
    assert path.stat().st_blocks == 0
    path.unlink()
    found = read_back(kept)
    assert found is not None
    assert found.state is ArenaState.COMMITTED
    kept.unlink()
    assert free_bytes(small_tmpfs) > 2**20
    Arena.create(path, 2**20, 4, SECRET).close()


def test_an_arena_without_blocks_or_data_works(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "rank0-slot0.arena", 0, 0, SECRET) as arena:
        arena.begin(header(1))
        arena.seal([])
        arena.commit()
        assert arena.state is ArenaState.COMMITTED
        assert len(arena.data) == 0
    with pytest.raises(ArenaError, match="not negative"):
        Arena.create(tmp_path / "x.arena", -1, 0, SECRET)
