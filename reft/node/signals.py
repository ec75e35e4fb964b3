"""What each node of a job tells all others of itself, and what that makes of the job. Pure.

The signals are those of the paper (REFERENCE 1.9): HEALTHY at the start, SNAP when a version is begun,
COMPLETED when all shards of the node are whole, UNHEALTHY for software that fails, OFFLINE for a node of
which nothing is heard. A node says the first four of itself; OFFLINE is what the others say of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import read_json
from reft.naming import Label
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, tolerance_left
from reft.speed.effective import Counts
from reft.speed.memory import MemoryUse, RunsOut
from reft.speed.reports import RankSpeed, Straggler

BOARD_FILE = "board.json"
MOST_CHARACTERS = 200
"""Of a text in a report; longer ones are cut."""
MOST_WARNINGS = 6
MOST_MEMORIES, MOST_RUNNING_OUT = 24, 3
_MOST_BOARD_BYTES = 64 * 2**20
"""Of a board, once it is unpacked: 65,536 nodes."""


class Signal(StrEnum):
    """The state of a node."""

    HEALTHY = "HEALTHY"
    """Its trainers run, or wait for other nodes; it has no version of this start yet."""
    SNAP = "SNAP"
    """A version is being copied."""
    COMPLETED = "COMPLETED"
    """All its shards of the newest version are whole."""
    UNHEALTHY = "UNHEALTHY"
    """A trainer has failed or stands still, or versions are not taken."""
    OFFLINE = "OFFLINE"
    """Nothing is heard of it."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def _cut(value: Any) -> Any:
    return value[:MOST_CHARACTERS] if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_cut)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda texts: tuple(texts)[:MOST_WARNINGS])]


class Shard(_Message):
    """A whole version of one rank in a node's memory.

    Attributes:
        at: its pipeline stage, replica and tensor slice.
        degrees: of the job that wrote it, in the same order.
        label: incarnation and step.
        scheme: its protection, ``arc:2+aec``; "" where nobody said.
        sealed_unix_secs: when it was whole.
        committed: by all ranks.
    """

    at: tuple[int, int, int]
    degrees: tuple[int, int, int]
    label: tuple[int, int]
    scheme: Text = ""
    sealed_unix_secs: float = 0.0
    committed: bool = False


class Recovery(_Message):
    """The last restart that followed a failure, as :class:`reft.node.history.Round` tells of it."""

    round: int
    unix_secs: float
    failures: Texts = ()
    lost: Texts = ()
    resumed_from: Text | None = None
    resumed_step: int | None = None
    newest_step: int = -1
    secs: dict[str, float] = Field(default_factory=dict)


class NodeReport(_Message):
    """What a node tells of itself.

    Attributes:
        node: its id.
        domain: what fails as one with it: the node, or the host of several that nobody declared to be nodes.
        number: one more with every report.
        round: of its trainers; 0 before the first.
        spare: it waits for a place.
        signal: its state; ``times`` says when it last was in each, in seconds since 1970.
        doing: the launcher's words for what it does; ``why`` for what is wrong.
        step: last one that its trainers have made; None: they have made none yet.
        steps_per_sec: measured over the last steps; None: not known yet.
        shards: newest whole version of each rank with memory on this node.
        trainers: that run.
        tolerance: node losses that the job's protection survives where all nodes are there; None: not known.
        restarts: after failures.
        recovery: the last of them.
        warnings: for people.
        flops_per_token, tokens_per_sample: as the trainers' pages have them.
        memory: that limits its trainers, and how much of it is in use.
        runs_out: which of it will be full, the soonest first.
        counts: the job's, as this node has counted them; None: not yet.
        left: it has ended, and says so.
    """

    node: str
    domain: str
    number: int = 0
    round: int = 0
    spare: bool = False
    signal: Signal = Signal.HEALTHY
    times: dict[Signal, float] = Field(default_factory=dict)
    doing: Text = ""
    why: Text = ""
    step: int | None = None
    steps_per_sec: float | None = None
    shards: tuple[Shard, ...] = ()
    trainers: int = 0
    tolerance: int | None = None
    restarts: int = 0
    recovery: Recovery | None = None
    warnings: Texts = ()
    flops_per_token: int = 0
    tokens_per_sample: int = 0
    memory: tuple[MemoryUse, ...] = ()
    runs_out: tuple[RunsOut, ...] = ()
    counts: Counts | None = None
    left: bool = False

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> NodeReport:
        """Raises ValueError if it is none."""
        return cls.model_validate_json(_inflated(data))


