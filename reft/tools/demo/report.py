"""The verdict: what failed, what came back from where, and whether any loss differs by a bit. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from reft.tools.demo.history import History, Incarnation

SOURCES = ("local", "copy", "peer", "parity", "disk")


@dataclass(frozen=True)
class Failure:
    """One failure that was made: at a Unix time, when ``step`` was done and the next one was computed."""

    step: int
    node: int
    kind: str
    time: float


@dataclass(frozen=True)
class Recovery:
    """One return to training: from ``memory`` or ``disk``, or ``none``, where nothing had been committed and
    it began again; seconds of the slowest rank until its state was restored, and from the failure to the
    first step done after it (None: no failure was made); bytes restored by source, all ranks together."""

    source: str
    version: int
    lost_steps: int
    load_secs: float
    failure_to_step_secs: float | None
    bytes_from: Mapping[str, int]
    failure_to_step: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshots:
    """What the snapshots did, in all incarnations together: versions committed by all ranks (the restored
    state counts once more) and given up; host memory of one version and what is sent to other nodes for it,
    on the rank where it is most; seconds of the training thread per snapshot, on the slowest rank."""

    committed: int
    skipped: int
    bytes_per_rank: int
    sent_bytes: int
    stall_secs_median: float | None


@dataclass(frozen=True)
class Report:
    """All that ``reft demo`` has found out.

    Attributes:
        losses: of steps 1 to ``steps``: what stands at the end; None: the step was never reached.
        reference_losses: of the undisturbed run without reft.
        max_abs_loss_difference: over all steps and all times a step was computed; None: some loss is
            missing. 0.0 means equal to the last bit.
        problem: why the demonstration failed; None: it did not.
    """

    layout: Mapping[str, Any]
    steps: int
    tolerance: int | None
    failures: tuple[Failure, ...]
    recoveries: tuple[Recovery, ...]
    losses: tuple[float | None, ...]
    reference_losses: tuple[float | None, ...]
    max_abs_loss_difference: float | None
    snapshots: Snapshots
    problem: str | None = None
    total_secs: float = 0.0

    @property
    def good(self) -> bool:
        """Training finished, and not one bit differs."""
        return self.problem is None and self.max_abs_loss_difference == 0.0

    def to_json(self) -> str:
        """The report as JSON; numbers that JSON does not know are null."""
        return json.dumps({**_finite(asdict(self)), "good": self.good}, indent=2, allow_nan=False)


def make_report(
    layout: Mapping[str, Any],
    steps: int,
    history: History,
    reference: History,
    failures: Sequence[Failure],
    *,
    problem: str | None = None,
    total_secs: float = 0.0,
) -> Report:
    """Put together what two runs left behind."""
    lives = [history.incarnations[n] for n in sorted(history.incarnations)]
    return Report(
        layout=layout,
        steps=steps,
        tolerance=next((life.tolerance for life in lives if life.tolerance is not None), None),
        failures=tuple(failures),
        recoveries=find_recoveries(lives, failures),
        losses=_standing(history, steps),
        reference_losses=_standing(reference, steps),
        max_abs_loss_difference=loss_difference(history, reference, steps),
        snapshots=_count_snapshots(lives),
        problem=problem,
        total_secs=total_secs,
    )


def find_recoveries(lives: Sequence[Incarnation], failures: Sequence[Failure]) -> tuple[Recovery, ...]:
    """One per incarnation, after the first to train, that came as far as a step.

    A failure during a recovery belongs to the recovery that succeeded in the end: it is counted from
    the first failure since the last step of the one before.
    """
    found = []
    for before, life in pairwise(life for life in lives if life.steps):
        began, done = before.first_step_times[0], life.first_step_times[1]
        since = [failure.time for failure in failures if began <= failure.time <= done]
        events = [event.fields for event in life.restored.values()]
        version = int(events[0]["version"]) if events else 0
        found.append(
            Recovery(
                source=str(events[0]["source"]) if events else "none",
                version=version,
                lost_steps=before.last_step - version,
                load_secs=max((float(fields["secs"]) for fields in events), default=0.0),
                failure_to_step_secs=done - min(since) if since else None,
                bytes_from={s: sum(int(f["bytes_from"].get(s, 0)) for f in events) for s in SOURCES},
                failure_to_step=failure_to_step(life, min(since)) if since else {},
            )
        )
    return tuple(found)


def failure_to_step(life: Incarnation, failed_at: float) -> dict[str, float]:
    """Seconds from the failure to the first step in their parts, as the node saw it that took longest:
    ``detection`` (until its launcher saw that a trainer had failed) and those of
    :data:`reft.node.history.PARTS`. Empty: no node that saw the failure is left."""
    seen = [e for e in life.recovered.values() if e.fields["failed_unix_secs"] is not None]
    if not seen:
        return {}
    last = max(seen, key=lambda event: event.time)
    detection = max(0.0, float(last.fields["failed_unix_secs"]) - failed_at)
    return {"detection": detection, **{name: float(secs) for name, secs in last.fields["secs"].items()}}


def loss_difference(history: History, reference: History, steps: int) -> float | None:
    """Largest absolute difference over all steps; also between two computations of one step."""
    worst = 0.0
    for step in range(1, steps + 1):
        found, expected = history.losses.get(step), reference.losses.get(step)
        if not found or not expected:
            return None
        worst = max(worst, *(_difference(a, b) for a in found for b in expected))
    return worst


def _difference(found: str, expected: str) -> float:
    if found == expected:
        return 0.0
    difference = abs(float.fromhex(found) - float.fromhex(expected))
    # Unequal bits never count as equal: not NaN against a number, not 0.0 against -0.0.
    return math.inf if math.isnan(difference) else difference or math.ulp(0.0)


def _standing(history: History, steps: int) -> tuple[float | None, ...]:
    losses = history.losses
    return tuple(float.fromhex(losses[s][-1]) if s in losses else None for s in range(1, steps + 1))


def _count_snapshots(lives: Sequence[Incarnation]) -> Snapshots:
    counters = [c for life in lives for c in life.counters.values()]
    slowest = [
        max(c["stall_secs_median"] or 0.0 for c in life.counters.values()) for life in lives if life.counters
    ]
    return Snapshots(
        committed=sum(len(life.committed) for life in lives),
        skipped=sum(len(life.skipped) for life in lives),
        bytes_per_rank=max((int(c["bytes_per_rank"]) for c in counters), default=0),
        sent_bytes=max((sum(c["traffic"]["sent"].values()) for c in counters), default=0),
        stall_secs_median=statistics.median(slowest) if slowest else None,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
