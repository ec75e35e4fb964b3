"""What each node of a job tells all others of itself, and what that makes of the job; and its
restarts.

The signals are those of the paper (REFERENCE 1.9): HEALTHY at the start, SNAP when a version is
begun, COMPLETED when all shards of the node are whole, UNHEALTHY for software that fails, OFFLINE
for a node of which nothing is heard. A node says the first four of itself; OFFLINE is what the
others say of it.

The restarts, as one node saw them, are lines of JSON in the job's memory, which outlasts them. The
launcher notes when a round of trainers starts and why the one before ended, the first trainer of
the node what it resumed from and when it had made a step.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter

from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import read_json
from reft.naming import safe_name
from reft.node.memory_watch import MemoryForecast, MemoryUse
from reft.node.progress import RankSteps
from reft.node.stragglers import RankSpeed, Straggler
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, tolerance_left

logger = logging.getLogger(__name__)

BOARD_FILE, HISTORY_FILE = "board.json", "history.jsonl"
CONFIG_FILE = "config.json"  # the block, as the trainers gave it to the daemon
_KEPT = "history-"
STARTED, RESUMED, STEPPED, ENDED = "started", "resumed", "stepped", "ended"  # events of the history
WAITING, FAILED = "waiting for nodes", "a trainer has failed"  # a launcher's words for what it does
ENDED_WELL = "the job ended well"  # why a launcher has ended whose job has
MOST_CHARACTERS = 200  # of a text in a report; longer ones are cut
MOST_WARNINGS = 6
_QUIET_SHARE = 1 / 3  # of the silence that makes a node OFFLINE; then it is not counted on
_MOST_BYTES = 64 * 2**20  # of a report or board, once it is unpacked: 65,536 nodes


PARTS = {
    "ending": "until the launcher, which had seen a trainer fail, had ended the others",
    "gathering": "until all nodes were there",
    "starting": "until the script began: the trainer is forked, or started and imports what reft "
    "needs",
    "script": "what the script does until it has an engine: imports, the model; without process "
    "groups",
    "groups": "init_distributed: the process groups",
    "engine": "deepspeed.initialize, without process groups",
    "joining": "until memory is looked at: reft's own start, and what the script does before it "
    "loads",
    "agreeing": "until all ranks agree on what is restored",
    "transfer": "until the state is restored, and protected again",
    "first_step": "until the first step was made",
}
"""Of an interruption, in their order."""


@dataclass
class RoundReport:
    round: int  # 1 for the first start under a launcher
    unix_secs: float  # when all nodes were there
    nodes: list[str] = field(default_factory=list)
    # why trainers of the round before ended: node, rank, and signal, exit code or error
    failures: list[str] = field(default_factory=list)
    # lost, joined, left: nodes that vanished since the round before, are new, or have left as they
    # were told
    lost: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    newest_step: int = -1  # newest committed step that a node knew of; -1: none
    # ``memory, ...`` or ``disk, ...``; None: from the beginning, or not yet
    resumed_from: str | None = None
    resumed_step: int | None = None  # step that it went on from
    # parts of the interruption, one after the other, by the wall clock of this node; see `PARTS`.
    # What nobody has seen is missing.
    secs: dict[str, float] = field(default_factory=dict)
    # when the launcher saw that a trainer of the round before had failed; None: none had
    failed_unix_secs: float | None = None
    ended: str | None = None  # what the launcher said when the job ended in this round


class HealthSignal(StrEnum):
    # Its trainers run, or wait for other nodes; it has no version of this start yet
    HEALTHY = "HEALTHY"
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
class GoodputTimes:
    """How much of a job's time was training that counts, since it began and over all its restarts,
    and what the rest was lost to: the effective training time ratio is 1 - lost / elapsed. Steps
    are counted once, however often they were made."""

    began_unix_secs: float
    elapsed_secs: float = 0.0  # that it was looked at
    # first_step, newest_step: that it began with, and that it has reached
    first_step: int | None = None
    newest_step: int | None = None
    last_step: int | None = None  # made last; below ``newest_step`` while steps are made again
    repeated_steps: int = 0  # made again after a rollback; ``repeated_secs``: their time
    repeated_secs: float = 0.0
    # of a step that was made twice once; ``flops``: of the model for these, as far as known
    samples: int = 0
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
    signal: HealthSignal = HealthSignal.HEALTHY
    times: dict[HealthSignal, float] = {}
    # the launcher's words for what it does, and since when; ``why`` for what is wrong
    doing: _Text = ""
    doing_since_unix_secs: float | None = None
    why: _Text = ""
    # last one that its trainers have made; ``steps_per_sec``: over the last steps
    step: int | None = None
    steps_per_sec: float | None = None
    shards: tuple[Shard, ...] = ()  # newest whole version of each rank with memory on this node
    trainers: int = 0  # that run
    # node losses that the job's protection survives where all nodes are there; None: not known
    tolerance: int | None = None
    restarts: int = 0  # after failures
    # the last of them, without the names of those that were there
    recovery: RoundReport | None = None
    warnings: _Texts = ()
    # that limits its trainers; ``runs_out``: what of it will be full, the soonest first
    memory: tuple[MemoryUse, ...] = ()
    runs_out: tuple[MemoryForecast, ...] = ()
    counts: GoodputTimes | None = None  # the job's, as this node has counted them
    # the last steps of its trainers; for who keeps the board, on which they are not
    ranks: tuple[RankSteps, ...] = ()
    left: bool = False  # it has ended, and says so
    # What the keeper of the board adds: how long the number has not changed, by its clock, and
    # since when nothing is heard of the node; None: it is heard of
    silent_secs: float = 0.0
    quiet: bool = False  # silent for longer than usual, and not OFFLINE yet
    offline_unix_secs: float | None = None

    @property
    def seen(self) -> HealthSignal:
        """Its signal, for the others."""
        return self.signal if self.offline_unix_secs is None else HealthSignal.OFFLINE

    def why_offline(self) -> str:
        if self.left:
            return f"its launcher has ended: {self.why or self.doing}"
        return "its launcher does not report"


class ReportBoard(_Message):
    """All nodes of a job, the same for all of them."""

    job_id: str
    keeper: str = ""  # the node whose launcher puts it together
    unix_secs: float = 0.0  # when it was put together, by the keeper's clock
    nodes: tuple[NodeReport, ...] = ()
    slow: tuple[Straggler, ...] = ()  # what is slower than its peers, the costliest first
    speeds: tuple[RankSpeed, ...] = ()  # of what the ranks' last steps consisted
    written_unix_secs: float = 0.0  # when a launcher wrote this copy into its node's memory
    # since when that launcher does not reach the others; None: it does
    store_lost_unix_secs: float | None = None

    def node(self, name: str) -> NodeReport | None:
        return next((n for n in self.nodes if n.node == name), None)


def read_board(path: Path) -> ReportBoard | None:
    """The copy in a job's memory on a node; None if there is none that can be read."""
    fields = read_json(path / BOARD_FILE)
    try:
        return None if fields is None else ReportBoard.model_validate(fields)
    except (ValueError, RecursionError):
        return None


