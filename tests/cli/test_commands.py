"""What all sub-commands share: they are imported when used, and have one manner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reft import cli
from reft.cli import COMMANDS
from reft.config import explain

HEAVY = ("torch", "deepspeed", "matplotlib", "numpy", "pydantic", "rich", "psutil")
COUNT = f"""
import json, sys
from reft import cli
code = cli.main(sys.argv[1:])
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
EVERY = [[name] for name in COMMANDS]


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["plan", "--version"]])
def test_help_and_version_import_no_more_than_the_parser(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_has_help(command: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, option]) == cli.EXIT_WELL
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: reft {' '.join(command)} [OPTIONS]")
    assert "-h, --help" in out


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_an_unknown_option_is_told_in_one_form(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--nonsense"]) == cli.EXIT_WRONG_USE
    usage, hint, empty, error, *more = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"Usage: reft {' '.join(command)} [OPTIONS]")
    assert hint == f"Try 'reft {' '.join(command)} -h' for help."
    assert (empty, error.partition(" ")[0], more) == ("", "Error:", [])


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_keys_are_read_at_80_columns_and_through_a_pipe(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["config", "--explain"]) == cli.EXIT_WELL
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    for key in explain():
        assert any(key.key in line for line in lines), key


@pytest.mark.parametrize(
    "arguments",
    [
        "profile --from p.json --figure",
        "profile --from p.json --trace",
        "profile --from p.json --json",
        "profile --figure",
    ],
)
def test_no_folder_is_made_for_a_file(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    Path("p.json").write_text("{}")
    rest = ["train.py"] if arguments == "profile --figure" else []
    assert cli.main([*arguments.split(), "folder/below/a.png", *rest]) == cli.EXIT_WRONG_USE
    assert "there is no folder folder/below" in " ".join(capsys.readouterr().err.split())
    assert not Path("folder").exists()
