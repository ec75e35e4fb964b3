"""The documentation site builds without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs: make docs installs it")
pytest.importorskip("material", reason="needs the extra docs: make docs installs it")
pytest.importorskip("mkdocstrings", reason="needs the extra docs: make docs installs it")


@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("attach", "resume", "resumable", "data.loader", "ExactAdam"):
        assert f'id="reft.{name}"' in api
