"""``reft status``: shows a whole job from any of its nodes. ``reft history``: its restarts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from reft.cli.memory import (
    EXIT_NOT_WELL,
    AsJson,
    Job,
    MemoryDirs,
    find_memory,
    format_size,
    require_memory,
)
from reft.cli.running import describe
from reft.errors import ConfigError, ReftError
from reft.memory.jobdir import JobDir
from reft.node.history import (
    RoundReport,
    describe_parts,
    read_history,
    read_kept_histories,
    why,
)
from reft.node.report import HealthSignal
from reft.node.status import ENDED_AS_WANTED, StatusReader, clock
from reft.node.stragglers import STEP_PARTS

_REMOVAL_SECS = 1.0
_MAX_RANKS = 16
_STYLES = {
    HealthSignal.HEALTHY: "green",
    HealthSignal.COMPLETED: "green",
    HealthSignal.SNAP: "cyan",
    HealthSignal.UNHEALTHY: "bold yellow",
    HealthSignal.OFFLINE: "bold red",
}


def status_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    *,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="keep showing it until Ctrl-C or the end of the job"),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="with --watch: seconds between updates")
    ] = 1.0,
    web: Annotated[
        bool,
        typer.Option(
            "--web", help="print the address of the web page that shows the same, and exit"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the whole job, from any of its nodes: the nodes and their signals, step and speed, the
    newest commit, the node losses that the job survives now, the last recovery and warnings; and
    details of this node.

    --json prints one document; with --watch, one document per line. Where no job is found, "job_id"
    is null and "problem" gives the reason.
    """
    try:
        reader = StatusReader(find_memory(memory_dir, job))
        if web:
            typer.echo(_find_page(reader.read()))
            return
        if watch:
            status = _watch(reader, interval, as_json=as_json)
        else:
            status = reader.read()
            _show(status, as_json=as_json)
    except (ReftError, PermissionError) as error:
        if as_json:
            typer.echo(json.dumps({"job_id": None, "nodes": [], "here": [], "problem": str(error)}))
        raise
    if not status["well"]:
        raise typer.Exit(EXIT_NOT_WELL)


def _find_page(status: dict[str, Any]) -> str:
    """Return the address of the status page, which the daemon of one of the nodes in
    ``status["here"]`` serves."""
    daemons = [node["status"] or {} for node in status["here"] if node["daemon_runs"]]
    for daemon in daemons:
        if problem := daemon.get("web_problem"):
            raise ReftError(
                f"the page is not served: {problem}. End what listens there, or start the job with "
                "another metrics.port"
            )
    for daemon in daemons:
        if url := daemon.get("web"):
            return str(url)
    raise ConfigError(
        f'no node daemon of job {status["job_id"]} serves the page here; write "metrics": '
        '{"port": 9095} into the reft block, and install the extra reft-ckpt[metrics]'
    )


