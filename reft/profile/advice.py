"""What the figures of a profile mean, in sentences for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from reft.profile.activity import Activity
from reft.profile.result import MeasuredWindow, ProfileResult, StageProfile

_FENCE_SHARE = 0.002
_IMBALANCE = 0.10
_MUCH_IDLE = 0.30
_MUCH_TRANSFER = 0.10
_MANY_STAGES = 4
_RARE = 0.9
_COMPUTE = (Activity.FORWARD, Activity.BACKWARD)


def advice(result: ProfileResult) -> tuple[str, ...]:
    """Lines to read after the table, the most important first."""
    lines = list(_fits(result))
    for stage in result.stages:
        lines += _fence(stage)
        lines += _variability(stage)
    lines += _rare(result)
    lines += _balance(result)
    lines += _bubbles(result)
    lines += _doubt(result)
    return tuple(lines)


def milliseconds(secs: float) -> str:
    """Three significant digits, never in exponents."""
    if secs == 0:
        return "0 ms"
    value = secs * 1e3
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    """One decimal below ten."""
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _fits(result: ProfileResult) -> Iterator[str]:
    """Stage by stage; of many that fit only the tightest."""

    def fits(stage: StageProfile) -> bool:
        return bool(stage.bytes_fit and 0 < stage.snapshot_bytes <= stage.bytes_fit)

    def share(stage: StageProfile) -> float:
        return stage.snapshot_bytes / (stage.bytes_fit or 1)

    well = [stage for stage in result.stages if fits(stage)]
    many = len(well) > _MANY_STAGES
    tightest = max(well, key=share, default=None)
    for stage in result.stages:
        lines = _fit(stage, result.bandwidth_bytes_per_sec)
        if not (many and fits(stage)):
            yield from lines
        elif stage is tightest:
            yield f"{next(lines)}; the other {len(well) - 1} stages that fit have more room"


def _fit(stage: StageProfile, bandwidth: float | None) -> Iterator[str]:
    name = f"stage {stage.stage_id}"
    if not stage.usable_windows:
        yield (
            f"{name} has no recurring idle time outside of its optimizer step: its snapshots run beside "
            f"computation (tier 2), or the optimizer step waits for them"
        )
        return
    room, need = stage.bytes_fit, stage.snapshot_bytes
    if room is None or bandwidth is None:
        yield f"{name} idles {milliseconds(stage.usable_secs.p50)} of a step outside of the optimizer step"
    elif not need:
        yield f"{name}: {decimal(room)} fit into its idle time at {decimal(int(bandwidth))}/s"
    elif need <= room:
        yield (
            f"{name}: a snapshot of {decimal(need)} fits into {percent(need / room)} of its idle time "
            f"({milliseconds(need / bandwidth)} at {decimal(int(bandwidth))}/s)"
        )
    else:
        yield (
            f"{name}: a snapshot of {decimal(need)} does not fit its idle time: {decimal(room)} do "
            f"({percent(room / need)}), the other {decimal(need - room)} are copied beside computation, or "
            f"the optimizer step waits for them. A larger interval_steps makes that rarer, more "
            f"data-parallel peers make the share smaller"
        )


def _fence(stage: StageProfile) -> Iterator[str]:
    use, step = stage.snapshots, stage.step_secs.p50
    waited, began = use.fence_secs.p50, use.capture_secs.p50
    if waited > _FENCE_SHARE * step:
        yield (
            f"stage {stage.stage_id}: training waited {milliseconds(waited)} of every step "
            f"({percent(waited / step)}) for its snapshot to end before the optimizer step"
        )
    if use.nbytes and began > _FENCE_SHARE * step:
        yield (
            f"stage {stage.stage_id}: beginning a snapshot takes {milliseconds(began)} of every step "
            f"({percent(began / step)}) on the training thread"
        )


def _rare(result: ProfileResult) -> Iterator[str]:
    """Not every step had a snapshot."""
    due = sum(stage.snapshot_bytes for stage in result.stages)
    copied = sum(stage.snapshots.nbytes for stage in result.stages)
    if 0 < copied < _RARE * due:
        yield (
            f"snapshots were taken of about {percent(copied / due)} of the measured steps: interval_steps is "
            f"larger than 1, or the version before was not committed yet (reft status counts skips)"
        )


def _variability(stage: StageProfile) -> Iterator[str]:
    def varies(window: MeasuredWindow) -> bool:
        return window.length_secs.p10 < 0.5 * window.length_secs.p50

    vague = list(filter(varies, stage.usable_windows))
    if vague:
        short, middle = (sum(w.length_secs[n] for w in vague) for n in (0, 1))
        yield (
            f"stage {stage.stage_id}: of {len(stage.usable_windows)} windows {len(vague)} vary much: "
            f"{milliseconds(middle)} together, but {milliseconds(short)} at their short ends (p10)"
        )


def _compute_secs(stage: StageProfile) -> float:
    return sum(stage.secs[a].p50 for a in _COMPUTE if a in stage.secs)


def _balance(result: ProfileResult) -> Iterator[str]:
    if len(result.stages) < 2:
        return
    computing = {stage.stage_id: _compute_secs(stage) for stage in result.stages}
    slowest = max(computing, key=lambda stage_id: computing[stage_id])
    mean = sum(computing.values()) / len(computing)
    if mean and computing[slowest] > (1 + _IMBALANCE) * mean:
        yield (
            f"stage {slowest} computes {percent(computing[slowest] / mean - 1)} longer than the mean stage, "
            f"and the others wait for it: it has too many layers, or a slow device"
        )


def _bubbles(result: ProfileResult) -> Iterator[str]:
    if len(result.stages) == 1:
        yield "one pipeline stage: it has no neighbours to wait for, so there are no bubbles"
        return
    idle = sum(stage.idle_share for stage in result.stages) / len(result.stages)
    if idle > _MUCH_IDLE:
        yield (
            f"the devices idle {percent(idle)} of the step: good for snapshots, costly for training; more "
            f"micro-batches per step shrink it"
        )
    moving = [
        s.secs[Activity.TRANSFER].p50 / s.step_secs.p50 for s in result.stages if Activity.TRANSFER in s.secs
    ]
    if moving and max(moving) > _MUCH_TRANSFER:
        yield f"transfers between stages take up to {percent(max(moving))} of a step; that time is not idle"


def _doubt(result: ProfileResult) -> Iterator[str]:
    method = result.method
    if method.matched_share < 0.9:
        yield (
            f"{percent(1 - method.matched_share)} of the time in sends and receives was split by the fastest "
            f"observation: there idle time is a lower bound"
        )
    if method.causality_secs > max(method.clock_error_secs * 2, 1e-5):
        yield (
            f"a receive seemed to end {milliseconds(method.causality_secs)} before its send began: the "
            f"hosts' clocks are aligned worse than thought; take waits of that length with care"
        )
