"""An arena's memory is really there, stays as long as somebody looks at it, and is given back."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from arena_tools import SECRET, make, read_back, write_version

from reft.errors import ArenaError, OutOfMemoryError
from reft.memory import arena as arena_module
from reft.memory import files
from reft.memory.arena import Arena, reserved_bytes
from reft.memory.files import cgroup_free_bytes, default_margin_bytes, free_bytes
from reft.memory.header import ArenaState
from tests.faults.job import small_file_system


def test_p9_all_memory_is_allocated_and_mapped_at_creation(tmp_path: Path) -> None:
    size = 32 * 2**20
    path = (
        Path("/dev/shm" if os.path.isdir("/dev/shm") else tmp_path)
        / f"reft-test-{os.getpid()}.arena"
    )
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
    path = tmp_path / "rank0-slot0.arena"
    with make(path) as arena:
        write_version(arena, 1)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        before = bytes(mapping)
        files.touch_by_hand(mapping, 0, len(before))
        assert bytes(mapping) == before


def test_an_arena_of_the_same_size_keeps_its_content_and_any_other_is_emptied(
    tmp_path: Path,
) -> None:
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
    with small_file_system(tmp_path / "small", "2m") as reason:
        if reason is not None:
            pytest.skip(reason)
        yield tmp_path / "small"


@pytest.mark.process
def test_p6_a_full_tmpfs_is_a_typed_error_and_leaves_no_file(small_tmpfs: Path) -> None:
    kept = small_tmpfs / "rank0-slot0.arena"
    with Arena.create(kept, 2**20, 4, SECRET) as arena:
        write_version(arena, 1)
    path = small_tmpfs / "rank0-slot1.arena"
    with pytest.raises(OutOfMemoryError, match=r"rank0-slot1\.arena"):
        Arena.create(path, 2**20, 4, SECRET)
    assert not path.exists()
    # Somebody else takes the memory between the look and the allocation: the kernel's answer counts.
    with path.open("wb") as stream:
        stream.truncate(2**20)
        with pytest.raises(OutOfMemoryError, match=r"rank0-slot1\.arena"):
            files.allocate(stream.fileno(), path, 2**20)
    assert path.stat().st_blocks == 0
    path.unlink()
    found = read_back(kept)
    assert found.state is ArenaState.COMMITTED
    kept.unlink()
    assert free_bytes(small_tmpfs) > 2**20
    Arena.create(path, 2**20, 4, SECRET).close()


def test_p9_memory_comes_as_blocks_are_written_and_the_rest_of_it_when_all_have(
    tmp_path: Path,
) -> None:
    size, path = 8 * 2**20, tmp_path / "rank0-slot0.arena"
    blocks = {0: 5000, 2**20 + 64: 2**20, size - 100: 100}
    with Arena.create(path, size, 8, SECRET, touch=False) as arena:
        assert path.stat().st_blocks * 512 < size // 2
        for offset, nbytes in blocks.items():
            arena.write(offset, memoryview(bytes([7]) * nbytes))
        with pytest.raises(ArenaError, match="outside"):
            arena.write(size - 99, memoryview(bytes(100)))
        arena.allocate()
        assert path.stat().st_blocks * 512 >= size
        expected = np.zeros(size, np.uint8)
        for offset, nbytes in blocks.items():
            expected[offset : offset + nbytes] = 7
        np.testing.assert_array_equal(np.frombuffer(arena.data, np.uint8), expected)


@pytest.mark.process
def test_p6_where_memory_ends_while_an_arena_is_filled_its_header_is_still_read(
    small_tmpfs: Path,
) -> None:
    path = small_tmpfs / "rank0-slot0.arena"
    with Arena.create(path, 3 * 2**19, 4, SECRET, touch=False) as arena:
        (small_tmpfs / "another").write_bytes(bytes(2**20))
        arena.write(0, memoryview(bytes(2**19)))
        with pytest.raises(OutOfMemoryError, match=r"rank0-slot0\.arena"):
            arena.write(2**19, memoryview(bytes(2**20)))
        with pytest.raises(OutOfMemoryError, match=r"rank0-slot0\.arena"):
            arena.allocate()
        assert arena.state is ArenaState.EMPTY
        assert arena.lost() is None


@pytest.mark.process
def test_p6_an_arena_that_was_left_without_its_memory_is_refused_where_there_is_none(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a restore leaves it that found no room; also where the kernel cannot touch pages for us."""
    path, size = small_tmpfs / "rank0-slot0.arena", 3 * 2**19
    Arena.create(path, size, 4, SECRET, touch=False).close()
    (small_tmpfs / "another").write_bytes(bytes(2**20))

    def by_hand(mapping: mmap.mmap, path: Path) -> None:
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "would be killed by SIGBUS"

    monkeypatch.setattr(arena_module, "touch_pages", by_hand)
    with pytest.raises(OutOfMemoryError, match=r"rank0-slot0\.arena"):
        Arena.create(path, size, 4, SECRET)
    (small_tmpfs / "another").unlink()
    with Arena.create(path, size, 4, SECRET) as arena:
        assert arena.state is ArenaState.EMPTY


MIB = 2**20


def _group(directory: Path, limit: str, used: int, cache: int, *, version: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        f"anon 4096\n{prefix}inactive_file {cache // 4}\n{prefix}active_file {cache - cache // 4}\nshmem {used}\n"
    )


def test_of_nested_control_groups_each_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    root = tmp_path / "root"
    _group(root / "job" / "step", "max", 50 * MIB, 0, version=2)
    _group(root / "job", str(100 * MIB), 70 * MIB, 8 * MIB, version=2)
    assert list(cgroup_free_bytes(tmp_path, root)) == [38 * MIB]
    # The limit shrinks below what is in use.
    _group(root / "job" / "step", str(40 * MIB), 50 * MIB, 0, version=2)
    assert list(cgroup_free_bytes(tmp_path, root)) == [-10 * MIB, 38 * MIB]


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/slurm/uid_0\n0::/\n")
    root = tmp_path / "root"
    _group(root / "memory" / "slurm" / "uid_0", str(10 * MIB), 9 * MIB, 2 * MIB, version=1)
    assert list(cgroup_free_bytes(tmp_path, root)) == [3 * MIB]


def test_in_a_container_the_mounted_group_counts(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/kubepods/pod7/abc\n")
    root = tmp_path / "root"
    _group(root, str(64 * MIB), 60 * MIB, 0, version=2)
    assert list(cgroup_free_bytes(tmp_path, root)) == [4 * MIB]


def test_without_control_groups_the_file_system_and_the_machine_count(tmp_path: Path) -> None:
    assert list(cgroup_free_bytes(tmp_path, tmp_path)) == []
    assert free_bytes(tmp_path) > 0
    assert 0 < default_margin_bytes(tmp_path) <= 2**30
