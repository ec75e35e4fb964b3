"""The ``reft`` command. A sub-command is imported only when it is used, to keep ``--help`` fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from reft import __version__, integrations
from reft.errors import ConfigError, ReftError

EXIT_WELL = 0
EXIT_NOT_WELL = 1
EXIT_WRONG_USE = 2
_HELP = ["-h", "--help"]


@dataclass(frozen=True)
class Command:
    """A sub-command. Its module is imported only when the command is used."""

    module: str
    name: str  # Name of the function in the module
    help: str  # One line for ``reft --help``
    # Whether the function parses its arguments itself and returns the exit code: it extends the
    # parser of another tool, such as torchrun. If False, typer parses the arguments.
    parses: bool = False


COMMANDS = {
    "launch": Command("reft.cli", "launch", "torchrun with reft: start this node's trainers", True),
    "rendezvous": Command(
        "reft.job.rendezvous.server", "main", "serve the store where nodes meet", True
    ),
    "hook": Command(
        "reft.cli.hook", "hook_command", "use the block under any launcher, in this environment"
    ),
    "config": Command(
        "reft.cli.config", "config_command", 'explain the "reft" block, or check one'
    ),
    "plan": Command(
        "reft.tools.planning.command",
        "plan_command",
        "predict what a job's protection costs and survives",
    ),
    "check": Command("reft.cli.check", "check_command", "find slow or hanging nodes before a job"),
    "profile": Command(
        "reft.tools.profile", "main", "measure where the devices of a job wait", True
    ),
    "replay": Command(
        "reft.cli.replay", "main", "make a stopped job's last step again, and compare", True
    ),
    "rehearse": Command(
        "reft.cli.rehearse",
        "main",
        "run a job undisturbed and killed, and compare every step",
        True,
    ),
    "demo": Command(
        "reft.tools.demo.command",
        "main",
        "train here, kill nodes, compare with an undisturbed run",
        True,
    ),
    "status": Command(
        "reft.cli.status", "status_command", "show the job from any node, once or live"
    ),
    "advise": Command(
        "reft.cli.running", "advise_command", "nodes to replace, drop or add; a ScalePlan"
    ),
    "history": Command(
        "reft.cli.status", "history_command", "show what failed, and from where it resumed"
    ),
    "protect": Command(
        "reft.cli.running", "protect_command", "show or switch a running job's redundancy"
    ),
    "scale": Command(
        "reft.cli.running", "scale_command", "change the number of nodes of a running job"
    ),
    "inspect": Command("reft.cli.memory", "inspect_command", "show the versions in memory"),
    "verify": Command(
        "reft.cli.memory", "verify_command", "compare all stored blocks with their checksums"
    ),
    "persist": Command(
        "reft.cli.memory", "persist_command", "write the newest version in memory to disk"
    ),
    "clean": Command("reft.cli.memory", "clean_command", "remove the memory of dead jobs"),
    "version": Command("reft.cli.config", "version_command", "print the version"),
}


def find_commands() -> dict[str, Command]:
    """Return all sub-commands by name: reft's own, and those of integrations such as MPI."""
    integrated = {}
    for name, (target, help_line) in integrations.entries("COMMANDS"):
        module, _, function = target.partition(":")
        integrated[name] = Command(module, function, help_line, parses=True)
    # The order in which ``reft --help`` lists them: commands that start jobs come first.
    return {"launch": COMMANDS["launch"], **integrated, **COMMANDS}


def make_app(commands: Mapping[str, Command], used: Collection[str]) -> typer.Typer:
    """Make the parser of the command line.

    Args:
        commands: all sub-commands, by name.
        used: names of the sub-commands to import. The others only appear in the list of commands.
    """
    app = typer.Typer(
        name="reft",
        help="Keeps hybrid-parallel LLM pretraining alive: state in the memory of peers, restarts "
        "in seconds.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Halves the time of --help
        context_settings={"help_option_names": _HELP},
    )
    app.callback()(_root)
    for name, command in commands.items():
        what: Any = _elsewhere
        if name in used and not command.parses:
            what = getattr(import_module(command.module), command.name)
        app.command(name, short_help=command.help)(what)
    return app


def _describe_in_lower_case(app: Any) -> None:
    """Write the help of typer's own options, such as ``--help``, in the style of reft's options."""
    context = typer.Context(app, help_option_names=_HELP)
    for each in (app, *app.commands.values()):
        for option in (*each.params, each.get_help_option(context)):
            if option.help and option.help.endswith("."):
                option.help = option.help[0].lower() + option.help[1:-1]


def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Declare the option ``--version``; :func:`_dispatch` handles it for every sub-command."""


def launch(argv: Sequence[str]) -> int:
    """Run ``reft launch``. For its help, torch is not imported, because that takes seconds."""
    if argv[:1] in (["-h"], ["--help"]):
        from reft.job.options import DESCRIPTION, add_own_options
        from reft.refusal import Parser

        parser = Parser(prog="reft launch", words="SCRIPT [ARGUMENTS]...", description=DESCRIPTION)
        add_own_options(parser)
        parser.print_help()
        return EXIT_WELL
    from reft.job.launch import main as run

    return run(["--help"] if argv[:1] == ["--help-all"] else argv)  # --help-all: torchrun's, too


def _elsewhere() -> None:
    raise AssertionError("a sub-command that is not used, or parses its arguments itself")


def main(argv: list[str] | None = None) -> int:
    """Run the ``reft`` command; return the exit code: 0: good; 1: a problem; 2: wrong usage."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    # An OSError is about a path that the user gave, which its message names.
    except (ReftError, OSError) as error:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True).print(f"reft: {error}", style="red", markup=False)
        return EXIT_WRONG_USE if isinstance(error, ConfigError) else EXIT_NOT_WELL


def _dispatch(arguments: Sequence[str]) -> int:
    name = next(iter(arguments), "")
    completes = "_REFT_COMPLETE" in os.environ  # The shell asks for completions
    # Integrations are looked up only if needed, because that takes 10 ms.
    commands = COMMANDS if name in COMMANDS and not completes else find_commands()
    command = commands.get(name)
    try:
        if command is not None and command.parses:
            return int(getattr(import_module(command.module), command.name)(arguments[1:]))
        if "--version" in arguments:
            typer.echo(f"reft {__version__}")
            return EXIT_WELL
        app = typer.main.get_command(make_app(commands, tuple(commands) if completes else (name,)))
        _describe_in_lower_case(app)
        app(args=arguments, prog_name="reft")
    # typer exits with the code of a command, or of a usage error, which it has already shown.
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_WELL
    return EXIT_WELL
