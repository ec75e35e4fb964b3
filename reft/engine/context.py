"""The job as seen by every part of a session. The context is created first and passed to each
part.

A part takes the context and the parts with which it works. It never takes the session, through
which it could reach every other part.
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
        config: the checked ``reft`` block with the job's name; equal on all ranks.
        engine: the training engine.
        coordinate: this rank's place in the pp x dp x tp grid.
        topology: the coordinate and the node of every rank.
        control: messages between the ranks, separate from training's collectives. Only the
            training thread uses it; the snapshot worker has a group of its own.
        job_dir: directory of the job's memory on this node.
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
        """Number of ranks on this node, computed from the topology because not every launcher
        sets LOCAL_WORLD_SIZE."""
        return len(self.topology.local_ranks(self.node))

    @property
    def is_first_on_node(self) -> bool:
        """Whether this rank reads and writes the files that exist once per node."""
        return self.topology.local_ranks(self.node)[0] == self.rank

    def warn(self, text: str, *, strict: bool = True) -> None:
        """Warn of something that would make a recovery impossible or different (P12). All ranks
        call this with the same arguments; rank 0 logs.

        Args:
            text: what was found, and what to change.
            strict: raise the warning as an error if the block contains ``"strict": true``.

        Raises:
            ConfigError: both this argument and the block say ``strict``.
        """
        if strict and self.config.strict:
            raise ConfigError(f'{text}. It is an error because the reft block says "strict": true')
        if self.is_rank_zero:
            logger.warning("%s", text)

    def report(self, findings: Iterable[Finding], *, strict: bool = True) -> None:
        """Report findings in order. All ranks call this with the same arguments.

        Args:
            findings: findings of the checks at the start.
            strict: raise warnings as errors if the block contains ``"strict": true``.

        Raises:
            ConfigError: a finding refuses the start, or a warning is an error.
        """
        for finding in findings:
            if finding.severity is Severity.REFUSED:
                raise ConfigError(str(finding))
            self.warn(str(finding), strict=strict and finding.severity is Severity.WARNING)
