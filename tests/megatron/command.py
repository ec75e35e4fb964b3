"""What the commands that run a real Megatron have in common: a checkout, cases by name, a folder for their logs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path

from reft.tools.demo.cluster import LocalClusterError


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


def run_cases(wanted: Sequence[str], trial: Callable[[Path], Callable[[str], list[str] | None]]) -> int:
    """Run them one after the other, and print what became of each as it ends; the exit code. A case that raises,
    as one that does not end in time does, has failed, and the next one is run.

    Args:
        wanted: names.
        trial: given a folder for the logs of all, runs a case by its name: what differs, or None where it could
            not be run and has said why.
    """
    scratch = Path(tempfile.mkdtemp(prefix="reft-megatron-"))
    differences = trial(scratch)
    wrong = [name for name in wanted if not _passes(name, differences)]
    if wrong:
        print(f"DIFFER: {', '.join(wrong)}; the logs are in {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def _passes(name: str, differences: Callable[[str], list[str] | None]) -> bool:
    """Run a case and print its result: whether nothing differs."""
    began = time.monotonic()
    try:
        found = differences(name)
    except Exception as error:
        if not isinstance(error, (AssertionError, LocalClusterError)):  # they say themselves what a job did
            traceback.print_exc()
        found = [f"{type(error).__name__}: {error}"]
    if found is None:
        return True
    for line in found:
        print(f"  DIFFERS {line}")
    print(f"{'DIFFERS' if found else 'EQUAL'} {name}, {time.monotonic() - began:.0f} s", flush=True)
    return not found
