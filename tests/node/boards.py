"""A board of two nodes, with something in every section."""

from __future__ import annotations

from dataclasses import replace

from reft.node.goodput import GoodputTimes
from reft.node.history import RoundReport
from reft.node.memory_watch import MemoryForecast, MemoryUse
from reft.node.report import HealthSignal, NodeReport, ReportBoard, Shard
from reft.node.stragglers import RankSpeed, SlownessKind, Straggler


def make_board(now: float = 100.0, **facts: object) -> ReportBoard:
    """Node a trains, node [b] was lost five seconds ago. ``facts``: fields of node a's report."""
    shard = Shard(
        at=(0, 0, 0),
        degrees=(1, 2, 1),
        label=(1, 7),
        scheme="arc",
        sealed_unix_secs=now - 10,
        committed=True,
    )
    report = {
        "signal": HealthSignal.COMPLETED,
        "times": {HealthSignal.HEALTHY: now - 60, HealthSignal.COMPLETED: now - 10},
        "doing": "running",
        "shards": (shard,),
        "step": 9,
        "steps_per_sec": 2.0,
        "round": 2,
        "tolerance": 1,
        "restarts": 1,
        "recovery": RoundReport(
            round=2,
            unix_secs=now - 50,
            lost=["[b]"],
            resumed_from="memory, own",
            resumed_step=5,
            secs={"gathering": 1.5, "transfer": 0.25},
        ),
        "counts": GoodputTimes(
            began_unix_secs=now - 99,
            elapsed_secs=10.0,
            first_step=1,
            newest_step=9,
            recovering_secs=2.0,
            samples=40,
            flops=8e13,
        ),
        "trainers": 2,
        "memory": (MemoryUse(name="the host", used_bytes=8, peak_bytes=9, limit_bytes=10),),
        "runs_out": (MemoryForecast("the host", "", 8, 10, 0.1, 20.0, 40, 2),),
        "warnings": ("the disk is full",),
    }
    here = NodeReport(node="a", domain="a", **{**report, **facts})
    lost = replace(shard, at=(0, 1, 0))
    gone = NodeReport(node="[b]", domain="b", shards=(lost,), offline_unix_secs=now - 5)
    speed = RankSpeed(3, "a", (0, 0, 0), 0.5, 0.2, 0.0, 0.1, 0.15, 0.05)
    slow = Straggler(SlownessKind.RANK, "rank 3 (a)", (3,), ("a",), 4, 1.5, 0.1, 0.2, "it computes")
    return ReportBoard(
        job_id="job", unix_secs=now, nodes=(here, gone), slow=(slow,), speeds=(speed,)
    )
