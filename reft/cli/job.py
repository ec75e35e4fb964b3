"""``reft status`` and ``reft persist``: a running job's node, and a dead job's memory onto disk."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reft.cli.history import restarts_among, summary
from reft.cli.memory import EXIT_NOT_WELL, AsJson, Job, MemoryDirs, find_memory, find_memory_or_say
from reft.cli.protect import describe
from reft.store.history import read_history
from reft.store.jobdir import JobDir, is_running, read_json
from reft.store.protection import read_record


def status_command(memory_dir: MemoryDirs = None, job: Job = None, as_json: AsJson = False) -> None:
    """What the node's daemon knows: newest commit, stale since which step, newest checkpoint on disk.

    With --json a list of nodes, empty where no memory is found; standard error says why.
    """
    nodes = [_node_status(path) for path in find_memory_or_say(memory_dir, job, as_json=as_json)]
    if as_json:
        typer.echo(json.dumps(nodes, indent=2, default=str))
    else:
        for node in nodes:
            _show_status(node)
    if not all(_is_well(node) for node in nodes):
        raise typer.Exit(EXIT_NOT_WELL)


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
    from reft.load.offline import persist_offline

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


def _node_status(path: Path) -> dict[str, Any]:
    """The daemon's last word, and whether it still runs."""
    directory = JobDir.open(path)
    daemon = read_json(path / "daemon.json")
    rounds = read_history(path)
    return {
        "job_id": directory.job_id,
        "node": directory.node,
        "memory": str(path),
        "daemon_runs": daemon is not None and is_running(daemon),
        "status": directory.read_status(),
        "restarts": summary(rounds),
        "last_recovery": restarts[-1].to_json() if (restarts := restarts_among(rounds)) else None,
        "protection": None if (record := read_record(path)) is None else record.to_json(),
    }


def _is_well(node: dict[str, Any]) -> bool:
    status = node["status"] or {}
    persist = status.get("persist") or {}
    stale = status.get("stale_since_step") is not None or persist.get("stale_since_step") is not None
    return bool(node["daemon_runs"]) and status.get("last_committed") is not None and not stale


def _show_status(node: dict[str, Any]) -> None:
    status = node["status"] or {}
    persist = status.get("persist") or {}
    table = Table(title=f"job {node['job_id']}, node {node['node']}", show_header=False)
    table.add_row("restarts", node["restarts"])
    table.add_row("daemon", "runs" if node["daemon_runs"] else "does not run")
    table.add_row("newest commit", _label(status.get("last_committed")))
    for name, said in zip(("protection", ""), describe(node["protection"] or {}), strict=False):
        table.add_row(name, said)
    table.add_row("snapshots", _staleness(status.get("stale_since_step"), status.get("stale_cause")))
    table.add_row(
        "skipped", ", ".join(f"{n}x {c}" for c, n in (status.get("skipped") or {}).items()) or "none"
    )
    for said in status.get("quiet") or ():
        table.add_row("QUIET", said)
    table.add_row("on disk", _label(persist.get("last")) if persist.get("dir") else "not configured")
    if persist.get("dir"):
        table.add_row("persist", _persisting(persist))
    for name, said in _traffic(status.get("trainers") or {}).items():
        table.add_row(name, said)
    if recomputed := _recomputed(status.get("trainers") or {}):
        table.add_row("recomputed", recomputed)
    if updated := status.get("updated_unix_secs"):
        table.add_row("as of", f"{max(0.0, time.time() - updated):.0f} s ago")
    Console().print(table, markup=False)


def _persisting(persist: dict[str, Any]) -> str:
    said = _staleness(persist.get("stale_since_step"), persist.get("error"))
    lag, writing = persist.get("lag_steps") or 0, persist.get("writing")
    return f"{said}; writes {_label(writing)}, {lag} steps behind memory" if writing else said


def _traffic(trainers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Bytes of the newest version of all ranks of the node, by what they are; nothing before there is one."""
    counted = [t["stats"]["traffic"] for t in trainers.values() if "traffic" in (t.get("stats") or {})]
    rows = {}
    for name, direction in (("a version copies", "to_host"), ("and sends to other nodes", "sent")):
        total: Counter[str] = sum((Counter(c[direction]) for c in counted), Counter())
        parts = ", ".join(f"{kind.replace('_', ' ')} {_size(n)}" for kind, n in total.items())
        if counted:
            rows[name] = f"{_size(total.total())} ({parts})" if total else "nothing"
    return rows


def _recomputed(trainers: dict[str, dict[str, Any]]) -> str | None:
    """How often ring peers' partitions were recomputed on this node, and how often and why copied; None where
    that was not asked for."""
    stats = [t["stats"] for t in trainers.values() if t.get("stats")]
    made = sum(s.get("recomputed", 0) for s in stats)
    copied: Counter[str] = sum((Counter(s.get("resynced") or {}) for s in stats), Counter())
    if not made and not copied:
        return None
    causes = ", ".join(f"{n}x {cause}" for cause, n in copied.items())
    return f"{made} partitions; copied from their owners: {causes or 'none'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _label(value: dict[str, int] | None) -> str:
    return "none" if value is None else f"step {value['step']} (incarnation {value['incarnation']})"


def _staleness(since: int | None, cause: str | None) -> str:
    return "up to date" if since is None else f"STALE since step {since}: {cause}"
