"""The report that each node sends to all others, and the board that holds all reports.

The signals are those of the REFT paper. A node reports one of the first four itself; the others
conclude OFFLINE from its silence.
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
# After this share of the time to OFFLINE, a silent node already counts as lost.
_QUIET_SHARE = 1 / 3
_MAX_BYTES = 64 * 2**20  # Largest unpacked board; enough for 65,536 nodes


class HealthSignal(StrEnum):
    # Trainers run or wait for other nodes; nothing was committed since the last restart
    HEALTHY = "HEALTHY"
    SNAP = "SNAP"  # A version is being copied
    COMPLETED = "COMPLETED"  # All shards of the newest version on this node are complete
    UNHEALTHY = "UNHEALTHY"  # A trainer has failed or hangs, or versions are not taken
    OFFLINE = "OFFLINE"  # No report arrives


class _Message(BaseModel):
    """A message that is compressed and stored in the rendezvous store."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The inverse of :meth:`pack`.

        Raises:
            ValueError: the bytes are not such a message, or too many.
        """
        unpacking = zlib.decompressobj()
        try:
            # The result is bounded, because a few bytes may unpack to gigabytes.
            text = unpacking.decompress(data, _MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if unpacking.unconsumed_tail:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return cls.model_validate_json(text)


def shorten(value: Any) -> Any:
    """Cut a text to MAX_TEXT_CHARS; other values are returned unchanged."""
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(shorten)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda texts: tuple(texts)[:MAX_WARNINGS])]


@dataclass(frozen=True)
class Shard:
    """A complete version of one rank in a node's memory."""

    at: tuple[int, int, int]  # Pipeline stage, replica and tensor slice of the rank
    degrees: tuple[int, int, int]  # Degrees of the job that wrote it, in the same order
    label: tuple[int, int]  # Incarnation and step
    scheme: str = ""  # Its protection, such as "arc:2+aec"; empty if unknown
    sealed_unix_secs: float = 0.0  # When it was complete
    committed: bool = False  # All ranks have committed it


class NodeReport(_Message):
    node: str
    # The failure domain: the node, or the host if the node was not declared
    domain: str
    number: int = 0  # Counts the reports
    round: int = 0  # Round of its trainers; 0 before the first
    spare: bool = False
    signal: HealthSignal = HealthSignal.HEALTHY
    times: dict[HealthSignal, float] = {}  # When it last entered each signal, in Unix seconds
    doing: _Text = ""  # State of the launcher, as users read it
    doing_since_unix_secs: float | None = None
    why: _Text = ""  # What is wrong; empty if nothing is
    step: int | None = None  # Last step that its trainers completed
    steps_per_sec: float | None = None  # Over the last steps
    shards: tuple[Shard, ...] = ()  # Newest complete version of each rank with memory on this node
    trainers: int = 0  # Number of running trainers
    # Node losses that the job's protection survives when all nodes are present; None if unknown
    tolerance: int | None = None
    restarts: int = 0  # Restarts after failures
    recovery: RoundReport | None = None  # The last of them, without the names of the present nodes
    warnings: _Texts = ()
    memory: tuple[MemoryUse, ...] = ()  # Memories that limit its trainers
    runs_out: tuple[MemoryForecast, ...] = ()  # Memories that are running out, the soonest first
    counts: GoodputTimes | None = None  # Times of the whole job, as this node counted them
    # The last steps of its trainers; only the aggregator needs them, so the board omits them
    ranks: tuple[RankSteps, ...] = ()
    left: bool = False  # Its launcher has ended; this is its last report
    # The aggregator sets the following fields by its own clock.
    silent_secs: float = 0.0  # Time since the number last changed
    quiet: bool = False  # Silent for longer than usual, and not OFFLINE yet
    offline_unix_secs: float | None = None  # Start of the silence; None while the node reports

    @property
    def observed_signal(self) -> HealthSignal:
        """The node's signal as the other nodes see it."""
        return self.signal if self.offline_unix_secs is None else HealthSignal.OFFLINE

    def why_offline(self) -> str:
        if self.left:
            return f"its launcher has ended: {self.why or self.doing}"
        return "its launcher does not report"


class ReportBoard(_Message):
    """The reports of all nodes of a job, the same for all of them."""

    job_id: str
    aggregator: str = ""  # Node whose launcher merged the reports
    unix_secs: float = 0.0  # When it merged them, by its own clock
    nodes: tuple[NodeReport, ...] = ()
    slow: tuple[Straggler, ...] = ()  # Stragglers, the costliest first
    speeds: tuple[RankSpeed, ...] = ()  # Parts of the ranks' last steps
    written_unix_secs: float = 0.0  # When a launcher wrote this copy into its node's memory
    # Since when that launcher cannot reach the rendezvous store; None if it can
    store_lost_unix_secs: float | None = None

    def node(self, name: str) -> NodeReport | None:
        return next((report for report in self.nodes if report.node == name), None)


def read_board(path: Path) -> ReportBoard | None:
    """Read the copy in a job's memory on a node; None if there is none, or it cannot be read."""
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
    """Update how long a node has been silent. Pure.

    Args:
        before: the node on the last board; None if it was not there.
        report: its newest report.
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
    """Update how long the aggregator has been silent, as another node sees it. Pure.

    An aggregator that writes no new board cannot report its own silence.
    """
    known = before.node(board.aggregator)
    aggregator = board.node(board.aggregator)
    if known is None or aggregator is None or before.aggregator != board.aggregator:
        return board
    silent = known.silent_secs + elapsed_secs if before.unix_secs == board.unix_secs else 0.0
    update = {"silent_secs": silent, "quiet": silent > _QUIET_SHARE * offline_after_secs}
    nodes = (n.model_copy(update=update) if n is aggregator else n for n in board.nodes)
    return board.model_copy(update={"nodes": tuple(nodes)})