class Row(_Message):
    """A node, as the keeper of the board sees it.

    Attributes:
        report: its newest.
        silent_secs: since then, by the keeper's clock.
        offline_unix_secs: since when nothing is heard of it; None: it is heard of.
    """

    report: NodeReport
    silent_secs: float = 0.0
    offline_unix_secs: float | None = None

    @property
    def signal(self) -> Signal:
        return self.report.signal if self.offline_unix_secs is None else Signal.OFFLINE


class Board(_Message):
    """All nodes of a job, the same for all of them.

    Attributes:
        job_id: the job.
        keeper: the node whose launcher puts it together.
        number: one more with every change.
        unix_secs: when it was put together, by the keeper's clock.
        rows: by node.
        slow: ranks, nodes and links that are slower than their peers, the costliest first.
        speeds: of what the ranks' last steps consisted.
        written_unix_secs: when a launcher wrote this copy into its node's memory.
        store_lost_unix_secs: since when that launcher does not reach the others; None: it does.
    """

    job_id: str
    keeper: str = ""
    number: int = 0
    unix_secs: float = 0.0
    rows: tuple[Row, ...] = ()
    slow: tuple[Straggler, ...] = ()
    speeds: tuple[RankSpeed, ...] = ()
    written_unix_secs: float = 0.0
    store_lost_unix_secs: float | None = None

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Board:
        """Raises ValueError if it is none."""
        return cls.model_validate_json(_inflated(data))

    def row(self, node: str) -> Row | None:
        """Of one node."""
        return next((r for r in self.rows if r.report.node == node), None)


def _inflated(data: bytes) -> bytes:
    """Raises ValueError if it is not compressed, or too much."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, _MOST_BOARD_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if unpacking.unconsumed_tail:
        raise ValueError(f"more than {_MOST_BOARD_BYTES} bytes")
    return text


def updated_row(
    before: Row | None, report: NodeReport, *, elapsed_secs: float, offline_after_secs: float, now: float
) -> Row:
    """A node's row after another look at its report.

    Args:
        before: its row at the last look; None: there was none.
        report: the newest.
        elapsed_secs: since the last look, as far as the keeper itself did not stand still.
        offline_after_secs: a node is OFFLINE when nothing was heard of it for longer.
        now: seconds since 1970.
    """
    heard = before is None or report.number != before.report.number
    silent = 0.0 if before is None or heard else before.silent_secs + elapsed_secs
    offline = None
    if report.left or silent > offline_after_secs:
        known = before.offline_unix_secs if before is not None else None
        offline = known if known is not None and not heard else now - silent
    return Row(report=report, silent_secs=silent, offline_unix_secs=offline)


def place(rows: Iterable[Row]) -> tuple[Degrees | None, dict[Coordinate, Row]]:
    """The placement by what is in memory: who held the newest version of each rank, gone or not."""
    newest: dict[Coordinate, tuple[Label, Row]] = {}
    degrees, last = None, Label(-1, -1)
    for row in rows:
        for shard in row.report.shards:
            at, label = Coordinate(*shard.at), Label(*shard.label)
            if at not in newest or label > newest[at][0]:
                newest[at] = label, row
            if label > last:
                degrees, last = Degrees(*shard.degrees), label
    if degrees is None:
        return None, {}
    inside = {
        at: row
        for at, (_, row) in newest.items()
        if at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
    }
    return degrees, inside


def newest_start(row: Row) -> int:
    """The start of the job that wrote the newest version in a node's memory; 0: it has none."""
    return max((shard.label[0] for shard in row.report.shards), default=0)


