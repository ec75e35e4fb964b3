"""The identity of a job (P7): its name and its fingerprint.

The functions are collective: every rank gets the same result or raises the same error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.engine.fingerprint import AT_LAUNCH, Fact, Fingerprint, differences, require_same
from reft.engine.protocol import TrainingEngine
from reft.errors import (
    ConfigError,
    FingerprintError,
)
from reft.grid import Topology, VersionId
from reft.memory.fingerprint_record import newest_record, record_fingerprint
from reft.memory.jobdir import find_jobs
from reft.memory.scale_request import note_size
from reft.naming import find_process_name
from reft.state.codec import decode, encode

logger = logging.getLogger(__name__)


def name_job(config: ReftConfig, control: ControlGroup) -> ReftConfig:
    """Add the job's name to the block: the configured one or, without one, a name that rank
    0 derives. Collective.

    Raises:
        ConfigError: the configured names of the ranks differ, or no name could be derived.
    """
    given = [g.decode() for g in control.gather_bytes((config.job_id or "").encode())]
    own = find_process_name() if control.rank == 0 and not given[0] else ""
    derived = control.gather_bytes(own.encode())[0].decode()
    names = {name or derived for name in given}
    if len(names) > 1 or "" in names:
        found = ", ".join(sorted(name or "none" for name in names))
        raise ConfigError(
            f"the ranks of this job give it different names: {found}. Give all nodes the same "
            f'--job-id NAME, or write "job_id" into the reft block'
        )
    if derived and control.rank == 0:
        logger.info("the job's name is %s, made from its user, directory and command line", derived)
        log_sibling_jobs(config.memory_dir, derived)
    return config.model_copy(update={"job_id": names.pop()})


def log_sibling_jobs(memory_dir: Path, name: str) -> None:
    """Log how to resume a job of the same program with other arguments, if this node has its
    memory and none of job ``name``."""
    program, others = name.rpartition("-")[0], [path.name for path in find_jobs(memory_dir)]
    if name not in others and (others := [n for n in others if n.rpartition("-")[0] == program]):
        logger.warning(
            "there is no memory of job %s, but there is memory of the same program with other "
            "arguments: %s. To continue one of these jobs, give its name: --job-id NAME, or "
            "REFT_JOB_ID=NAME under plain torchrun",
            *(name, ", ".join(others)),
        )


_ANOTHER_BATCH = frozenset({"config", "config.train_batch_size"})
"""Keys of ``accept_changes`` that allow the job to continue with a different global batch size."""


@dataclass
class Identity:
    """The fingerprint of the running job, by which stored state is accepted or refused.

    Attributes:
        fingerprint: fingerprint of the job.
        config: the job's ``reft`` block.
        control: messages between the job's ranks.
        restarted: True for an automatic restart after a failure, where no person can change a
            setting.
        why_one_size: reason why the job cannot continue with the same results at another
            data-parallel degree; "" if it can.
        is_one_size: True if that reason forbids another number of nodes, instead of only
            changing the results.
    """

    fingerprint: Fingerprint
    config: ReftConfig
    control: ControlGroup
    restarted: bool
    why_one_size: str = ""
    is_one_size: bool = False

    @classmethod
    def gather(
        cls, config: ReftConfig, engine: TrainingEngine, control: ControlGroup, topology: Topology
    ) -> Identity:
        """Gather the fingerprint: rank 0's settings and the shapes of all ranks. Collective."""
        degrees, at = topology.degrees, topology.coordinates[control.rank]
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        message = encode([str(at), engine.shapes(), restarts])
        replies = [decode(data) for data in control.gather_bytes(message)]
        layout = {"layout.pp": degrees.pp, "layout.dp": degrees.dp, "layout.tp": degrees.tp}
        facts: dict[str, Fact] = {**engine.settings(), **layout}
        facts |= {
            f"model.{where.replace('.dp0', '')}": shapes
            for where, shapes, _ in replies
            if ".dp0." in where
        }
        common = control.gather_bytes(Fingerprint(facts).encode() if control.rank == 0 else b"")[0]
        resizing = engine.resizing
        why = (
            "its training loop resumes at its own degree alone"
            if resizing is None
            else resizing.why_not
        )
        return cls(
            Fingerprint.decode(common),
            config,
            control,
            restarted=any(restarts for _, _, restarts in replies),
            why_one_size=why,
            # A job whose data depends on the degree may run at another one, with different
            # results.
            is_one_size=resizing is None or why not in ("", resizing.data_is_bound),
        )

    def require_same(self, was: Fingerprint, of: str, but: Collection[str] = ()) -> None:
        """Refuse stored state of another job, or of this one with other settings.

        Args:
            was: fingerprint of the stored state, the same on all ranks.
            of: source of the state, for the message.
            but: facts that may differ.

        Raises:
            FingerprintError: facts differ; the message names them. Raised on all ranks.
        """
        was, now = was.without(but), self.fingerprint.without(but)
        if self.restarted:
            # In an automatic restart no person can decide: log the differences and continue.
            for line in differences(was.only(AT_LAUNCH), now.only(AT_LAUNCH)):
                logger.warning("%s, after a restart: %s. The job continues with %s", of, line, of)
            was, now = was.without(AT_LAUNCH), now.without(AT_LAUNCH)
        require_same(was, now, of=of, accepted=self.config.accept_changes)

    def check_memory(
        self, job_dir: Path, label: VersionId, *, reads: bool, but: Collection[str] = ()
    ) -> None:
        """Refuse a version in memory that was written by another job, or by this one with other
        settings. Collective.

        Args:
            job_dir: the memory of this node.
            label: name of the version.
            reads: True if this rank reads the record of its node, for all ranks of the node.
            but: facts that may differ, since the job may continue at another degree or in
                another layout with the same global batch.

        Raises:
            FingerprintError: on all ranks.
        """
        record = newest_record(job_dir, label.incarnation) if reads else None
        replies = self.control.gather_bytes(encode(record and list(record)))
        records = {(int(r[0]), str(r[1])) for data in replies if (r := decode(data)) is not None}
        # A node that was absent lacks the records of later incarnations: use the newest one.
        newest = max((number for number, _ in records), default=0)
        found = []
        for text in sorted(text for number, text in records if number == newest):
            try:
                found.append(Fingerprint.decode(text))
            except FingerprintError as error:
                logger.warning("a node's record is ignored: %s", error)
        of = f"the memory of job {self.config.job_id}"
        if not found and self.control.rank == 0:
            logger.warning(
                "%s has no record of the settings it was written with; whether they are those of "
                "this job cannot be checked",
                of,
            )
        for fingerprint in found:
            self.require_same(fingerprint, of, but)

    def check_checkpoint(
        self, was: str | None, of: str, *, own: bool, but: Collection[str] = ()
    ) -> None:
        """Refuse a checkpoint on storage that this job wrote with other settings.

        Args:
            was: encoded fingerprint of the checkpoint; None if it has none.
            of: the checkpoint, for messages.
            own: True if this job wrote the checkpoint. The differences of another job's
                checkpoint are only logged: it is loaded only if the script names its directory,
                which is the user's decision.
            but: facts that may differ.

        Raises:
            FingerprintError: on all ranks.
        """
        if was is None:
            return
        stored = Fingerprint.decode(was)
        if own:
            self.require_same(stored, of, but)
        elif self.control.rank == 0:
            for line in differences(stored, self.fingerprint):
                logger.warning("%s is another job's: %s", of, line)

    def record(self, job_dir: Path, incarnation: int) -> None:
        """Record the fingerprint for versions from ``incarnation`` on. Called by one rank of each
        node."""
        try:
            record_fingerprint(job_dir, incarnation, self.fingerprint.encode().decode())
            any_batch = not _ANOTHER_BATCH.isdisjoint(self.config.accept_changes)
            fixed = self.is_one_size and not any_batch
            note_size(
                job_dir, self.fingerprint.facts, self.why_one_size, fixed=fixed, any_batch=any_batch
            )
        except OSError as error:
            logger.warning("the job's settings cannot be recorded next to its memory: %s", error)
