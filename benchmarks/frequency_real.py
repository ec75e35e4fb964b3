"""A real job that finds its interval on storage while another process loads the disk; see
``frequency.py``.

Two ranks of DeepSpeed's pipeline engine train under ``reft launch``; ``persist.interval_steps`` is
"auto". In the second of three parts another process writes to the same disk and syncs without a
pause. A part is as long as 20 versions on storage take (``--versions``), or ends before them after
``--most-part-secs``; of parts with fewer nothing is said of the goal. What versions on storage cost
is counted from the ranks' own steps, apart from what the job itself observes: steps beside a
version on its way to storage against those of the same part without one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from job_events import EventReader
from local_cluster import LocalCluster

from examples.llama import PRETRAIN
from reft.env import ENV_EVENTS

_PARTS = ("alone", "another process loads the disk", "alone again")
_LOOK_SECS = 0.1
_START_SECS = 600.0
_MODEL = (
    *("--layers", "4", "--hidden", "192", "--heads", "6", "--kv-heads", "6", "--ffn", "512"),
    *("--vocab", "2048", "--seq", "32", "--micro-batch", "1", "--micro-batches", "2"),
    *("--pp", "1", "--dp", "2"),
    *("--steps", "1000000", "--log-interval", "1000"),
)


@dataclass(frozen=True)
class Look:
    """What the node's status said at one instant.

    Attributes:
        secs: since the measurement began.
        interval_steps, why, overhead: of the rate that the ranks agreed on, as the job tells it.
        writing: step of the version on its way to storage; None: none.
        written: step of the newest version there.
    """

    secs: float
    interval_steps: int
    why: str
    overhead: float | None
    writing: int | None
    written: int | None


@contextmanager
def another_process(directory: Path) -> Iterator[None]:
    """Loads the disk."""
    script = str(Path(__file__).with_name("storage_load.py"))
    process = subprocess.Popen([sys.executable, script, str(directory)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the job; returns the parts, and the rate over time."""
    with tempfile.TemporaryDirectory(prefix="reft-frequency-", dir=options.disk) as name:
        return _measure(Path(name), options)


