"""``reft status``: a whole job, seen from any of its nodes, once or live."""

from __future__ import annotations

import json
import os
import pwd
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from reft.cli.advise import advice_now
from reft.cli.memory import EXIT_NOT_WELL, AsJson, Job, MemoryDirs, find_memory
from reft.cli.node import node_is_well, node_status, node_table
from reft.errors import ReftError
from reft.memory.jobdir import DAEMON_FILE, JobDir, is_running, read_json
from reft.node.history import describe_parts, read_history
from reft.node.observe import Doing, NodeObserver
from reft.node.progress import read_pages
from reft.node.signals import Board, Row, Signal, is_well, read_board, summary
from reft.speed.reports import STEP_PARTS

_OLD_SECS = 10.0
_MOST_RANKS = 16
_STYLES = {
    Signal.HEALTHY: "green",
    Signal.COMPLETED: "green",
    Signal.SNAP: "cyan",
    Signal.UNHEALTHY: "bold yellow",
    Signal.OFFLINE: "bold red",
}


def status_command(
    memory_dir: MemoryDirs = None,
    job: Job = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="go on showing it, until Ctrl-C or the job's end")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="with --watch: seconds between two looks")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """The whole job, from any of its nodes: which nodes there are and how they are, step and speed, the
    newest commit, the node losses it survives now, the last recovery, warnings; and more of this node.

    With --json one document, with --watch too one a line. Without a job "job_id" is null and "problem" says
    why.
    """
    try:
        looker = _Looker(_find(memory_dir, job))
        if watch:
            told = _watch(looker, interval, as_json=as_json)
        else:
            told = looker.look()
            _show(told, as_json=as_json)
    except ReftError as error:
        if as_json:
            typer.echo(json.dumps({"job_id": None, "nodes": [], "here": [], "problem": str(error)}))
        raise
    if not told["well"]:
        raise typer.Exit(EXIT_NOT_WELL)


def _find(memory_dir: list[Path] | None, job: str | None) -> list[Path]:
    """As :func:`find_memory`, but an error says whose memory there is instead."""
    others = _others(memory_dir or [])
    try:
        return find_memory(memory_dir, job)
    except PermissionError as error:
        raise ReftError(f"{error.filename} cannot be read. {others}") from error
    except ReftError as error:
        if not others:
            raise
        raise type(error)(f"{error}. {others}") from error


def _others(given: Sequence[Path]) -> str:
    """Whose jobs may be meant."""
    owners = set()
    for path in given or Path("/dev/shm").glob("reft-*"):
        with suppress(OSError):
            owner = path.stat().st_uid
            if owner not in (os.geteuid(), 0):
                owners.add(owner)
    if not owners:
        return ""
    names = ", ".join(sorted(map(_user, owners)))
    place = ", ".join(map(str, given)) or "this host"
    return f"In {place} there is memory of another user ({names}), whose jobs they alone see"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# -- looking -------------------------------------------------------------------------------------------


@dataclass
class _Looker:
    """Looks at a job again and again.

    Attributes:
        paths: its memory, on the nodes of this host that are asked.
    """

    paths: list[Path]

    def __post_init__(self) -> None:
        self._observers = {
            path: NodeObserver(path, directory.node, directory.node, has_daemon=_has_daemon(path))
            for path in self.paths
            for directory in [JobDir.open(path)]
        }

    def look(self) -> dict[str, Any]:
        """Everything that is told, as JSON types."""
        now = time.time()
        running = any(map(_runs, self.paths))
        board, said = self._board(now, running)
        told = summary(board, now)
        told["warnings"] = [*said, *told["warnings"]]
        here = [node_status(path) for path in self.paths]
        told["advice"] = [a.to_json() for a in advice_now(self.paths, board)] if running else []
        ended = None if running else _end(self.paths)
        told |= {"state": "runs" if running else "ended", "ended": ended}
        told["well"] = running and is_well(told) and all(map(node_is_well, here))
        return {**told, "here": here}

    def _board(self, now: float, running: bool) -> tuple[Board, list[str]]:
        """The newest board on any of the nodes; of a job without one what these nodes tell themselves."""
        boards = [b for path in self.paths if (b := read_board(path)) is not None]
        if boards:
            board = max(boards, key=lambda b: b.written_unix_secs)
            said = []
            if running and (old := now - board.written_unix_secs) > _OLD_SECS:
                said.append(f"the launcher of this node has told nothing for {old:.0f} s: is it stopped?")
            if (lost := board.store_lost_unix_secs) is not None:
                said.append(
                    f"the launcher does not reach the rendezvous store since {_clock(lost)}: of other nodes "
                    f"this is the last that was heard"
                )
            return board, said
        rows = tuple(
            Row(report=observer.look(Doing("runs" if _runs(path) else "ended")))
            for path, observer in self._observers.items()
        )
        said = ["no launcher of reft tells of other nodes: this is what is known here"] if running else []
        return Board(job_id=JobDir.open(self.paths[0]).job_id, unix_secs=now, rows=rows), said


