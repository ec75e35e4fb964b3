"""A launcher and its memory directory: whose it is, what an earlier run left there, and who takes it away (P3, P7)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reft.errors import AuthenticationError
from reft.memory.arena import Arena
from reft.memory.files import holder
from reft.memory.jobdir import SECRET_FILE, JobDir
from reft.node.client import NodeMemory
from tests.job.conftest import SECRET


@pytest.mark.parametrize("end", [NodeMemory.remove, NodeMemory.discard_unused])
def test_p7_a_launcher_leaves_the_directory_that_another_made_and_holds(tmp_path: Path, end: object) -> None:
    first = NodeMemory(tmp_path, "job", "node0")
    first.prepare(SECRET)
    shutil.rmtree(first.path)
    second = NodeMemory(tmp_path, "job", "node0")
    second.prepare(SECRET)
    end(first)  # type: ignore[operator]
    assert holder(second.path) is not None
    end(second)  # type: ignore[operator]
    assert not second.path.exists()


def test_p7_a_directory_made_again_is_held_again_and_goes_with_a_good_end(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    shutil.rmtree(memory.path)
    memory.remove()  # nothing is there
    memory.make_again(SECRET)
    assert holder(memory.path) is not None
    memory.remove()
    assert not memory.path.exists()


def test_what_trainers_made_again_goes_with_a_good_end(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    (memory.path / "job.lock").unlink()  # trainers do not hold it
    memory.remove()
    assert not memory.path.exists()


# -- what was there before ---------------------------------------------------------------------------


def left_by_an_earlier_run(memory_dir: Path) -> Path:
    job = JobDir.open_or_create(memory_dir, "job", "node0", secret=SECRET)
    Arena.create(job.path / "rank0-slot0.arena", 4096, 4, SECRET).close()
    return job.path


def test_p7_a_launch_that_meets_nobody_leaves_the_memory_of_an_earlier_run_and_nothing_of_its_own(
    tmp_path: Path,
) -> None:
    path = left_by_an_earlier_run(tmp_path)
    (path / "exits-3").mkdir()  # of a launcher that was killed
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    assert not (path / "exits-3").exists()
    memory.discard_unused()
    assert (path / "rank0-slot0.arena").exists()


@pytest.mark.parametrize("damage", ["readable by others", "short", "link"])
def test_p3_memory_whose_secret_cannot_be_read_stays(tmp_path: Path, damage: str) -> None:
    path = left_by_an_earlier_run(tmp_path)
    file = path / SECRET_FILE
    if damage == "readable by others":
        file.chmod(0o644)
    elif damage == "short":
        file.write_text(SECRET.hex()[:10])
    else:
        file.rename(path / "moved")
        file.symlink_to("moved")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(AuthenticationError, match=r"secret.*reft clean"):
        NodeMemory(tmp_path, "job", "node0").prepare(SECRET)
    after = {p.name: p.read_bytes() for p in path.iterdir()}
    assert {name: after.get(name) for name in before} == before


def test_p3_memory_under_another_secret_stays(tmp_path: Path) -> None:
    path = left_by_an_earlier_run(tmp_path)
    with pytest.raises(AuthenticationError, match=r"another secret.*is kept.*reft clean"):
        NodeMemory(tmp_path, "job", "node0").prepare(b"x" * 32)
    assert (path / "rank0-slot0.arena").exists()
    assert (path / SECRET_FILE).read_text().strip() == SECRET.hex()


def test_p3_memory_whose_secret_is_lost_is_opened_by_the_users(tmp_path: Path) -> None:
    path = left_by_an_earlier_run(tmp_path)
    other = path / "rank1-slot0.arena"
    Arena.create(other, 4096, 4, bytes(32)).close()
    (path / SECRET_FILE).unlink()
    NodeMemory(tmp_path, "job", "node0").prepare(SECRET)
    assert (path / "rank0-slot0.arena").exists()
    assert not other.exists()


def test_p11_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "job").mkdir(parents=True)
    (home / "job" / SECRET_FILE).write_text("precious")
    (tmp_path / "reft").symlink_to(home)
    with pytest.raises(AuthenticationError, match="symbolic link"):
        NodeMemory(tmp_path / "reft", "job", "node0").prepare(bytes(32))
    (tmp_path / "memory").mkdir(mode=0o700)
    (tmp_path / "memory" / "job").symlink_to(home / "job")
    with pytest.raises(AuthenticationError, match="expected a directory"):
        NodeMemory(tmp_path / "memory", "job", "node0").prepare(bytes(32))
    assert [path.name for path in (home / "job").iterdir()] == [SECRET_FILE]
