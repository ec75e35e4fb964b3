"""The profile as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reft.profile.activity import Activity
from reft.profile.advice import advice, percent
from reft.profile.result import MeasuredWindow, ProfileResult, SnapshotUse, Spread, StageProfile
from reft.snapshot.scheduling.windows import WindowKind

_COLUMNS = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER, Activity.REDUCE, Activity.TRANSFER)


def show(result: ProfileResult, console: Console) -> None:
    """Print everything."""
    console.print(tables(result))


def tables(result: ProfileResult) -> RenderableType:
    """Stages, windows, what it means, how it was measured."""
    parts: list[RenderableType] = [_stages(result)]
    if any(stage.windows for stage in result.stages):
        parts.append(_windows(result))
    parts += [Text(f"• {line}") for line in advice(result)]
    parts.append(Padding(Text(_measured_how(result), style="dim"), (1, 0, 0, 0)))
    return Group(*parts)


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
        table.add_row(*_stage_row(stage))
    return table


def _stage_row(stage: StageProfile) -> list[str]:
    fits = stage.bytes_fit
    return [
        str(stage.stage_id),
        _ms(stage.step_secs),
        *(_ms(stage.secs.get(activity)) for activity in _COLUMNS),
        f"{_ms(stage.secs.get(Activity.WAIT))} ({percent(stage.idle_share)})",
        _ms(stage.usable_secs),
        "?" if fits is None else decimal(fits),
        decimal(stage.snapshot_bytes) if stage.snapshot_bytes else "–",
        f"{stage.snapshots.held_up_secs * 1e3:.2f}",
        tiers(stage.snapshots),
    ]


def tiers(use: SnapshotUse) -> str:
    """Bytes per step by tier."""
    if not use.nbytes:
        return "no snapshots"
    copied = (int(use.bytes_by_tier.get(tier, 0)) for tier in (1, 2, 3, 0))
    return " / ".join(decimal(nbytes) if nbytes else "0" for nbytes in copied)


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
        for windows in groups.values():
            table.add_row(
                str(stage.stage_id), *_window_row(windows), style=None if windows[0].usable else "dim"
            )
    return table


def _window_row(windows: Sequence[MeasuredWindow]) -> list[str]:
    lengths = [sum(w.length_secs[n] for w in windows) for n in range(3)]
    fits = [w.bytes_fit for w in windows if w.bytes_fit is not None]
    longest = max(w.length_secs.p50 for w in windows)
    room = decimal(sum(fits)) if fits else "?"
    return [
        str(windows[0].kind),
        str(len(windows)),
        *(f"{secs * 1e3:.2f}" for secs in (windows[0].start_secs, *lengths, longest)),
        room if windows[0].usable else "behind the fence",
        ", ".join(dict.fromkeys(w.name for w in windows)),
    ]


def _measured_how(result: ProfileResult) -> str:
    method = result.method
    speed = result.bandwidth_bytes_per_sec
    return (
        f"Times by the {method.clock} clock. Waiting and transfer were told apart with the partner's record "
        f"for {percent(method.matched_share)} of the point-to-point time, else by the fastest observation; "
        f"clocks agree within {method.clock_error_secs * 1e6:.0f} us. Bandwidth: "
        f"{'unknown' if speed is None else decimal(int(speed)) + '/s'} ({result.bandwidth_source})."
    )