def _measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    text = directory / "corpus.txt"
    text.write_text(
        "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    )
    disk = directory / "disk"
    disk.mkdir()
    persist = {
        "dir": str(disk),
        "interval_steps": "auto",
        "max_overhead": options.max_overhead,
        "node_mtbf_days": options.mtbf_secs / 86400,
    }
    block = directory / "reft.json"
    block.write_text(json.dumps({"enabled": True, "allow_unprotected": True, "persist": persist}))
    events = directory / "events"
    cluster = LocalCluster(
        command=[
            *(PRETRAIN, *_MODEL, "--data", str(text), "--reft", str(block)),
            *("--save-dir", str(directory / "saved"), "--cache-dir", str(directory / "cache")),
        ],
        directory=directory,
        nodes=1,
        procs_per_node=2,
        env={ENV_EVENTS: str(events)},
        job_id="frequency",
    )
    with cluster:
        cluster.start()
        reader = EventReader(events)
        steps: dict[int, float] = {}
        looks: list[tuple[float, dict[str, Any]]] = []

        def look() -> None:
            steps.update(
                {
                    int(event.fields["step"]): event.time
                    for event in reader.poll()
                    if event.kind == "step" and event.rank == 0
                }
            )
            looks.append((time.time(), dict(cluster.status(0) or {})))

        def settled() -> bool:
            look()
            return _rate(looks[-1][1]).get("overhead") is not None

        cluster.wait_until(settled, _START_SECS, "the first version on storage to be measured")
        began, ends = time.time(), []
        for part in range(len(_PARTS)):
            with ExitStack() as loading:
                if part == 1:
                    loading.enter_context(another_process(disk))
                begin = time.time()
                written: set[int] = set()
                while (secs := time.time() - begin) < options.most_part_secs:
                    look()
                    written |= (
                        {label["step"]} if (label := _persist(looks[-1][1]).get("last")) else set()
                    )
                    if secs >= options.part_secs and len(written) > options.versions:
                        break
                    time.sleep(_LOOK_SECS)
            ends.append(time.time())
    course = Course(
        {step: at - began for step, at in steps.items()},
        [_look(at - began, status) for at, status in looks if at >= began],
    )
    result = course.to_json([end - began for end in ends])
    return result | {"goal": goal(result["parts"], options.max_overhead, options.versions)}


def goal(parts: Sequence[Mapping[str, Any]], max_overhead: float, versions: int) -> dict[str, Any]:
    """Whether the overhead was held in every part.

    Args:
        parts: as :meth:`Course.part` counts them.
        max_overhead: allowed.
        versions: that a part must have for that to be said.
    """
    few = [part["part"] for part in parts if part["versions_written"] < versions]
    held = None if few else all(part["overhead"] <= max_overhead for part in parts)
    return {"max_overhead": max_overhead, "versions": versions, "held": held, "too_few_in": few}


def _persist(status: Mapping[str, Any]) -> dict[str, Any]:
    return status.get("persist") or {}


def _rate(status: Mapping[str, Any]) -> dict[str, Any]:
    trainers = (status.get("trainers") or {}).values()
    rates = [r for t in trainers if (r := (t.get("stats") or {}).get("persist_rate"))]
    return max(rates, key=lambda r: r["interval_steps"]) if rates else {}


def _look(secs: float, status: Mapping[str, Any]) -> Look:
    rate, persist = _rate(status), _persist(status)
    return Look(
        secs,
        rate.get("agreed_steps", 0),
        rate.get("why", ""),
        rate.get("overhead"),
        (persist.get("writing") or {}).get("step"),
        (persist.get("last") or {}).get("step"),
    )


# -- what it has cost ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """What was seen of the job.

    Attributes:
        steps: when each ended on rank 0, in seconds since the measurement began.
        looks: at the status, in order.
    """

    steps: Mapping[int, float]
    looks: Sequence[Look]

    def to_json(self, ends: Sequence[float]) -> dict[str, Any]:
        """The parts, which end then, and the rate whenever it or what is on storage changed."""
        parts = [self.part(*which) for which in zip(_PARTS, (0.0, *ends), ends, strict=False)]
        changes = [self.looks[0]]
        for seen in self.looks:
            if (seen.interval_steps, seen.written) != (
                changes[-1].interval_steps,
                changes[-1].written,
            ):
                changes.append(seen)
        return {"parts": parts, "rate_over_time": [vars(seen) for seen in changes]}

    def part(self, name: str, begin: float, end: float) -> dict[str, Any]:
        """What versions on storage have cost between two moments. A step is beside one if one was
        on its way in it; the mean of the others is what it would have taken. With ``all_steps`` as
        it is, else the tenth of the steps that is longest is left out of both: the machine does
        other things too."""
        plain, beside = self._times(begin, end)
        here = [seen for seen in self.looks if begin <= seen.secs <= end]
        told = [seen.overhead for seen in here if seen.overhead is not None]
        intervals = [seen.interval_steps for seen in here]
        return {
            "part": name,
            "secs": end - begin,
            "steps": len(plain) + len(beside),
            "versions_written": len({seen.written for seen in here if seen.written is not None})
            - 1,
            "plain_step_secs": median(plain),
            "beside_step_secs": median(beside) if beside else None,
            "overhead": _overhead(_without_longest(plain), _without_longest(beside)),
            "overhead_all_steps": _overhead(plain, beside),
            "overhead_told_last": told[-1] if told else None,
            "interval_steps": {
                "first": intervals[0],
                "longest": max(intervals),
                "last": intervals[-1],
            },
            "why_at_the_end": here[-1].why,
        }

    def _times(self, begin: float, end: float) -> tuple[list[float], list[float]]:
        writing = [(a.secs, b.secs) for a, b in pairwise(self.looks) if a.writing is not None]
        plain: list[float] = []
        beside: list[float] = []
        for step, at in self.steps.items():
            since = self.steps.get(step - 1)
            if since is not None and begin <= since and at <= end:
                meets = any(a < at and b > since for a, b in writing)
                (beside if meets else plain).append(at - since)
        return plain, beside


def _without_longest(times: Sequence[float]) -> list[float]:
    return sorted(times)[: len(times) - len(times) // 10]


def _overhead(plain: Sequence[float], beside: Sequence[float]) -> float:
    """(sum of the iterations - n Ti0) / (n Ti0)."""
    if not beside:
        return 0.0
    usual = fmean(plain)
    return (sum(beside) - len(beside) * usual) / ((len(plain) + len(beside)) * usual)


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    head = f"{'part':32} {'steps':>6} {'written':>8} {'overhead':>9} {'told':>7}"
    yield f"{head}   interval: first, longest, last"
    for p in result["parts"]:
        told = "" if p["overhead_told_last"] is None else f"{p['overhead_told_last']:.2%}"
        yield (
            f"{p['part']:32} {p['steps']:6} {p['versions_written']:8} {p['overhead']:9.2%} "
            f"{told:>7}   "
            f"{', '.join(map(str, p['interval_steps'].values()))}: {p['why_at_the_end']}"
        )
    if (found := result.get("goal")) is not None:
        said = {True: "is held", False: "is NOT held", None: "is not judged"}[found["held"]]
        few = f": fewer than {found['versions']} versions in {', '.join(found['too_few_in'])}"
        yield (
            f"an overhead of {found['max_overhead']:.1%} {said}{few if found['too_few_in'] else ''}"
        )
    yield "rate over time: " + ", ".join(
        f"{s['secs']:.0f} s {s['interval_steps']}" for s in result["rate_over_time"]
    )
