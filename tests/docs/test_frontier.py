"""docs/frontier.md has only commands and messages that exist, and claims no run."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress

import pytest

from reft import cli
from tests.docs.support import ROOT
from tests.docs.test_troubleshooting import literals

PAGE = (ROOT / "docs" / "frontier.md").read_text()
COMMANDS = sorted(set(re.findall(r"\breft ([a-z]+)((?: +(?!reft )[^`|\n]+)?)[`|\n]", PAGE)))
SAID = (
    "nothing is refused or warned of",
    "memory cannot be pinned",
    "on a %s device before",
    "STALE since",
    "blocks match their checksums",
)
"""Of reft's own words, those that the page has a reader look for, as they stand in the sources."""


def usage(command: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        cli.main([command, "--help-all" if command == "launch" else "--help"])
    return out.getvalue()


@pytest.mark.parametrize(("command", "arguments"), [c for c in COMMANDS if "-" in c[1]])
def test_every_command_has_the_options_that_are_written(command: str, arguments: str) -> None:
    text = usage(command)
    for option in re.findall(r"(?<!\S)--[a-z-]+", arguments):
        assert option in text, f"reft {command} has no {option}"


def test_the_page_has_commands() -> None:
    assert {"config", "plan", "launch", "status", "verify", "clean", "version"} <= {
        name for name, _ in COMMANDS
    }


@pytest.mark.parametrize("message", SAID)
def test_what_must_be_seen_is_said(message: str) -> None:
    words = [word for word in re.split(r"%s|ROCm", message) if word.strip()]
    assert all(word.strip() in PAGE for word in words)
    said = "\n".join(text for path in (ROOT / "reft").rglob("*.py") for text in literals(path))
    assert message in said


def test_files_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:configs|reft|docs|tests)/[\w./-]+)`", PAGE):
        assert (ROOT / path).exists(), path


def test_no_run_is_claimed() -> None:
    assert "reft has never run on Frontier" in PAGE
    assert not re.search(r"\bwe (ran|saw|measured)|was measured|has run\b", PAGE)
