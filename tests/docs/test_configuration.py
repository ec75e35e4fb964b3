"""docs/configuration.md is what ``reft config --explain`` says; ``python -m tests.docs.test_configuration`` writes it."""

from __future__ import annotations

import json
from itertools import groupby

from reft.config import KeyDoc, explain
from tests.test_wheel import ROOT

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

The `reft` block of the DeepSpeed JSON. Without it, or with `"enabled": false`, reft does nothing. Unknown keys and impossible
values are refused with what to write. `reft config --explain` prints the same; `reft config --check ds.json` checks a file,
and whether this host can write to `persist.dir`.
"""


def page() -> str:
    def section_of(doc: KeyDoc) -> str:
        return doc.key.rpartition(".")[0]

    text = HEAD
    for section, keys in groupby(
        sorted(explain(), key=lambda doc: section_of(doc) != ""), section_of
    ):
        text += f"\n## {f'`{section}`' if section else 'The block'}\n\n"
        text += "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(map(row, keys))
    return text


def row(doc: KeyDoc) -> str:
    name = doc.key.rpartition(".")[2]
    default = "per user" if name == "memory_dir" else f"`{json.dumps(doc.default)}`"
    cells = (f"`{name}`", doc.type, default + (f" {doc.unit}" if doc.unit else ""), doc.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def test_the_page_is_what_the_command_says() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.docs.test_configuration"


if __name__ == "__main__":
    PAGE.write_text(page())
