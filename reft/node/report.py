"""What each node of a job tells all others of itself, and what that makes of the job. Pure.

The signals are those of the paper (REFERENCE 1.9): HEALTHY at the start, SNAP when a version is begun,
COMPLETED when all shards of the node are whole, UNHEALTHY for software that fails, OFFLINE for a node of
which nothing is heard. A node says the first four of itself; OFFLINE is what the others say of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import read_json
from reft.node.history import Round
from reft.node.memory_watch import MemoryUse, RunsOut
from reft.node.progress import RankSteps
from reft.node.stragglers import RankSpeed, Straggler
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, tolerance_left

BOARD_FILE = "board.json"
ENDED_WELL = "the job ended well"  # why a launcher has ended whose job has
MOST_CHARACTERS = 200  # of a text in a report; longer ones are cut
MOST_WARNINGS = 6
_MOST_BYTES = 64 * 2**20  # of a report or board, once it is unpacked: 65,536 nodes


class Signal(StrEnum):
    HEALTHY = "HEALTHY"  # Its trainers run, or wait for other nodes; it has no version of this start yet
    SNAP = "SNAP"  # a version is being copied
    COMPLETED = "COMPLETED"  # All its shards of the newest version are whole
    UNHEALTHY = "UNHEALTHY"  # a trainer has failed or stands still, or versions are not taken
    OFFLINE = "OFFLINE"  # Nothing is heard of it


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ValueError if it is none, or too much."""
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(data, _MOST_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if unpacking.unconsumed_tail:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return cls.model_validate_json(text)


def cut(value: Any) -> Any:
    return value[:MOST_CHARACTERS] if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(cut)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda texts: tuple(texts)[:MOST_WARNINGS])]


@dataclass
class Counts:
    """How much of a job's time was training that counts, since it began and over all its restarts, and what
    the rest was lost to: the effective training time ratio is 1 - lost / elapsed. Steps are counted once,
    however often they were made."""

    began_unix_secs: float
    elapsed_secs: float = 0.0  # that it was looked at
    first_step: int | None = None  # first_step, newest_step: that it began with, and that it has reached
    newest_step: int | None = None
    last_step: int | None = None  # made last; below ``newest_step`` while steps are made again
    repeated_steps: int = 0  # made again after a rollback; ``repeated_secs``: their time
    repeated_secs: float = 0.0
    samples: int = 0  # of a step that was made twice once; ``flops``: of the model for these, as far as known
    flops: float = 0.0
    starting_secs: float = 0.0  # until its first step
    recovering_secs: float = 0.0  # in which no step was made later: trainers were gone, or loaded
    snapshot_secs: float = 0.0  # in which training waited for versions
    straggler_secs: float = 0.0  # that stragglers have cost, at most

    @property
    def lost_secs(self) -> dict[str, float]:
        return {
            "starting": self.starting_secs,
            "recovering": self.recovering_secs,
            "repeated steps": self.repeated_secs,
            "snapshots": self.snapshot_secs,
            "stragglers": self.straggler_secs,
        }

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio, 0 to 1; None before there was time."""
        if self.elapsed_secs <= 0.0:
            return None
        return max(0.0, 1.0 - sum(self.lost_secs.values()) / self.elapsed_secs)

    @property
    def samples_per_sec(self) -> float | None:
        """Over the whole time, losses included; None where the engine does not tell its batch."""
        return self.samples / self.elapsed_secs if self.samples and self.elapsed_secs > 0 else None

    def waited(self, secs: float) -> None:
        self.elapsed_secs += secs
        if self.newest_step is None:
            self.starting_secs += secs
        else:
            self.recovering_secs += secs

    def trained(
        self,
        secs: float,
        step: int,
        *,
        samples: int = 0,
        flops: float = 0.0,
        stall_secs: float = 0.0,
        straggler_secs: float = 0.0,
    ) -> None:
        """Training went on for so long, up to ``step``."""
        made = 0 if self.newest_step is None else max(0, step - self.newest_step)
        self.elapsed_secs += secs
        self.first_step = step if self.first_step is None else self.first_step
        self.newest_step = max(step, step if self.newest_step is None else self.newest_step)
        self.last_step = step
        self.samples += made * samples
        self.flops += made * flops
        self.snapshot_secs += stall_secs
        self.straggler_secs += made * straggler_secs

    def went_back(self, resumed_step: int, step_secs: float) -> None:
        """The job goes on from ``resumed_step``: what it had made beyond that, it makes again."""
        again = max(0, (self.last_step or 0) - resumed_step)
        self.last_step = resumed_step
        self.repeated_steps += again
        self.repeated_secs += again * step_secs


@dataclass(frozen=True)
class Shard:
    """A whole version of one rank in a node's memory."""

    at: tuple[int, int, int]  # its pipeline stage, replica and tensor slice
    degrees: tuple[int, int, int]  # of the job that wrote it, in the same order
    label: tuple[int, int]  # incarnation and step
    scheme: str = ""  # its protection, ``arc:2+aec``; "" where nobody said
    sealed_unix_secs: float = 0.0  # when it was whole
    committed: bool = False  # by all ranks


