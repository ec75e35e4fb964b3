"""The commands of docs/quickstart.md, as they stand there; its lines are those of the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import free_port
from tests.wheel import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.nightly
def test_the_commands_lose_a_node_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    output = tmp_path / "output"
    with output.open("wb") as file:
        done = subprocess.run(
            ["bash", "-u"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
            input="\n".join(fenced("bash")).encode(),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=540,
        )
    said = output.read_text(errors="replace")
    logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in tmp_path.glob("*.log"))
    assert done.returncode == 0, said + logs
    assert re.search(r"resumed at step \d+ from memory", said), said + logs


@pytest.mark.parametrize(
    ("diff", "example"),
    [*zip(fenced("diff"), ("plain.py", "trainer.py"), strict=True)],
    ids=["plain", "trainer"],
)
def test_what_reft_adds_is_what_the_example_marks(diff: str, example: str) -> None:
    lines = (ROOT / "examples" / example).read_text().splitlines()
    code = [line.split("  # reft")[0].strip() for line in lines]
    marked = [line.split("  # reft")[0].strip() for line in lines if "  # reft" in line]
    assert [line[1:].strip() for line in diff.splitlines() if line.startswith("+")] == marked
    for line in diff.splitlines():
        if not line.startswith(("+", "-")):
            assert line.strip() in code, line
