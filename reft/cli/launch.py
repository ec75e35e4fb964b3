"""``reft launch``: its help without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from reft.job.options import DESCRIPTION, add_own_options
from reft.refusal import Parser


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft launch``; see :func:`reft.job.launch.main` for the exit codes."""
    if argv[:1] in (["-h"], ["--help"]):
        parser = Parser(prog="reft launch", words="SCRIPT [ARGUMENTS]...", description=DESCRIPTION)
        add_own_options(parser)
        parser.print_help()
        return 0
    if argv[:1] == ["--help-all"]:  # torchrun's too
        argv = ["--help"]
    from reft.job.launch import main as launch

    return launch(argv)
