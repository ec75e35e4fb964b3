"""What each node of a job reports to all others, and the board that holds all reports.

The signals are those of the REFT paper. A node reports the first four of itself;
OFFLINE is what the others conclude from its silence.
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
WAITING, FAILED = "waiting for nodes", "a trainer has failed"  # values of NodeReport.doing
ENDED_WELL = "the job ended well"  # value of NodeReport.why
MAX_TEXT_CHARS = 200  # longer texts of a report are cut
MAX_WARNINGS = 6
# A node that was silent for this share of the time to OFFLINE counts as lost already.
_QUIET_SHARE = 1 / 3
_MAX_BYTES = 64 * 2**20  # of an unpacked board; enough for 65,536 nodes


class HealthSignal(StrEnum):
    HEALTHY = (
        "HEALTHY"  # trainers run or wait for other nodes; nothing committed since the last restart
    )
    SNAP = "SNAP"  # a version is being copied
    COMPLETED = "COMPLETED"  # all shards of the newest version on this node are complete
    UNHEALTHY = "UNHEALTHY"  # a trainer has failed or stands still, or versions are not taken
    OFFLINE = "OFFLINE"  # no report arrives


class _Message(BaseModel):
    """What goes through the rendezvous store, compressed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The inverse of :meth:`pack`.

        Raises:
            ValueError: the bytes are no such message, or too many.
        """
        unpacking = zlib.decompressobj()
        try:
            # A bound on the result: a few bytes may unpack to gigabytes.
            text = unpacking.decompress(data, _MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if unpacking.unconsumed_tail:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return cls.model_validate_json(text)


def shorten(value: Any) -> Any:
    """Cut a text to MAX_TEXT_CHARS; other values stay as they are."""
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(shorten)]
_Texts = Annotated[tuple[_Text, ...], BeforeValidator(lambda texts: tuple(texts)[:MAX_WARNINGS])]


@dataclass(frozen=True)
class Shard:
    """A complete version of one rank in a node's memory."""

    at: tuple[int, int, int]  # pipeline stage, replica and tensor slice of the rank
    degrees: tuple[int, int, int]  # of the job that wrote it, in the same order
    label: tuple[int, int]  # incarnation and step
    scheme: str = ""  # its protection, such as "arc:2+aec"; "" if unknown
    sealed_unix_secs: float = 0.0  # when it was complete
    committed: bool = False  # by all ranks


class NodeReport(_Message):
    node: str
    # The failure domain: the node, or the host of several that were not declared as nodes.
    domain: str
    number: int = 0  # counts the reports
    round: int = 0  # of its trainers; 0 before the first
    spare: bool = False
    signal: HealthSignal = HealthSignal.HEALTHY
    times: dict[HealthSignal, float] = {}  # when it last entered each signal, in Unix seconds
    doing: _Text = ""  # what the launcher does, in words
    doing_since_unix_secs: float | None = None
    why: _Text = ""  # what is wrong
    step: int | None = None  # last step that its trainers completed
    steps_per_sec: float | None = None  # over the last steps
    shards: tuple[Shard, ...] = ()  # newest complete version of each rank with memory on this node
    trainers: int = 0  # number that run
    # Node losses that the job's protection survives when all nodes are present; None if unknown.
    tolerance: int | None = None
    restarts: int = 0  # after failures
    recovery: RoundReport | None = None  # the last of them, without the names of the nodes present
    warnings: _Texts = ()
    memory: tuple[MemoryUse, ...] = ()  # memories that limit its trainers
    runs_out: tuple[MemoryForecast, ...] = ()  # those of them that will be full, the soonest first
    counts: GoodputTimes | None = None  # of the whole job, as this node counted them
    # The last steps of its trainers, for the aggregator; they are not on the board.
    ranks: tuple[RankSteps, ...] = ()
    left: bool = False  # its launcher has ended and sent this as its last report
    # The following are set by the aggregator, by its own clock.
    silent_secs: float = 0.0  # since when the number has not changed
    quiet: bool = False  # silent for longer than usual, and not OFFLINE yet
    offline_unix_secs: float | None = None  # start of the silence; None while the node reports

    @property
    def seen(self) -> HealthSignal:
        """The node's signal as the others see it."""
        return self.signal if self.offline_unix_secs is None else HealthSignal.OFFLINE

    def why_offline(self) -> str:
        if self.left:
            return f"its launcher has ended: {self.why or self.doing}"
        return "its launcher does not report"


class ReportBoard(_Message):
    """The reports of all nodes of a job, the same for all of them."""

    job_id: str
    aggregator: str = ""  # node whose launcher merged the reports
    unix_secs: float = 0.0  # when it merged them, by its own clock
    nodes: tuple[NodeReport, ...] = ()
    slow: tuple[Straggler, ...] = ()  # what is slower than its peers, the costliest first
    speeds: tuple[RankSpeed, ...] = ()  # how the ranks' last steps divide
    written_unix_secs: float = 0.0  # when a launcher wrote this copy into its node's memory
    # Since when that launcher has not reached the rendezvous store; None if it reaches it.
    store_lost_unix_secs: float | None = None

    def node(self, name: str) -> NodeReport | None:
        return next((report for report in self.nodes if report.node == name), None)


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


def mark_silence(
    before: NodeReport | None,
    report: NodeReport,
    *,
    elapsed_secs: float,
    offline_after_secs: float,
    now: float,
) -> NodeReport:
    """Update for how long a node has been silent. Pure.

    Args:
        before: the node on the last board; None if it was not there.
        report: its newest report.
        elapsed_secs: time since the last board, without the time that the aggregator stood still.
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
    """Update for how long the aggregator has been silent, as the other nodes see it: an aggregator
    that writes no new board cannot report its own silence. Pure."""
    known = before.node(board.aggregator)
    aggregator = board.node(board.aggregator)
    if known is None or aggregator is None or before.aggregator != board.aggregator:
        return board
    silent = known.silent_secs + elapsed_secs if before.unix_secs == board.unix_secs else 0.0
    update = {"silent_secs": silent, "quiet": silent > _QUIET_SHARE * offline_after_secs}
    nodes = (n.model_copy(update=update) if n is aggregator else n for n in board.nodes)
    return board.model_copy(update={"nodes": tuple(nodes)})