def _has_daemon(path: Path) -> bool:
    return (path / DAEMON_FILE).exists()


def _runs(path: Path) -> bool:
    """Whether any process of the job runs on the node, without touching a lock that it may want."""
    daemon, launcher = read_json(path / DAEMON_FILE), read_json(path / "launcher.json") or {}
    if daemon is not None and is_running(daemon):
        return True
    if any(page.state not in ("", "Z") for page in read_pages(path)):
        return True
    board = read_board(path)
    told = board is not None and time.time() - board.written_unix_secs < _OLD_SECS
    return told and not str(launcher.get("state", "")).startswith("ended")


def _end(paths: Sequence[Path]) -> str:
    """Why the job does not run any more, as far as these nodes know."""
    for path in paths:
        rounds = read_history(path)
        if rounds and rounds[-1].ended is not None:
            return rounds[-1].ended
    states = [str((read_json(path / "launcher.json") or {}).get("state", "")) for path in paths]
    if "ended well" in states:
        return "it ended well"
    return "its launcher was told to end" if "ended" in states else "its processes are gone"


# -- showing -------------------------------------------------------------------------------------------


def _watch(looker: _Looker, interval_secs: float, *, as_json: bool) -> dict[str, Any]:
    """Show the job until Ctrl-C or its end; returns what was seen last."""
    console = Console()
    told: dict[str, Any] = {"well": True}
    live = console.is_terminal and not as_json
    try:
        if live:
            with Live(console=console, auto_refresh=False, transient=False) as screen:
                for told in _looks(looker, interval_secs):
                    screen.update(_view(told), refresh=True)
        else:
            for told in _looks(looker, interval_secs):
                _show(told, as_json=as_json, briefly=True)
                sys.stdout.flush()
    except KeyboardInterrupt:
        return told
    except BrokenPipeError:  # whoever read it has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return told
    if not as_json:
        console.print(f"job {told['job_id']} does not run any more: {told['ended']}", markup=False)
    return told


def _looks(looker: _Looker, interval_secs: float) -> Iterator[dict[str, Any]]:
    """What is seen, one look after the other, until the job has ended."""
    told: dict[str, Any] = {}
    while True:
        try:
            told = looker.look()
        except (ReftError, OSError):
            if all(path.is_dir() for path in looker.paths):
                raise
            # Its memory is removed when a job has ended well.
            yield {
                **told,
                "state": "ended",
                "ended": "it ended well, and its memory was removed",
                "well": True,
            }
            return
        yield told
        if told["state"] == "ended":
            return
        time.sleep(interval_secs)


def _show(told: dict[str, Any], *, as_json: bool, briefly: bool = False) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=None if briefly else 2, default=str))
        return
    console = Console()
    console.print(_view(told))
    for node in () if briefly else told["here"]:
        console.print(node_table(node), markup=False)


def _view(told: dict[str, Any]) -> RenderableType:
    """The whole job."""
    table = Table(title=escape(f"job {told['job_id']}"), show_header=False)
    for name, value in _facts(told):
        table.add_row(name, escape(value))
    parts: list[RenderableType] = [table, _nodes(told)]
    if told["speeds"]:
        parts.append(_speeds(told))
    parts += [f"[bold yellow]warning:[/] {escape(said)}" for said in told["warnings"]]
    parts += [f"[cyan]advice:[/] {escape(advice['said'])}" for advice in told["advice"]]
    return Group(*parts)


