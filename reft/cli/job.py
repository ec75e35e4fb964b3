"""``reft persist``: a dead job's memory onto disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reft.cli.memory import AsJson, Job, MemoryDirs, find_memory


def persist_command(
    out: Annotated[Path, typer.Option("--out", help="directory of DeepSpeed checkpoints to write to")],
    memory_dir: MemoryDirs = None,
    job: Job = None,
    keep: Annotated[int, typer.Option(min=1, help="newest checkpoints of the job to keep there")] = 2,
    as_json: AsJson = False,
) -> None:
    """Write the newest recoverable version as a DeepSpeed checkpoint, without the job's processes.

    Give --memory-dir once per node that is left; blocks of lost nodes come from their copies.
    """
    from reft.recover.offline import persist_offline

    screen = Console(stderr=True)
    result = persist_offline(
        find_memory(memory_dir, job),
        out,
        keep=keep,
        progress=lambda progress: screen.print(f"  {progress}", markup=False, highlight=False),
    )
    info = result.checkpoint
    facts = {
        "checkpoint": str(info.path),
        "tag": info.tag,
        "step": info.label.step,
        "bytes_from": result.plan.bytes_from,
        "corrupt_blocks_replaced": result.corrupt_blocks,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        load = f"engine.load_checkpoint({str(info.directory)!r})"
        typer.echo(f"wrote step {info.label.step} to {info.path}; {load} loads it")
        if result.corrupt_blocks:
            typer.echo(f"{result.corrupt_blocks} corrupt blocks were replaced by copies")