def newest_board(paths: Iterable[Path]) -> ReportBoard | None:
    boards = [board for path in paths if (board := read_board(path)) is not None]
    return max(boards, key=lambda board: board.written_unix_secs, default=None)


def heard(
    before: NodeReport | None,
    report: NodeReport,
    *,
    elapsed_secs: float,
    offline_after_secs: float,
    now: float,
) -> NodeReport:
    """A node's report after another look at it. ``elapsed_secs``: since the last look, as far as
    the keeper itself did not stand still; who is not heard for longer than ``offline_after_secs``
    is OFFLINE."""
    same = before is not None and report.number == before.number
    silent = before.silent_secs + elapsed_secs if before is not None and same else 0.0
    offline = None
    if report.left or silent > offline_after_secs:
        known = before.offline_unix_secs if before is not None and same else None
        offline = now - silent if known is None else known
    quiet = offline is None and silent > _QUIET_SHARE * offline_after_secs
    return report.model_copy(
        update={"silent_secs": silent, "quiet": quiet, "offline_unix_secs": offline}
    )


def note_keeper(
    before: ReportBoard, board: ReportBoard, *, elapsed_secs: float, offline_after_secs: float
) -> ReportBoard:
    """The board as nodes other than its keeper see it: a keeper that writes nothing new is silent
    itself."""
    known = before.node(board.keeper)
    keeper = board.node(board.keeper)
    if known is None or keeper is None or before.keeper != board.keeper:
        return board
    silent = known.silent_secs + elapsed_secs if before.unix_secs == board.unix_secs else 0.0
    seen = {"silent_secs": silent, "quiet": silent > _QUIET_SHARE * offline_after_secs}
    nodes = (n.model_copy(update=seen) if n is keeper else n for n in board.nodes)
    return board.model_copy(update={"nodes": tuple(nodes)})


