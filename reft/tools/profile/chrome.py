"""The timelines as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process per rank, named after its stage; a track for instructions, one for snapshot chunks. Events on
one track never overlap. The format is a list of JSON objects; no library is needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reft.profile.activity import Activity
from reft.profile.result import ChunkSlice, ProfileResult, RankTimeline, Segment

_INSTRUCTIONS = 1
_SNAPSHOTS = 2
_STEPS = 0
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "rail_animation",
    "optimizer": "rail_response",
    "wait": "thread_state_sleeping",
    "transfer": "thread_state_iowait",
    "reduce": "thread_state_runnable",
    "fence": "terrible",
    "capture": "bad",
}


def write_trace(result: ProfileResult, path: Path) -> None:
    """Write the JSON object format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "traceEvents": list(events(result))}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def events(result: ProfileResult) -> Iterator[dict[str, Any]]:
    """All events: names of processes and tracks first, then by step and rank."""
    if result.timelines:
        for rank in result.timelines[0].ranks:
            yield from _names(rank)
    for timeline in result.timelines:
        for rank in timeline.ranks:
            whole = (rank.begin_secs, rank.end_secs)
            yield _slice((rank.rank, _STEPS), f"step {timeline.step}", whole, "step")
            for segment in rank.segments:
                yield _instruction(rank.rank, segment)
            at = rank.begin_secs
            for chunk in sorted(rank.chunks):
                # Chunks of different streams may overlap; on one track they must not.
                at = max(at, chunk.begin_secs)
                yield _chunk(rank.rank, chunk, at)
                at = max(at, chunk.end_secs)


def _names(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    yield _meta(rank.rank, 0, "process_name", name=f"stage {rank.stage_id} (rank {rank.rank})")
    yield _meta(rank.rank, 0, "process_sort_index", sort_index=rank.stage_id)
    for track, name in ((_STEPS, "steps"), (_INSTRUCTIONS, "instructions"), (_SNAPSHOTS, "snapshot")):
        yield _meta(rank.rank, track, "thread_name", name=name)


def _meta(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slice(
    track: tuple[int, int], name: str, between: tuple[float, float], category: str, **args: Any
) -> dict[str, Any]:
    # Whole nanoseconds: sums of rounded microseconds could overlap.
    start, stop = (round(secs * 1e9) for secs in between)
    event = {
        "ph": "X",
        "pid": track[0],
        "tid": track[1],
        "ts": start / 1e3,
        "dur": max(0, stop - start) / 1e3,
        "name": name,
        "cat": category,
        "args": args,
    }
    if category in _COLOURS:
        event["cname"] = _COLOURS[category]
    return event


def _instruction(pid: int, segment: Segment) -> dict[str, Any]:
    name = segment.name
    if segment.activity in (Activity.WAIT, Activity.FENCE):
        name = f"{segment.activity.value} in {segment.name}"
    elif segment.activity is Activity.CAPTURE:
        name = "begin of a snapshot"
    facts: dict[str, Any] = {"position": segment.position}
    if segment.micro_batch is not None:
        facts["micro_batch"] = segment.micro_batch
    between = (segment.begin_secs, segment.end_secs)
    return _slice((pid, _INSTRUCTIONS), name, between, segment.activity.value, **facts)


def _chunk(pid: int, chunk: ChunkSlice, begin: float) -> dict[str, Any]:
    name = f"tier {chunk.tier}" if chunk.tier else "at the fence"
    between = (begin, max(begin, chunk.end_secs))
    return _slice((pid, _SNAPSHOTS), name, between, "snapshot", nbytes=chunk.nbytes, section=chunk.section)
