"""``reft profile``: runs a job like ``reft launch``, measures some steps, says where its devices
wait.

For people in tables, with what the figures mean; as a picture; as trace events for tools.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from reft.config import ProfileConfig
from reft.env import ENV_JOB_ID, ENV_PROFILE
from reft.errors import ConfigError
from reft.pacing.schedule import WindowKind
from reft.profile.result import (
    PROFILE_FILE,
    Activity,
    MeasuredWindow,
    Overlap,
    Percentiles,
    ProfileError,
    ProfileResult,
    RankStep,
    StageProfile,
)
from reft.refusal import Parser

_NAME = "reft profile"
_WIDTH = 170
_DESCRIPTION = (
    "Run a job like 'reft launch' (with the same options: --help-all lists them), measure some "
    "steps after warm-up, and report where the devices of every pipeline stage wait and how much "
    "of a snapshot fits there. The job ends after the measurement."
)


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft profile``; returns the exit code: 0, 1 if there is no profile in the
    end, else what ``reft launch`` returns. Raises ReftError: a :class:`~reft.errors.ConfigError`
    for wrong use."""
    if argv[:1] in (["-h"], ["--help"]):  # without torch, whose import takes seconds
        parser = Parser(prog=_NAME, words="SCRIPT [ARGUMENTS]...", description=_DESCRIPTION)
        _add_options(parser)
        parser.print_help()
        return 0
    if any(word.partition("=")[0] == "--from" for word in argv):
        parser = Parser(prog=_NAME, add_help=False, allow_abbrev=False)
        _add_outputs(parser)
        saved, rest = parser.parse_known_args(list(argv))
        if not rest:  # elsewhere it is an option of the script
            _check_outputs(saved)
            try:
                _present(ProfileResult.load(saved.saved), saved)
            except ProfileError as error:
                raise ConfigError(str(error)) from error
            return 0
    return _run(["--help"] if argv[:1] == ["--help-all"] else argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Profile")
    for option, default, says in (
        ("--steps", 10, "steps to measure"),
        ("--warmup-steps", ProfileConfig().warmup_steps, "steps before the measurement"),
    ):
        dest = f"profile_{option[2:].replace('-', '_')}"
        shown = f"{says} (default: %(default)s)"
        group.add_argument(option, type=int, default=default, dest=dest, metavar="N", help=shown)
    group.add_argument("--dir", type=Path, help="directory in which to keep all files")
    says = "let the job continue to its own end after the measurement"
    group.add_argument("--keep-running", action="store_true", help=says)
    group.add_argument(
        "--without-snapshots", action="store_true", help="measure the job without snapshots"
    )
    _add_outputs(group)


def _add_outputs(group: argparse._ActionsContainer) -> None:
    says = "show the profile that --json saved in FILE; run no job"
    group.add_argument("--from", type=Path, dest="saved", metavar="FILE", help=says)
    for option, kind, metavar, says in (
        ("--json", Path, "FILE", "write the profile as JSON; '-' is stdout"),
        ("--trace", Path, "FILE", "write Chrome trace events, for ui.perfetto.dev"),
        ("--figure", Path, "FILE", "draw the timeline (png, svg, pdf; needs matplotlib)"),
        ("--figure-step", int, "STEP", "draw this step instead of the median one"),
    ):
        group.add_argument(option, type=kind, metavar=metavar, help=says)


def _run(argv: Sequence[str]) -> int:
    from reft.job.launch import launch
    from reft.job.options import collect_options, make_parser
    from reft.profile.profiler import forget_taken

    parser = make_parser()
    parser.prog = _NAME
    parser.description = _DESCRIPTION
    _add_options(parser)
    args = parser.parse_args(list(argv))
    if args.saved is not None:
        raise ConfigError("--from shows a saved profile: remove the script and its launch options")
    _check_outputs(args)
    with tempfile.TemporaryDirectory(prefix="reft-profile-") as scratch:
        folder = (args.dir or Path(scratch)).absolute()
        _set_up_environment(args, folder)
        written = folder / PROFILE_FILE
        written.unlink(missing_ok=True)
        forget_taken(folder)
        code = launch(collect_options(args))
        ranks = forget_taken(folder)
        if code != 0:
            return code
        if not written.exists():
            return _explain_nothing(args, ranks)
        _present(ProfileResult.load(written), args)
    return 0


def _set_up_environment(args: argparse.Namespace, folder: Path) -> None:
    """What the trainers, who inherit it, are to do; see :func:`reft.config.parse_block`."""
    for name, value, least in (
        ("--steps", args.profile_steps, 1),
        ("--warmup-steps", args.profile_warmup_steps, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; expected at least {least}")
    profile = ProfileConfig(
        steps=args.profile_steps,
        warmup_steps=args.profile_warmup_steps,
        dir=folder,
        then="go_on" if args.keep_running else "exit",
    )
    block: dict[str, object] = {
        "profile": profile.model_dump(mode="json"),
        "allow_unprotected": True,
    }
    if args.without_snapshots:
        block |= {"variant": "none", "has": {}, "persist": {}}
    os.environ[ENV_PROFILE] = json.dumps(block)
    if args.job_id in (None, os.environ.get(ENV_JOB_ID)):
        # The memory of the job proper is neither restored from nor touched.
        own = uuid.uuid4().hex[:12] if args.rdzv_id == "none" else args.rdzv_id
        args.job_id = f"profile-{args.job_id or own}"


def _explain_nothing(args: argparse.Namespace, ranks: set[int]) -> int:
    """Why there is nothing to show on this node, which may be well."""
    if ranks and 0 not in ranks:
        print(f"{_NAME}: measured; the profile is on the node of rank 0", file=sys.stderr)
        return 0
    why = "the profile could not be made; see the log above"
    if not ranks:
        why = (
            f"it made fewer than {args.profile_warmup_steps} + {args.profile_steps} + 1 steps "
            "(lower --warmup-steps or --steps), or has no pipeline engine"
        )
    print(f"{_NAME}: the job ended well, but left no profile: {why}", file=sys.stderr)
    return 1


def _check_outputs(args: argparse.Namespace) -> None:
    """Before the job runs, not after it."""
    for option, path in (("--json", args.json), ("--trace", args.trace)):
        if path is not None and str(path) != "-":
            check_folder(option, path)
    if args.figure is not None:
        check_figure("--figure", args.figure)


def _present(result: ProfileResult, args: argparse.Namespace) -> None:
    if args.json is not None and str(args.json) == "-":
        json.dump(result.to_json(), sys.stdout)
        print()
    else:
        wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
        show(result, Console(width=wide))
        if args.json is not None:
            result.save(args.json)
    if args.trace is not None:
        write_trace(result, args.trace)
    if args.figure is not None:
        draw(result, args.figure, args.figure_step)
    for path in (args.json, args.trace, args.figure):
        if path is not None and str(path) != "-":
            print(f"wrote {path}", file=sys.stderr)


# -- tables ----------------------------------------------------------------------------------------

_COLUMNS = (
    Activity.FORWARD,
    Activity.BACKWARD,
    Activity.OPTIMIZER,
    Activity.REDUCE,
    Activity.TRANSFER,
)
_IMBALANCE = 0.10
_RARE = 0.9
_MATCHED = 0.9


def show(result: ProfileResult, console: Console) -> None:
    """Print stages, windows, what it means, how it was measured."""
    console.print(_stages(result))
    if any(stage.windows for stage in result.stages):
        console.print(_windows(result))
    for line in advice(result):
        console.print(f"• {line}", markup=False, highlight=False)
    speed = result.bandwidth_bytes_per_sec
    console.print(
        f"\nTimes by the {result.clock} clock. Waiting and transfer were separated by the "
        "partner's record "
        f"for {percent(result.matched_share)} of the point-to-point time, else by the fastest "
        "observation; "
        f"clocks agree within {result.clock_error_secs * 1e6:.0f} us. Bandwidth: "
        f"{'unknown' if speed is None else decimal(int(speed)) + '/s'} "
        f"({result.bandwidth_source}).",
        style="dim",
        markup=False,
        highlight=False,
    )


def milliseconds(secs: float) -> str:
    """Three significant digits, never in exponents."""
    value = secs * 1e3
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} ms"


def percent(share: float) -> str:
    """One decimal below ten."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _ms(spread: Percentiles | None) -> str:
    return "–" if spread is None or spread.p50 == 0 else f"{spread.p50 * 1e3:.2f}"


def _stages(result: ProfileResult) -> Table:
    pp, dp, tp = result.degrees
    title = (
        f"job {escape(result.job_id)}, pp {pp} x dp {dp} x tp {tp}: {len(result.steps)} steps of "
        f"{result.step_secs.p50 * 1e3:.1f} ms (medians, ms per step)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("stage", "step", *_COLUMNS, "idle", "usable", "fits", "snapshot", "held up"):
        table.add_column(str(name), justify="right", no_wrap=True)
    table.add_column("tier 1 / 2 / 3 / fence", no_wrap=True)
    for stage in result.stages:
        fits = stage.bytes_fit
        copied = [
            decimal(n) if (n := int(stage.copied.get(tier, 0))) else "0" for tier in (1, 2, 3, 0)
        ]
        table.add_row(
            str(stage.stage_id),
            _ms(stage.step_secs),
            *(_ms(stage.secs.get(activity)) for activity in _COLUMNS),
            f"{_ms(stage.secs.get(Activity.WAIT))} ({percent(stage.idle_share)})",
            _ms(stage.usable_secs),
            "?" if fits is None else decimal(fits),
            decimal(stage.snapshot_bytes) if stage.snapshot_bytes else "–",
            f"{stage.held_up_secs * 1e3:.2f}",
            " / ".join(copied) if stage.copied_bytes else "no snapshots",
        )
    return table


def _windows(result: ProfileResult) -> Table:
    """One line per stage, kind and side of the fence; the JSON has every window."""
    table = Table(title="idle windows of a step (ms)", title_justify="left")
    for name in ("stage", "kind", "number", "first at", "p10", "p50", "p90", "longest", "fits"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    table.add_column("waits in", no_wrap=True)
    for stage in result.stages:
        groups: dict[tuple[WindowKind, bool], list[MeasuredWindow]] = {}
        for window in stage.windows:
            groups.setdefault((window.kind, window.usable), []).append(window)
        for (kind, usable), windows in groups.items():
            lengths = (sum(w.length_secs[n] for w in windows) for n in range(3))
            times = (windows[0].start_secs, *lengths, max(w.length_secs.p50 for w in windows))
            fits = [w.bytes_fit for w in windows if w.bytes_fit is not None]
            room = decimal(sum(fits)) if fits else "?"
            table.add_row(
                *(str(stage.stage_id), str(kind), str(len(windows))),
                *(f"{secs * 1e3:.2f}" for secs in times),
                room if usable else "after the fence",
                ", ".join(dict.fromkeys(w.name for w in windows)),
                style=None if usable else "dim",
            )
    return table


# -- what it means ---------------------------------------------------------------------------------


def advice(result: ProfileResult) -> Iterator[str]:
    """Lines to read after the tables, the most important first."""
    yield verdict(result)
    for stage in result.stages:
        yield f"stage {stage.stage_id}{_fit(stage, result.bandwidth_bytes_per_sec)}"
    due = sum(stage.snapshot_bytes for stage in result.stages)
    copied = sum(stage.copied_bytes for stage in result.stages)
    if 0 < copied < _RARE * due:
        yield (
            f"snapshots were taken of about {percent(copied / due)} of the measured steps: "
            "interval_steps is larger than 1, or the version before was not committed yet (reft "
            "status counts skips)"
        )
    stages, kinds = result.stages, (Activity.FORWARD, Activity.BACKWARD)
    computing = {s.stage_id: sum(s.secs[a].p50 for a in kinds if a in s.secs) for s in stages}
    slowest = max(computing, key=lambda stage_id: computing[stage_id])
    mean = sum(computing.values()) / len(computing)
    if len(stages) == 1:
        yield "one pipeline stage: it has no neighbours to wait for, so there are no bubbles"
    elif mean and computing[slowest] > (1 + _IMBALANCE) * mean:
        yield (
            f"stage {slowest} computes {percent(computing[slowest] / mean - 1)} longer than the "
            "mean stage, and the others wait for it: it has too many layers, or a slow device"
        )
    if result.matched_share < _MATCHED:
        yield (
            f"{percent(1 - result.matched_share)} of the time in sends and receives was split by "
            "the fastest observation: there idle time is a lower bound"
        )


def _fit(stage: StageProfile, bandwidth: float | None) -> str:
    room, need = stage.bytes_fit, stage.snapshot_bytes
    if not any(window.usable for window in stage.windows):
        return (
            " has no recurring idle time outside of its optimizer step: its snapshots run during "
            "computation (tier 2), or the optimizer step waits for them"
        )
    if room is None or bandwidth is None:
        return (
            f" idles {milliseconds(stage.usable_secs.p50)} of a step outside of the optimizer step"
        )
    if need <= room:
        fits = (
            f"a snapshot of {decimal(need)} fits into {percent(need / room)} of"
            if need
            else "there fit into"
        )
        return f": {fits} its idle time, {decimal(room)} at {decimal(int(bandwidth))}/s"
    return (
        f": a snapshot of {decimal(need)} does not fit its idle time: {decimal(room)} do "
        f"({percent(room / need)}), the other {decimal(need - room)} are copied during "
        "computation, or the optimizer step waits for them. A larger interval_steps makes that "
        "rarer; more data-parallel peers make the share smaller"
    )


# -- as Chrome trace events, for ui.perfetto.dev or chrome://tracing -------------------------------
#
# One process per rank, named after its stage; a track for steps, one for instructions, one for
# snapshots. Events on one track never overlap. The format is a list of JSON objects; no library is
# needed to write it.

_STEPS, _INSTRUCTIONS, _SNAPSHOTS = range(3)


def write_trace(result: ProfileResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(result))}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def _events(result: ProfileResult) -> Iterator[dict[str, Any]]:
    """Names of processes and tracks first, then by step and rank."""
    for rank in result.timeline():
        for what, track, args in (
            ("process_name", 0, {"name": f"stage {rank.stage_id} (rank {rank.rank})"}),
            ("process_sort_index", 0, {"sort_index": rank.stage_id}),
            ("thread_name", _STEPS, {"name": "steps"}),
            ("thread_name", _INSTRUCTIONS, {"name": "instructions"}),
            ("thread_name", _SNAPSHOTS, {"name": "snapshot"}),
        ):
            yield {"ph": "M", "pid": rank.rank, "tid": track, "name": what, "args": args}
    for rank in result.timelines:
        yield _slice(rank, _STEPS, f"step {rank.step}", (rank.begin_secs, rank.end_secs), "step")
        for segment in rank.segments:
            between, category = (segment.begin_secs, segment.end_secs), segment.activity.value
            facts = {"position": segment.position, "micro_batch": segment.micro_batch}
            name = segment.name
            if segment.activity in (Activity.WAIT, Activity.FENCE):
                name = f"{segment.activity.value} in {name}"
            elif segment.activity is Activity.CAPTURE:
                name = "begin of a snapshot"
            yield _slice(rank, _INSTRUCTIONS, name, between, category, **facts)
        at = rank.begin_secs
        for chunk in sorted(rank.chunks, key=lambda chunk: chunk.begin_secs):
            # Chunks of different streams may overlap; on one track they must not.
            at = max(at, chunk.begin_secs)
            name, until = (
                f"tier {chunk.tier}" if chunk.tier else "at the fence",
                max(at, chunk.end_secs),
            )
            yield _slice(rank, _SNAPSHOTS, name, (at, until), "snapshot", **asdict(chunk))
            at = until


def _slice(
    rank: RankStep, track: int, name: str, between: tuple[float, float], category: str, **args: Any
) -> dict[str, Any]:
    # Whole nanoseconds: sums of rounded microseconds could overlap.
    start, stop = (round(secs * 1e9) for secs in between)
    times = {"ts": start / 1e3, "dur": max(0, stop - start) / 1e3}
    return {
        "ph": "X",
        "pid": rank.rank,
        "tid": track,
        **times,
        "name": name,
        "cat": category,
        "args": args,
    }


# -- the picture: one step of the pipeline, a row per stage, snapshot chunks where they really ran -

_INK, _FAINT = "#22303c", "#6b7a88"
_ACTIVITIES = {
    Activity.FORWARD: ("forward", "#3f7fbf"),
    Activity.BACKWARD: ("backward", "#1b4b7d"),
    Activity.OPTIMIZER: ("optimizer", "#7a5ba8"),
    Activity.REDUCE: ("gradient reduction", "#b08bc9"),
    Activity.TRANSFER: ("transfer", "#e0a63a"),
    Activity.LOAD: ("load data", "#9fb4c7"),
    Activity.OTHER: ("other", "#c3ccd4"),
    Activity.WAIT: ("waiting (idle)", "#ffffff"),
    Activity.FENCE: ("waiting for the snapshot", "#d43d3d"),
    Activity.CAPTURE: ("beginning a snapshot", "#ef9a9a"),
}
_TIERS = {
    1: ("tier 1, in idle time", "#2f9e5b"),
    2: ("tier 2, during computation", "#f28a2e"),
    3: ("tier 3, during communication", "#d4579b"),
    0: ("at the fence", "#d43d3d"),
}
_BAR, _CHUNKS = (-0.34, 0.46), (0.19, 0.15)
_FADED = 0.3
_MOSTLY, _HARDLY = 0.9, 0.05
_MUCH_HELD_UP = 0.01


def draw(result: ProfileResult, path: Path, step: int | None = None) -> None:
    """Draw one step into a file; its suffix chooses the format (png, svg, pdf). ``result``: the
    profile. ``path``: file to write. ``step``: global step; by default the one whose length is
    nearest to the median."""
    timeline = result.timeline(step)
    if not timeline:
        raise ConfigError(
            f"step {step} was not profiled; the profile has steps {list(result.steps)}"
        )
    begin, end = min(rank.begin_secs for rank in timeline), max(rank.end_secs for rank in timeline)
    # Of each stage the rank of the first pipeline that was gathered.
    rows = [*{rank.stage_id: rank for rank in reversed(timeline)}.values()]
    rows.sort(key=lambda row: row.stage_id)
    figure = new_figure(13.0, 2.5 + 0.72 * max(2, len(rows)), dpi=150)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.add_subplot()
    stages = {stage.stage_id: stage for stage in result.stages}
    for number, row in enumerate(rows):
        axes.axhspan(number - 0.42, number + 0.42, color="#f6f7f9", zorder=0, linewidth=0)
        # Stages begin and end a step at different times: the steps before and after are shown too.
        for near in result.timelines:
            if near.rank == row.rank and abs(near.step - row.step) <= 1:
                _draw_row(axes, number, near, begin, 1.0 if near.step == row.step else _FADED)
        _label_row(axes, number, stages[row.stage_id])
    axes.set_xlim(0.0, (end - begin) * 1e3)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(
        range(len(rows)), [f"stage {row.stage_id}" for row in rows], fontsize=9, color=_INK
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_FAINT, labelsize=8)
    axes.set_xlabel("milliseconds from the start of the step", fontsize=9, color=_FAINT)
    axes.grid(axis="x", color="#e3e7ec", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    pp, dp, tp = result.degrees
    idle = sum(stage.idle_share for stage in result.stages) / len(result.stages)
    facts = (
        f"job {result.job_id}, pp {pp} x dp {dp} x tp {tp}, step {rows[0].step}, "
        f"{milliseconds(end - begin)}   ·   idle {percent(idle)} of the step   ·   held up "
        f"{milliseconds(max(row.held_up_secs for row in rows))}"
    )
    for text, up, style in (
        (verdict(result), 26, {"fontsize": 13, "fontweight": "bold", "color": _INK}),
        (facts, 9, {"fontsize": 9, "color": _FAINT}),
    ):
        axes.annotate(
            text, (0, 1), (0, up), xycoords="axes fraction", textcoords="offset points", **style
        )
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))  # of all rows
    style = {
        "loc": "outside lower center",
        "ncols": min(8, len(found)),
        "frameon": False,
        "fontsize": 8.5,
    }
    figure.legend(found.values(), found.keys(), labelcolor=_INK, **style)
    save_figure(figure, path)


def _draw_row(axes: Any, number: int, row: RankStep, origin: float, alpha: float) -> None:
    def bars(found: Sequence[Any], at: tuple[float, float], label: str, **style: Any) -> None:
        ranges = [((x.begin_secs - origin) * 1e3, (x.end_secs - x.begin_secs) * 1e3) for x in found]
        if ranges:
            named = label if alpha == 1.0 else "_"  # what begins so is in no legend
            axes.broken_barh(ranges, (number + at[0], at[1]), alpha=alpha, label=named, **style)

    for activity, (label, colour) in _ACTIVITIES.items():
        idle = {"edgecolors": "#aab6c1", "linewidth": 0.5, "hatch": "////"}
        busy = {"edgecolors": "white", "linewidth": min(0.4, 40.0 / max(1, len(row.segments)))}
        style = idle if activity is Activity.WAIT else busy
        found = [s for s in row.segments if s.activity is activity]
        bars(found, _BAR, label, facecolors=colour, zorder=2, **style)
    for tier, (label, colour) in _TIERS.items():
        chunks = [c for c in row.chunks if c.tier == tier]
        bars(chunks, _CHUNKS, label, facecolors=colour, linewidth=0, zorder=3)


def _label_row(axes: Any, number: int, stage: StageProfile) -> None:
    room, secs = stage.bytes_fit, sum(stage.copying_secs.values())
    lines = [f"idle {percent(stage.idle_share)} of the step"]
    if secs:
        idle = stage.copying_secs.get(Overlap.IDLE, 0.0) / secs
        lines.append(f"copying {milliseconds(secs)}, {percent(idle)} of it in idle time")
    amounts = (
        [f"{decimal(int(n))} to copy"] if (n := stage.copied_bytes or stage.snapshot_bytes) else []
    )
    amounts += [f"{decimal(room)} fit"] if room is not None else []
    place = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
    text = "\n".join([*lines, *([", ".join(amounts)] if amounts else ())])
    axes.text(1.012, number, text, fontsize=8, color=_INK, linespacing=1.35, **place)


def verdict(result: ProfileResult) -> str:
    """One line: are snapshots free in this job? Parts are of the time that copying takes."""
    if not any(stage.copied_bytes for stage in result.stages):
        return "No snapshots ran in the profiled steps"
    held_up = max(stage.held_up_secs for stage in result.stages) / result.step_secs.p50
    secs = {
        place: sum(stage.copying_secs.get(place, 0.0) for stage in result.stages)
        for place in Overlap
    }
    idle, moving, computing = (
        secs[place] / max(1e-12, sum(secs.values()))
        for place in (Overlap.IDLE, Overlap.COMMUNICATION, Overlap.COMPUTATION)
    )
    if held_up > _MUCH_HELD_UP:
        return (
            f"Snapshots hold training up for {percent(held_up)} of a step (median of "
            f"{len(result.steps)} steps)"
        )
    if idle > _MOSTLY:
        return f"Snapshots are free here: {percent(idle)} of the copying time is idle time"
    beside = (
        f"{percent(idle)} of the copying time is idle time, {percent(moving)} during communication"
    )
    if computing < _HARDLY:
        return f"Snapshots do not disturb computation: {beside}"
    return f"{beside}, {percent(computing)} during computation"


# -- what all figures have in common; matplotlib is the optional extra ``plot`` --------------------


def check_folder(option: str, path: Path) -> None:
    """Before long work: the folder of a file to be written has to be there, none is made."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {path.parent}; make it, or give another path"
        )


def check_figure(option: str, path: Path) -> None:
    """Before long work: whether a figure can be drawn into a file."""
    check_folder(option, path)
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"{option} {path}: the suffix is {path.suffix!r}; expected one of "
            f"{', '.join(sorted(formats))}"
        )


def new_figure(width: float, height: float, dpi: int = 120) -> Any:
    """An empty figure, in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a figure needs matplotlib, which is not installed: pip install "
            "'reft-ckpt[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {path}: {error}") from error
