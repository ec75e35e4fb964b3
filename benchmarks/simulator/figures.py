"""Figures of simulations. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reft.config import Variant
from reft.policy.rate import DAY_SECS
from reft.profile.figure import new_figure, save_figure
from reft.protect.placement import losses_within, node_survival, protected_survival

from .copying import Tier
from .instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    Compute,
    ForwardPass,
    OptimizerStep,
    ReduceGrads,
    ReduceTiedGrads,
)
from .result import Interval, Simulation, StageResult
from .settings import V100
from .variants import Predictions

_VARIANTS = {
    "blocking": "#8c2d04",
    "host": "#e6550d",
    "host_device": "#fdae6b",
    "inter_node": "#756bb1",
    "has": "#238b45",
}
_ACTIVITIES: dict[type, tuple[str, str]] = {
    ForwardPass: ("forward", "#4292c6"),
    BackwardPass: ("backward", "#08519c"),
    BackwardInput: ("backward", "#08519c"),
    BackwardWeight: ("backward, weights", "#6baed6"),
    ReduceTiedGrads: ("reduction", "#fe9929"),
    ReduceGrads: ("reduction", "#fe9929"),
    OptimizerStep: ("optimizer", "#807dba"),
}
_TRANSFER = ("transfer", "#fec44f")
_TIERS = {
    Tier.WAITING: ("copy in a bubble", "#41ab5d"),
    Tier.COMPUTING: ("copy beside computation", "#d94801"),
    Tier.COMMUNICATING: ("copy beside communication", "#cc4c02"),
    Tier.FENCE: ("copy, device waits", "#99000d"),
}
_BAR = 0.1
_LEAST_NUMBERED_SHARE = 0.012


def draw_overheads(groups: Sequence[tuple[str, Sequence[Predictions]]], path: Path) -> None:
    """Overhead of every variant, one panel for each group of jobs; the suffix chooses the format.

    Raises:
        ConfigError: matplotlib is missing.
    """
    rows = -(-len(groups) // 2)
    figure = new_figure(13.0, 1.0 + 3.4 * rows)
    panels = figure.subplots(rows, min(2, len(groups)), squeeze=False, sharey=True)
    for axes, (title, results) in zip(panels.flat, groups, strict=False):
        _draw_group(axes, results)
        axes.set_title(title, fontsize=10, loc="left")
    for axes in panels[:, 0]:
        axes.set_ylabel("iteration time added, %")
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8, frameon=False)
    figure.suptitle(
        "A snapshot every step: simulated from published hardware figures, not measured"
    )
    save_figure(figure, path)


def _draw_group(axes: Any, results: Sequence[Predictions]) -> None:
    shown = [p for p in results[0].variants if p.variant is not Variant.NONE]
    for number, like in enumerate(shown):
        values = [100 * r.of(like.variant, like.whole_stage).overhead for r in results]
        bars = axes.bar(
            [x + (number - (len(shown) - 1) / 2) * _BAR for x in range(len(results))],
            values,
            _BAR,
            label=like.name,
            color=_VARIANTS[like.variant],
            hatch="////" if like.name.endswith("unsharded") else None,
            edgecolor="white",
            linewidth=0.4,
        )
        if like.variant is not Variant.HAS:
            axes.bar_label(bars, [_percent(v) for v in values], fontsize=6, padding=1)
            continue
        # Its bars often have no height, and have to be seen all the same.
        colour = _VARIANTS[like.variant]
        axes.bar_label(
            bars, [f"has\n{_percent(v)}" for v in values], fontsize=7, padding=3, color=colour
        )
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        axes.plot(middles, values, "o", color=colour, markersize=3.5, clip_on=False)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(0, 400)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.axhline(3.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(results)), [_label(r) for r in results], fontsize=7)


def _percent(value: float) -> str:
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.05 else f"{value:.2f}" if value >= 0.005 else "0"


def _label(result: Predictions) -> str:
    t = result.training
    return f"{t.shape.name}, {t.devices:,} {t.machine.name}\nTP{t.tensor} PP{t.stages} DP{t.data}"


def draw_bars(
    categories: Sequence[str], series: Mapping[str, Sequence[float]], what: str, path: Path
) -> None:
    """Draw printed values next to ours.

    Args:
        categories: groups of bars.
        series: a value for each category, by name; the first series is the printed one.
        what: the quantity and its unit.
        path: file to write; its suffix selects the format.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = new_figure(7.0, 3.4)
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        bars = axes.bar(
            [x + (number - (len(series) - 1) / 2) * width for x in range(len(categories))],
            values,
            width,
            label=name,
            color="#555555" if number == 0 else None,
        )
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7, padding=1)
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel(what, fontsize=8)
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_survival(path: Path) -> None:
    """Draw the survival of 128 nodes of V100 by the paper's formula, at the cluster's failure rate.

    Raises:
        ConfigError: matplotlib is missing.
    """
    nodes, days = 128, [point / 2 for point in range(61)]
    causes = [rate.weibull for rate in V100.failures]
    alive = [node_survival(day * DAY_SECS, causes) for day in days]
    figure = new_figure(7.0, 3.4)
    axes = figure.add_subplot()
    for size in (4, 8, 16, 32):
        survived = losses_within(size, 1)
        axes.plot(
            days, [protected_survival(q, nodes, survived) for q in alive], label=f"groups of {size}"
        )
    axes.plot(days, [q**nodes for q in alive], color="#555555", label="no protection")
    axes.set(xlabel="days without a replacement", ylabel="probability (computed)", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_timeline(simulation: Simulation, path: Path, title: str = "") -> None:
    """One step, one row per stage, with the snapshot's copies below; the suffix chooses the format.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = new_figure(13.0, 1.8 + 0.7 * len(simulation.stages))
    axes = figure.add_subplot()
    scale, unit = (1.0, "s") if simulation.makespan_secs >= 2 else (1e3, "ms")
    least_secs = _LEAST_NUMBERED_SHARE * simulation.makespan_secs
    for stage in simulation.stages:
        _draw_stage(axes, stage, scale, least_secs)
    axes.set_yticks(
        [s.stage_id for s in simulation.stages], [f"stage {s.stage_id}" for s in simulation.stages]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.makespan_secs * scale)
    axes.set_xlabel(unit)
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        by_label.values(),
        by_label.keys(),
        loc="outside lower center",
        ncols=8,
        fontsize=8,
        frameon=False,
    )
    what = title or simulation.schedule
    axes.set_title(f"{what} (simulated): bubble {simulation.bubble_fraction:.0%}", loc="left")
    save_figure(figure, path)


def _draw_stage(axes: Any, stage: StageResult, scale: float, least_secs: float) -> None:
    row = stage.stage_id

    def bar(
        begin_secs: float, end_secs: float, top: float, height: float, look: tuple[str, str]
    ) -> None:
        label, colour = look
        where = [(begin_secs * scale, (end_secs - begin_secs) * scale)]
        axes.broken_barh(
            where, (row + top, height), label=label, color=colour, edgecolor="white", lw=0.4
        )

    for window in stage.windows:
        where = [(window.start_secs * scale, window.length_secs * scale)]
        axes.broken_barh(
            where,
            (row - 0.38, 0.5),
            label="waiting",
            facecolor="none",
            edgecolor="#aaaaaa",
            hatch="////",
            lw=0.4,
        )
    for interval, look in _busy(stage.intervals):
        bar(interval.begin_secs, interval.end_secs, -0.38, 0.5, look)
        if isinstance(interval.instruction, Compute) and interval.busy_secs >= least_secs:
            middle = scale * (interval.begin_secs + interval.end_secs) / 2
            text = str(interval.instruction.micro_batch)
            axes.text(middle, row - 0.13, text, color="white", fontsize=7, ha="center", va="center")
    for piece in stage.pieces:
        bar(piece.begin_secs, piece.end_secs, 0.16, 0.18, _TIERS[piece.tier])


def _busy(intervals: Sequence[Interval]) -> Iterator[tuple[Interval, tuple[str, str]]]:
    for interval in intervals:
        if interval.busy_secs > 0:
            yield interval, _ACTIVITIES.get(type(interval.instruction), _TRANSFER)
