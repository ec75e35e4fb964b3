"""Summarizes a job as one dictionary: ``reft status --json`` without its part about this node."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from reft.grid import Coordinate
from reft.node.report import HealthSignal, NodeReport, ReportBoard, Shard
from reft.node.tolerance import find_holders, read_scheme, tolerance_now

_NODE_FIELDS = {
    "node",
    "domain",
    "spare",
    "round",
    "step",
    "steps_per_sec",
    "trainers",
    "quiet",
}


def summary(board: ReportBoard, now: float) -> dict[str, Any]:
    """Summarize a job from the reports of its nodes.

    Args:
        board: reports of all nodes.
        now: time now, in Unix seconds, for the ages in the summary.
    """
    nodes = sorted(board.nodes, key=lambda n: n.node)
    present = [n for n in nodes if n.observed_signal is not HealthSignal.OFFLINE]
    step = max((n.step for n in present if n.step is not None and n.step >= 0), default=None)
    speeds = [n.steps_per_sec for n in present if n.steps_per_sec is not None]
    recoveries = [n.recovery for n in nodes if n.recovery is not None]
    last_recovery = max(recoveries, key=lambda r: (r.round, r.unix_secs), default=None)
    holders = {node.node for node in find_holders(nodes)[1].values()}
    left = tolerance_now(nodes, without_quiet=True)
    runs_out = [
        {"node": n.node, **asdict(forecast), "said": f"{n.node}: {forecast}"}
        for n in present
        for forecast in n.runs_out
    ]
    return {
        "job_id": board.job_id,
        "round": max((n.round for n in present), default=0),
        "step": step,
        "steps_per_sec": median(speeds) if speeds else None,
        **_describe_commit([s for n in nodes for s in n.shards if s.committed], step, now),
        "protection": read_scheme(nodes) or None,
        "tolerance": max((n.tolerance for n in present if n.tolerance is not None), default=None),
        "tolerance_left": left,
        "restarts": max((n.restarts for n in nodes), default=0),
        "last_recovery": None if last_recovery is None else asdict(last_recovery),
        "nodes": [_describe_node(n, n.node in holders) for n in nodes],
        "since_start": _since_start(nodes),
        "slow": [asdict(straggler) for straggler in board.slow],
        "speeds": [asdict(speed) for speed in board.speeds],
        "memory": [{"node": n.node, **asdict(use)} for n in present for use in n.memory],
        "runs_out": runs_out,
        "warnings": [
            *_warnings(nodes, holders, left),
            *map(str, board.slow),
            *(forecast["said"] for forecast in runs_out),
        ],
        "as_of_unix_secs": board.unix_secs,
    }


def _describe_commit(committed: Sequence[Shard], step: int | None, now: float) -> dict[str, Any]:
    newest = max(committed, key=lambda s: (s.label, s.sealed_unix_secs), default=None)
    if newest is None:
        return {"newest_commit": None, "commit_age_secs": None, "commit_lag_steps": None}
    incarnation, committed_step = newest.label
    return {
        "newest_commit": {
            "incarnation": incarnation,
            "step": committed_step,
            "unix_secs": newest.sealed_unix_secs,
        },
        "commit_age_secs": max(0.0, now - newest.sealed_unix_secs),
        "commit_lag_steps": None if step is None else max(0, step - committed_step),
    }


def _since_start(nodes: Sequence[NodeReport]) -> dict[str, Any] | None:
    """Return useful and lost time since the job's start, by the node that observed it longest.

    ``tflops`` is the model's operations over the job's whole time, lost time included. It is None
    unless a node knows the model's size and the tokens per sample.
    """
    counted = [n.counts for n in nodes if n.counts is not None]
    counts = max(counted, key=lambda c: c.elapsed_secs, default=None)
    if counts is None:
        return None
    flops_per_sample = max((c.flops / c.samples for c in counted if c.samples), default=0.0)
    trainers = sum(n.trainers for n in nodes if not n.spare)
    tflops = flops_per_sample * (counts.samples_per_sec or 0.0) / 1e12
    is_known = tflops > 0 and trainers > 0
    return {
        **asdict(counts),
        "effective_ratio": counts.effective_ratio,
        "samples_per_sec": counts.samples_per_sec,
        "lost_secs": counts.lost_secs,
        "tflops": tflops if is_known else None,
        "tflops_per_trainer": tflops / trainers if is_known else None,
    }


def _describe_node(node: NodeReport, holds_shards: bool) -> dict[str, Any]:
    offline = node.observed_signal is HealthSignal.OFFLINE
    times = {str(signal): at for signal, at in sorted(node.times.items())}
    if node.offline_unix_secs is not None:
        times[HealthSignal.OFFLINE] = node.offline_unix_secs
    return {
        **node.model_dump(mode="json", include=_NODE_FIELDS),
        "signal": str(node.observed_signal),
        "since_unix_secs": times.get(node.observed_signal),
        "times": times,
        "holds_shards": holds_shards,
        "doing": "" if offline else node.doing,
        "why": node.why_offline() if offline else node.why,
        "shards": [
            {
                "at": str(Coordinate(*shard.at)),
                "incarnation": shard.label[0],
                "step": shard.label[1],
            }
            for shard in node.shards
        ],
    }


def _warnings(
    nodes: Iterable[NodeReport], holders: Container[str], left: int | None
) -> Iterator[str]:
    """Yield warnings about nodes and tolerance; a warning that several nodes give comes once.

    Args:
        nodes: reports of all nodes.
        holders: ids of the nodes that hold the newest version of some rank.
        left: number of further node losses that the job survives; None if unknown.
    """
    names_by_warning: dict[str, list[str]] = {}
    for node in nodes:
        if node.quiet:
            secs = f"{node.silent_secs:.0f} s"
            yield f"{node.node} has not reported for {secs}; it counts as lost until it does"
        if node.observed_signal is not HealthSignal.OFFLINE:
            for warning in node.warnings:
                names_by_warning.setdefault(warning, []).append(node.node)
        elif node.node in holders:
            yield f"{node.node} is gone: {node.why_offline()}"
    if left is not None and left < 0:
        yield (
            "the versions in memory are lost with the nodes that are gone, unless one of them "
            "comes back"
        )
    elif left == 0:
        yield "the loss of one more node would lose the versions in memory"
    for warning, names in names_by_warning.items():
        yield f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: {warning}"


def is_well(job: Mapping[str, Any]) -> bool:
    """Whether a job, as summarized by :func:`summary`, has a commit and no node in trouble.

    Nodes that are OFFLINE but were replaced are ignored.
    """
    relevant = [n for n in job["nodes"] if n["holds_shards"] or n["signal"] != HealthSignal.OFFLINE]
    bad = (HealthSignal.UNHEALTHY, HealthSignal.OFFLINE)
    in_trouble = any(n["signal"] in bad or n["quiet"] for n in relevant)
    return job["newest_commit"] is not None and not in_trouble
