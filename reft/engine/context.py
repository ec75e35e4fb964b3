"""What every part of a session knows of its job. It is made before the parts, and handed to each.

A part takes the context, and besides it only the parts that it works with. It never takes the
session, through which each part could reach every other one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.engine.protocol import TrainingEngine
from reft.errors import ConfigError
from reft.findings import Finding, Severity
from reft.grid import Coordinate, Topology
from reft.log import EventLog
from reft.memory.jobdir import JobDir
from reft.snapshot.stats import SnapshotStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobContext:
    """The job as one rank sees it.

    Attributes:
        config: the checked ``reft`` block, with the job's name in it. All ranks have the same.
        engine: the program that trains.
        coordinate: this rank's place in the pp x dp x tp grid.
        topology: the coordinate and the node of every rank.
        control: messages between the ranks, apart from training's collectives. For the training
            thread; the snapshot worker has a group of its own.
        job_dir: the job's memory on this node.
        stats: counters of this rank's versions.
        events: the event log of this rank.
    """

    config: ReftConfig
    engine: TrainingEngine
    coordinate: Coordinate
    topology: Topology
    control: ControlGroup
    job_dir: JobDir
    stats: SnapshotStats
    events: EventLog

    @property
    def job_id(self) -> str:
        return self.job_dir.job_id

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def node(self) -> str:
        return self.topology.nodes[self.rank]

    @property
    def ranks_here(self) -> int:
        """Ranks on this node, from the topology: not every launcher sets LOCAL_WORLD_SIZE."""
        return len(self.topology.local_ranks(self.node))

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank reads and writes what its node has once."""
        return self.topology.local_ranks(self.node)[0] == self.rank

    def warn(self, text: str, *, strict: bool = True) -> None:
        """Report what would make a recovery impossible or different (P12). On all ranks alike.

        Args:
            text: what was found, and what to change. Logged by rank 0.
            strict: whether a block with ``"strict": true`` makes it an error.

        Raises:
            ConfigError: it is an error.
        """
        if strict and self.config.strict:
            raise ConfigError(f'{text}. It is an error because the reft block says "strict": true')
        if self.is_rank_zero:
            logger.warning("%s", text)

    def report(self, findings: Iterable[Finding], *, strict: bool = True) -> None:
        """Report findings in their order. On all ranks alike.

        Args:
            findings: what was found.
            strict: whether warnings are errors in a block with ``"strict": true``.

        Raises:
            ConfigError: one of them refuses the start, or is an error.
        """
        for finding in findings:
            if finding.severity is Severity.REFUSED:
                raise ConfigError(str(finding))
            self.warn(str(finding), strict=strict and finding.severity is Severity.WARNING)