def history_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    kept: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="a job's directory in persist.dir, or its --log-dir, after the job ended well",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every start of a job's trainers on a node: why the previous one ended, and from where it
    resumed.

    When a job ends well, its history moves from memory to persist.dir/JOB, or else to --log-dir.
    --json prints a list of nodes; it is empty if no history is found, and standard error says why.
    """
    histories = (
        _kept(kept, as_json=as_json)
        if kept is not None
        else _read_memory(memory_dir, job, as_json=as_json)
    )
    if as_json:
        nodes = [
            {"job_id": j, "node": n, "rounds": [*map(vars, rounds)]}
            for (j, n), rounds in histories.items()
        ]
        typer.echo(json.dumps(nodes, indent=2))
        return
    for (job_id, node), rounds in histories.items():
        title = f"job {job_id}, as node {node} saw it"
        table = Table("when", "why", "resumed from", "seconds", title=title, show_lines=True)
        for row in rounds:
            ended = "" if row.ended is None else f". Then the job ended: {row.ended}"
            lost = row.newest_step - (row.resumed_step or 0)
            resumed = (
                "the beginning"
                if row.resumed_from is None
                else f"step {row.resumed_step} ({row.resumed_from})"
            )
            if row.resumed_from is not None and lost > 0:
                resumed += f"; {lost} committed steps were lost"
            when = f"{datetime.fromtimestamp(row.unix_secs):%m-%d %H:%M:%S}"
            table.add_row(when, why(row) + ended, resumed, describe_parts(row.secs))
        Console().print(table, markup=False)


# Reports of the starts of trainers, by job and node
Histories = Mapping[tuple[str, str], Sequence[RoundReport]]


def _read_memory(memory_dir: list[Path] | None, job: str | None, *, as_json: bool) -> Histories:
    try:
        paths = require_memory(memory_dir, job, as_json=as_json)
    except ConfigError:
        raise
    except ReftError as error:
        raise ReftError(
            f"{error}. The history of a job that ended well is in persist.dir/JOB, or in its "
            "--log-dir: reft history --from DIRECTORY"
        ) from error
    jobs = map(JobDir.open, paths)
    return {(job.job_id, job.node): read_history(job.path) for job in jobs}


def _kept(directory: Path, *, as_json: bool) -> Histories:
    found = read_kept_histories(directory)
    if not found:
        if as_json:
            typer.echo("[]")
        raise ReftError(f"--from {directory}: no job has left its history there")
    return found


# -- showing ---------------------------------------------------------------------------------------


def _watch(reader: StatusReader, interval_secs: float, *, as_json: bool) -> dict[str, Any]:
    """Show the job repeatedly until Ctrl-C or the job's end; return the last status."""
    console = Console()
    status: dict[str, Any] = {"well": True}
    try:
        if console.is_terminal and not as_json:
            with Live(console=console, auto_refresh=False, transient=False) as screen:
                for status in _poll(reader, interval_secs):
                    screen.update(_view(status), refresh=True)
        else:
            for status in _poll(reader, interval_secs):
                _show(status, as_json=as_json, briefly=True)
                sys.stdout.flush()
    except KeyboardInterrupt:
        return status
    except BrokenPipeError:  # The program that reads the output has ended
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return status
    if not as_json:
        console.print(f"job {status['job_id']} has ended: {status['ended']}", markup=False)
    return status


def _poll(reader: StatusReader, interval_secs: float) -> Iterator[dict[str, Any]]:
    """Read the status repeatedly until the job has ended."""
    status: dict[str, Any] = {}
    while status.get("state") != "ended":
        if status:
            time.sleep(interval_secs)
        try:
            ran, status = bool(status), reader.read()
            status["well"] = status["well"] or status["ended"] == ENDED_AS_WANTED
            vanishes = ran and status["state"] == "ended" and _vanishes(reader.paths)
        except (ReftError, OSError):
            if not (vanishes := _vanishes(reader.paths)):
                raise
        if vanishes:
            ended = f"{ENDED_AS_WANTED}, and its memory was removed"
            status = {**status, "state": "ended", "ended": ended, "well": True}
        yield status


