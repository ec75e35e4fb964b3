"""Converts a profile to Chrome trace events, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reft.profile.result import (
    Activity,
    ProfileResult,
    RankStep,
)

_STEPS, _INSTRUCTIONS, _SNAPSHOTS = range(3)  # Tracks of a rank


def write_trace(result: ProfileResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(result))}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def _events(result: ProfileResult) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and tracks, then the events by step and rank."""
    for rank in result.timeline():
        for what, track, args in (
            ("process_name", 0, {"name": f"stage {rank.stage_id} (rank {rank.rank})"}),
            ("process_sort_index", 0, {"sort_index": rank.stage_id}),
            ("thread_name", _STEPS, {"name": "steps"}),
            ("thread_name", _INSTRUCTIONS, {"name": "instructions"}),
            ("thread_name", _SNAPSHOTS, {"name": "snapshot"}),
        ):
            yield {"ph": "M", "pid": rank.rank, "tid": track, "name": what, "args": args}
    for rank in result.timelines:
        step_span = (rank.begin_secs, rank.end_secs)
        yield _slice(rank, _STEPS, f"step {rank.step}", step_span, category="step")
        for segment in rank.segments:
            name = segment.name
            if segment.activity in (Activity.WAIT, Activity.FENCE):
                name = f"{segment.activity.value} in {name}"
            elif segment.activity is Activity.CAPTURE:
                name = "begin of a snapshot"
            span = (segment.begin_secs, segment.end_secs)
            facts = {"position": segment.position, "micro_batch": segment.micro_batch}
            category = segment.activity.value
            yield _slice(rank, _INSTRUCTIONS, name, span, category=category, args=facts)
        at = rank.begin_secs
        for chunk in sorted(rank.chunks, key=lambda chunk: chunk.begin_secs):
            # Chunks of different streams may overlap, but slices of one track must not.
            span = (max(at, chunk.begin_secs), max(at, chunk.end_secs))
            name = f"tier {chunk.tier}" if chunk.tier else "at the fence"
            yield _slice(rank, _SNAPSHOTS, name, span, category="snapshot", args=asdict(chunk))
            at = span[1]


def _slice(
    rank: RankStep,
    track: int,
    name: str,
    span: tuple[float, float],
    *,
    category: str,
    args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    # Round to whole nanoseconds, because sums of rounded microseconds could overlap.
    begin, end = (round(secs * 1e9) for secs in span)
    return {
        "ph": "X",
        "pid": rank.rank,
        "tid": track,
        "ts": begin / 1e3,
        "dur": max(0, end - begin) / 1e3,
        "name": name,
        "cat": category,
        "args": args or {},
    }