def scheme_of(rows: Iterable[Row]) -> str:
    """The protection of the newest version that any node tells of; "" where nobody said."""
    shards = [s for row in rows for s in row.report.shards]
    return max(shards, key=lambda s: s.label).scheme if shards else ""


def tolerance_now(rows: Iterable[Row]) -> int | None:
    """Further node losses that every sharding group survives, from the real placement without the nodes that
    are gone (P4).

    Returns:
        -1: what is gone already is more than that; None: no version, or it is not said how it is protected.
    """
    known = list(rows)
    degrees, holders = place(known)
    scheme = scheme_of(known)
    if degrees is None or not scheme:
        return None
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            held = [holders.get(Coordinate(pp, dp, tp)) for dp in range(degrees.dp)]
            # A rank that nobody has told of is lost, alone.
            nodes = tuple(f"?{dp}" if r is None else r.report.domain for dp, r in enumerate(held))
            lost = frozenset(dp for dp, r in enumerate(held) if r is None or r.signal is Signal.OFFLINE)
            groups.add((nodes, lost))
    try:
        return min(_left(nodes, lost, scheme) for nodes, lost in groups)
    except ReftError:  # another release's scheme
        return None


@lru_cache(maxsize=1024)
def _left(nodes: tuple[str, ...], lost: frozenset[int], scheme: str) -> int:
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)


# -- the whole job -------------------------------------------------------------------------------------


def summary(board: Board, now: float) -> dict[str, Any]:
    """The job, for people and programs.

    Args:
        board: of the job.
        now: seconds since 1970; ages are counted to it.
    """
    rows = board.rows
    present = [r.report for r in rows if r.signal is not Signal.OFFLINE]
    committed = [s for r in rows for s in r.report.shards if s.committed]
    newest = max(committed, key=lambda s: (s.label, s.sealed_unix_secs), default=None)
    steps = [r.step for r in present if r.step is not None and r.step >= 0]
    speeds = [r.steps_per_sec for r in present if r.steps_per_sec is not None]
    recoveries = [r.report.recovery for r in rows if r.report.recovery is not None]
    last = max(recoveries, key=lambda r: (r.round, r.unix_secs), default=None)
    _, holders = place(rows)
    needed = {row.report.node for row in holders.values()}
    left = tolerance_now(rows)
    step = max(steps, default=None)
    return {
        "job_id": board.job_id,
        "round": max((r.round for r in present), default=0),
        "step": step,
        "steps_per_sec": median(speeds) if speeds else None,
        "newest_commit": None
        if newest is None
        else {"incarnation": newest.label[0], "step": newest.label[1], "unix_secs": newest.sealed_unix_secs},
        "commit_age_secs": None if newest is None else max(0.0, now - newest.sealed_unix_secs),
        "commit_lag_steps": None if newest is None or step is None else max(0, step - newest.label[1]),
        "protection": scheme_of(rows) or None,
        "tolerance": max((r.tolerance for r in present if r.tolerance is not None), default=None),
        "tolerance_left": left,
        "restarts": max((r.report.restarts for r in rows), default=0),
        "last_recovery": None if last is None else last.model_dump(mode="json"),
        "nodes": [_node(r, r.report.node in needed) for r in sorted(rows, key=lambda r: r.report.node)],
        "since_start": _since_start(rows),
        "slow": [s.model_dump(mode="json") for s in board.slow],
        "speeds": [s.model_dump(mode="json") for s in board.speeds],
        "memory": [{"node": n.node, **m.model_dump(mode="json")} for n in present for m in n.memory],
        "runs_out": [
            {"node": n.node, **r.model_dump(mode="json"), "said": f"{n.node}: {r}"}
            for n in present
            for r in n.runs_out
        ],
        "warnings": [
            *_warnings(rows, needed, left),
            *map(str, board.slow),
            *(f"{n.node}: {r}" for n in present for r in n.runs_out),
        ],
        "as_of_unix_secs": board.unix_secs,
    }


