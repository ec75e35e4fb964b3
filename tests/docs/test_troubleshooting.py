"""Every message that docs/troubleshooting.md and docs/support.md quote is one that reft says; tests that the pages name
exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_wheel import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)
SUPPORT = (ROOT / "docs" / "support.md").read_text()
REFUSED = re.findall(
    r"^\| (.+?) \|", SUPPORT.partition("## Refused")[2].partition("\n## ")[0], re.MULTILINE
)[2:]


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(
        text
        for package in ("reft", "reft_etcd", "reft_mpi")
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in literals(path)
    )


def literals(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, parts)))
    return found


@pytest.mark.parametrize("message", [*MESSAGES, *REFUSED])
def test_a_quoted_message_is_said(said: str, message: str) -> None:
    parts = message.replace("`", "").replace("*", "").split("…")
    missing = [part for part in parts if part.strip() not in said.replace("`", "").replace("*", "")]
    assert missing == [], "reft does not say this (any more): change docs/troubleshooting.md"


def test_the_page_has_messages() -> None:
    assert min(len(MESSAGES), len(REFUSED)) >= 20
    for page in (ROOT / "docs").glob("*.md"):
        named = re.findall(r"`(tests/[\w/]+|(?:\w+/)+\w+\.py)`", page.read_text())
        missing = [
            path
            for path in named
            if not any((top / path).exists() for top in (ROOT, ROOT / "reft"))
        ]
        assert missing == [], page.name


def test_messages_name_extras_that_exist(said: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"reft-ckpt\[([a-z0-9]+)\]", said))
    assert {"etcd", "metrics"} <= named <= set(extras)


QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", QUICKSTART, re.MULTILINE | re.DOTALL)


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


@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="needs the extra docs: make docs installs it")
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
