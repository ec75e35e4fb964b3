"""The ``reft`` command. Every sub-command is imported when it is used, so that ``--help`` is quick."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reft import __version__
from reft.errors import ConfigError, ReftError

EXIT_WELL = 0
EXIT_NOT_WELL = 1
EXIT_WRONG_USE = 2

app = typer.Typer(
    name="reft",
    help="Keeps hybrid-parallel LLM pretraining alive: state in the memory of peers, restarts in seconds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# These take the options of the tools they build upon (torchrun's, the demonstration's) and parse
# them themselves; typer only lists them.
_PASS_THROUGH = {
    "launch": ("reft.elastic.launch", "torchrun with reft: starts this node's daemon and trainers"),
    "profile": ("reft.cli.profile", "run a job and measure where its devices wait; show saved profiles"),
    "rendezvous": ("reft.elastic.rendezvous", "serve the job's store on a host that does not train"),
    "demo": ("reft.tools.demo", "train over several nodes here, kill some, compare with an undisturbed run"),
}


@app.command("config")
def config_command(
    explain: Annotated[bool, typer.Option("--explain", help="list every key with its default")] = False,
    check: Annotated[str | None, typer.Option(help="a DeepSpeed JSON to check")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Explain the "reft" block of the DeepSpeed JSON, or check one."""
    from reft.config import explain as explain_keys
    from reft.config import load_config

    if check is not None:
        from reft.tools.planning.json_file import read_object

        block = load_config(read_object(Path(check), "the DeepSpeed configuration", "an object"))
        _print_json(block.model_dump(mode="json")) if as_json else Console().print(block)
        return
    if not explain:
        raise ConfigError("say what to do: 'reft config --explain' or 'reft config --check ds_config.json'")
    keys = list(explain_keys())
    if as_json:
        _print_json([vars(k) for k in keys])
        return
    table = Table("key", "type", "default", "unit", "meaning", title='the "reft" block', show_lines=False)
    for key in keys:
        table.add_row(key.key, key.type, json.dumps(key.default), key.unit, key.meaning)
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=False)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _register_pass_through() -> None:
    for name, (_, help_text) in _PASS_THROUGH.items():

        def placeholder() -> None:  # dispatched in main(), before typer sees the arguments
            raise AssertionError

        app.command(
            name,
            help=help_text,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(placeholder)


def _register_memory_commands() -> None:
    from reft.cli import job as cli_job
    from reft.cli import memory as cli_memory
    from reft.cli import plan as cli_plan
    from reft.cli import protect as cli_protect
    from reft.cli import simulate as cli_simulate

    cli_memory.register(app)
    cli_job.register(app)
    cli_protect.register(app)
    cli_plan.register(app)
    cli_simulate.register(app)


_register_pass_through()
_register_memory_commands()


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 well, 1 the thing asked about is not well, 2 wrong use."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except ReftError as error:
        Console(stderr=True).print(f"reft: {error}", style="red", markup=False)
        return EXIT_WRONG_USE if isinstance(error, ConfigError) else EXIT_NOT_WELL
    except OSError as error:  # of a path that was given: its message names it
        Console(stderr=True).print(f"reft: {error}", style="red", markup=False)
        return EXIT_NOT_WELL


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in _PASS_THROUGH:
        module = import_module(_PASS_THROUGH[arguments[0]][0])
        return int(module.main(arguments[1:]))
    try:
        app(args=arguments)
    except SystemExit as stop:  # typer has shown usage errors; typer.Exit carries a command's verdict
        return stop.code if isinstance(stop.code, int) else EXIT_WELL
    return EXIT_WELL
