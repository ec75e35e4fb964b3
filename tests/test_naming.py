"""Names of jobs, pure: never shared by accident, the same at every start, safe as a directory's name (P7)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.config import parse_block
from reft.engine.identity import tell_of_siblings
from reft.memory.jobdir import JobDir
from reft.naming import is_name, name_of_run, own_name, safe_name

UUID = "123e4567-e89b-42d3-a456-426614174000"


@given(st.text(max_size=300))
def test_p7_any_text_gives_a_usable_name(text: str) -> None:
    name = safe_name(text)
    assert is_name(name)
    assert len(name) <= 128
    assert is_name(text) == (name == text)


@given(st.text(max_size=20), st.text(max_size=20))
def test_p7_two_texts_give_two_names(one: str, other: str) -> None:
    assert (one == other) == (safe_name(one) == safe_name(other))


def test_p7_a_name_is_of_directory_program_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to("train.py")
    name = own_name("train.py", ["--lr", "1"])
    assert name.startswith("train-")
    assert is_name(name)
    assert name == own_name(os.path.abspath("train.py"), ["--lr", "1"])
    assert name.rpartition("-")[0] == own_name("link.py", ["--lr", "1"]).rpartition("-")[0].replace(
        "link", "train"
    )
    others = [
        own_name("train.py", ["--lr", "2"]),
        own_name("train.py", ["--lr 1"]),
        own_name("other.py", ["--lr", "1"]),
        own_name("train", ["--lr", "1"], module=True),
    ]
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    others.append(own_name("../train.py", ["--lr", "1"]))
    assert len({name, *others}) == 6


@pytest.mark.parametrize(
    ("run_id", "nodes", "expected"),
    [
        ("", 2, None),
        ("none", 2, None),
        ("job7", 1, "job7"),
        (UUID, 1, None),  # torchrun --standalone
        (UUID, 2, UUID),
    ],
)
def test_p7_a_run_id_names_a_job_unless_it_is_nobodys(run_id: str, nodes: int, expected: str | None) -> None:
    environ = {"TORCHELASTIC_RUN_ID": run_id, "GROUP_WORLD_SIZE": str(nodes)}
    assert name_of_run(environ) == expected
    assert name_of_run({}) is None


def test_p10_a_run_id_with_other_characters_is_no_error() -> None:
    assert parse_block({}, {"TORCHELASTIC_RUN_ID": "run 7/a"}).job_id == safe_name("run 7/a")
    assert parse_block({}, {"TORCHELASTIC_RUN_ID": ".."}).job_id == safe_name("..")


def test_p12_what_the_same_program_left_under_other_arguments_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, other = own_name("train.py", ["--lr", "2"]), own_name("train.py", ["--lr", "1"])
    JobDir.open_or_create(tmp_path, "another", "n0")
    tell_of_siblings(tmp_path, name)
    assert caplog.text == ""
    JobDir.open_or_create(tmp_path, other, "n0")
    tell_of_siblings(tmp_path, name)
    assert other in caplog.text
    caplog.clear()
    JobDir.open_or_create(tmp_path, name, "n0")
    tell_of_siblings(tmp_path, name)
    assert caplog.text == ""
