"""Creates, locks and removes the job's memory directory (arenas on tmpfs) on a node."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from reft.env import (
    ENV_JOB_ID,
    ENV_LAUNCHER_PID,
    ENV_MEMORY_DIR,
    ENV_NODE_DECLARED,
    ENV_NODE_ID,
    ENV_SECRET,
)
from reft.errors import AuthenticationError, ConfigError, JobInUseError, ReftError
from reft.memory.arena import ARENA_SUFFIX, Arena, scan
from reft.memory.files import LOCK_FILE, JobLock
from reft.memory.job_secret import SECRET_FILE
from reft.memory.jobdir import (
    CONFIG_FILE,
    JobDir,
    make_job_directory,
    read_json,
    remove_job,
)
from reft.memory.ownership import check_place
from reft.node.history import keep_history

logger = logging.getLogger(__name__)

EXITS_PREFIX = "exits-"  # Prefix of the directories with the trainers' exit notes
# Longest wait for the lock: a launcher that was just killed holds it until the kernel has removed
# that process.
_LOCK_SECS = 5.0


class NodeMemory:
    """The job's memory directory on this node, held by one launcher at a time.

    Args:
        memory_dir: directory with one directory per job, in tmpfs.
        job_id: name of the job's directory in it.
        node: id of this node.
    """

    def __init__(self, memory_dir: Path, job_id: str, node: str) -> None:
        self.memory_dir = memory_dir
        self.job_id = job_id
        self.node = node
        self.path = memory_dir / job_id
        self.job_dir: JobDir | None = None
        self._lock: JobLock | None = None
        self._made = False  # Whether this launcher has created the directory

    def environ(self, secret: bytes, holder_pid: int, *, declared: bool) -> dict[str, str]:
        """Return the environment variables by which the node's trainers find this directory.

        Args:
            secret: the user's secret, which authenticates connections.
            holder_pid: id of the process that holds the directory's lock for the trainers.
            declared: whether the user, not reft, chose the node's id.
        """
        return {
            ENV_NODE_ID: self.node,
            ENV_NODE_DECLARED: str(int(declared)),
            ENV_MEMORY_DIR: str(self.memory_dir),
            ENV_JOB_ID: self.job_id,
            ENV_LAUNCHER_PID: str(holder_pid),
            ENV_SECRET: secret.hex(),
        }

    def prepare(self, secret: bytes) -> JobDir:
        """Create the directory and lock it, before the launcher contacts any other node.

        Raises:
            JobInUseError: another launcher, or a job under plain torchrun, holds the directory.
            ConfigError: the directory cannot be created.
            AuthenticationError: the directory belongs to another user, or was made with another
                secret.
        """
        check_place(self.path)
        self._made = not os.path.lexists(self.path)
        try:
            make_job_directory(self.memory_dir, self.job_id)
        except OSError as error:
            if isinstance(error, ReftError):
                raise
            raise ConfigError(
                f"--memory-dir {self.memory_dir} cannot be used: {error.strerror}; write a "
                f"directory on tmpfs that can be written, such as /dev/shm/reft"
            ) from error
        self._lock = JobLock(self.path, self.job_id, wait_secs=_LOCK_SECS)
        # The lock is held, so these directories were left by a launcher that was killed.
        for left in self.path.glob(f"{EXITS_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        if not self.holds_versions():
            # A secret file without arenas protects nothing, and may differ from the user's secret.
            (self.path / SECRET_FILE).unlink(missing_ok=True)
        elif not os.path.lexists(self.path / SECRET_FILE):
            # The secret file is lost: keep arenas that open with the user's secret, remove others.
            for path, arena in scan(self.path, secret):
                if isinstance(arena, Arena):
                    arena.close()
                    continue
                logger.warning(
                    "%s: its secret is lost, so this memory cannot be read; it is removed", path
                )
                path.unlink(missing_ok=True)
        try:
            self.job_dir = JobDir.open_or_create(self.memory_dir, self.job_id, self.node, secret)
        except AuthenticationError as error:
            if not self.holds_versions():
                raise
            raise AuthenticationError(
                f"{error}. The memory that an earlier run left in {self.path} is kept: repair its "
                f"secret or give it as {ENV_SECRET}, or remove both with 'reft clean', or start "
                "under another --job-id"
            ) from error
        return self.job_dir

    def make_again(self, secret: bytes) -> None:
        """Create and lock the directory again if it was removed while the job runs.

        Raises:
            JobInUseError: another job has created the directory and holds its lock.
            ReftError: the directory cannot be created.
        """
        if self._lock is None or self._lock.lies_in(self.path):
            return
        logger.error("%s was removed, with all versions on this node; it is made again", self.path)
        try:
            make_job_directory(self.memory_dir, self.job_id)
            # Lock before using the directory: another job may have created it meanwhile.
            lock = JobLock(self.path, self.job_id, wait_secs=_LOCK_SECS)
            self._lock.close()
            self._lock = lock
            self.job_dir = JobDir.open_or_create(self.memory_dir, self.job_id, self.node, secret)
        except OSError as error:
            raise ReftError(
                f"{self.path}, the job's memory on this node, was removed and cannot be made "
                f"again: {error}. Make {self.memory_dir} writable, or start the node with "
                f"another --memory-dir"
            ) from error

    def discard_unused(self) -> None:
        """Remove the directory if this launcher created it and it holds no version."""
        if self._made and self._lock is not None and not self.holds_versions():
            if self._is_ours():
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()

    def _is_ours(self) -> bool:
        """Whether the directory still belongs to this launcher (P7).

        The directory may have been removed and created again: by another job, which then holds the
        new directory's lock, or by this job's trainers, which do not lock it.
        """
        if self._lock is None or self._lock.lies_in(self.path):
            return True
        if not os.path.lexists(self.path / LOCK_FILE):
            with suppress(OSError, JobInUseError):
                self._lock = JobLock(self.path, self.job_id)
                return True
        if os.path.lexists(self.path):
            logger.warning(
                "%s was removed under this job and made again by another; it is left as it is",
                self.path,
            )
        return False

    def holds_versions(self) -> bool:
        """Whether the directory holds arenas, files that each hold one version of a rank."""
        return any(self.path.glob(f"*{ARENA_SUFFIX}"))

    def remove(self, log_dir: Path | None = None) -> None:
        """Remove the memory of a job that ended well.

        Args:
            log_dir: directory that keeps the job's history if there is no persist directory.
        """
        if self.job_dir is None:
            return
        try:
            if self._is_ours():
                self._keep_history(log_dir)
                remove_job(self.job_dir.path, force=True)
        except (OSError, ReftError) as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        if self._lock is not None:
            self._lock.close()

    def _keep_history(self, log_dir: Path | None) -> None:
        block = read_json(self.path / CONFIG_FILE)
        if block is None:
            return  # P10: no trainer had a ``reft`` block
        persist_dir = (block.get("persist") or {}).get("dir")
        directory = log_dir if persist_dir is None else Path(persist_dir)
        if directory is None or not directory.is_dir():
            return
        if persist_dir is not None:
            directory /= self.job_id
            directory.mkdir(exist_ok=True)
        keep_history(self.path, self.job_id, self.node, directory)
