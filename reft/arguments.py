"""One manner for all sub-commands: argparse's parsers show usage and errors as typer's do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from reft import __version__


class _Formatter(argparse.HelpFormatter):
    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


class Parser(argparse.ArgumentParser):
    """For a sub-command that parses its arguments itself, with ``-h`` and ``--version``.

    Args:
        words: what stands behind the options in the line of usage.
        others: as for :class:`argparse.ArgumentParser`; ``prog`` is the command, such as ``reft demo``.
    """

    def __init__(self, *, words: str = "", **others: Any) -> None:
        usage = " ".join(["%(prog)s [OPTIONS]", *([words] if words else [])])
        super().__init__(usage=usage, formatter_class=_Formatter, **others)
        self.add_argument(
            "--version", action="version", version=f"reft {__version__}", help="print the version"
        )

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"Try '{self.prog} -h' for help.\n\nError: {message}\n")