# -- the placement ---------------------------------------------------------------------------------


def place(nodes: Iterable[NodeReport]) -> tuple[Degrees | None, dict[Coordinate, NodeReport]]:
    """The placement by what is in memory: who held the newest version of each rank, gone or not."""
    held = [(shard, node) for node in nodes for shard in node.shards]
    if not held:
        return None, {}
    degrees = Degrees(*max(held, key=lambda pair: pair[0].label)[0].degrees)
    newest: dict[Coordinate, tuple[tuple[int, int], NodeReport]] = {}
    for shard, node in held:
        at = Coordinate(*shard.at)
        inside = at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
        if inside and (at not in newest or shard.label > newest[at][0]):
            newest[at] = shard.label, node
    return degrees, {at: node for at, (_, node) in newest.items()}


def read_scheme(nodes: Iterable[NodeReport]) -> str:
    """The protection of the newest version that any node tells of; "" where nobody said."""
    shards = [s for node in nodes for s in node.shards]
    return max(shards, key=lambda s: s.label).scheme if shards else ""


def tolerance_now(nodes: Sequence[NodeReport], *, without_quiet: bool = False) -> int | None:
    """Further node losses that every sharding group survives, from the real placement without the
    nodes that are gone, or also without those that are quiet (P4). -1: what is gone is more than
    that; None: no version, or its protection is not known."""
    degrees, holders = place(nodes)
    scheme = read_scheme(nodes)
    if degrees is None or not scheme:
        return None
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            held = [holders.get(Coordinate(pp, dp, tp)) for dp in range(degrees.dp)]
            # P4: a rank that nobody has told of counts as lost, alone.
            domains = tuple(f"?{dp}" if n is None else n.domain for dp, n in enumerate(held))
            lost = frozenset(
                dp
                for dp, n in enumerate(held)
                if n is None or n.seen is HealthSignal.OFFLINE or (without_quiet and n.quiet)
            )
            groups.add((domains, lost))
    try:
        return min(losses_left(domains, lost, scheme) for domains, lost in groups)
    except ReftError:  # another release's scheme
        return None


@lru_cache(maxsize=1024)
def losses_left(nodes: tuple[str, ...], lost: frozenset[int], scheme: str) -> int:
    """Further node losses that a sharding group survives, whose members at ``lost`` are gone; below
    0: it is lost. Raises ReftError: there is no such scheme."""
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)


# -- the whole job ---------------------------------------------------------------------------------


def summary(board: ReportBoard, now: float) -> dict[str, Any]:
    """The job, for people and programs; ages are counted to ``now``, in seconds since 1970."""
    nodes = sorted(board.nodes, key=lambda n: n.node)
    present = [n for n in nodes if n.seen is not HealthSignal.OFFLINE]
    committed = [s for n in nodes for s in n.shards if s.committed]
    newest = max(committed, key=lambda s: (s.label, s.sealed_unix_secs), default=None)
    step = max((n.step for n in present if n.step is not None and n.step >= 0), default=None)
    speeds = [n.steps_per_sec for n in present if n.steps_per_sec is not None]
    recoveries = [n.recovery for n in nodes if n.recovery is not None]
    last = max(recoveries, key=lambda r: (r.round, r.unix_secs), default=None)
    needed = {node.node for node in place(nodes)[1].values()}
    left = tolerance_now(nodes, without_quiet=True)
    runs_out = [
        {"node": n.node, **asdict(r), "said": f"{n.node}: {r}"} for n in present for r in n.runs_out
    ]
    warnings = [
        *_warnings(nodes, needed, left),
        *map(str, board.slow),
        *(r["said"] for r in runs_out),
    ]
    told: dict[str, Any] = {
        "newest_commit": None,
        "commit_age_secs": None,
        "commit_lag_steps": None,
    }
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
        "round": max((n.round for n in present), default=0),
        "step": step,
        "steps_per_sec": median(speeds) if speeds else None,
        **told,
        "protection": read_scheme(nodes) or None,
        "tolerance": max((n.tolerance for n in present if n.tolerance is not None), default=None),
        "tolerance_left": left,
        "restarts": max((n.restarts for n in nodes), default=0),
        "last_recovery": None if last is None else asdict(last),
        "nodes": [_node(n, n.node in needed) for n in nodes],
        "since_start": _since_start(nodes),
        "slow": [asdict(s) for s in board.slow],
        "speeds": [asdict(s) for s in board.speeds],
        "memory": [{"node": n.node, **asdict(m)} for n in present for m in n.memory],
        "runs_out": runs_out,
        "warnings": warnings,
        "as_of_unix_secs": board.unix_secs,
    }


