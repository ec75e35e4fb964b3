"""``reft config`` and ``reft version``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reft import __version__
from reft.config_keys import KeyDoc
from reft.config_keys import explain as explain_keys
from reft.errors import ConfigError

_TABLE_COLUMNS = 140
_TITLE = 'the "reft" block'


def config_command(
    *,
    explain: Annotated[bool, typer.Option("--explain", help="list every key with its default")] = False,
    check: Annotated[
        str | None, typer.Option(help="a DeepSpeed JSON to check: what is refused, warned of, survived, kept")
    ] = None,
    script: Annotated[str | None, typer.Option(help="a training script to read for what it lacks")] = None,
    parameters: Annotated[
        float | None, typer.Option(help="with --check: of the whole model (7e9), to count the memory")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="with --check: instead, llama2-6.7b or a Hugging Face config.json, as in 'reft plan'"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Explain the "reft" block of the DeepSpeed JSON, or check one."""
    if check is not None or script is not None:
        if not _check(check, script, _parameters(parameters, model), as_json=as_json):
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
    _show_keys(keys, Console())


def _show_keys(keys: Sequence[KeyDoc], console: Console) -> None:
    """A table where there is room for one, else a list."""
    if console.width >= _TABLE_COLUMNS:
        table = Table("key", "type", "default", "unit", "meaning", title=_TITLE)
        for key in keys:
            table.add_row(key.key, key.type, json.dumps(key.default), key.unit, key.meaning)
        console.print(table, markup=False)
        return
    console.print(_TITLE, style="italic", markup=False, highlight=False)
    for key in keys:
        unit = f" {key.unit}" if key.unit else ""
        console.print(
            f"{key.key} ({key.type}) = {json.dumps(key.default)}{unit}", markup=False, highlight=False
        )
        console.print(Padding(Text(key.meaning), (0, 0, 0, 4)))


def _parameters(parameters: float | None, model: str | None) -> float | None:
    """Of the whole model, where one of the two says it."""
    if parameters is not None and model is not None:
        raise ConfigError("--parameters and --model both say how large the model is; leave one of them out")
    if model is not None:
        from reft.tools.planning.shapes import load_shape

        return load_shape(model, None)[0].parameters
    if parameters is not None and not 0 < parameters < 1e15:
        raise ConfigError(f"--parameters is {parameters:g}; write a number such as 7e9")
    return parameters


def _check(check: str | None, script: str | None, parameters: float | None, *, as_json: bool) -> bool:
    """Print what a configuration and a script say of the job; whether reft takes it."""
    from reft.engine.script_look import ScriptLook
    from reft.json_file import read_object
    from reft.tools.planning.check import check_config

    checked = None
    if check is not None:
        checked = check_config(
            read_object(Path(check), "the DeepSpeed configuration", "an object"), parameters
        )
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
