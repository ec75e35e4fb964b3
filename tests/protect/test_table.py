"""The table in the documentation is what the command prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reft.protect.table import schemes_table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "protection.md"


@pytest.mark.process
def test_the_documented_table_is_the_computed_one() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "reft.protect.table"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() in DOCS.read_text()


def test_the_table_tells_what_each_group_size_survives() -> None:
    lines = schemes_table(["aec", "naive:arc+aec", "arc+aec"], [2, 5]).splitlines()
    assert lines[2] == "| `aec` | 100.0%, survives 1 | 25.0%, survives 1 |"
    assert "survives 1 |" in lines[3].rsplit("|", 2)[1] + "|"
    assert lines[4] == "| `arc+aec` | too few | 46.7%, survives 2 |"
