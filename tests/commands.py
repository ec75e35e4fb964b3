"""The commands of reft as a user calls them, within this process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from reft.cli import main


class Answer(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*words: str | Path) -> Answer:
    """Call ``reft WORDS...``."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])
    return Answer(code, out.getvalue(), err.getvalue())


def inspected(*places: Path) -> dict[str, Any]:
    """What ``reft inspect --json`` says of one job's memory in these directories."""
    options = [word for place in places for word in ("--memory-dir", place)]
    found: dict[str, Any] = command("inspect", *options, "--json").json
    return found


def newest_protection(*places: Path) -> str:
    """Of the newest committed version; empty where none is."""
    versions = inspected(*places)["versions"]
    return next((str(v["protection"]) for v in versions if v["committed"]), "")
