"""The lines of docs/quickstart.md are those of the examples; tests/docs/test_from_wheel.py runs its commands."""

from __future__ import annotations

import re

import pytest

from tests.wheel import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


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