class NodeReport(_Message):
    node: str
    # what fails as one with it: the node, or the host of several that nobody declared to be nodes
    domain: str
    number: int = 0  # one more with every report
    round: int = 0  # of its trainers; 0 before the first
    spare: bool = False
    # its state; ``times`` says when it last was in each, in seconds since 1970
    signal: Signal = Signal.HEALTHY
    times: dict[Signal, float] = {}
    doing: _Text = ""  # the launcher's words for what it does; ``why`` for what is wrong
    why: _Text = ""
    step: int | None = None  # last one that its trainers have made; ``steps_per_sec``: over the last steps
    steps_per_sec: float | None = None
    shards: tuple[Shard, ...] = ()  # newest whole version of each rank with memory on this node
    trainers: int = 0  # that run
    # node losses that the job's protection survives where all nodes are there; None: not known
    tolerance: int | None = None
    restarts: int = 0  # after failures
    recovery: Round | None = None  # the last of them, without the names of those that were there
    warnings: _Texts = ()
    # that limits its trainers; ``runs_out``: what of it will be full, the soonest first
    memory: tuple[MemoryUse, ...] = ()
    runs_out: tuple[RunsOut, ...] = ()
    counts: Counts | None = None  # the job's, as this node has counted them
    # the last steps of its trainers; for who keeps the board, on which they are not
    ranks: tuple[RankSteps, ...] = ()
    left: bool = False  # it has ended, and says so


class Row(_Message):
    """A node, as the keeper of the board sees it."""

    report: NodeReport  # its newest
    silent_secs: float = 0.0  # since then, by the keeper's clock
    offline_unix_secs: float | None = None  # since when nothing is heard of it; None: it is heard of

    @property
    def signal(self) -> Signal:
        return self.report.signal if self.offline_unix_secs is None else Signal.OFFLINE

    def why_offline(self) -> str:
        if self.report.left:
            return f"its launcher has ended: {self.report.why or self.report.doing}"
        return "its launcher does not report"


class Board(_Message):
    """All nodes of a job, the same for all of them."""

    job_id: str
    keeper: str = ""  # the node whose launcher puts it together
    number: int = 0  # one more with every change
    unix_secs: float = 0.0  # when it was put together, by the keeper's clock
    rows: tuple[Row, ...] = ()
    slow: tuple[Straggler, ...] = ()  # what is slower than its peers, the costliest first
    speeds: tuple[RankSpeed, ...] = ()  # of what the ranks' last steps consisted
    written_unix_secs: float = 0.0  # when a launcher wrote this copy into its node's memory
    # since when that launcher does not reach the others; None: it does
    store_lost_unix_secs: float | None = None

    def row(self, node: str) -> Row | None:
        return next((r for r in self.rows if r.report.node == node), None)


def read_board(path: Path) -> Board | None:
    """The copy in a job's memory on a node; None if there is none that can be read."""
    fields = read_json(path / BOARD_FILE)
    try:
        return None if fields is None else Board.model_validate(fields)
    except (ValueError, RecursionError):
        return None


def newest_board(paths: Iterable[Path]) -> Board | None:
    boards = [board for path in paths if (board := read_board(path)) is not None]
    return max(boards, key=lambda board: board.written_unix_secs, default=None)


