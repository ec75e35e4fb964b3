"""The picture: one step of the pipeline, one row per stage, snapshot chunks where they really ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from reft.errors import ConfigError
from reft.profile.activity import Activity
from reft.profile.advice import milliseconds, percent
from reft.profile.result import Beside, ProfileResult, RankTimeline, Segment, StageProfile, StepTimeline
from reft.tools.drawing import new_figure, save_figure

_INK = "#22303c"
_FAINT = "#6b7a88"
_ROW = "#f6f7f9"
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
    2: ("tier 2, beside computation", "#f28a2e"),
    3: ("tier 3, beside communication", "#d4579b"),
    0: ("at the fence", "#d43d3d"),
}
_BAR = (-0.34, 0.46)
_CHUNKS = (0.19, 0.15)
_FADED = 0.3
_MOSTLY = 0.9
_HARDLY = 0.05
_LEGEND_COLUMNS = 8
_VISIBLE_SHARE = 0.001
_MUCH_HELD_UP = 0.01
_LEAST_SHARE = 0.004
"""Narrower bars than this share of the axis carry no number and no border."""


def draw(result: ProfileResult, path: Path, step: int | None = None) -> None:
    """Draw one step into a file; its suffix chooses the format (png, svg, pdf).

    Args:
        result: the profile.
        path: file to write.
        step: global step; by default the one whose length is nearest to the median.

    Raises:
        ConfigError: matplotlib is missing, there is no such step, or the file cannot be written.
    """
    timeline = _choose(result, step)
    rows = _rows(timeline)
    figure = new_figure(13.0, 2.5 + 0.72 * max(2, len(rows)), dpi=150)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.add_subplot()
    stages = {stage.stage_id: stage for stage in result.stages}
    span = (timeline.end_secs - timeline.begin_secs) * 1e3
    for number, row in enumerate(rows):
        for neighbour in _neighbours(result, timeline, row.rank):
            _draw_row(axes, number, neighbour, timeline.begin_secs, span, faded=True)
        _draw_row(axes, number, row, timeline.begin_secs, span)
        _label_row(axes, number, stages[row.stage_id])
    _dress(axes, rows, span)
    _title(axes, result, timeline)
    _legend(figure, rows)
    save_figure(figure, path)


def _choose(result: ProfileResult, step: int | None) -> StepTimeline:
    if step is None:
        return result.median_timeline()
    for timeline in result.timelines:
        if timeline.step == step:
            return timeline
    raise ConfigError(f"step {step} was not profiled; the profile has steps {list(result.steps)}")


def _rows(timeline: StepTimeline) -> list[RankTimeline]:
    """One rank of each stage: those of the first pipeline that was gathered."""
    first: dict[int, RankTimeline] = {}
    for rank in timeline.ranks:
        first.setdefault(rank.stage_id, rank)
    return [first[stage_id] for stage_id in sorted(first)]


def _neighbours(result: ProfileResult, timeline: StepTimeline, rank: int) -> list[RankTimeline]:
    """The steps before and after of a rank: stages begin and end a step at different times."""
    steps = (timeline.step - 1, timeline.step + 1)
    return [r for t in result.timelines if t.step in steps for r in t.ranks if r.rank == rank]


def _draw_row(
    axes: Any, number: int, row: RankTimeline, origin: float, span: float, *, faded: bool = False
) -> None:
    alpha = _FADED if faded else 1.0

    def at(secs: float) -> float:
        return (secs - origin) * 1e3

    axes.axhspan(number - 0.42, number + 0.42, color=_ROW, zorder=0, linewidth=0)
    for activity, (_, colour) in _ACTIVITIES.items():
        bars = [s for s in row.segments if s.activity is activity]
        if not bars:
            continue
        ranges = [(at(s.begin_secs), s.secs * 1e3) for s in bars]
        idle = activity is Activity.WAIT
        axes.broken_barh(
            ranges,
            (number + _BAR[0], _BAR[1]),
            facecolors=colour,
            edgecolors="#aab6c1" if idle else "white",
            linewidth=0.5 if idle else min(0.4, 40.0 / max(1, len(row.segments))),
            hatch="////" if idle else None,
            zorder=2,
            alpha=alpha,
        )
        if not faded and activity in (Activity.FORWARD, Activity.BACKWARD):
            _number(axes, number, bars, origin, span)
    for tier, (_, colour) in _TIERS.items():
        chunks = [c for c in row.chunks if c.tier == tier]
        if chunks:
            ranges = [(at(c.begin_secs), max(c.end_secs - c.begin_secs, 0.0) * 1e3) for c in chunks]
            axes.broken_barh(
                ranges,
                (number + _CHUNKS[0], _CHUNKS[1]),
                facecolors=colour,
                linewidth=0,
                zorder=3,
                alpha=alpha,
            )


def _number(axes: Any, row: int, bars: Sequence[Segment], origin: float, span: float) -> None:
    """Micro batch numbers in bars that are wide enough."""
    for bar in bars:
        if bar.micro_batch is None or bar.secs * 1e3 < 3 * _LEAST_SHARE * span:
            continue
        middle = ((bar.begin_secs + bar.end_secs) / 2 - origin) * 1e3
        axes.text(
            middle,
            row + _BAR[0] + _BAR[1] / 2,
            str(bar.micro_batch),
            color="white",
            fontsize=7,
            ha="center",
            va="center",
            zorder=4,
        )


def _label_row(axes: Any, number: int, stage: StageProfile) -> None:
    """Left the name, right the figures that matter."""
    use, room = stage.snapshots, stage.bytes_fit
    lines = [f"idle {percent(stage.idle_share)} of the step"]
    if use.secs:
        idle = use.secs_beside.get(Beside.IDLE, 0.0) / use.secs
        lines.append(f"copying {milliseconds(use.secs)}, {percent(idle)} of it in idle time")
    amounts = [f"{decimal(int(n))} to copy"] if (n := use.nbytes or stage.snapshot_bytes) else []
    amounts += [f"{decimal(room)} fit"] if room is not None else []
    if amounts:
        lines.append(", ".join(amounts))
    axes.text(
        1.012,
        number,
        "\n".join(lines),
        transform=axes.get_yaxis_transform(),
        fontsize=8,
        color=_INK,
        va="center",
        ha="left",
        linespacing=1.35,
    )


def _dress(axes: Any, rows: Sequence[RankTimeline], span: float) -> None:
    axes.set_xlim(0.0, span)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [f"stage {row.stage_id}" for row in rows], fontsize=9, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_FAINT, labelsize=8)
    axes.set_xlabel("milliseconds from the begin of the step", fontsize=9, color=_FAINT)
    axes.grid(axis="x", color="#e3e7ec", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3ccd4")


def verdict(result: ProfileResult) -> str:
    """One line: are snapshots free in this job? Parts are of the time that copying takes."""
    uses = [stage.snapshots for stage in result.stages]
    total = sum(use.nbytes for use in uses)
    if not total:
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
    if computing < _HARDLY:
        return (
            f"Snapshots leave computation alone: {percent(idle)} of the copying time is idle time, "
            f"{percent(moving)} beside communication"
        )
    return (
        f"{percent(idle)} of the copying time is idle time, {percent(moving)} beside communication, "
        f"{percent(computing)} beside computation"
    )


def _title(axes: Any, result: ProfileResult, timeline: StepTimeline) -> None:
    pp, dp, tp = result.degrees
    uses = [stage.snapshots for stage in result.stages]
    idle = sum(stage.idle_share for stage in result.stages) / len(result.stages)
    held_up = max(use.held_up_secs for use in uses)
    facts = [
        f"job {result.job_id}, pp {pp} x dp {dp} x tp {tp}, step {timeline.step}, "
        f"{milliseconds(timeline.end_secs - timeline.begin_secs)}",
        f"idle {percent(idle)} of the step",
    ]
    if any(use.nbytes for use in uses):
        facts.append(f"held up: {milliseconds(held_up)}")
    for text, up, style in (
        (verdict(result), 26, {"fontsize": 13, "fontweight": "bold", "color": _INK}),
        ("   ·   ".join(facts), 9, {"fontsize": 9, "color": _FAINT}),
    ):
        axes.annotate(text, (0, 1), (0, up), xycoords="axes fraction", textcoords="offset points", **style)


def _secs_of(row: RankTimeline, activity: Activity) -> float:
    return sum(s.secs for s in row.segments if s.activity is activity)


def _legend(figure: Any, rows: Sequence[RankTimeline]) -> None:
    from matplotlib.patches import Patch

    least = _VISIBLE_SHARE * max(row.end_secs - row.begin_secs for row in rows)
    seen = {a for row in rows for a in Activity if _secs_of(row, a) > least}
    tiers = {c.tier for row in rows for c in row.chunks}
    handles = [
        Patch(
            facecolor=colour,
            label=label,
            edgecolor="#aab6c1" if activity is Activity.WAIT else "none",
            hatch="////" if activity is Activity.WAIT else None,
        )
        for activity, (label, colour) in _ACTIVITIES.items()
        if activity in seen
    ]
    handles += [
        Patch(facecolor=colour, label=label) for tier, (label, colour) in _TIERS.items() if tier in tiers
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=-(-len(handles) // -(-len(handles) // _LEGEND_COLUMNS)),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.3,
        handleheight=0.9,
        columnspacing=1.6,
    )
