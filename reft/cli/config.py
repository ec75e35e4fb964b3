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
from reft.config_keys import explain as explain_keys
from reft.errors import ConfigError


def config_command(
    explain: Annotated[bool, typer.Option("--explain", help="list every key with its default")] = False,
    check: Annotated[
        str | None, typer.Option(help="a DeepSpeed JSON to check: what is refused, warned of, survived, kept")
    ] = None,
    script: Annotated[str | None, typer.Option(help="a training script to read for what it lacks")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Explain the "reft" block of the DeepSpeed JSON, or check one."""
    if check is not None or script is not None:
        if not _check(check, script, as_json=as_json):
            raise typer.Exit(1)
        return
    if not explain:
        raise ConfigError(
            "say what to do: 'reft config --explain', 'reft config --check ds_config.json' or 'reft config "
            "--check ds_config.json --script train.py'"
        )
    keys = list(explain_keys())
    if as_json:
        _print_json([vars(k) for k in keys])
        return
    table = Table("key", "type", "default", "unit", "meaning", title='the "reft" block', show_lines=False)
    for key in keys:
        table.add_row(key.key, key.type, json.dumps(key.default), key.unit, key.meaning)
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=False)


def _check(check: str | None, script: str | None, *, as_json: bool) -> bool:
    """Print what a configuration and a script say of the job; whether reft takes it."""
    from reft.hook.script_look import ScriptLook
    from reft.tools.planning.check import check_config
    from reft.tools.planning.json_file import read_object

    checked = None
    if check is not None:
        checked = check_config(read_object(Path(check), "the DeepSpeed configuration", "an object"))
    lacks: list[str] = []
    if script is not None:
        lacks = [f"{script}: {finding}" for finding in ScriptLook(_source(script), script).findings()]
    refused = list(checked.refused) if checked else []
    warned = [*(checked.warned if checked else ()), *lacks]
    facts = dict(checked.facts) if checked else {}
    well = not refused and not (lacks and checked and checked.block.strict)
    if as_json:
        block = checked.block.model_dump(mode="json") if checked else None
        _print_json({"well": well, "refused": refused, "warned": warned, "facts": facts, "block": block})
        return well
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    for kind, texts in (("REFUSED", refused), ("WARNING", warned)):
        for text in texts:
            typer.echo(f"{kind}: {text}")
    if not refused and not warned:
        typer.echo("nothing is refused or warned of")
    return well


def _source(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the script {script}: {error.strerror}; write its path") from error


def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