def updated_row(
    before: Row | None, report: NodeReport, *, elapsed_secs: float, offline_after_secs: float, now: float
) -> Row:
    """A node's row after another look at its report. ``elapsed_secs``: since the last look, as far as the
    keeper itself did not stand still; when nothing was heard for longer than ``offline_after_secs`` it is
    OFFLINE."""
    heard = before is None or report.number != before.report.number
    silent = 0.0 if before is None or heard else before.silent_secs + elapsed_secs
    offline = None
    if report.left or silent > offline_after_secs:
        known = before.offline_unix_secs if before is not None else None
        offline = known if known is not None and not heard else now - silent
    return Row(report=report, silent_secs=silent, offline_unix_secs=offline)


# -- the placement ---------------------------------------------------------------------------------------


def place(rows: Iterable[Row]) -> tuple[Degrees | None, dict[Coordinate, Row]]:
    """The placement by what is in memory: who held the newest version of each rank, gone or not."""
    held = [(shard, row) for row in rows for shard in row.report.shards]
    if not held:
        return None, {}
    degrees = Degrees(*max(held, key=lambda pair: pair[0].label)[0].degrees)
    newest: dict[Coordinate, tuple[tuple[int, int], Row]] = {}
    for shard, row in held:
        at = Coordinate(*shard.at)
        inside = at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
        if inside and (at not in newest or shard.label > newest[at][0]):
            newest[at] = shard.label, row
    return degrees, {at: row for at, (_, row) in newest.items()}


def newest_start(row: Row) -> int:
    """The start of the job that wrote the newest version in a node's memory; 0: it has none."""
    return max((shard.label[0] for shard in row.report.shards), default=0)


def scheme_of(rows: Iterable[Row]) -> str:
    """The protection of the newest version that any node tells of; "" where nobody said."""
    shards = [s for row in rows for s in row.report.shards]
    return max(shards, key=lambda s: s.label).scheme if shards else ""


def tolerance_now(rows: Iterable[Row]) -> int | None:
    """Further node losses that every sharding group survives, from the real placement without the nodes that
    are gone (P4). -1: what is gone is more than that; None: no version, or its protection is not known."""
    known = list(rows)
    degrees, holders = place(known)
    scheme = scheme_of(known)
    if degrees is None or not scheme:
        return None
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            held = [holders.get(Coordinate(pp, dp, tp)) for dp in range(degrees.dp)]
            # P4: a rank that nobody has told of counts as lost, alone.
            nodes = tuple(f"?{dp}" if r is None else r.report.domain for dp, r in enumerate(held))
            lost = frozenset(dp for dp, r in enumerate(held) if r is None or r.signal is Signal.OFFLINE)
            groups.add((nodes, lost))
    try:
        return min(losses_left(nodes, lost, scheme) for nodes, lost in groups)
    except ReftError:  # another release's scheme
        return None


@lru_cache(maxsize=1024)
def losses_left(nodes: tuple[str, ...], lost: frozenset[int], scheme: str) -> int:
    """Further node losses that a sharding group survives, whose members at ``lost`` are gone; below 0: it
    is lost. Raises ReftError: there is no such scheme."""
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)


# -- the whole job -------------------------------------------------------------------------------------


