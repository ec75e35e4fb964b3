"""What a job has on one node: its directory, held while the job runs, and the number of this start (P7)."""

from __future__ import annotations

import logging
import os

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.engine.identity import Identity, hold_memory
from reft.engine.job import JobRecord
from reft.engine.joining import agree_on_incarnation, open_job_dir
from reft.env import ENV_STORE
from reft.memory.jobdir import JobDir

logger = logging.getLogger(__name__)


class JobMemory:
    """Made collectively on all ranks.

    Args:
        config: the block, with the job's name.
        identity: of what is trained.
        node: name of this node.
        writes: whether this rank writes what the node has once.
        control: to agree by.

    Raises:
        ConfigError: another engine of this process has the memory.
        JobInUseError: another job has it.
    """

    def __init__(
        self, config: ReftConfig, identity: Identity, *, node: str, writes: bool, control: ControlGroup
    ) -> None:
        assert config.job_id is not None  # name_job() has seen to it
        self.identity = identity
        self._writes = writes
        self._lock = hold_memory(config, config.job_id, control)
        try:
            self.job_dir = open_job_dir(config, config.job_id, node, control)
            store = os.environ.get(ENV_STORE) if control.rank == 0 else None
            self.record = JobRecord.at(store, config.job_id)
            """What the rendezvous store knows of the job; for rank 0."""
            self.incarnation = agree_on_incarnation(config, self.job_dir, control)
            """Which start of the job this is; counted on where it goes back to an older version."""
            self._note()
        except BaseException:
            self.close()
            raise

    def count_on(self, incarnation: int) -> None:
        """The versions to come belong to this incarnation, unless a later one runs already. On all ranks."""
        self.incarnation = max(self.incarnation, incarnation)
        self._note()

    def _note(self) -> None:
        if not self._writes:
            return
        try:
            self.job_dir.note_incarnation(self.incarnation)
        except OSError as error:
            logger.warning("%s does not tell the number of this start: %s", self.job_dir.path, error)

    def record_identity(self) -> None:
        """Note what is trained, for the next start to compare with."""
        if self._writes:
            self.identity.record(self.job_dir.path, self.incarnation)

    def remake(self) -> None:
        """Somebody removed this node's memory of the job: make it anew, under the same secret."""
        made = self.job_dir
        JobDir.open_or_create(made.path.parent, made.job_id, node=made.node, secret=made.secret)
        self.record_identity()
        self._note()

    def close(self) -> None:
        """Let go of the memory; it stays."""
        if self._lock is not None:
            self._lock.close()
