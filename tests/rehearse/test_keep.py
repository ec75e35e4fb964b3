"""What a rehearsed script writes stays away from its own files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reft.errors import ConfigError
from reft.rehearse.keep import Guard, to_load, to_save


def test_checkpoints_go_below_the_directory_at_their_own_path(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    assert to_save(root, "/data/run/step5") == root / "data" / "run" / "step5"
    assert to_save(root, "checkpoints") == root.joinpath(*Path.cwd().parts[1:], "checkpoints")
    assert to_save(root, to_save(root, "/data/run")) == root / "data" / "run"


def test_what_is_loaded_is_the_rehearsals_own_or_the_scripts(tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "saved", tmp_path / "checkpoint"
    assert to_load(root, checkpoint) == checkpoint
    assert to_load(root, to_save(root, checkpoint)) == checkpoint
    to_save(root, checkpoint).mkdir(parents=True)
    assert to_load(root, checkpoint) == to_save(root, checkpoint)


@pytest.fixture
def guarded(tmp_path: Path) -> tuple[Guard, Path]:
    directory, work = tmp_path / "rehearsal", tmp_path / "work"
    directory.mkdir()
    work.mkdir()
    return Guard(directory), work


def opens(guard: Guard, path: Path, flags: int) -> None:
    guard("open", (str(path), None, flags))


def test_a_file_that_is_there_is_not_emptied(guarded: tuple[Guard, Path]) -> None:
    guard, work = guarded
    (work / "losses.txt").write_text("of a run of weeks")
    with pytest.raises(
        ConfigError, match=r"test_keep.py:\d+ would overwrite .*losses.txt.*--overwrite"
    ):
        opens(guard, work / "losses.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with pytest.raises(ConfigError, match=r"losses\.txt"):
        guard("os.rename", (str(work / "new"), str(work / "losses.txt"), -1, -1))


def test_files_are_read_and_appended_to(guarded: tuple[Guard, Path]) -> None:
    guard, work = guarded
    (work / "losses.txt").write_text("of a run of weeks")
    opens(guard, work / "losses.txt", os.O_RDONLY)
    opens(guard, work / "losses.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def test_a_file_that_the_rehearsal_made_may_be_written_again(guarded: tuple[Guard, Path]) -> None:
    guard, work = guarded
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    opens(guard, work / "new.txt", flags)
    (work / "new.txt").write_text("of the first run")
    opens(guard, work / "new.txt", flags)
    opens(
        Guard(work.parent / "rehearsal"), work / "new.txt", flags
    )  # another process, or the next run


def test_the_rehearsals_own_files_and_caches_are_free(guarded: tuple[Guard, Path]) -> None:
    guard, work = guarded
    for path in (
        work.parent / "rehearsal" / "file",
        work / ".triton" / "kernel",
        work / "__pycache__" / "a.pyc",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        opens(guard, path, os.O_WRONLY | os.O_TRUNC)
    opens(guard, Path("/dev/null"), os.O_WRONLY | os.O_TRUNC)
