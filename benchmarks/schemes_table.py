"""The schemes side by side: what a member stores, what the group survives.

Tolerances are computed by rank for one member per node, bytes counted piece by piece.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from reft.protect.codes import Code, Scheme, make_code, tolerance

NAMES = (
    "none",
    "arc",
    "aec",
    "naive:arc+aec",
    "arc:2",
    "rs:2",
    "arc+aec",
    "arc:3",
    "rs:3",
    "arc+rs:2",
)
MEMBERS = (2, 4, 8, 16)


def schemes_table(names: Sequence[str] = NAMES, members: Sequence[int] = MEMBERS) -> str:
    """A Markdown table: one row per scheme, one column per group size.

    Args:
        names: as :meth:`Scheme.parse` reads them.
        members: group sizes D.
    """
    head = ["scheme", *(f"D={size}" for size in members)]
    rows = [[f"`{name}`", *(_cell(Scheme.parse(name), size) for size in members)] for name in names]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _cell(scheme: Scheme, size: int) -> str:
    if scheme.why_no_room(size):
        return "too few" if size < scheme.least_members else "too many"
    code: Code = make_code(scheme, range(size))
    return f"{float(code.scheme.share(code.size)):.1%}, survives {tolerance(code)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/schemes_table.py", description=__doc__)
    parser.add_argument(
        "--members", type=int, nargs="+", default=list(MEMBERS), help="group sizes D"
    )
    parser.add_argument(
        "--schemes", nargs="+", default=list(NAMES), help="such as aec, rs:2, arc:2+aec"
    )
    options = parser.parse_args()
    print(schemes_table(options.schemes, options.members))


if __name__ == "__main__":
    main()