def _since_start(nodes: Sequence[NodeReport]) -> dict[str, Any] | None:
    """What the node that has counted for longest has counted; operations of the model per second of
    the job, losses included, and of a trainer, where some node knows its parameters and saw its
    tokens."""
    told = [n.counts for n in nodes if n.counts is not None]
    counts = max(told, key=lambda c: c.elapsed_secs, default=None)
    if counts is None:
        return None
    per_sample = max((c.flops / c.samples for c in told if c.samples), default=0.0)
    trainers = sum(n.trainers for n in nodes if not n.spare)
    tflops = per_sample * (counts.samples_per_sec or 0.0) / 1e12
    known = tflops > 0 and trainers > 0
    derived = {
        key: getattr(counts, key) for key in ("effective_ratio", "samples_per_sec", "lost_secs")
    }
    speeds = {"tflops": tflops, "tflops_per_trainer": tflops / max(1, trainers)}
    return asdict(counts) | derived | (speeds if known else dict.fromkeys(speeds))


_OF_NODE = {"node", "domain", "spare", "round", "step", "steps_per_sec", "trainers", "quiet"}


def _node(node: NodeReport, needed: bool) -> dict[str, Any]:
    offline = node.seen is HealthSignal.OFFLINE
    times = {str(s): at for s, at in sorted(node.times.items())}
    if node.offline_unix_secs is not None:
        times[HealthSignal.OFFLINE] = node.offline_unix_secs
    return {
        **node.model_dump(mode="json", include=_OF_NODE),
        "signal": str(node.seen),
        "since_unix_secs": times.get(node.seen),
        "times": times,
        "holds_shards": needed,
        "doing": "" if offline else node.doing,
        "why": node.why_offline() if offline else node.why,
        "shards": [
            {"at": str(Coordinate(*s.at)), "incarnation": s.label[0], "step": s.label[1]}
            for s in node.shards
        ],
    }


def _warnings(
    nodes: Iterable[NodeReport], needed: Iterable[str], left: int | None
) -> Iterable[str]:
    told: dict[str, list[str]] = {}
    for node in nodes:
        if node.quiet:
            secs = f"{node.silent_secs:.0f} s"
            yield f"{node.node} has not reported for {secs}; it counts as lost until it does"
        if node.seen is not HealthSignal.OFFLINE:
            for said in node.warnings:
                told.setdefault(said, []).append(node.node)
        elif node.node in needed:
            yield f"{node.node} is gone: {node.why_offline()}"
    if left is not None and left < 0:
        yield (
            "the versions in memory are lost with the nodes that are gone, unless one of them "
            "comes back"
        )
    elif left == 0:
        yield "the loss of one more node would lose the versions in memory"
    for said, names in told.items():
        yield f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: {said}"


def is_well(told: Mapping[str, Any]) -> bool:
    needed = [n for n in told["nodes"] if n["holds_shards"] or n["signal"] != HealthSignal.OFFLINE]
    bad = (HealthSignal.UNHEALTHY, HealthSignal.OFFLINE)
    return told["newest_commit"] is not None and not any(
        n["signal"] in bad or n["quiet"] for n in needed
    )


# -- the restarts ----------------------------------------------------------------------------------


