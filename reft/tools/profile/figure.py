"""The picture: one step of the pipeline, one row per stage, snapshot chunks where they really ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from reft.errors import ConfigError
from reft.profile.result import Activity, Beside, ProfileResult, RankTimeline, StageProfile
from reft.tools.profile.display import milliseconds, percent

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
    """Draw one step into a file; its suffix chooses the format (png, svg, pdf). ``result``: the profile.
    ``path``: file to write. ``step``: global step; by default the one whose length is nearest to the
    median."""
    by_step = {timeline.step: timeline for timeline in result.timelines}
    timeline = result.median_timeline() if step is None else by_step.get(step)
    if timeline is None:
        raise ConfigError(f"step {step} was not profiled; the profile has steps {list(result.steps)}")
    # Of each stage the rank of the first pipeline that was gathered.
    rows = [*{rank.stage_id: rank for rank in reversed(timeline.ranks)}.values()]
    rows.sort(key=lambda row: row.stage_id)
    figure = new_figure(13.0, 2.5 + 0.72 * max(2, len(rows)), dpi=150)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.add_subplot()
    stages = {stage.stage_id: stage for stage in result.stages}
    for number, row in enumerate(rows):
        axes.axhspan(number - 0.42, number + 0.42, color="#f6f7f9", zorder=0, linewidth=0)
        # Stages begin and end a step at different times: the steps before and after are shown too.
        for near in (by_step.get(timeline.step - 1), by_step.get(timeline.step + 1)):
            for rank in near.ranks if near is not None else ():
                if rank.rank == row.rank:
                    _draw_row(axes, number, rank, timeline.begin_secs, _FADED)
        _draw_row(axes, number, row, timeline.begin_secs)
        _label_row(axes, number, stages[row.stage_id])
    axes.set_xlim(0.0, (timeline.end_secs - timeline.begin_secs) * 1e3)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [f"stage {row.stage_id}" for row in rows], fontsize=9, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_FAINT, labelsize=8)
    axes.set_xlabel("milliseconds from the start of the step", fontsize=9, color=_FAINT)
    axes.grid(axis="x", color="#e3e7ec", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    pp, dp, tp = result.degrees
    idle = sum(stage.idle_share for stage in result.stages) / len(result.stages)
    facts = (
        f"job {result.job_id}, pp {pp} x dp {dp} x tp {tp}, step {timeline.step}, "
        f"{milliseconds(timeline.end_secs - timeline.begin_secs)}   ·   idle {percent(idle)} of the step"
    )
    for text, up, style in (
        (verdict(result), 26, {"fontsize": 13, "fontweight": "bold", "color": _INK}),
        (facts, 9, {"fontsize": 9, "color": _FAINT}),
    ):
        axes.annotate(text, (0, 1), (0, up), xycoords="axes fraction", textcoords="offset points", **style)
    _legend(figure, rows)
    save_figure(figure, path)


def _draw_row(axes: Any, number: int, row: RankTimeline, origin: float, alpha: float = 1.0) -> None:
    def bars(found: Sequence[Any], at: tuple[float, float], **style: Any) -> None:
        ranges = [((x.begin_secs - origin) * 1e3, (x.end_secs - x.begin_secs) * 1e3) for x in found]
        if ranges:
            axes.broken_barh(ranges, (number + at[0], at[1]), alpha=alpha, **style)

    for activity, (_, colour) in _ACTIVITIES.items():
        idle = {"edgecolors": "#aab6c1", "linewidth": 0.5, "hatch": "////"}
        busy = {"edgecolors": "white", "linewidth": min(0.4, 40.0 / max(1, len(row.segments)))}
        style = idle if activity is Activity.WAIT else busy
        found = [s for s in row.segments if s.activity is activity]
        bars(found, _BAR, facecolors=colour, zorder=2, **style)
    for tier, (_, colour) in _TIERS.items():
        chunks = [c for c in row.chunks if c.tier == tier]
        bars(chunks, _CHUNKS, facecolors=colour, linewidth=0, zorder=3)


def _label_row(axes: Any, number: int, stage: StageProfile) -> None:
    use, room = stage.snapshots, stage.bytes_fit
    lines = [f"idle {percent(stage.idle_share)} of the step"]
    if use.secs:
        idle = use.secs_beside.get(Beside.IDLE, 0.0) / use.secs
        lines.append(f"copying {milliseconds(use.secs)}, {percent(idle)} of it in idle time")
    amounts = [f"{decimal(int(n))} to copy"] if (n := use.nbytes or stage.snapshot_bytes) else []
    amounts += [f"{decimal(room)} fit"] if room is not None else []
    place = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
    text = "\n".join([*lines, *([", ".join(amounts)] if amounts else ())])
    axes.text(1.012, number, text, fontsize=8, color=_INK, linespacing=1.35, **place)


def verdict(result: ProfileResult) -> str:
    """One line: are snapshots free in this job? Parts are of the time that copying takes."""
    uses = [stage.snapshots for stage in result.stages]
    if not any(use.nbytes for use in uses):
        return "No snapshots ran in the profiled steps"
    held_up = max(use.held_up_secs for use in uses) / result.step_secs.p50
    secs = max(1e-12, sum(use.secs for use in uses))
    idle, moving, computing = (
        sum(use.secs_beside.get(place, 0.0) for use in uses) / secs
        for place in (Beside.IDLE, Beside.COMMUNICATION, Beside.COMPUTATION)
    )
    if held_up > _MUCH_HELD_UP:
        return f"Snapshots hold training up for {percent(held_up)} of a step"
    if idle > _MOSTLY:
        return f"Snapshots are free here: {percent(idle)} of the copying time is idle time"
    beside = f"{percent(idle)} of the copying time is idle time, {percent(moving)} during communication"
    if computing < _HARDLY:
        return f"Snapshots do not disturb computation: {beside}"
    return f"{beside}, {percent(computing)} during computation"


def _legend(figure: Any, rows: Sequence[RankTimeline]) -> None:
    from matplotlib.patches import Patch

    seen = {segment.activity for row in rows for segment in row.segments}
    tiers = {c.tier for row in rows for c in row.chunks}
    handles = []
    for activity, (label, colour) in _ACTIVITIES.items():
        idle: dict[str, Any] = {"edgecolor": "#aab6c1", "hatch": "////"} if activity is Activity.WAIT else {}
        if activity in seen:
            handles.append(Patch(facecolor=colour, label=label, **idle))
    handles += [Patch(facecolor=c, label=label) for tier, (label, c) in _TIERS.items() if tier in tiers]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(8, len(handles)),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
    )


# -- what all figures have in common; matplotlib is the optional extra ``plot`` -----------------------------


def check_folder(option: str, path: Path) -> None:
    """Before long work: the folder of a file to be written has to be there, none is made."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or give another path")


def check_figure(option: str, path: Path) -> None:
    """Before long work: whether a figure can be drawn into a file."""
    check_folder(option, path)
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"{option} {path}: the suffix is {path.suffix!r}; expected one of {', '.join(sorted(formats))}"
        )


def new_figure(width: float, height: float, dpi: int = 120) -> Any:
    """An empty figure, in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a figure needs matplotlib, which is not installed: pip install 'reft-ckpt[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {path}: {error}") from error