def summary(board: Board, now: float) -> dict[str, Any]:
    """The job, for people and programs; ages are counted to ``now``, in seconds since 1970."""
    rows = sorted(board.rows, key=lambda r: r.report.node)
    present = [r.report for r in rows if r.signal is not Signal.OFFLINE]
    committed = [s for r in rows for s in r.report.shards if s.committed]
    newest = max(committed, key=lambda s: (s.label, s.sealed_unix_secs), default=None)
    step = max((r.step for r in present if r.step is not None and r.step >= 0), default=None)
    speeds = [r.steps_per_sec for r in present if r.steps_per_sec is not None]
    recoveries = [r.report.recovery for r in rows if r.report.recovery is not None]
    last = max(recoveries, key=lambda r: (r.round, r.unix_secs), default=None)
    needed = {row.report.node for row in place(rows)[1].values()}
    left = tolerance_now(rows)
    runs_out = [{"node": n.node, **asdict(r), "said": f"{n.node}: {r}"} for n in present for r in n.runs_out]
    warnings = [*_warnings(rows, needed, left), *map(str, board.slow), *(r["said"] for r in runs_out)]
    told: dict[str, Any] = {"newest_commit": None, "commit_age_secs": None, "commit_lag_steps": None}
    if newest is not None:
        incarnation, committed_step = newest.label
        told = {
            "newest_commit": {
                "incarnation": incarnation,
                "step": committed_step,
                "unix_secs": newest.sealed_unix_secs,
            },
            "commit_age_secs": max(0.0, now - newest.sealed_unix_secs),
            "commit_lag_steps": None if step is None else max(0, step - committed_step),
        }
    return {
        "job_id": board.job_id,
        "round": max((r.round for r in present), default=0),
        "step": step,
        "steps_per_sec": median(speeds) if speeds else None,
        **told,
        "protection": scheme_of(rows) or None,
        "tolerance": max((r.tolerance for r in present if r.tolerance is not None), default=None),
        "tolerance_left": left,
        "restarts": max((r.report.restarts for r in rows), default=0),
        "last_recovery": None if last is None else asdict(last),
        "nodes": [_node(r, r.report.node in needed) for r in rows],
        "since_start": _since_start(rows),
        "slow": [asdict(s) for s in board.slow],
        "speeds": [asdict(s) for s in board.speeds],
        "memory": [{"node": n.node, **asdict(m)} for n in present for m in n.memory],
        "runs_out": runs_out,
        "warnings": warnings,
        "as_of_unix_secs": board.unix_secs,
    }


def _since_start(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What the node that has counted for longest has counted; operations of the model per second of the job,
    losses included, and of a trainer, where some node knows its parameters and saw its tokens."""
    told = [r.report.counts for r in rows if r.report.counts is not None]
    counts = max(told, key=lambda c: c.elapsed_secs, default=None)
    if counts is None:
        return None
    per_sample = max((c.flops / c.samples for c in told if c.samples), default=0.0)
    trainers = sum(r.report.trainers for r in rows if not r.report.spare)
    tflops = per_sample * (counts.samples_per_sec or 0.0) / 1e12
    known = tflops > 0 and trainers > 0
    derived = {key: getattr(counts, key) for key in ("effective_ratio", "samples_per_sec", "lost_secs")}
    speeds = {"tflops": tflops, "tflops_per_trainer": tflops / max(1, trainers)}
    return asdict(counts) | derived | (speeds if known else dict.fromkeys(speeds))


_OF_NODE = {"node", "domain", "spare", "round", "step", "steps_per_sec", "trainers"}


def _node(row: Row, needed: bool) -> dict[str, Any]:
    report, offline = row.report, row.signal is Signal.OFFLINE
    times = {str(s): at for s, at in sorted(report.times.items())}
    if row.offline_unix_secs is not None:
        times[Signal.OFFLINE] = row.offline_unix_secs
    return {
        **report.model_dump(mode="json", include=_OF_NODE),
        "signal": str(row.signal),
        "since_unix_secs": times.get(row.signal),
        "times": times,
        "holds_shards": needed,
        "doing": "" if offline else report.doing,
        "why": row.why_offline() if offline else report.why,
        "shards": [
            {"at": str(Coordinate(*s.at)), "incarnation": s.label[0], "step": s.label[1]}
            for s in report.shards
        ],
    }


def _warnings(rows: Iterable[Row], needed: Iterable[str], left: int | None) -> Iterable[str]:
    told: dict[str, list[str]] = {}
    for row in rows:
        node = row.report.node
        if row.signal is not Signal.OFFLINE:
            for said in row.report.warnings:
                told.setdefault(said, []).append(node)
        elif node in needed:
            yield f"{node} is gone: {row.why_offline()}"
    if left is not None and left < 0:
        yield "the versions in memory are lost with the nodes that are gone, unless one of them comes back"
    elif left == 0:
        yield "the loss of one more node would lose the versions in memory"
    for said, nodes in told.items():
        yield f"{', '.join(nodes[:3])}{' and others' if len(nodes) > 3 else ''}: {said}"


def is_well(told: Mapping[str, Any]) -> bool:
    needed = [n for n in told["nodes"] if n["holds_shards"] or n["signal"] != Signal.OFFLINE]
    bad = (Signal.UNHEALTHY, Signal.OFFLINE)
    return told["newest_commit"] is not None and not any(n["signal"] in bad for n in needed)
