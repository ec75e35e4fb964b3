"""Prints a profile as tables, for ``reft profile``."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from reft.pacing.schedule import WindowKind
from reft.profile.findings import advice, percent
from reft.profile.result import (
    Activity,
    MeasuredWindow,
    Percentiles,
    ProfileResult,
)

_COLUMNS = (
    Activity.FORWARD,
    Activity.BACKWARD,
    Activity.OPTIMIZER,
    Activity.REDUCE,
    Activity.TRANSFER,
)


def show(result: ProfileResult, console: Console) -> None:
    """Print the stages, the windows, their interpretation, and how they were measured."""
    console.print(_stages(result))
    if any(stage.windows for stage in result.stages):
        console.print(_windows(result))
    for line in advice(result):
        console.print(f"• {line}", markup=False, highlight=False)
    speed = result.bandwidth_bytes_per_sec
    console.print(
        f"\nTimes by the {result.clock} clock. Waiting and transfer were separated by the "
        f"partner's record for {percent(result.matched_share)} of the point-to-point time, else by "
        f"the fastest observation; clocks agree within {result.clock_error_secs * 1e6:.0f} us. "
        f"Bandwidth: {'unknown' if speed is None else decimal(int(speed)) + '/s'} "
        f"({result.bandwidth_source}).",
        style="dim",
        markup=False,
        highlight=False,
    )


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
    """Return a table with one row for each stage and kind of window, separately before and after
    the fence.

    The profile's JSON file contains every single window.
    """
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