def note(job_dir: Path, event: str, **facts: Any) -> None:
    """Append a line. One that cannot be written is lost, and nothing else happens (P6)."""
    line = json.dumps({"event": event, "unix_secs": time.time(), **facts})
    try:
        fd = os.open(job_dir / HISTORY_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning("the restart history in %s cannot be written: %s", job_dir, error)


_ROUND = TypeAdapter(RoundReport)


def why(row: RoundReport) -> str:
    said = [*row.failures, *(f"node {node} was lost" for node in row.lost)]
    if not said:
        said = [f"node {node} joined" for node in row.joined]
    return "; ".join(said) if said else "the job was started"


def restarts_among(rounds: Iterable[RoundReport]) -> list[RoundReport]:
    return [r for r in rounds if r.failures or r.lost]


def describe_parts(secs: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in secs.items())


def after_failure(job_dir: Path) -> str:
    """What the newest start followed, for the end of a sentence; "" where nothing had failed."""
    for row in restarts_among(read_history(job_dir)[-1:]):
        since = row.failed_unix_secs
        secs = "" if since is None else f"{max(0.0, time.time() - since):.1f} s "
        return f", {secs}after the failure ({why(row)})"
    return ""


def read_history(job_dir: Path) -> list[RoundReport]:
    """Every start of the trainers that the node has seen; lines that are no events are left out."""
    try:
        lines = (job_dir / HISTORY_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return []
    rounds: list[RoundReport] = []
    resumed_at = 0.0
    for line in lines:
        # Another release, or a full disk, may have written what this one does not understand.
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            facts = json.loads(line)
            event, at = facts.pop("event"), _secs(facts["unix_secs"])
            if event == STARTED:
                told = {part: facts.get(f"{part}_secs") for part in ("ending", "gathering")}
                waits = {part: _secs(secs) for part, secs in told.items() if secs is not None}
                rounds.append(_ROUND.validate_python({**facts, "secs": waits}))
                resumed_at = 0.0
            elif event == RESUMED and rounds:
                times = {name: _secs(secs) for name, secs in facts.get("times", {}).items()}
                source, step = _text(facts["source"]), int(facts["step"])
                rounds[-1].resumed_from, rounds[-1].resumed_step = source, step
                rounds[-1].secs |= _parts(rounds[-1].unix_secs, at, times)
                resumed_at = at
            elif event == STEPPED and rounds and resumed_at:
                rounds[-1].secs["first_step"] = at - resumed_at
            elif event == ENDED and rounds:
                rounds[-1].ended = _text(facts["reason"])
    return rounds


def keep_history(job_dir: Path, job_id: str, node: str, directory: Path) -> None:
    """Append the history of a node, a line for each start, to a file that outlives the job's
    memory. Raises OSError: it cannot be written."""
    lines = (
        json.dumps({"job_id": job_id, "node": node, **asdict(row)}) for row in read_history(job_dir)
    )
    with (directory / f"{_KEPT}{job_id}-{safe_name(node)}.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def read_kept_histories(directory: Path) -> dict[tuple[str, str], list[RoundReport]]:
    """The starts that :func:`keep_history` has kept there, by job and node; other lines are left
    out."""
    found: dict[tuple[str, str], list[RoundReport]] = {}
    for path in sorted(directory.glob(f"{_KEPT}*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                facts = json.loads(line)
                of = _text(facts.pop("job_id")), _text(facts.pop("node"))
                found.setdefault(of, []).append(_ROUND.validate_python(facts))
    return found


def _secs(value: Any) -> float:
    """Raises ValueError, TypeError: it is none, or none since 1970 that a calendar has."""
    if not 0 <= (secs := float(value)) < 2**37:
        raise ValueError(f"{value!r} is no time")
    return secs


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _parts(formed: float, resumed: float, times: Mapping[str, float]) -> dict[str, float]:
    """What lies between the moment in which all nodes were there and that in which the state was
    restored."""
    ends = {"starting": "began", "script": "engine", "engine": "built", "joining": "survey"}
    secs, since = {}, formed
    for part, end in (*ends.items(), ("agreeing", "agreed")):
        if end in times:
            secs[part] = max(0.0, times[end] - since)
            since = max(since, times[end])
    secs["transfer"] = max(0.0, resumed - since)
    if {"groups", "grouped"} <= times.keys():
        groups = secs["groups"] = max(0.0, times["grouped"] - times["groups"])
        for part in ("script", "engine", "joining"):  # one of which they are made in
            if part in secs and times["groups"] < times[ends[part]]:
                secs[part] = max(0.0, secs[part] - groups)
                break
    return {part: secs[part] for part in PARTS if part in secs}
