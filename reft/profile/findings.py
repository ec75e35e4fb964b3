"""Interprets the numbers of a profile, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from reft.profile.result import (
    Activity,
    Overlap,
    ProfileResult,
    StageProfile,
)

# A stage is reported as slow if its computing time exceeds the mean by this fraction
_IMBALANCE = 0.10
# If less than this fraction of the expected bytes was copied, not every step had a version
_RARE = 0.9
# If less than this fraction of the point-to-point time could be matched with a partner's record,
# idle time is reported as a lower bound
_MATCHED = 0.9
# Limits for "mostly" and "hardly", as fractions of the copying time
_MOSTLY, _HARDLY = 0.9, 0.05
# Fraction of a step from which it is reported that versions hold training up
_MUCH_HELD_UP = 0.01


def milliseconds(secs: float) -> str:
    """Format a time with three significant digits and without an exponent."""
    value = secs * 1e3
    if value >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Format a fraction as a percentage, with one decimal place below ten percent."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def advice(result: ProfileResult) -> Iterator[str]:
    """Yield sentences to print after the tables, the most important first."""
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


def verdict(result: ProfileResult) -> str:
    """Return one line that says whether snapshots slow this job down. Percentages in it are
    fractions of the copying time."""
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
