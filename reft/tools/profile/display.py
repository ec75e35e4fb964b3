"""The profile as tables for people, with what its figures mean, and as trace events for tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from reft.profile.result import Activity, MeasuredWindow, ProfileResult, RankTimeline, Spread, StageProfile
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


# -- as Chrome trace events, for ui.perfetto.dev or chrome://tracing ---------------------------------------
#
# One process per rank, named after its stage; a track for steps, one for instructions, one for snapshots.
# Events on one track never overlap. The format is a list of JSON objects; no library is needed to write it.

_STEPS, _INSTRUCTIONS, _SNAPSHOTS = range(3)


def write_trace(result: ProfileResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(result))}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def _events(result: ProfileResult) -> Iterator[dict[str, Any]]:
    """Names of processes and tracks first, then by step and rank."""
    for rank in result.timelines[0].ranks if result.timelines else ():
        for what, track, args in (
            ("process_name", 0, {"name": f"stage {rank.stage_id} (rank {rank.rank})"}),
            ("process_sort_index", 0, {"sort_index": rank.stage_id}),
            ("thread_name", _STEPS, {"name": "steps"}),
            ("thread_name", _INSTRUCTIONS, {"name": "instructions"}),
            ("thread_name", _SNAPSHOTS, {"name": "snapshot"}),
        ):
            yield {"ph": "M", "pid": rank.rank, "tid": track, "name": what, "args": args}
    for timeline in result.timelines:
        for rank in timeline.ranks:
            yield _slice(rank, _STEPS, f"step {timeline.step}", (rank.begin_secs, rank.end_secs), "step")
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
            for chunk in sorted(rank.chunks):
                # Chunks of different streams may overlap; on one track they must not.
                at = max(at, chunk.begin_secs)
                name, facts = f"tier {chunk.tier}" if chunk.tier else "at the fence", chunk._asdict()
                yield _slice(rank, _SNAPSHOTS, name, (at, max(at, chunk.end_secs)), "snapshot", **facts)
                at = max(at, chunk.end_secs)


def _slice(
    rank: RankTimeline, track: int, name: str, between: tuple[float, float], category: str, **args: Any
) -> dict[str, Any]:
    # Whole nanoseconds: sums of rounded microseconds could overlap.
    start, stop = (round(secs * 1e9) for secs in between)
    times = {"ts": start / 1e3, "dur": max(0, stop - start) / 1e3}
    return {"ph": "X", "pid": rank.rank, "tid": track, **times, "name": name, "cat": category, "args": args}
