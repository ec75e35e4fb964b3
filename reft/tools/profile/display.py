"""The profile as tables for people, and what its figures mean."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from reft.profile.result import Activity, MeasuredWindow, ProfileResult, Spread, StageProfile
from reft.snapshot.schedule import WindowKind

_COLUMNS = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER, Activity.REDUCE, Activity.TRANSFER)
_HELD_UP_SHARE = 0.002
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
    method, speed = result.method, result.bandwidth_bytes_per_sec
    console.print(
        f"\nTimes by the {method.clock} clock. Waiting and transfer were separated by the partner's record "
        f"for {percent(method.matched_share)} of the point-to-point time, else by the fastest observation; "
        f"clocks agree within {method.clock_error_secs * 1e6:.0f} us. Bandwidth: "
        f"{'unknown' if speed is None else decimal(int(speed)) + '/s'} ({result.bandwidth_source}).",
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


def _ms(spread: Spread | None) -> str:
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
        use, fits = stage.snapshots, stage.bytes_fit
        copied = [decimal(n) if (n := int(use.bytes_by_tier.get(tier, 0))) else "0" for tier in (1, 2, 3, 0)]
        table.add_row(
            str(stage.stage_id),
            _ms(stage.step_secs),
            *(_ms(stage.secs.get(activity)) for activity in _COLUMNS),
            f"{_ms(stage.secs.get(Activity.WAIT))} ({percent(stage.idle_share)})",
            _ms(stage.usable_secs),
            "?" if fits is None else decimal(fits),
            decimal(stage.snapshot_bytes) if stage.snapshot_bytes else "–",
            f"{use.held_up_secs * 1e3:.2f}",
            " / ".join(copied) if use.nbytes else "no snapshots",
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


# -- what it means --------------------------------------------------------------------------------------


def advice(result: ProfileResult) -> Iterator[str]:
    """Lines to read after the tables, the most important first."""
    for stage in result.stages:
        yield f"stage {stage.stage_id}{_fit(stage, result.bandwidth_bytes_per_sec)}"
    for stage in result.stages:
        held_up, step = stage.snapshots.held_up_secs, stage.step_secs.p50
        if held_up > _HELD_UP_SHARE * step:
            yield (
                f"stage {stage.stage_id}: its snapshots hold training up for {milliseconds(held_up)} of "
                f"every step ({percent(held_up / step)})"
            )
    due = sum(stage.snapshot_bytes for stage in result.stages)
    copied = sum(stage.snapshots.nbytes for stage in result.stages)
    if 0 < copied < _RARE * due:
        yield (
            f"snapshots were taken of about {percent(copied / due)} of the measured steps: interval_steps is "
            f"larger than 1, or the version before was not committed yet (reft status counts skips)"
        )
    stages, kinds = result.stages, (Activity.FORWARD, Activity.BACKWARD)
    computing = {s.stage_id: sum(s.secs[a].p50 for a in kinds if a in s.secs) for s in stages}
    slowest = max(computing, key=lambda stage_id: computing[stage_id])
    mean = sum(computing.values()) / len(computing)
    if len(stages) == 1:
        yield "one pipeline stage: it has no neighbours to wait for, so there are no bubbles"
    elif mean and computing[slowest] > (1 + _IMBALANCE) * mean:
        yield (
            f"stage {slowest} computes {percent(computing[slowest] / mean - 1)} longer than the mean stage, "
            f"and the others wait for it: it has too many layers, or a slow device"
        )
    if result.method.matched_share < _MATCHED:
        yield (
            f"{percent(1 - result.method.matched_share)} of the time in sends and receives was split by the "
            f"fastest observation: there idle time is a lower bound"
        )


def _fit(stage: StageProfile, bandwidth: float | None) -> str:
    room, need = stage.bytes_fit, stage.snapshot_bytes
    if not any(window.usable for window in stage.windows):
        return (
            " has no recurring idle time outside of its optimizer step: its snapshots run during "
            "computation (tier 2), or the optimizer step waits for them"
        )
    if room is None or bandwidth is None:
        return f" idles {milliseconds(stage.usable_secs.p50)} of a step outside of the optimizer step"
    if need <= room:
        fits = (
            f"a snapshot of {decimal(need)} fits into {percent(need / room)} of" if need else "there fit into"
        )
        return f": {fits} its idle time, {decimal(room)} at {decimal(int(bandwidth))}/s"
    return (
        f": a snapshot of {decimal(need)} does not fit its idle time: {decimal(room)} do "
        f"({percent(room / need)}), the other {decimal(need - room)} are copied during computation, or the "
        "optimizer step waits for them. A larger interval_steps makes that rarer; more data-parallel peers "
        "make the share smaller"
    )
