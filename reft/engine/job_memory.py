"""The memory of a job on a node (P7): a directory, which is locked while the job runs, and the
incarnation (number of the start). Collective: every rank gets the same result or raises the same
error."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.engine.identity import Identity
from reft.engine.job_record import JobRecord
from reft.engine.nodes import local_rank
from reft.engine.protocol import TrainingEngine
from reft.env import (
    ENV_INCARNATION,
    ENV_LAUNCHER_PID,
    ENV_MEMORY_DIR,
    ENV_SECRET,
    ENV_STORE,
)
from reft.errors import (
    ConfigError,
    FencedError,
    JobInUseError,
    ReftError,
)
from reft.grid import Topology
from reft.memory.files import JobLock, holder
from reft.memory.job_secret import SECRET_BYTES, SECRET_FILE, read_secret
from reft.memory.jobdir import JobDir, make_job_directory
from reft.naming import kernel_id
from reft.storage import fence
from reft.storage.persisted import job_directory, newest_incarnation

logger = logging.getLogger(__name__)

# Job memory that engines of this process hold, by the directory's resolved path
held: WeakValueDictionary[str, JobMemory] = WeakValueDictionary()

# Longest time in seconds to wait for the lock: killed trainers hold it until the kernel has
# freed their memory
_LOCK_SECS = 10.0


def hold_memory(config: ReftConfig, job_id: str, control: ControlGroup) -> JobLock | None:
    """Lock the job's memory on this node against every other start, before any file in it is read
    or written. Collective.

    The first rank of the node takes the lock and shares it; the others join.

    Returns:
        This rank's part of the lock, to be closed with the session; None if the launcher holds the
        lock for its trainers.

    Raises:
        ConfigError: another engine of this process holds the memory.
        JobInUseError: another job, or another start of this one, holds it on some node.
    """
    path = config.memory_dir / job_id
    place = f"{kernel_id()}:{os.path.realpath(path)}".encode()
    first = control.gather_bytes(place).index(place) == control.rank
    lock: JobLock | None = None

    def lead() -> None:
        nonlocal lock
        other = held.get(os.path.realpath(path))
        if other is not None and not other.closed:
            raise ConfigError(
                f"a second engine asks for reft in job {job_id!r}, but a job's memory has room for "
                f"the state of one engine, and another one of this process has it ({path}). Leave "
                'the block to one of them: write "reft": {"enabled": false} into the configuration '
                "of the other, or, where the first engine is done with, call "
                "reft.attach(engine).close() before the second is made"
            )
        make_job_directory(config.memory_dir, job_id)
        if first and not _held_by_launcher(path):
            lock = JobLock(path, job_id, wait_secs=_LOCK_SECS)
            lock.share()

    def join() -> None:
        nonlocal lock
        if not first and not _held_by_launcher(path):
            lock = JobLock.join(path, job_id)

    try:
        for attempt in (lead, join):
            all_or_none(
                attempt,
                control,
                lambda why: JobInUseError(f"another rank cannot get the job's memory: {why}"),
            )
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


def _held_by_launcher(path: Path) -> bool:
    launcher = os.environ.get(ENV_LAUNCHER_PID)
    return launcher is not None and str((holder(path) or {}).get("pid")) == launcher


def all_or_none(
    attempt: Callable[[], None], control: ControlGroup, refused: Callable[[str], Exception]
) -> None:
    """Run ``attempt`` on all ranks. If it fails on any rank, raise on all of them. Collective.

    Args:
        attempt: function that may raise ReftError or OSError.
        control: messages between the ranks.
        refused: makes the error for the ranks on which ``attempt`` succeeded.
    """
    own: Exception | None = None
    try:
        attempt()
    except (ReftError, OSError) as error:
        own = error
    replies = control.gather_bytes(b"" if own is None else str(own).encode())
    if own is not None:
        raise own
    if failed := [reply.decode() for reply in replies if reply]:
        raise refused(failed[0])


def open_job_dir(config: ReftConfig, job_id: str, node: str, control: ControlGroup) -> JobDir:
    """Open the job's memory on this node with the secret that all nodes share. Collective.

    The secret comes from the launcher (REFT_SECRET). With plain ``torchrun`` it comes from a
    surviving node's memory, or from rank 0 for a new job.
    """
    secret = None
    if not os.environ.get(ENV_SECRET):
        path = config.job_memory_dir
        known = read_secret(path) if (path / SECRET_FILE).exists() else b""
        gathered = control.gather_bytes(known)
        fresh = control.gather_bytes(secrets.token_bytes(SECRET_BYTES))[0]
        secret = next((s for s in gathered if s), fresh)
    return JobDir.open_or_create(config.memory_dir, job_id, node=node, secret=secret)


def _require_own_files(path: Path, control: ControlGroup) -> None:
    """Check that no two ranks would write the same arenas. Raises ConfigError on all ranks."""
    at = path.stat()
    places = control.gather_bytes(f"{kernel_id()} {at.st_dev} {at.st_ino} {local_rank()}".encode())
    for rank, place in enumerate(places):
        if (first := places.index(place)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same memory and the same LOCAL_RANK; expected "
                f"a memory directory ({ENV_MEMORY_DIR}) for each node of a host, a LOCAL_RANK for "
                "each rank of a node"
            )


def agree_on_incarnation(
    config: ReftConfig, job_dir: JobDir, control: ControlGroup, *, is_first_on_node: bool
) -> int:
    """Agree on the incarnation, the number of this start: one more than any node or the storage
    has recorded (P7). Collective.

    Rank 0 reads and claims the storage; if each node has a disk of its own, the first rank of each
    node does.

    The incarnation equals the number on which the launchers agreed when they started the trainers,
    unless storage has recorded a later one. After this call, older starts of the job cannot write
    to storage.

    Raises:
        FencedError: another start of the job has claimed the storage with the same number.
            Raised on all ranks.
    """
    reads_disk = is_first_on_node if config.persist.local else control.rank == 0
    job_id, disk = job_dir.job_id, config.persist.dir if reads_disk else None
    seen = max(job_dir.newest_incarnation(), int(os.environ.get(ENV_INCARNATION, "0")) - 1)
    if disk is not None:
        try:
            seen = max(seen, newest_incarnation(job_directory(disk, job_id), job_id))
        except (ReftError, OSError) as error:  # The job can run without storage
            logger.warning("the incarnations on disk cannot be read: %s", error)
    incarnation = 1 + max(values[0] for values in control.gather_ints([seen]))

    def keep_older_starts_from_writing() -> None:
        if disk is None:
            return
        try:
            directory = job_directory(disk, job_id)
            for made in (disk, directory):
                with suppress(FileExistsError):
                    made.mkdir()
            fence.claim(directory, job_id, incarnation, alone=True)
        except FencedError:
            raise
        except (ReftError, OSError) as error:
            logger.warning(
                "older starts of the job cannot be kept from writing to %s: %s", disk, error
            )

    all_or_none(keep_older_starts_from_writing, control, FencedError)
    return incarnation


class JobMemory:
    """The job's memory on this node. The constructor is collective.

    Attributes:
        identity: identity of the job, with its fingerprint.
        job_dir: directory of the job's memory on this node.
        record: record of the job in the rendezvous store, which rank 0 uses.
        incarnation: number of this start; incremented when the job goes back to an older version.

    Raises:
        ConfigError: another engine of this process holds the job's memory.
        JobInUseError: another job, or another start of this one, holds it on some node.
    """

    def __init__(
        self, config: ReftConfig, engine: TrainingEngine, control: ControlGroup, topology: Topology
    ) -> None:
        assert config.job_id is not None  # name_job() has set it
        job_id, node = config.job_id, topology.nodes[control.rank]
        self.identity = Identity.gather(config, engine, control, topology)
        self.closed = False
        self._writes = topology.local_ranks(node)[0] == control.rank
        self._lock = hold_memory(config, job_id, control)
        try:
            _require_own_files(config.job_memory_dir, control)
            self.job_dir = open_job_dir(config, job_id, node, control)
            store = os.environ.get(ENV_STORE) if control.rank == 0 else None
            self.record = JobRecord.at(store, job_id)
            self.incarnation = agree_on_incarnation(
                config, self.job_dir, control, is_first_on_node=self._writes
            )
            self._note()
        except BaseException:
            self.close()
            raise
        held[os.path.realpath(self.job_dir.path)] = self

    def count_on(self, incarnation: int) -> None:
        """Set the incarnation to ``incarnation``, unless the current one is later. Called on all
        ranks."""
        self.incarnation = max(self.incarnation, incarnation)
        self._note()

    def _note(self) -> None:
        if not self._writes:
            return
        try:
            self.job_dir.note_incarnation(self.incarnation)
        except OSError as error:
            logger.warning(
                "the number of this start cannot be recorded in %s: %s", self.job_dir.path, error
            )

    def record_identity(self) -> None:
        if self._writes:
            self.identity.record(self.job_dir.path, self.incarnation)

    def remake(self) -> None:
        """Create the job's directory on this node again, with the same secret, after it was
        removed."""
        made = self.job_dir
        JobDir.open_or_create(made.path.parent, made.job_id, node=made.node, secret=made.secret)
        self.record_identity()
        self._note()

    def describe_save(self, step: int) -> dict[str, Any]:
        """Return a description of this job for the host-state file that it writes next to
        DeepSpeed's checkpoint."""
        return {
            "job_id": self.job_dir.job_id,
            "incarnation": self.incarnation,
            "step": step,
            "fingerprint": self.identity.fingerprint.encode().decode(),
        }

    def close(self) -> None:
        self.closed = True
        if self._lock is not None:
            self._lock.close()
