"""The report that each node sends to all others, and the board that holds all reports.

The signals (HEALTHY, SNAP, ...) are those of the REFT paper. A node reports its own signal, except
OFFLINE, which the other nodes infer when it falls silent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

from reft.memory.jobdir import read_json
from reft.node.goodput import GoodputTimes
from reft.node.history import RoundReport
from reft.node.memory_watch import MemoryForecast, MemoryUse
from reft.node.progress import RankSteps
from reft.node.stragglers import RankSpeed, Straggler

BOARD_FILE = "board.json"
WAITING, FAILED = "waiting for nodes", "a trainer has failed"  # Values of NodeReport.doing
ENDED_WELL = "the job ended well"  # Value of NodeReport.why
MAX_TEXT_CHARS = 200  # Longer texts of a report are cut
MAX_WARNINGS = 6
# A node that is silent for this share of the time after which it is OFFLINE is called quiet.
_QUIET_SHARE = 1 / 3
_MAX_BYTES = 64 * 2**20  # Largest unpacked board; enough for 65,536 nodes


class HealthSignal(StrEnum):
    # Trainers run or wait for other nodes; no version was begun since their last start
    HEALTHY = "HEALTHY"
    SNAP = "SNAP"  # A version is being copied
    COMPLETED = "COMPLETED"  # All shards of the newest version on this node are complete
    UNHEALTHY = "UNHEALTHY"  # A trainer has failed or hangs, or versions are not taken
    OFFLINE = "OFFLINE"  # No report arrives


class _Message(BaseModel):
    """A message that nodes exchange through the rendezvous store, compressed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode a message that :meth:`pack` has encoded.

        Raises:
            ValueError: the bytes are not an encoded message, or unpack to more than 64 MiB.
        """
        unpacking = zlib.decompressobj()
        try:
            # Limit the result: a few compressed bytes may unpack to gigabytes.
            text = unpacking.decompress(data, _MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if unpacking.unconsumed_tail:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return cls.model_validate_json(text)


def shorten(value: Any) -> Any:
    """Cut a text to MAX_TEXT_CHARS; return any other value unchanged."""
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(shorten)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda texts: tuple(texts)[:MAX_WARNINGS])]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a version, complete in a node's memory."""

    at: tuple[int, int, int]  # Pipeline stage, replica and tensor slice of the rank
    # Degrees of pipeline, data and tensor parallelism of the job when the version was taken
    degrees: tuple[int, int, int]
    label: tuple[int, int]  # Id of the version: number of the job's start, and step
    scheme: str = ""  # Protection scheme of the version, such as "arc:2+aec"; empty if unknown
    sealed_unix_secs: float = 0.0  # Time at which the shard became complete
    committed: bool = False  # Whether all ranks have committed the version


class NodeReport(_Message):
    node: str
    # Failure domain: the node if the user gave it an id, otherwise its host
    domain: str
    number: int = 0  # Number of the report, higher than the number of the node's previous report
    round: int = 0  # Round of the node's trainers; 0 before the first
    spare: bool = False  # Whether the node waits until another node is lost
    signal: HealthSignal = HealthSignal.HEALTHY
    times: dict[HealthSignal, float] = {}  # Time at which each signal last began, in Unix seconds
    doing: _Text = ""  # State of the launcher, as a text for users
    doing_since_unix_secs: float | None = None
    why: _Text = ""  # Text that says what is wrong; empty if nothing is wrong
    step: int | None = None  # Last step that the node's trainers completed
    steps_per_sec: float | None = None  # Mean speed over the last steps
    # For each rank whose arenas are on this node: its newest committed or else complete version
    shards: tuple[Shard, ...] = ()
    trainers: int = 0  # Number of running trainers
    # Number of node losses that the protection survives if no node is missing; None if unknown
    tolerance: int | None = None
    restarts: int = 0  # Restarts of the trainers after failures
    # Last restart after a failure, without the names of all nodes
    recovery: RoundReport | None = None
    warnings: _Texts = ()
    memory: tuple[MemoryUse, ...] = ()  # Use of each memory that limits the node's trainers
    runs_out: tuple[MemoryForecast, ...] = ()  # Memories that are running out, the soonest first
    counts: GoodputTimes | None = None  # Useful and lost time of the job, as this node counts them
    # Times of the trainers' last steps, for the aggregator (the launcher that merges all reports).
    # Left out of the board.
    ranks: tuple[RankSteps, ...] = ()
    left: bool = False  # Whether the launcher has ended, so that this is its last report
    # The aggregator sets the following fields by its own clock.
    silent_secs: float = 0.0  # Time since a report with a new number arrived
    quiet: bool = False  # Silent for a third of the time after which the node is OFFLINE
    offline_unix_secs: float | None = None  # Start of the silence of an OFFLINE node, else None

    @property
    def observed_signal(self) -> HealthSignal:
        """The node's signal as the other nodes see it."""
        return self.signal if self.offline_unix_secs is None else HealthSignal.OFFLINE

    def why_offline(self) -> str:
        if self.left:
            return f"its launcher has ended: {self.why or self.doing}"
        return "its launcher does not report"


