"""Files are whole or not there."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from reft.durable import whole_file, write_durably


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_durably(path, b"old")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"new, but not")
            assert path.read_bytes() == b"old"
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    with whole_file(tmp_path / "secret", mode=0o600, sync=False) as file:
        assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_draft_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "latest"
    draft = f".latest.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.new"
    (tmp_path / draft).symlink_to(elsewhere)
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert not elsewhere.exists()


def test_of_several_that_do_not_replace_one_another_the_first_stays(tmp_path: Path) -> None:
    path, begun = tmp_path / "secret", threading.Barrier(8)
    found = []

    def write(number: int) -> None:
        begun.wait(60)
        with whole_file(path, replace=False) as file:
            file.write(bytes([number]) * 4096)
        found.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert set(found) == {path.read_bytes()}
    assert len(set(path.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [path]
