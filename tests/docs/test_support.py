"""docs/support.md is what its script writes, and names tests that exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import LAUNCHERS, LOADERS, PAGE, ROOT
from tests.old_deepspeed import VERSION


@pytest.mark.integration
@pytest.mark.skipif(
    VERSION < (0, 19), reason="the page is of DeepSpeed 0.19: older releases have other wrappers"
)
def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    written = tmp_path / "support.md"
    command = [sys.executable, "-m", "tests.docs.support", str(written)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    assert written.read_text() == PAGE.read_text(), "run: .venv/bin/python -m tests.docs.support"


def test_every_row_has_a_test() -> None:
    scripts = (ROOT / "tests" / "attack" / "data_job.py").read_text()
    functions = {node.name for node in ast.parse(scripts).body if isinstance(node, ast.FunctionDef)}
    assert LOADERS.keys() <= functions
    for launcher in LAUNCHERS:
        assert (ROOT / "tests" / launcher.test).is_file(), launcher
