"""The plan as a picture. matplotlib is the optional extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reft.policy.choose import GIB, Alternative
from reft.policy.loads import Load
from reft.tools.drawing import new_figure, save_figure
from reft.tools.planning.plan import JobPlan, duration
from reft.tools.planning.survival import DAY, HOUR

_PARTS: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
    ("own shard", "#2171b5", lambda load: load.shard_bytes),
    ("copies, parities", "#6baed6", lambda load: load.redundant_bytes),
    ("own partition", "#238b45", lambda load: load.owned_bytes),
    ("gradients (AOR)", "#a1d99b", lambda load: load.gradient_bytes),
    ("sent to peers", "#9e9ac8", lambda load: load.sent_bytes),
)
_GOOD, _SHORT, _BAD, _GREY = "#238b45", "#e6821e", "#cb181d", "#969696"
_KINDS = {"fill": "#c6dbef", "mid": "#6baed6", "cool_down": "#2171b5", "drain": "#08306b", "other": "#969696"}


def draw_plan(plan: JobPlan, path: Path) -> None:
    """Bytes, memory, windows and survival in four panels; the suffix chooses the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    rows = len(plan.choice.alternatives)
    figure = new_figure(11.5, 4.6 + 0.32 * rows)
    (traffic, memory), (windows, survival) = figure.subplots(
        2, 2, height_ratios=[0.32 * rows + 0.6, 2.9], width_ratios=[1.35, 1.0]
    )
    _draw_traffic(traffic, plan)
    _draw_memory(memory, plan)
    _draw_windows(windows, plan)
    _draw_survival(survival, plan)
    training = plan.job.training
    figure.suptitle(
        f"{training.name}, {plan.survival.nodes} nodes: planned {plan.planned.name}; "
        + ("estimated, nothing was measured" if plan.pace.measured is None else plan.source)
    )
    save_figure(figure, path)


def _names(axes: Any, plan: JobPlan) -> None:
    alternatives = plan.choice.alternatives
    axes.set_yticks(
        range(len(alternatives)), [f"{a.name}  [{a.tolerance}]" for a in alternatives], fontsize=8
    )
    for tick, alternative in zip(axes.get_yticklabels(), alternatives, strict=True):
        tick.set_color(_colour(plan, alternative))
        tick.set_fontweight("bold" if alternative is plan.planned else "normal")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _colour(plan: JobPlan, alternative: Alternative) -> str:
    if not alternative.available:
        return _GREY
    if not alternative.fits_memory:
        return _BAD
    return _SHORT if alternative.tolerance < plan.choice.wished else _GOOD


def _draw_traffic(axes: Any, plan: JobPlan) -> None:
    alternatives = plan.choice.alternatives
    for row, alternative in enumerate(alternatives):
        left, load = 0.0, alternative.busiest
        for label, colour, of in _PARTS:
            width = of(load) / 1e9
            axes.barh(row, width, 0.62, left, color=colour, edgecolor="white", linewidth=0.4, label=label)
            left += width
        assert alternative.fit is not None
        text = f" {load.moved_bytes / 1e9:.3g} GB, {alternative.fit.overhead:.1%} of a step"
        axes.text(left, row, text, va="center", fontsize=7)
    widest = max(a.busiest.moved_bytes for a in alternatives) / 1e9
    axes.set_xlim(0, 1.35 * widest)
    axes.set_xlabel("GB per snapshot, busiest rank")
    axes.set_title("what a rank moves; [node losses survived]", fontsize=10, loc="left")
    _names(axes, plan)
    used = {label for label, _, of in _PARTS if any(of(a.busiest) for a in alternatives)}
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    shown = {label: handle for label, handle in by_label.items() if label in used}
    axes.legend(shown.values(), shown.keys(), fontsize=7, frameon=False, loc="upper right")


