"""Every message that docs/troubleshooting.md and docs/support.md quote is one that reft says; tests that the pages name
exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.wheel import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)
SUPPORT = (ROOT / "docs" / "support.md").read_text()
REFUSED = re.findall(r"^\| (.+?) \|", SUPPORT.partition("## Refused")[2].partition("\n## ")[0], re.MULTILINE)[
    2:
]


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(text for path in sorted((ROOT / "reft").rglob("*.py")) for text in literals(path))


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
        missing = [path for path in named if not any((top / path).exists() for top in (ROOT, ROOT / "reft"))]
        assert missing == [], page.name


def test_messages_name_extras_that_exist(said: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"reft-ckpt\[([a-z0-9]+)\]", said))
    assert {"etcd", "metrics"} <= named <= set(extras)
