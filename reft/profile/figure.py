"""Draws one step of a profile, with a row for each stage.

Chunks of a version are drawn at the times when they were copied. Matplotlib is the optional extra
``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from reft.errors import ConfigError
from reft.profile.findings import milliseconds, percent, verdict
from reft.profile.result import (
    Activity,
    Overlap,
    ProfileResult,
    RankStep,
    StageProfile,
)

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


# (Offset, height) of the bars and of the chunks within a row
_BAR, _CHUNKS = (-0.34, 0.46), (0.19, 0.15)
_FADED = 0.3  # Opacity of the steps before and after


def draw(result: ProfileResult, path: Path, step: int | None = None) -> None:
    """Draw one step.

    Args:
        result: the profile.
        path: file to write; its suffix selects the format (png, svg, pdf).
        step: global step; None: the step whose length is nearest to the median.

    Raises:
        ConfigError: the step was not profiled, matplotlib is missing, or the file cannot be
            written.
    """
    timeline = result.timeline(step)
    if not timeline:
        raise ConfigError(
            f"step {step} was not profiled; the profile has steps {list(result.steps)}"
        )
    begin, end = min(rank.begin_secs for rank in timeline), max(rank.end_secs for rank in timeline)
    # One rank for each stage: that of the first pipeline with complete traces
    rows = [*{rank.stage_id: rank for rank in reversed(timeline)}.values()]
    rows.sort(key=lambda row: row.stage_id)
    figure = new_figure(13.0, 2.5 + 0.72 * max(2, len(rows)), dpi=150)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.add_subplot()
    stages = {stage.stage_id: stage for stage in result.stages}
    for number, row in enumerate(rows):
        axes.axhspan(number - 0.42, number + 0.42, color="#f6f7f9", zorder=0, linewidth=0)
        # Stages begin and end a step at different times, so adjacent steps are drawn as well.
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
    found = dict(zip(labels, handles, strict=True))  # One handle per label, over all rows
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
            named = label if alpha == 1.0 else "_"  # Legends omit labels that begin with "_"
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


def check_folder(option: str, path: Path) -> None:
    """Raise if the folder of an output file does not exist. To be called before the long work
    begins.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {path.parent}; make it, or give another path"
        )


def check_figure(option: str, path: Path) -> None:
    """Raise if an output file cannot hold a figure. To be called before the long work begins.

    Raises:
        ConfigError: the folder does not exist, the format is unknown, or matplotlib is missing.
    """
    check_folder(option, path)
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"{option} {path}: the suffix is {path.suffix!r}; expected one of "
            f"{', '.join(sorted(formats))}"
        )


def new_figure(width: float, height: float, dpi: int = 120) -> Any:
    """Make an empty figure. ``width`` and ``height`` are in inches.

    Raises:
        ConfigError: matplotlib is missing.
    """
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
