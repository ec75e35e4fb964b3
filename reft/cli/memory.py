"""``reft inspect``, ``verify``, ``persist``, ``clean``: commands on the memory that a job leaves.

They need no process of the job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from reft.config import ReftConfig
from reft.env import ENV_MEMORY_DIR
from reft.errors import ConfigError, ReftError
from reft.grid import VersionId
from reft.memory.jobdir import JobSummary, list_jobs, live_processes, remove_job, summarise
from reft.storage.inspect import ArenaReport, JobReport, find_job_dirs, inspect_job, inspect_stored
from reft.storage.persist import PersistProgress

EXIT_NOT_WELL = 1
_REMOVED, _PLANNED, _FAILED = "removed", "would be removed", "failed"
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "DS_ACCELERATOR": "cpu"}
"""Environment variables that hide all devices. The value is -1 because AMD's runtime would show
every device if the list were empty."""

MemoryDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--memory-dir",
        help="memory directory of a node; may be repeated, once per node",
        show_default="REFT_MEMORY_DIR",
    ),
]
Job = Annotated[
    str | None, typer.Option("--job", help="name of the job; not needed if there is only one")
]
Stored = Annotated[
    Path | None,
    typer.Option(
        "--from", help="a job's directory in persist.dir, instead of the memory of its nodes"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def inspect_command(
    memory_dir: MemoryDirs = None, job: Job = None, stored: Stored = None, as_json: AsJson = False
) -> None:
    """Show the versions in memory: of which ranks, complete or torn, recoverable or why not."""
    report = _inspect(memory_dir, job, stored)
    _show(report, as_json)
    if report.restores is None:
        raise typer.Exit(EXIT_NOT_WELL)


def verify_command(
    memory_dir: MemoryDirs = None, job: Job = None, stored: Stored = None, as_json: AsJson = False
) -> None:
    """Read every stored block and compare it with its checksum."""
    report = _inspect(memory_dir, job, stored, verify=True)
    _show(report, as_json)
    if not report.well:
        raise typer.Exit(EXIT_NOT_WELL)


def _inspect(
    memory_dirs: Sequence[Path] | None,
    job: str | None,
    stored: Path | None,
    *,
    verify: bool = False,
) -> JobReport:
    if stored is not None:
        return inspect_stored(_existing(stored), verify)
    return inspect_job(find_memory(memory_dirs, job), verify)


def clean_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    force: Annotated[
        bool, typer.Option("--force", help="remove --job even if it is alive")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only print what would be removed")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the memory of dead jobs; live jobs are kept."""
    if force and job is None:
        raise ConfigError("--force removes the memory of a live job: name it with --job")
    dirs = _memory_dirs(memory_dir)
    if job is None:
        summaries = [summary for path in dirs for summary in list_jobs(path)]
    else:
        paths = require_memory(memory_dir, job, as_json=as_json)
        summaries = [summarise(path) for path in paths]
    actions = [(summary, _clean(summary, force, dry_run)) for summary in summaries]
    if as_json:
        rows = [
            {**summary.to_json(), "action": action, "removed": action == _REMOVED}
            for summary, action in actions
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        _show_cleaning(actions, dirs, dry_run)
    for _, action in actions:
        is_named_and_kept = job is not None and action not in (_REMOVED, _PLANNED)
        if action.startswith(_FAILED) or is_named_and_kept:
            raise typer.Exit(EXIT_NOT_WELL)


def persist_command(  # noqa: PLR0917 - options of the command line
    out: Annotated[
        Path, typer.Option("--out", help="directory of DeepSpeed checkpoints to write to")
    ],
    memory_dir: MemoryDirs = None,
    job: Job = None,
    stored: Stored = None,
    keep: Annotated[
        int, typer.Option(min=1, help="number of the job's newest checkpoints to keep there")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Write the newest recoverable version as a DeepSpeed checkpoint, without the job's processes.

    A running job continues. Until the version is written it is held in memory, so the job may have
    to skip versions for lack of a free arena.

    Give --memory-dir once per node that is left; blocks of lost nodes come from their copies.
    """
    from reft.storage.offline import export_stored, persist_offline

    screen = Console(stderr=True)

    def progress(at: PersistProgress) -> None:
        screen.print(f"  {at}", markup=False, highlight=False)

    paths = [] if stored is not None else find_memory(memory_dir, job)
    if any(live_processes(path) for path in paths):
        screen.print(
            "the job is running: its newest complete version is held in memory until it is "
            "written. Training continues; it skips versions for which no other arena is free",
            markup=False,
        )
    with _no_device(), redirect_stdout(sys.stderr):  # DeepSpeed prints while it is imported
        if stored is not None:
            result = export_stored(_existing(stored), out, keep=keep, progress=progress)
        else:
            result = persist_offline(paths, out, keep=keep, progress=progress)
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


def _existing(stored: Path) -> Path:
    if not stored.is_dir():
        raise ConfigError(
            f"--from {stored}: no such directory; give the job's directory in persist.dir"
        )
    return stored


@contextmanager
def _no_device() -> Iterator[None]:
    """Hide all devices from the libraries that are imported in the ``with`` block."""
    before = {name: os.environ.get(name) for name in _NO_DEVICE}
    os.environ.update(_NO_DEVICE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def find_memory(memory_dirs: Sequence[Path] | None, job: str | None) -> list[Path]:
    """Find the memory directories of one job on all given nodes.

    Args:
        memory_dirs: directories with the memory of all jobs, one per node; None: this node's
            default.
        job: name of the job; None: the only job that has memory in these directories.

    Raises:
        ReftError: the job has no memory in these directories.
        ConfigError: several jobs have memory in them, and ``job`` is None.
    """
    dirs = _memory_dirs(memory_dirs)
    job_dirs = find_job_dirs(dirs)
    places, names = ", ".join(map(str, dirs)), ", ".join(sorted(job_dirs))
    if job is not None and job not in job_dirs:
        raise ReftError(f"no memory of job {job!r} in {places}; found: {names or 'none'}")
    if not job_dirs:
        raise ReftError(f"no job has memory in {places}")
    if job is None and len(job_dirs) > 1:
        raise ConfigError(f"several jobs have memory in {places}: {names}; choose one with --job")
    return job_dirs[job if job is not None else next(iter(job_dirs))]


def require_memory(
    memory_dirs: Sequence[Path] | None, job: str | None, *, as_json: bool
) -> list[Path]:
    """Call :func:`find_memory`, for a command that prints a list; print ``[]`` if that fails."""
    try:
        return find_memory(memory_dirs, job)
    except ReftError:
        if as_json:
            typer.echo("[]")
        raise


def _memory_dirs(given: Sequence[Path] | None) -> list[Path]:
    default = os.environ.get(ENV_MEMORY_DIR) or ReftConfig.model_fields["memory_dir"].default
    dirs = list(given or [Path(default)])
    for path in dirs if given else []:
        if not path.is_dir():
            raise ConfigError(f"--memory-dir {path}: no such directory")
    return dirs


def _clean(summary: JobSummary, force: bool, dry_run: bool) -> str:
    """Remove the memory of a job if that is allowed; return a text on what was done."""
    if summary.alive and not force:
        return f"left alone: {'; '.join(summary.alive_because)}"
    if summary.owner_uid != os.geteuid():
        return f"left alone: belongs to uid {summary.owner_uid}"
    if dry_run:
        return _PLANNED
    try:
        remove_job(summary.path, force)
    except (ReftError, OSError) as error:
        return f"{_FAILED}: {error}"
    return _REMOVED


# -- tables ----------------------------------------------------------------------------------------


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _show(report: JobReport, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
        return
    console = _console()
    console.print(_versions_table(report), markup=False)
    console.print(_arenas_table(report), markup=False)
    for version in report.versions:
        if not version.recoverable:
            _echo(console, f"{version.label} cannot be recovered:", version.reasons, "yellow")
    _echo(console, f"{len(report.problems)} arenas cannot be read:", report.problems, "red")
    for node, reasons in report.alive_because.items():
        _echo(console, f"node {node} is alive:", reasons, "cyan")
    if report.restores is None:
        console.print(
            "a restart would find nothing to restore in this memory", style="bold red", markup=False
        )
    else:
        console.print(
            f"a restart would restore {report.restores}; {report.why[0]}",
            style="bold green",
            markup=False,
        )
    if report.verified:
        style = "bold red" if report.bad_blocks else "bold green"
        console.print(_verified(report), style=style, markup=False)


def _echo(console: Console, title: str, lines: Sequence[str], style: str) -> None:
    if lines:
        console.print(title, style=style, markup=False)
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _verified(report: JobReport) -> str:
    blocks = sum(
        len(a.header.entries) for a in report.arenas if a.header and a.bad_blocks is not None
    )
    if not report.bad_blocks:
        return f"all {blocks} blocks match their checksums"
    return f"{report.bad_blocks} of {blocks} blocks do not match their checksums"


def _versions_table(report: JobReport) -> Table:
    table = Table(
        *("version", "recoverable", "committed", "whole on", "protection", "bytes", "sealed"),
        title=f"job {report.job_id}",
    )
    for version in report.versions:
        age = version.age_secs()
        table.add_row(
            _label(version.label),
            "yes" if version.recoverable else "no",
            "yes" if version.committed else "no",
            f"{version.whole_ranks} of {version.ranks} ranks",
            version.scheme or "unknown",
            format_size(version.nbytes),
            "never" if age is None else f"{age:.0f} s ago",
        )
    return table


def _arenas_table(report: JobReport) -> Table:
    columns = ["node", "arena", "rank at", "version", "state", "blocks", "own", "for others"]
    table = Table(*columns, *(["damaged"] if report.verified else []), title="arenas")
    for arena in sorted(report.arenas, key=lambda a: (a.node, a.path.name)):
        row = [arena.node, arena.path.name, *_arena_cells(arena)]
        if report.verified:
            bad = arena.bad_blocks
            names = ", ".join(f"{k.section} {k.member}.{k.index}" for k in (bad or ())[:4])
            row.append("not read" if bad is None else names or "none")
        table.add_row(*row)
    return table


def _arena_cells(arena: ArenaReport) -> list[str]:
    header = arena.header
    if header is None:
        return ["", "", str(arena.state), "", "", ""]
    return [
        str(header.coordinate),
        _label(header.label),
        "torn (being written)" if not header.state.whole else str(header.state),
        str(len(header.entries)),
        format_size(arena.own_bytes),
        format_size(arena.redundant_bytes),
    ]


def _show_cleaning(
    actions: Sequence[tuple[JobSummary, str]], dirs: Sequence[Path], dry_run: bool
) -> None:
    console = _console()
    if not actions:
        console.print(f"no job has memory in {', '.join(map(str, dirs))}", markup=False)
        return
    table = Table("job", "node", "owner", "incarnation", "arenas", "memory", "directory", "action")
    for summary, action in actions:
        table.add_row(
            summary.job_id,
            summary.node,
            str(summary.owner_uid),
            str(summary.incarnation),
            str(summary.arenas),
            format_size(summary.nbytes),
            str(summary.path),
            action,
        )
    console.print(table, markup=False)
    freed = sum(s.nbytes for s, action in actions if action in (_REMOVED, _PLANNED))
    console.print(f"{format_size(freed)} {'would be' if dry_run else 'were'} freed", markup=False)


def _label(label: VersionId) -> str:
    return f"step {label.step} (incarnation {label.incarnation})"


def format_size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:.1f} KiB"
