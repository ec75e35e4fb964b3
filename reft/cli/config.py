"""``reft config``: explains or checks the ``reft`` block; ``reft version``: prints the version."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from reft import __version__
from reft.config import explain as explain_keys
from reft.errors import ConfigError


def config_command(
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="list every key with its default")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(help="a DeepSpeed JSON to check: print what reft refuses or warns about"),
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="a training script to check: print what it lacks")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Explain the "reft" block of the DeepSpeed JSON, or check one."""
    if check is not None or script is not None:
        if not _check(check, script, as_json=as_json):
            raise typer.Exit(1)
        return
    if not explain:
        raise ConfigError(
            "say what to do: 'reft config --explain', 'reft config --check ds_config.json' or "
            "'reft config --check ds_config.json --script train.py'"
        )
    keys = list(explain_keys())
    if as_json:
        typer.echo(json.dumps([vars(k) for k in keys], indent=2, default=str))
        return
    for key in keys:
        unit = f" {key.unit}" if key.unit else ""
        typer.echo(f"{key.key} ({key.type}) = {json.dumps(key.default)}{unit}")
        typer.echo(textwrap.indent(textwrap.fill(key.meaning, 76), "    "))


def _check(check: str | None, script: str | None, *, as_json: bool) -> bool:
    from reft.checks.preflight import (
        ScriptLook,
        config_findings,
        holds_block_alone,
        installed,
        storage_findings,
    )
    from reft.config import read_object
    from reft.findings import Finding, Severity

    block = None
    findings: list[Finding] = []
    if check is not None:
        config = read_object(Path(check), "the DeepSpeed configuration", "an object")
        block, findings = config_findings(config)
        if not holds_block_alone(config):
            findings.append(installed(config))
            findings += storage_findings(block)
    lines = [(finding.severity, str(finding)) for finding in findings]
    lacks = []
    if script is not None:
        try:
            lacks = ScriptLook(Path(script).read_bytes(), script).findings()
        except OSError as error:
            raise ConfigError(
                f"cannot read the script {script}: {error.strerror}; write its path"
            ) from error
    lines += [(finding.severity, f"{script}: {finding}") for finding in lacks]
    lines.sort(key=lambda line: line[0] is not Severity.REFUSED)
    refused, warned, noted = ([text for kind, text in lines if kind is of] for of in Severity)
    is_strict = block is not None and block.strict
    lacking = any(finding.severity is Severity.WARNING for finding in lacks)
    well = not refused and not (lacking and is_strict)
    if as_json:
        shown = block.model_dump(mode="json") if block is not None else None
        report = {
            "well": well,
            "refused": refused,
            "warned": warned,
            "noted": noted,
            "block": shown,
        }
        typer.echo(json.dumps(report, indent=2, default=str))
        return well
    for kind, text in lines:
        typer.echo(f"{kind}: {text}")
    if not refused + warned:
        typer.echo("reft refuses nothing and has no warnings")
    return well


def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)
