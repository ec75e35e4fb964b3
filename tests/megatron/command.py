"""What the commands that run a real Megatron have in common: a checkout, cases by name, a folder for their logs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path


def cases_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the checkout's directory, ``--cases`` and ``--list``."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="the checkout, with pretrain_gpt.py in it")
    parser.add_argument("--cases", nargs="*", help="names, * stands for anything; by default all")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    return parser


def chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Collection[str], repository: str
) -> tuple[Path, list[str]]:
    """The checkout's script, and the cases that are asked for.

    Raises:
        SystemExit: the names were asked for, no case is so called, or the script is not there.
    """
    wanted = [name for name in names if any(fnmatch(name, p) for p in options.cases or ["*"])]
    if options.list or not wanted:
        print("\n".join(names))
        raise SystemExit(0 if options.list else 2)
    script: Path = options.directory.resolve() / "pretrain_gpt.py"
    if not script.is_file():
        parser.error(f"{script} does not exist; expected the directory of a {repository} checkout")
    return script, wanted


def run_cases(wanted: Sequence[str], trial: Callable[[Path], Callable[[str], bool]]) -> int:
    """Run them one after the other; the exit code.

    Args:
        wanted: names.
        trial: given a folder for the logs of all, runs a case by its name: whether nothing differs.
    """
    scratch = Path(tempfile.mkdtemp(prefix="reft-megatron-"))
    passes = trial(scratch)
    wrong = [name for name in wanted if not passes(name)]
    if wrong:
        print(f"DIFFER: {', '.join(wrong)}; the logs are in {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0
