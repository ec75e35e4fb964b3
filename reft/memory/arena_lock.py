"""The lock of an open arena: who writes it, who has pinned it, and that its job is alive."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from reft.errors import ArenaError
from reft.memory.files import hold_directory, reopen

_open_locks: WeakSet[ArenaLock] = WeakSet()


class ArenaLock:
    """`flock` on a file description of its own: a crash releases it, and processes forked from the holder
    (data loader workers) do not keep it. That of a writable arena also holds the directory shared, which is
    how others know that the job is alive.

    Raises:
        ArenaError: the file was replaced meanwhile, or its directory is being removed.
    """

    def __init__(self, path: Path, fd: int, writable: bool) -> None:
        self._path = path
        self._held: int | None = None
        self._fd = self._directory_fd = -1
        _open_locks.add(self)
        try:
            self._fd = reopen(path, fd, writable)
            if writable:
                self._directory_fd = hold_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def is_exclusive(self) -> bool:
        return self._held == fcntl.LOCK_EX

    def take_exclusive(self) -> bool:
        """Keep readers and other writers out; False if there are some. A shared lock is given up."""
        return self._take(fcntl.LOCK_EX, blocking=False)

    def take_shared(self, blocking: bool) -> bool:
        """Keep writers out; False if there is one. An exclusive lock is given up."""
        return self._take(fcntl.LOCK_SH, blocking)

    def release(self) -> None:
        if self._held is not None and self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._held = None

    @property
    def fd(self) -> int:
        """The file that was opened, whatever has become of its name; -1 once the lock is closed."""
        return self._fd

    def stat(self) -> os.stat_result:
        """Of the file that was opened, whatever has become of its name.

        Raises:
            OSError: the lock is closed.
        """
        return os.fstat(self._fd)

    def close(self) -> None:
        # Forgotten before they are closed: a process that is forked meanwhile would close them too, when the
        # numbers may be those of other files.
        fds = self._fd, self._directory_fd
        self._fd = self._directory_fd = -1
        self._held = None
        for fd in fds:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _take(self, operation: int, blocking: bool) -> bool:
        if self._held == operation:
            return True
        self.release()
        if self._fd < 0:
            raise ArenaError(f"{self._path}: closed, or inherited by a forked process; open it again")
        try:
            fcntl.flock(self._fd, operation if blocking else operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._held = operation
        return True


def _forget_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