class ReportBoard(_Message):
    """The reports of all nodes of a job. Every node has a copy of the same board."""

    job_id: str
    aggregator: str = ""  # Node whose launcher merged the reports
    unix_secs: float = 0.0  # Time of the merge, by the aggregator's clock
    nodes: tuple[NodeReport, ...] = ()
    slow: tuple[Straggler, ...] = ()  # Stragglers, the costliest first
    # Times of each rank's steps, divided into computing, waiting, ...
    speeds: tuple[RankSpeed, ...] = ()
    written_unix_secs: float = 0.0  # Time at which a launcher wrote this copy on its own node
    # Time since which the launcher that wrote this copy cannot reach the store; None if it can
    store_lost_unix_secs: float | None = None

    def node(self, name: str) -> NodeReport | None:
        return next((report for report in self.nodes if report.node == name), None)


def read_board(path: Path) -> ReportBoard | None:
    """Read a node's copy of the board.

    Args:
        path: the job's memory directory on the node.

    Returns:
        The board; None if there is no copy, or it cannot be read.
    """
    fields = read_json(path / BOARD_FILE)
    try:
        return None if fields is None else ReportBoard.model_validate(fields)
    except (ValueError, RecursionError):
        return None


def newest_board(paths: Iterable[Path]) -> ReportBoard | None:
    boards = [board for path in paths if (board := read_board(path)) is not None]
    return max(boards, key=lambda board: board.written_unix_secs, default=None)


def mark_silence(
    before: NodeReport | None,
    report: NodeReport,
    *,
    elapsed_secs: float,
    offline_after_secs: float,
    now: float,
) -> NodeReport:
    """Return a node's report with the node's time of silence updated. Pure.

    Args:
        before: the node's report on the last board; None if the node was not on it.
        report: the node's newest report.
        elapsed_secs: time since the last board, without time in which the aggregator was suspended.
        offline_after_secs: silence after which a node is OFFLINE.
        now: Unix seconds.
    """
    unchanged = before is not None and report.number == before.number
    silent = before.silent_secs + elapsed_secs if before is not None and unchanged else 0.0
    offline = None
    if report.left or silent > offline_after_secs:
        known = before.offline_unix_secs if before is not None and unchanged else None
        offline = now - silent if known is None else known
    quiet = offline is None and silent > _QUIET_SHARE * offline_after_secs
    return report.model_copy(
        update={"silent_secs": silent, "quiet": quiet, "offline_unix_secs": offline}
    )


def mark_aggregator_silence(
    before: ReportBoard, board: ReportBoard, *, elapsed_secs: float, offline_after_secs: float
) -> ReportBoard:
    """Return a board with its aggregator's time of silence updated. Pure.

    Every other node calls this on the board that it reads, because an aggregator that writes no new
    board cannot report its own silence.

    Args:
        before: the board as this node last had it.
        board: the board as just read.
        elapsed_secs: time since the last call, without time in which this node was suspended.
        offline_after_secs: silence after which a node is OFFLINE.
    """
    known = before.node(board.aggregator)
    aggregator = board.node(board.aggregator)
    if known is None or aggregator is None or before.aggregator != board.aggregator:
        return board
    silent = known.silent_secs + elapsed_secs if before.unix_secs == board.unix_secs else 0.0
    update = {"silent_secs": silent, "quiet": silent > _QUIET_SHARE * offline_after_secs}
    nodes = (n.model_copy(update=update) if n is aggregator else n for n in board.nodes)
    return board.model_copy(update={"nodes": tuple(nodes)})
