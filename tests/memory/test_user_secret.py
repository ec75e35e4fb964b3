"""`~/.reft/secret`: made at its first use, and nobody else's."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reft.errors import AuthenticationError, ConfigError
from reft.memory.jobdir import user_secret


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".reft" / "secret"


def test_p11_many_that_ask_at_once_get_the_same(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_secret(), range(16)))
    assert len(found) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_p11_the_environment_comes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFT_SECRET", "ab" * 32)
    assert user_secret() == b"\xab" * 32
    assert not path.parent.exists()
    monkeypatch.setenv("REFT_SECRET", "ab" * 31)
    with pytest.raises(AuthenticationError, match="64 digits"):
        user_secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_p11_a_file_that_others_can_use_is_refused(path: Path, mode: int) -> None:
    user_secret()
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match=rf"mode 0{mode:o}\); expected 0600.*chmod go=.*remove it"):
        user_secret()


def test_p11_a_link_and_anothers_file_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_secret()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AuthenticationError, match=r"belongs to uid .* remove it"):
        user_secret()
    monkeypatch.undo()
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(path.parent.parent))
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="REFT_SECRET"):
        user_secret()


def test_p11_a_damaged_file_is_not_replaced(path: Path) -> None:
    user_secret()
    path.write_text("half")
    with pytest.raises(AuthenticationError, match="not a secret"):
        user_secret()
    assert path.read_text() == "half"


def test_p11_without_a_home_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(ConfigError, match=r"HOME is not set.*REFT_SECRET to 64"):
        user_secret()
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot be kept"):
        user_secret()