def _vanishes(paths: Sequence[Path]) -> bool:
    """Whether a memory directory is being removed, as after the good end of a job.

    A removal in progress looks like missing files, so wait briefly to see whether a whole directory
    disappears.
    """
    deadline = time.monotonic() + _REMOVAL_SECS
    while (whole := all(path.is_dir() for path in paths)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not whole


def _show(status: dict[str, Any], *, as_json: bool, briefly: bool = False) -> None:
    if as_json:
        typer.echo(json.dumps(status, indent=None if briefly else 2, default=str))
        return
    console = Console()
    console.print(_view(status))
    for node in () if briefly else status["here"]:
        table = Table(title=escape(f"job {node['job_id']}, node {node['node']}"), show_header=False)
        for name, text in _describe_node(node):
            table.add_row(name, escape(text))
        console.print(table)


def _view(status: dict[str, Any]) -> RenderableType:
    table = Table(title=escape(f"job {status['job_id']}"), show_header=False)
    for name, value in _facts(status):
        table.add_row(name, escape(value))
    parts: list[RenderableType] = [table, _nodes(status)]
    if status["speeds"]:
        parts.append(_speeds(status))
    parts += [f"[bold yellow]warning:[/] {escape(text)}" for text in status["warnings"]]
    parts += [f"[cyan]advice:[/] {escape(advice['said'])}" for advice in status["advice"]]
    return Group(*parts)


def _facts(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "state", _state(status)
    speed = "" if status["steps_per_sec"] is None else f", {status['steps_per_sec']:.3g} steps/s"
    yield "step", f"{_or(status['step'], 'none yet')}{speed}; round {status['round']}"
    if (counts := status["since_start"]) is not None and counts["newest_step"] is not None:
        parts = [
            f"{counts['newest_step'] - counts['first_step']} steps in {counts['elapsed_secs']:.0f} "
            "s"
        ]
        if counts["samples_per_sec"] is not None:
            parts.append(f"{counts['samples_per_sec']:.3g} samples/s")
        if counts["tflops"] is not None:
            parts.append(
                f"{counts['tflops']:.3g} TFLOP/s, {counts['tflops_per_trainer']:.3g} a trainer"
            )
        parts.append(f"{counts['effective_ratio']:.1%} effective")
        if lost := [
            f"{name} {secs:.0f} s" for name, secs in counts["lost_secs"].items() if secs >= 0.5
        ]:
            parts.append(f"lost to {', '.join(lost)}")
        yield "since the start", "; ".join(parts)
    age = "" if status["newest_commit"] is None else f", {status['commit_age_secs']:.0f} s ago"
    yield "newest commit", _label(status["newest_commit"]) + age
    yield "protection", _or(status["protection"], "not known")
    left, whole = status["tolerance_left"], status["tolerance"]
    text = "not known yet"
    if left is not None:
        usual = "" if whole is None or whole == left else f" (of {whole} when all nodes are there)"
        text = f"the loss of {left} node(s){usual}"
    if left is not None and left < 0:
        text = "NOTHING: more nodes are lost than the protection survives"
    yield "survives now", text
    if (last := status["last_recovery"]) is not None:
        causes = "; ".join([*last["failures"], *(f"node {n} was lost" for n in last["lost"])])
        resumed = ""
        if last["resumed_step"] is not None:
            resumed = f"; step {last['resumed_step']} ({last['resumed_from']})"
        yield "last recovery", f"{clock(last['unix_secs'])}, {causes}{resumed}"
        recovered = describe_parts(last["secs"])
        total = sum(last["secs"].values())
        yield "its seconds", f"{total:.1f}: {recovered}" if recovered else "not known yet"
    yield "restarts", str(status["restarts"])


def _state(status: dict[str, Any]) -> str:
    if status["ended"] is not None:
        return f"does not run: {status['ended']}"
    text = str(status["state"])
    if (waiting := status["waiting"]) is None:
        return text
    if len(names := waiting["for"]) == 1:
        text += f": {names[0]}, or one in its place"
    elif names:
        text += f": {', '.join(names)}, or others in their place"
    if (since := waiting["since_unix_secs"]) is not None:
        text += f", since {clock(since)} ({max(0.0, time.time() - since):.0f} s)"
    until = waiting["until_unix_secs"]
    limit = "--rdzv-conf join_timeout is over (600 s by default)" if until is None else clock(until)
    return f"{text}, until {limit} at most"


def _nodes(status: dict[str, Any]) -> Table:
    table = Table(
        Column("node", overflow="fold"), "signal", "since", "step", "shards", "what it does"
    )
    for node in status["nodes"]:
        signal, since = HealthSignal(node["signal"]), node["since_unix_secs"]
        shown = "snapshot done" if signal is HealthSignal.COMPLETED else str(signal)
        style = _STYLES[HealthSignal.UNHEALTHY if node["quiet"] else signal]
        doing = "waits as a spare" if node["spare"] else node["doing"]
        shards = "none"
        if steps := sorted({s["step"] for s in node["shards"]}):
            shards = f"{len(node['shards'])} at step {steps[0]}" + (
                f" to {steps[-1]}" if steps[1:] else ""
            )
            shards += "" if node["holds_shards"] else " (replaced)"
        table.add_row(
            escape(node["node"]),
            f"[{style}]{'silent' if node['quiet'] else shown}[/]",
            "" if since is None else clock(since),
            str(_or(node["step"], "")),
            escape(shards),
            escape(": ".join(filter(None, (doing, node["why"])))),
        )
    return table


def _speeds(status: dict[str, Any]) -> Table:
    longest = sorted(status["speeds"], key=lambda s: -float(s["compute_secs"]))
    title = "what a step consists of, in ms"
    table = Table("rank", Column("node", overflow="fold"), "step", *STEP_PARTS, title=title)
    slow = {rank for s in status["slow"] for rank in s["ranks"]}
    for speed in sorted(longest[:_MAX_RANKS], key=lambda s: int(s["rank"])):
        style = _STYLES[HealthSignal.UNHEALTHY] if speed["rank"] in slow else ""
        millis = (f"{speed[f'{name}_secs'] * 1000:.3g}" for name in ("step", *STEP_PARTS))
        table.add_row(str(speed["rank"]), escape(speed["node"]), *millis, style=style)
    if (left_out := len(longest) - _MAX_RANKS) > 0:
        table.caption = f"and {left_out} that compute no longer than these"
    return table


def _describe_node(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a node's own part of the status, as rows (name, text) of a table."""
    status = node["status"] or {}
    stats = [t["stats"] for t in (status.get("trainers") or {}).values() if t.get("stats")]
    skipped = (status.get("skipped") or {}).items()
    yield "restarts", node["restarts"]
    yield "daemon", "runs" if node["daemon_runs"] else "does not run"
    yield "newest commit", _label(status.get("last_committed"))
    yield from zip(("protection", ""), describe(node["protection"] or {}), strict=False)
    yield "snapshots", _staleness(status.get("stale_since_step"), status.get("stale_cause"))
    yield "skipped", ", ".join(f"{count}x {cause}" for cause, count in skipped) or "none"
    yield from _describe_storage(status.get("persist") or {})
    yield from _describe_rates(stats)
    yield from _describe_traffic(stats)
    if updated := status.get("updated_unix_secs"):
        yield "as of", f"{max(0.0, time.time() - updated):.0f} s ago"


def _describe_storage(persist: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not persist.get("dir"):
        yield "on disk", "not configured"
        return
    yield "on disk", _label(persist.get("last"))
    state = _staleness(persist.get("stale_since_step"), persist.get("error"))
    if writing := persist.get("writing"):
        state += f"; writes {_label(writing)}, {persist.get('lag_steps') or 0} steps behind memory"
    yield "persist", state


def _describe_rates(stats: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Describe how often versions are taken and persisted, if reft adapts that.

    Of all ranks' intervals the longest is shown.
    """
    for name, key, when in (
        ("snapshot rate", "memory_rate", "after a failure that memory survives"),
        ("persist rate", "persist_rate", "when memory fails"),
    ):
        rates = [rank[key] for rank in stats if rank.get(key)]
        if not rates:
            continue
        rate = max(rates, key=lambda rate: rate["interval_steps"])
        observed = "not measured yet"
        if rate["overhead"] is not None:
            observed = f"{rate['overhead']:.1%} observed"
        lost_steps = max(rate["most_lost_steps"], 2 * rate["agreed_steps"])
        observing = "; looks at steps without a snapshot now" if rate.get("observing") else ""
        yield (
            name,
            f"every {rate['agreed_steps']} steps ({rate['why']}{observing}); {observed} of "
            f"{rate['max_overhead']:.1%} allowed; at most {lost_steps} steps are lost {when}",
        )


def _describe_traffic(stats: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Describe the bytes that the newest version moved, by kind, summed over the node's ranks."""
    traffic = [rank["traffic"] for rank in stats if "traffic" in rank]
    for name, way in (("a version copies", "to_host"), ("and sends to other nodes", "sent")):
        total: Counter[str] = sum((Counter(rank[way]) for rank in traffic), Counter())
        parts = ", ".join(f"{kind.replace('_', ' ')} {format_size(n)}" for kind, n in total.items())
        if traffic:
            yield name, f"{format_size(total.total())} ({parts})" if total else "nothing"
    recomputed = sum(rank.get("recomputed", 0) for rank in stats)
    copied: Counter[str] = sum((Counter(rank.get("resynced") or {}) for rank in stats), Counter())
    if recomputed or copied:
        causes = ", ".join(f"{count}x {cause}" for cause, count in copied.items()) or "none"
        yield "recomputed", f"{recomputed} partitions; copied from their owners: {causes}"


def _staleness(since: int | None, cause: str | None) -> str:
    return "up to date" if since is None else f"STALE since step {since}: {cause}"


def _label(value: dict[str, Any] | None) -> str:
    return "none" if value is None else f"step {value['step']} (incarnation {value['incarnation']})"


def _or(value: Any, otherwise: str) -> str:
    return otherwise if value is None else str(value)
