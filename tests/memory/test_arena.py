"""Arenas: damage is found, transitions have an order, and files that are not this job's are refused."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from arena_tools import SECRET, answer, fill, header, holder, make, read_back, write_version
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reft.device import compiled
from reft.errors import ArenaError
from reft.grid import BlockKey, Section
from reft.memory import arena as arena_lock
from reft.memory import stream
from reft.memory.arena import Arena
from reft.memory.header import (
    FORMAT_VERSION,
    MAGIC,
    TABLE,
    ArenaState,
    Entry,
    checksum,
    pack_entries,
)
from reft.memory.stream import (
    EXPONENTS,
    CutRanges,
    HashingCopier,
    PlainHashingCopier,
    choose_loop,
    copier,
    find_ranges,
    hashing_copier,
)


def test_p5_a_flipped_byte_in_any_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
        found = arena.header()
        assert all(arena.verify(e) for e in found.entries)
        for block in found.entries:
            for at in (0, block.nbytes // 2, block.nbytes - 1):
                arena.data[block.arena_offset + at] ^= 0x10
                assert [arena.verify(e) for e in found.entries] == [
                    e is not block for e in found.entries
                ]
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
def test_packed_entries_that_do_not_fit_are_refused(
    tmp_path: Path, offset: int, nbytes: int
) -> None:
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    return path


@pytest.mark.timeout(60)
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
    with (
        Arena.open(path, SECRET, writable=True) as writer,
        holder(path, "arena.lock_shared()") as process,
    ):
        assert answer(process) == "True"
        assert not writer.try_lock_exclusive()
        with pytest.raises(ArenaError, match="pinned by a reader"):
            writer.begin(header(2))
        assert writer.state is ArenaState.COMMITTED
        process.kill()
        process.wait(timeout=30)
        writer.begin(header(2))
        assert writer.state is ArenaState.WRITING


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
def test_a_closed_arena_locks_nothing(path: Path) -> None:
    arena = Arena.open(path, SECRET, writable=True)
    assert arena.try_lock_exclusive()
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.lock_shared()
    with Arena.open(path, SECRET) as other:
        assert other.lock_shared()


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
def test_a_header_torn_at_any_byte_reads_as_the_older_state(
    tmp_path: Path, name: str, tail: str
) -> None:
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
    assert [len(data) for _, data in wipes] == (
        [len(MAGIC)] if "begin" in name or name == "clear" else []
    )

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


def test_damage_to_the_header_never_brings_back_a_version_that_is_being_overwritten(
    tmp_path: Path,
) -> None:
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


PAGE = 4096
SIZES = st.one_of(
    st.integers(0, 300), st.integers(0, 20 * PAGE), st.sampled_from([4 * PAGE, 8 * PAGE])
)


def use_pieces(nbytes: int) -> None:
    """Copy in the given way, as :func:`~reft.memory.stream.choose_loop` would choose it."""
    function = compiled("reft.memory._stream", "reft_use_pieces")
    function.argtypes = [ctypes.c_size_t]
    function(nbytes)


WAYS = {"pages": 0, "pieces of 4 KiB": PAGE, "pieces of 16 KiB": 4 * PAGE}


@given(
    nbytes=SIZES,
    source_at=st.integers(0, 70),
    target_at=st.integers(0, 70),
    seed=st.integers(0, 2**32),
    pieces=st.sampled_from([0, PAGE, 4 * PAGE]),
)
def test_a_copy_is_exact_and_touches_nothing_else(
    nbytes: int, source_at: int, target_at: int, seed: int, pieces: int
) -> None:
    if copier() is not ctypes.memmove:
        use_pieces(pieces)
    source = np.random.default_rng(seed).integers(0, 256, nbytes + source_at, dtype=np.uint8)
    target = np.full(nbytes + target_at + 100, 0xEE, np.uint8)
    copier()(target.ctypes.data + target_at, source.ctypes.data + source_at, nbytes)
    np.testing.assert_array_equal(target[target_at : target_at + nbytes], source[source_at:])
    assert (target[:target_at] == 0xEE).all()
    assert (target[target_at + nbytes :] == 0xEE).all()


HASH_SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 20 * PAGE),
    st.builds(lambda blocks, more: 1024 * blocks + more, st.integers(1, 80), st.integers(-1, 1)),
)
PARTS = st.lists(
    st.tuples(st.one_of(st.integers(0, 1100), st.integers(0, 6 * PAGE)), st.booleans()), max_size=12
)


@pytest.fixture(params=[*WAYS, "SSE2", "plain"])
def hasher(request: pytest.FixtureRequest) -> Iterator[HashingCopier]:
    if request.param == "plain":
        yield PlainHashingCopier()
        return
    made = hashing_copier()
    if type(made) is PlainHashingCopier:
        pytest.skip("the loop that hashes was not built: no C++ compiler, or no x86-64")
    use_avx2 = compiled("reft.memory._stream", "reft_use_avx2")
    wide = request.param in WAYS
    if use_avx2(wide) != wide:
        pytest.skip("this processor has no AVX2")
    use_pieces(WAYS.get(request.param, PAGE))
    yield made
    use_avx2(True)
    use_pieces(choose_loop())


def test_a_measured_way_to_copy_is_used() -> None:
    if copier() is ctypes.memmove:
        pytest.skip("the loop was not built: no C++ compiler, or no x86-64")
    assert choose_loop() in WAYS.values()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=HASH_SIZES,
    parts=PARTS,
    at=st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 2**32)),
    calls=st.integers(1, 4),
)
def test_p5_what_is_copied_is_hashed_in_one_pass_however_it_is_cut(
    hasher: HashingCopier,
    nbytes: int,
    parts: list[tuple[int, bool]],
    at: tuple[int, int, int],
    calls: int,
) -> None:
    """Some parts are hashed only. The same object is used twice: nothing of the first input is left."""
    source_at, target_at, seed = at
    source = np.random.default_rng(seed).integers(0, 256, nbytes + source_at, dtype=np.uint8)
    target = np.full(nbytes + target_at + 100, 0xEE, np.uint8)
    expected = target.copy()
    rows, begin = [], 0
    for wanted, copied in [*parts, (nbytes, True)]:
        size = min(wanted, nbytes - begin)
        place, read = target_at + begin, source_at + begin
        rows.append((copied and target.ctypes.data + place, source.ctypes.data + read, size))
        if copied:
            expected[place : place + size] = source[read : read + size]
        begin += size
    for _ in range(2):
        for call in range(calls):
            hasher.copy(
                find_ranges(rows[call * len(rows) // calls : (call + 1) * len(rows) // calls])
            )
        assert hasher.take() == checksum(source[source_at:])
    np.testing.assert_array_equal(target, expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(
        st.lists(st.integers(0, 6 * PAGE), min_size=1, max_size=4), min_size=1, max_size=8
    ),
    steps=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1])), min_size=1, max_size=4
    ),
)
def test_p5_chunks_are_copied_and_hashed_until_another_thread_says_so(
    hasher: HashingCopier, chunks: list[list[int]], steps: list[tuple[int, int | None]]
) -> None:
    source = np.random.default_rng(2).integers(0, 256, sum(map(sum, chunks)), dtype=np.uint8)
    target = np.zeros_like(source)
    rows, at = [], 0
    for sizes in chunks:
        rows.append([])
        for size in sizes:
            rows[-1].append((target.ctypes.data + at, source.ctypes.data + at, size))
            at += size
    cut = CutRanges.of(rows)
    done, number = 0, 0
    while done < len(chunks):
        wanted, flag = steps[number % len(steps)]
        number += 1
        stop = min(len(chunks), done + wanted)
        copied = hasher.copy_chunks(cut, done, stop, None if flag is None else ctypes.c_int(flag))
        assert copied == (1 if flag else stop - done)
        done += copied
        end = cut.nbytes(0, done)
        np.testing.assert_array_equal(target[:end], source[:end])
        assert not target[end:].any()
    assert hasher.take() == checksum(source)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    bits=st.sampled_from(["nan", "inf", "-inf", "largest", "-largest", "0", "ints"]),
    nbytes=st.integers(1, 5 * PAGE).map(lambda n: 8 * n),
    places=st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 200).map(lambda n: 8 * n)),
)
def test_numbers_that_are_not_finite_are_seen_on_the_way(
    hasher: HashingCopier, dtype: str, bits: str, nbytes: int, places: tuple[float, int]
) -> None:
    """Anywhere, and nothing else is: the largest numbers are none, nor are the same bits of integers."""
    kind, (at, before) = getattr(torch, dtype), places
    numbers = (torch.randn(nbytes // 8, dtype=torch.float64) * 1e4).to(kind)
    value = torch.finfo(kind).max * (-1 if bits[0] == "-" else 1) if "largest" in bits else bits
    numbers[int(at * len(numbers))] = float("nan" if bits == "ints" else value)
    source, head = numbers.view(torch.uint8), torch.full((before,), 255, dtype=torch.uint8)
    target = torch.empty_like(source)
    rows = [
        (0, head.data_ptr(), before),
        (
            target.data_ptr(),
            source.data_ptr(),
            len(source),
            0 if bits == "ints" else EXPONENTS[dtype],
        ),
    ]
    for _ in range(2):
        hasher.copy(find_ranges(rows))
        assert hasher.take() == checksum(torch.cat([head, source]).numpy().data)
        assert hasher.not_finite == (bits in ("nan", "inf", "-inf"))
    assert torch.equal(target, source)
    hasher.copy(find_ranges([(0, source.data_ptr(), len(source))]))
    hasher.take()
    assert not hasher.not_finite


def test_without_the_compiled_loops_memmove_and_the_package_do_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reft.device.find_spec", lambda name: None)
    known = (copier, stream.compiled_hash)
    for function in known:
        function.cache_clear()
    try:
        assert copier() is ctypes.memmove
        assert type(hashing_copier()) is PlainHashingCopier
    finally:
        for function in known:
            function.cache_clear()
