"""Tables that fit 80 columns where their authors see to it: light lines, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from reft.snapshot.scheduling.windows import Window


def numbers_table(title: str, first: str, *numbers: str) -> Table:
    """A table whose first column is text and whose others are numbers; none of them is cut."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def windows_by_kind(windows: Iterable[Window]) -> str:
    """Milliseconds of each kind of window, and how many there are: ``fill 9.4, cool-down 12.1 (3)``."""
    found: dict[str, list[float]] = {}
    for window in windows:
        found.setdefault(window.kind.value.replace("_", "-"), []).append(window.length_secs * 1e3)
    return ", ".join(
        f"{kind} {sum(lengths):.3g}" + (f" ({len(lengths)})" if len(lengths) > 1 else "")
        for kind, lengths in found.items()
    )
