"""What nodes tell of their ranks' speed, and what is made of it. Messages."""

from __future__ import annotations

import zlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

MOST_STEPS = 32
"""That a report has of a rank."""
MOST_SHOWN = 64
"""Ranks whose split is on the board: the slowest of them."""
_MOST_BYTES = 4 * 2**20


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RankSteps(_Message):
    """The last steps of one rank.

    Attributes:
        rank, pid: of the trainer.
        at: its pipeline stage, replica and tensor slice.
        steps: one after the other: its number, and in microseconds the whole step, computing, ready to
            compute without a core, at transfers, at collectives, at the optimizer's step, and the quickest
            transfer with the stage before and after (0: none); last, the number of transfers.
    """

    rank: int
    pid: int
    at: tuple[int, int, int]
    steps: tuple[tuple[int, int, int, int, int, int, int, int, int, int], ...]


class SpeedReport(_Message):
    """What a node tells of the speed of its trainers."""

    node: str
    round: int
    ranks: tuple[RankSteps, ...] = ()

    def pack(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> SpeedReport:
        """Raises ValueError if it is none."""
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(data, _MOST_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        return cls.model_validate_json(text)


STEP_PARTS = ("compute", "busy", "transfer", "wait", "other")
"""Of a step, as :class:`RankSpeed` has them."""


class RankSpeed(_Message):
    """Of what a rank's steps consist: means over the last steps, in seconds.

    Attributes:
        rank, node, at: which.
        step_secs: a whole step.
        compute_secs: in which it computes.
        busy_secs: in which it could compute and has no core: its machine is busy with something else.
        transfer_secs: sends, receives and reductions, from the moment at which all who take part are there.
        wait_secs: in which it waits for others to be there.
        other_secs: the optimizer's step, the data, the script's own.
    """

    rank: int
    node: str
    at: tuple[int, int, int]
    step_secs: float
    compute_secs: float
    busy_secs: float
    transfer_secs: float
    wait_secs: float
    other_secs: float


class Kind(StrEnum):
    """What is slow."""

    RANK = "rank"
    NODE = "node"
    LINK = "link"


class Straggler(_Message):
    """Something that is slower than its peers.

    Attributes:
        kind: a rank, a node whose ranks all are, or a link between two stages.
        name: for people: ``rank 3``, ``node2``, ``rank 1 (node0) - rank 3 (node2)``.
        ranks: that are meant; of a link its ends.
        nodes: where they are.
        since_step: first step in which it was slow.
        since_unix_secs: when it was named.
        factor: how many times as long as its peers it takes.
        cost_secs: that it costs the job in every step, at most: its time beyond its peers'.
        cost_share: the same, of the whole step.
        why: what is slow of it.
    """

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    since_step: int
    since_unix_secs: float
    factor: float
    cost_secs: float
    cost_share: float
    why: str

    def __str__(self) -> str:
        return (
            f"{self.name} is slow since step {self.since_step}: {self.why}, {self.factor:.2f} times its "
            f"peers'; it costs the job up to {self.cost_secs:.3g} s in every step ({self.cost_share:.0%})"
        )
