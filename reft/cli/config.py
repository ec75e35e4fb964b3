"""``reft config`` and ``reft version``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reft import __version__
from reft.config import load_config
from reft.config_keys import explain as explain_keys
from reft.errors import ConfigError


def config_command(
    explain: Annotated[bool, typer.Option("--explain", help="list every key with its default")] = False,
    check: Annotated[str | None, typer.Option(help="a DeepSpeed JSON to check")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Explain the "reft" block of the DeepSpeed JSON, or check one."""
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


def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
