"""How much memory may still be taken."""

from __future__ import annotations

from pathlib import Path

from reft.memory.files import cgroup_free_bytes, default_margin_bytes, free_bytes

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
