"""``reft rehearse``: tests whether a training script resumes exactly after a failure."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from reft.errors import ConfigError
from reft.refusal import Parser

_NAME = "reft rehearse"
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Run the command ``reft rehearse``.

    Returns:
        The exit code: 0: all steps are equal; 1: a step differs after the kill, or the job did not
        resume; 3: the two undisturbed runs differ; 130: stopped by a signal.

    Raises:
        ConfigError: options contradict each other, or the undisturbed job fails.
    """
    from reft.job.local import handle_stop_signals
    from reft.rehearse.run import rehearse

    what, as_json = parse(argv)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    handle_stop_signals()
    try:
        with console.status("the job starts") as status:
            report = rehearse(what, status.update, console.print)
    except KeyboardInterrupt:
        console.print(
            "stopped; all processes are killed and their memory is removed", style="yellow"
        )
        return _EXIT_INTERRUPTED
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(describe(report)))
    return int(report["exit_code"])


def parse(argv: Sequence[str]) -> tuple[Any, bool]:
    """Parse the command line of ``reft rehearse``.

    Returns:
        The rehearsal to run, and whether to print its report as JSON.

    Raises:
        SystemExit: argparse refuses an option, or ``--help`` is given.
    """
    from reft.job.options import collect_options, make_parser
    from reft.naming import safe_name
    from reft.rehearse.run import Rehearsal, new_job_id

    parser = make_parser()
    parser.prog = _NAME
    parser.description = (
        "Run a job twice undisturbed and twice with a trainer killed (SIGKILL), and compare every "
        "step to the last bit: the batch that each rank trained on, generators, learning rates, "
        "client state, the state of the engine and every tensor. Takes the options of 'reft "
        "launch'; with --nnodes N and without --rdzv-endpoint the nodes are started on this "
        "machine, else run it on every node of the job. The script needs no change and keeps its "
        "working directory. The memory of the job itself is not touched, and checkpoints that the "
        "script saves go into a directory of the rehearsal. Exit codes: 0 equal, 1 a step differs "
        "after the kill, 2 wrong use, 3 the undisturbed runs differ."
    )
    _add_own(parser.add_argument_group("rehearse"))
    args = parser.parse_args(list(argv))
    own = Parser(prog=_NAME, add_help=False, allow_abbrev=False)
    _add_own(own)
    program = len(argv) - 1 - len(args.training_script_args)
    # Drop a "--" before the script: it belongs neither to the launcher nor to the script.
    _, launch = own.parse_known_args(list(argv[:program]))
    launch = [word for word in launch if word != "--"]
    given_nodes = args.nnodes
    meets = bool(args.rdzv_endpoint or args.slurm or args.hostfile or args.standalone)
    if not meets and given_nodes is not None:
        # Placeholder endpoint: the rehearsed nodes, all on this machine, are started later with a
        # real port.
        args.rdzv_endpoint = "127.0.0.1:0"
    options = collect_options(args)
    # Remove the directory for logs that torchrun creates while it reads its options.
    with suppress(OSError, AttributeError):
        os.rmdir(options.config.logs_specs.root_log_dir)  # type: ignore[union-attr]
    nodes = 0 if meets and options.config.max_nodes > 1 else options.config.min_nodes
    what = Rehearsal(
        launch=tuple(launch),
        program=tuple(argv[program:]),
        job_id=new_job_id() if nodes else safe_name(f"rehearse-{options.job_id}"),
        memory_parent=options.memory_dir,
        steps=args.rehearse_steps,
        kill_after=args.rehearse_kill,
        kills_node=args.rehearse_node,
        overwrites=args.rehearse_overwrite,
        nodes=nodes,
        directory=args.rehearse_dir and args.rehearse_dir.absolute(),
    )
    if what.directory is not None and what.directory.exists() and any(what.directory.iterdir()):
        raise ConfigError(
            f"--dir {what.directory} is not empty; give a directory for this rehearsal alone"
        )
    return what, args.rehearse_json


def _add_own(group: argparse._ActionsContainer) -> None:
    def add(option: str, help_text: str, **settings: Any) -> None:
        group.add_argument(option, dest=f"rehearse_{option[2:]}", help=help_text, **settings)

    add(
        "--steps",
        "steps to make and compare (default: %(default)s)",
        type=int,
        default=12,
        metavar="N",
    )
    add(
        "--kill",
        "kill a trainer after this step (default: %(default)s)",
        type=int,
        default=5,
        metavar="STEP",
    )
    add("--node", "kill everything on a node and remove its memory instead", action="store_true")
    add("--overwrite", "let the script overwrite files that are there already", action="store_true")
    add("--dir", "keep records, logs and checkpoints in this new directory", type=Path)
    add("--json", "print the report as JSON", action="store_true")


def describe(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a report to the user."""
    if report["unsteady"]:
        first = report["unsteady"][0]
        yield f"not deterministic by itself: {first['text']}"
        yield f"two undisturbed runs differ, so a recovery cannot be judged: {report['advice']}"
        return
    for one in report["tries"]:
        yield from _describe_try(report["steps"], one)
    # Show reft's warnings even if all steps are equal: state may be lost that does not affect them.
    for text in report["said"]:
        yield f"reft said: {text}"


_WHERE = {
    "step": "killed after step {}",
    "boundary": "killed between step {} and the next one",
    "evaluation": "killed in the evaluation after step {}",
    "save": "killed in the save after step {}",
}


def _describe_try(steps: int, one: dict[str, Any]) -> Iterator[str]:
    killed = _WHERE[one["killed_at"]].format(one["killed_after"])
    if one["node"]:
        killed = killed.replace("killed", "a node killed", 1)
    back = "" if one["back_secs"] is None else f"; back in {one['back_secs']:.1f} s"
    if one["equal"]:
        yield f"{steps} steps equal to the last bit, {killed}{back}"
    elif one["failed"]:
        yield f"NOT RESUMED, {killed}: {one['failed']}"
    else:
        first, more = one["differences"][0], one["different"] - 1
        others = f" (and {more} more)" if more else ""
        yield f"DIFFERENT, {killed}{back}: {first['text']}{others}"
    if one["advice"]:
        yield f"  {one['advice']}"