def _draw_memory(axes: Any, plan: JobPlan) -> None:
    alternatives = plan.choice.alternatives
    values = [a.memory_bytes / GIB for a in alternatives]
    colours = [_colour(plan, a) for a in alternatives]
    bars = axes.barh(range(len(values)), values, 0.62, color=colours, alpha=0.75)
    axes.bar_label(bars, [f"{v:.3g}" for v in values], fontsize=7, padding=2)
    limit = plan.planned.limit_bytes
    if limit is not None:
        near = limit / GIB < 4 * max(values)
        if near:
            axes.axvline(limit / GIB, color="black", linestyle="--", linewidth=1.0)
        axes.set_xlim(0, 1.15 * max(*values, limit / GIB if near else 0.0))
        axes.set_xlabel(f"GiB per node; {limit / GIB:.0f} may be reserved{' (dashed)' if near else ''}")
    _names(axes, plan)
    axes.set_title("host memory", fontsize=10, loc="left")
    _explain_colours(axes, plan)


def _explain_colours(axes: Any, plan: JobPlan) -> None:
    from matplotlib.patches import Patch

    used = {_colour(plan, a) for a in plan.choice.alternatives}
    meanings = (
        (_GOOD, "would do"),
        (_SHORT, f"survives fewer than the {plan.choice.wished} wished"),
        (_BAD, "does not fit into the memory"),
        (_GREY, "not asked for"),
    )
    handles = [Patch(color=colour, alpha=0.75, label=text) for colour, text in meanings if colour in used]
    axes.legend(handles=handles, fontsize=7, frameon=False, loc="upper right")


def _draw_windows(axes: Any, plan: JobPlan) -> None:
    for stage in plan.stages:
        left = 0.0
        for window in stage.windows:
            width = window.length_secs * 1e3
            axes.barh(
                stage.stage_id - 0.18,
                width,
                0.3,
                left,
                color=_KINDS[window.kind.value],
                edgecolor="white",
                linewidth=0.4,
                label=window.kind.value.replace("_", "-"),
            )
            left += width
        needed = stage.load.to_host_bytes / stage.bytes_per_sec * 1e3
        axes.barh(stage.stage_id + 0.2, needed, 0.22, color="#d94801", label="copying takes")
    axes.set_yticks(
        [s.stage_id for s in plan.stages], [f"stage {s.stage_id}" for s in plan.stages], fontsize=8
    )
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms of a step")
    axes.set_title(
        f"idle windows against copying ({plan.planned.name}); step {plan.pace.step_secs:.3g} s, "
        f"bubble {plan.bubble_fraction:.0%}",
        fontsize=10,
        loc="left",
    )
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.set_xlim(0, 1.3 * axes.get_xlim()[1])
    axes.legend(by_label.values(), by_label.keys(), fontsize=7, frameon=False, loc="upper right")


def _draw_survival(axes: Any, plan: JobPlan) -> None:
    seen = plan.survival
    points = seen.dense_curve()
    hours = [p.secs / HOUR for p in points]
    bound = "" if seen.exact else ", at least"
    axes.plot(hours, [p.protected for p in points], color=_GOOD, label=f"{plan.planned.name}{bound}")
    axes.plot(hours, [p.unprotected for p in points], color=_BAD, label="without")
    axes.axhline(seen.target, color="grey", linestyle=":", linewidth=0.9)
    axes.plot([seen.persist_secs / HOUR], [seen.target], "o", color=_GOOD, markersize=5)
    axes.annotate(
        f"persist every {duration(seen.persist_secs)}\nfor {seen.target:.4g}",
        (seen.persist_secs / HOUR, seen.target),
        xytext=(0.04, 0.4),
        textcoords="axes fraction",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
    )
    axes.set_xscale("log")
    axes.set_xlim(hours[0], hours[-1])
    axes.set_ylim(0, 1.05)
    marks = [(secs, text) for secs, text in _MARKS if hours[0] <= secs / HOUR <= hours[-1]]
    axes.set_xticks([secs / HOUR for secs, _ in marks], [text for _, text in marks], fontsize=8)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("without a checkpoint on storage")
    axes.set_title("probability that the job lives on memory alone", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="lower left")


_MARKS = (
    (60.0, "1 min"),
    (600.0, "10 min"),
    (HOUR, "1 h"),
    (6 * HOUR, "6 h"),
    (DAY, "1 day"),
    (7 * DAY, "1 week"),
    (30 * DAY, "30 days"),
    (365 * DAY, "1 year"),
)
