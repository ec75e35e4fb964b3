"""Every message that docs/troubleshooting.md quotes is one that reft says."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.support import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    """All string literals of reft, with what is put in at run time left out."""
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


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_said(said: str, message: str) -> None:
    missing = [part for part in message.split("…") if part.strip() not in said]
    assert missing == [], "reft does not say this (any more): change docs/troubleshooting.md"


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) >= 20


def test_messages_name_extras_that_exist(said: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"reft-ckpt\[([a-z0-9]+)\]", said))
    assert {"etcd", "metrics"} <= named <= set(extras)