def _facts(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "state", told["state"] if told["ended"] is None else f"does not run: {told['ended']}"
    speed = "" if told["steps_per_sec"] is None else f", {told['steps_per_sec']:.3g} steps/s"
    yield "step", f"{_or(told['step'], 'none yet')}{speed}; round {told['round']}"
    if (counts := told["since_start"]) is not None and counts["newest_step"] is not None:
        yield "since the start", _since_start(counts)
    commit = told["newest_commit"]
    if commit is None:
        yield "newest commit", "none"
    else:
        label = f"step {commit['step']} (incarnation {commit['incarnation']})"
        yield "newest commit", f"{label}, {told['commit_age_secs']:.0f} s ago"
    yield "protection", _or(told["protection"], "not known")
    yield "survives now", _losses(told)
    if (last := told["last_recovery"]) is not None:
        why = "; ".join([*last["failures"], *(f"node {n} was lost" for n in last["lost"])])
        resumed = (
            "" if last["resumed_step"] is None else f"; step {last['resumed_step']} ({last['resumed_from']})"
        )
        total = sum(last["secs"].values())
        parts = describe_parts(last["secs"])
        yield "last recovery", f"{_clock(last['unix_secs'])}, {why}{resumed}"
        yield "its seconds", f"{total:.1f}: {parts}" if parts else "not known yet"
    yield "restarts", str(told["restarts"])


def _since_start(counts: dict[str, Any]) -> str:
    speed = counts["samples_per_sec"]
    made = counts["newest_step"] - counts["first_step"]
    lost = ", ".join(f"{name} {secs:.0f} s" for name, secs in counts["lost_secs"].items() if secs >= 0.5)
    parts = (
        f"{made} steps in {counts['elapsed_secs']:.0f} s",
        "" if speed is None else f"{speed:.3g} samples/s",
        _tflops(counts),
        f"{counts['effective_ratio']:.1%} effective",
        lost and f"lost to {lost}",
    )
    return "; ".join(filter(None, parts))


def _tflops(counts: dict[str, Any]) -> str:
    if counts["tflops"] is None:
        return f"TFLOP/s not known: {counts['no_tflops']}"
    return f"{counts['tflops']:.3g} TFLOP/s, {counts['tflops_per_trainer']:.3g} a trainer"


def _losses(told: dict[str, Any]) -> str:
    left, whole = told["tolerance_left"], told["tolerance"]
    if left is None:
        return "not known yet"
    if left < 0:
        return "NOTHING: what is gone is more than the protection survives"
    usual = "" if whole is None or whole == left else f" (of {whole} when all nodes are there)"
    return f"the loss of {left} node(s){usual}"


def _nodes(told: dict[str, Any]) -> Table:
    table = Table(Column("node", overflow="fold"), "signal", "since", "step", "shards", "what it does")
    for node in told["nodes"]:
        signal = Signal(node["signal"])
        since = node["since_unix_secs"]
        table.add_row(
            escape(node["node"]),
            f"[{_STYLES[signal]}]{signal}[/]",
            "" if since is None else _clock(since),
            str(_or(node["step"], "")),
            escape(_shards(node)),
            escape(": ".join(filter(None, (_doing(node), node["why"])))),
        )
    return table


def _speeds(told: dict[str, Any]) -> Table:
    """Of the ranks that compute longest."""
    longest = sorted(told["speeds"], key=lambda s: -float(s["compute_secs"]))
    left_out = len(longest) - _MOST_RANKS
    table = Table(
        "rank", Column("node", overflow="fold"), "step", *STEP_PARTS, title="what a step consists of, in ms"
    )
    slow = {rank for s in told["slow"] for rank in s["ranks"]}
    for speed in sorted(longest[:_MOST_RANKS], key=lambda s: int(s["rank"])):
        style = _STYLES[Signal.UNHEALTHY] if speed["rank"] in slow else ""
        secs = (speed[f"{name}_secs"] for name in ("step", *STEP_PARTS))
        table.add_row(
            str(speed["rank"]), escape(speed["node"]), *(f"{s * 1000:.3g}" for s in secs), style=style
        )
    if left_out > 0:
        table.caption = f"and {left_out} that compute no longer than these"
    return table


def _doing(node: dict[str, Any]) -> str:
    return "waits as a spare" if node["spare"] else str(node["doing"])


def _shards(node: dict[str, Any]) -> str:
    if not node["shards"]:
        return "none"
    steps = sorted({s["step"] for s in node["shards"]})
    said = f"{len(node['shards'])} at step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    return said if node["holds_shards"] else f"{said} (replaced)"


def _or(value: Any, otherwise: str) -> str:
    return otherwise if value is None else str(value)


def _clock(unix_secs: float) -> str:
    return f"{datetime.fromtimestamp(unix_secs):%H:%M:%S}"
