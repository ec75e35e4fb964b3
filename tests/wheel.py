"""Builds reft's wheel as ``make wheel`` does, but for what makes it serve other Linuxes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
_SOURCES = ("reft", "megatron_patches", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(command: Sequence[str | Path], folder: Path, secs: float = 300) -> str:
    """What ``command`` prints; it must end well."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=secs,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Built from a copy of the sources: building leaves files beside them."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    run((*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source), folder)
    (built,) = folder.glob("*.whl")
    return built