def _since_start(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What the node that has counted for longest has counted."""
    counts = max(
        (r.report.counts for r in rows if r.report.counts), key=lambda c: c.elapsed_secs, default=None
    )
    if counts is None:
        return None
    return {
        **counts.model_dump(mode="json"),
        "effective_ratio": counts.effective_ratio,
        "samples_per_sec": counts.samples_per_sec,
        "lost_secs": counts.lost_secs,
        **_tflops(rows, counts),
    }


def _tflops(rows: Sequence[Row], counts: Counts) -> dict[str, Any]:
    """Operations of the model per second since the job's start, losses included: of the job, and of a
    trainer. Where they are not known, why."""
    per_sample = max(
        (c.flops / c.samples for r in rows if (c := r.report.counts) is not None and c.samples), default=0.0
    )
    speed, trainers = counts.samples_per_sec, sum(r.report.trainers for r in rows if not r.report.spare)
    if per_sample and speed and trainers:
        found = per_sample * speed / 1e12
        return {"tflops": found, "tflops_per_trainer": found / trainers, "no_tflops": ""}
    flops = {r.report.flops_per_token for r in rows} - {0}
    if min(flops, default=0) < 0:
        why = "the model has experts, and a token passes some of them"
    elif not flops:
        why = "the engine has not told its parameters"
    else:
        why = "no micro-batch of token ids (integers, samples x tokens) was seen"
    return {"tflops": None, "tflops_per_trainer": None, "no_tflops": why}


def _node(row: Row, needed: bool) -> dict[str, Any]:
    report = row.report
    times = {str(s): at for s, at in sorted(report.times.items())}
    if row.offline_unix_secs is not None:
        times[Signal.OFFLINE] = row.offline_unix_secs
    return {
        "node": report.node,
        "domain": report.domain,
        "signal": str(row.signal),
        "since_unix_secs": times.get(row.signal),
        "times": times,
        "spare": report.spare,
        "holds_shards": needed,
        "doing": "" if row.signal is Signal.OFFLINE else report.doing,
        "why": why_offline(row) if row.signal is Signal.OFFLINE else report.why,
        "round": report.round,
        "step": report.step,
        "steps_per_sec": report.steps_per_sec,
        "shards": [
            {"at": str(Coordinate(*s.at)), "incarnation": s.label[0], "step": s.label[1]}
            for s in report.shards
        ],
        "trainers": report.trainers,
    }


def why_offline(row: Row) -> str:
    """For people."""
    if row.report.left:
        return f"its launcher has ended: {row.report.why or row.report.doing}"
    return "nothing is heard of its launcher"


def _warnings(rows: Iterable[Row], needed: Iterable[str], left: int | None) -> Iterable[str]:
    told: dict[str, list[str]] = {}
    for row in rows:
        report = row.report
        if row.signal is Signal.OFFLINE:
            if report.node in needed:
                yield f"{report.node} is gone: {why_offline(row)}"
            continue
        for said in report.warnings:
            told.setdefault(said, []).append(report.node)
    if left is not None and left < 0:
        yield "the versions in memory are lost with the nodes that are gone, unless one of them comes back"
    elif left == 0:
        yield "the loss of one more node would lose the versions in memory"
    for said, nodes in told.items():
        yield f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}: {said}"


def is_well(told: Mapping[str, Any]) -> bool:
    """Whether the job of a :func:`summary` is as it should be."""
    needed = [n for n in told["nodes"] if n["holds_shards"] or n["signal"] != Signal.OFFLINE]
    bad = (Signal.UNHEALTHY, Signal.OFFLINE)
    return told["newest_commit"] is not None and not any(n["signal"] in bad for n in needed)


def read_board(path: Path) -> Board | None:
    """The copy in a job's memory on a node; None if there is none that can be read."""
    fields = read_json(path / BOARD_FILE)
    try:
        return None if fields is None else Board.model_validate(fields)
    except (ValueError, RecursionError):
        return None
