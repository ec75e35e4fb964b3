"""``reft profile``: measures where the devices of a job wait.

It runs a job like ``reft launch``, measures some steps, and shows the result as tables, a figure or
trace events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from reft.config import ProfileConfig
from reft.env import ENV_JOB_ID, ENV_PROFILE
from reft.errors import ConfigError
from reft.profile.figure import check_figure, check_folder, draw
from reft.profile.result import (
    PROFILE_FILE,
    ProfileError,
    ProfileResult,
)
from reft.profile.table import show
from reft.profile.trace_events import write_trace
from reft.refusal import Parser

_NAME = "reft profile"
_WIDTH = 170  # Width in characters of tables that are not printed to a terminal
_DESCRIPTION = (
    "Run a job like 'reft launch' (with the same options: --help-all lists them), measure some "
    "steps after warm-up, and report where the devices of every pipeline stage wait and how much "
    "of a snapshot fits there. The job ends after the measurement."
)


def main(argv: Sequence[str]) -> int:
    """Run the command ``reft profile``.

    Returns:
        The exit code: 0; 1 if the job ended without a profile; if the job fails, its exit code.

    Raises:
        ConfigError: wrong usage.
        ReftError: the job cannot be run.
    """
    if argv[:1] in (["-h"], ["--help"]):  # Without importing torch, which takes seconds
        parser = Parser(prog=_NAME, words="SCRIPT [ARGUMENTS]...", description=_DESCRIPTION)
        _add_options(parser)
        parser.print_help()
        return 0
    if any(word.partition("=")[0] == "--from" for word in argv):
        parser = Parser(prog=_NAME, add_help=False, allow_abbrev=False)
        _add_outputs(parser)
        saved, rest = parser.parse_known_args(list(argv))
        if not rest:  # With more words there is a script, and --from may be its option
            _check_outputs(saved)
            try:
                _present(ProfileResult.load(saved.saved), saved)
            except ProfileError as error:
                raise ConfigError(str(error)) from error
            return 0
    return _run(["--help"] if argv[:1] == ["--help-all"] else argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Profile")
    for option, default, says in (
        ("--steps", 10, "steps to measure"),
        ("--warmup-steps", ProfileConfig().warmup_steps, "steps before the measurement"),
    ):
        dest = f"profile_{option[2:].replace('-', '_')}"
        shown = f"{says} (default: %(default)s)"
        group.add_argument(option, type=int, default=default, dest=dest, metavar="N", help=shown)
    group.add_argument("--dir", type=Path, help="directory in which to keep all files")
    says = "let the job continue to its own end after the measurement"
    group.add_argument("--keep-running", action="store_true", help=says)
    group.add_argument(
        "--without-snapshots", action="store_true", help="measure the job without snapshots"
    )
    _add_outputs(group)


def _add_outputs(group: argparse._ActionsContainer) -> None:
    says = "show the profile that --json saved in FILE; run no job"
    group.add_argument("--from", type=Path, dest="saved", metavar="FILE", help=says)
    for option, kind, metavar, says in (
        ("--json", Path, "FILE", "write the profile as JSON; '-' is stdout"),
        ("--trace", Path, "FILE", "write Chrome trace events, for ui.perfetto.dev"),
        ("--figure", Path, "FILE", "draw the timeline (png, svg, pdf; needs matplotlib)"),
        ("--figure-step", int, "STEP", "draw this step instead of the median one"),
    ):
        group.add_argument(option, type=kind, metavar=metavar, help=says)


def _run(argv: Sequence[str]) -> int:
    from reft.job.launch import launch
    from reft.job.options import collect_options, make_parser
    from reft.profile.profiler import forget_taken

    parser = make_parser()
    parser.prog = _NAME
    parser.description = _DESCRIPTION
    _add_options(parser)
    args = parser.parse_args(list(argv))
    if args.saved is not None:
        raise ConfigError("--from shows a saved profile: remove the script and its launch options")
    _check_outputs(args)
    with tempfile.TemporaryDirectory(prefix="reft-profile-") as scratch:
        folder = (args.dir or Path(scratch)).absolute()
        _set_up_environment(args, folder)
        written = folder / PROFILE_FILE
        written.unlink(missing_ok=True)
        forget_taken(folder)
        code = launch(collect_options(args))
        ranks = forget_taken(folder)
        if code != 0:
            return code
        if not written.exists():
            return _explain_nothing(args, ranks)
        _present(ProfileResult.load(written), args)
    return 0


def _set_up_environment(args: argparse.Namespace, folder: Path) -> None:
    """Set the environment variable in which trainers find what to measure.

    :func:`reft.config.parse_block` reads it.
    """
    for name, value, least in (
        ("--steps", args.profile_steps, 1),
        ("--warmup-steps", args.profile_warmup_steps, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; expected at least {least}")
    profile = ProfileConfig(
        steps=args.profile_steps,
        warmup_steps=args.profile_warmup_steps,
        dir=folder,
        then="go_on" if args.keep_running else "exit",
    )
    block: dict[str, object] = {
        "profile": profile.model_dump(mode="json"),
        "allow_unprotected": True,
    }
    if args.without_snapshots:
        block |= {"variant": "none", "has": {}, "persist": {}}
    os.environ[ENV_PROFILE] = json.dumps(block)
    if args.job_id in (None, os.environ.get(ENV_JOB_ID)):
        # Use a job id of its own, so that the memory of the real job is neither read nor changed.
        own = uuid.uuid4().hex[:12] if args.rdzv_id == "none" else args.rdzv_id
        args.job_id = f"profile-{args.job_id or own}"


def _explain_nothing(args: argparse.Namespace, ranks: set[int]) -> int:
    """Print why there is no profile on this node; return the exit code, 0 if that is normal."""
    if ranks and 0 not in ranks:
        print(f"{_NAME}: measured; the profile is on the node of rank 0", file=sys.stderr)
        return 0
    why = "the profile could not be made; see the log above"
    if not ranks:
        why = (
            f"it made fewer than {args.profile_warmup_steps} + {args.profile_steps} + 1 steps "
            "(lower --warmup-steps or --steps), or has no pipeline engine"
        )
    print(f"{_NAME}: the job ended well, but left no profile: {why}", file=sys.stderr)
    return 1


def _check_outputs(args: argparse.Namespace) -> None:
    """Check the paths of the outputs; called before the job runs, so that no run is wasted."""
    for option, path in (("--json", args.json), ("--trace", args.trace)):
        if path is not None and str(path) != "-":
            check_folder(option, path)
    if args.figure is not None:
        check_figure("--figure", args.figure)


def _present(result: ProfileResult, args: argparse.Namespace) -> None:
    if args.json is not None and str(args.json) == "-":
        json.dump(result.to_json(), sys.stdout)
        print()
    else:
        wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
        show(result, Console(width=wide))
        if args.json is not None:
            result.save(args.json)
    if args.trace is not None:
        write_trace(result, args.trace)
    if args.figure is not None:
        draw(result, args.figure, args.figure_step)
    for path in (args.json, args.trace, args.figure):
        if path is not None and str(path) != "-":
            print(f"wrote {path}", file=sys.stderr)
