"""A launcher and its memory directory, when somebody takes that away under it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reft.job.node import NodeMemory
from reft.memory.joblock import holder

SECRET = b"s" * 32


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


def test_what_trainers_made_again_goes_with_a_good_end(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    shutil.rmtree(memory.path)
    memory.remove()  # nothing is there
    again = NodeMemory(tmp_path, "job", "node0")
    again.prepare(SECRET)
    (again.path / "job.lock").unlink()  # trainers do not hold it
    again.remove()
    assert not again.path.exists()


def test_p7_a_directory_made_again_is_held_again(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "job", "node0")
    memory.prepare(SECRET)
    shutil.rmtree(memory.path)
    memory.make_again(SECRET)
    assert holder(memory.path) is not None
    memory.remove()
    assert not memory.path.exists()
