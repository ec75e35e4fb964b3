"""The table of a rendezvous store on disk, for a server that comes back: all of it, then every change.

Every record carries a code keyed with the user's secret, which is checked before the record is parsed (P11).
Records are written, not synced: the death of the process loses nothing, that of the host perhaps the last
ones, which nodes that live write again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgpack

from reft.durable import whole_file
from reft.errors import AuthenticationError, ConfigError
from reft.mac import authenticate, check_authentic

logger = logging.getLogger(__name__)

_FILE, _LOCK = "rendezvous.journal", "rendezvous.lock"
_PURPOSE = b"rendezvous state"
_LENGTH = struct.Struct(">I")
_LEAST_COMPACTED_BYTES = 1 << 20
_LEAST_ZEROS = 4


class Journal:
    """Of one server at a time.

    Args:
        directory: where it is kept; made if it is missing, for its user alone.
        secret: the user's secret.

    Raises:
        ConfigError: the directory cannot be used, or another server uses it.
        AuthenticationError: somebody else has written there.
    """

    def __init__(self, directory: Path, secret: bytes) -> None:
        self._path = directory / _FILE
        self._secret = secret
        self._file: BinaryIO | None = None
        self._compact_at = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self.table = dict(self._read())
                self._write(self.table)
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError as error:
            raise ConfigError(
                f"another `reft rendezvous` keeps its state in {directory}: end it, or give this one its own "
                f"--state-dir"
            ) from error
        except OSError as error:
            if isinstance(error, AuthenticationError):
                raise
            raise ConfigError(
                f"--state-dir {directory} cannot be used: {error.strerror or error}; give a directory that "
                f"you may write to"
            ) from error

    def note(self, table: Mapping[str, bytes], key: str) -> None:
        """``key`` of ``table`` was changed, or deleted. A disk that fails is told once, and ends the journal:
        nothing that is out of date is read later."""
        if self._file is None:
            return
        try:
            if self._file.tell() > self._compact_at:
                self._write(table)
            else:
                record = self._record(key, table.get(key))
                if self._file.write(record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a disk that is full takes a part
        except OSError as error:
            logger.warning("the rendezvous' state is not kept any more: %s", error)
            self._file = None
            with suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        """Let another server have it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        os.close(self._lock)

    def _record(self, key: str, value: bytes | None) -> bytes:
        sealed = authenticate(msgpack.packb([key, value]), self._secret, _PURPOSE)
        return _LENGTH.pack(len(sealed)) + sealed

    def _write(self, table: Mapping[str, bytes]) -> None:
        """All of it, in the place of what is there."""
        if self._file is not None:
            self._file.close()
        with whole_file(self._path, mode=0o600, sync=False) as file:
            for key, value in table.items():
                file.write(self._record(key, value))
        self._file = self._path.open("ab", buffering=0)
        self._compact_at = max(_LEAST_COMPACTED_BYTES, 4 * self._file.tell())

    def _read(self) -> Iterator[tuple[str, bytes]]:
        table: dict[str, bytes] = {}
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if len(sealed := file.read(length)) < length:
                    break  # the server was killed while it wrote
                try:
                    key, value = msgpack.unpackb(check_authentic(sealed, self._secret, _PURPOSE))
                except AuthenticationError as error:
                    if _ends_in_zeros(head + sealed, file.read()):
                        logger.warning(
                            "the end of %s is zeros: this host went down while it was written. It is read up "
                            "to there",
                            self._path,
                        )
                        break
                    raise AuthenticationError(
                        f"{self._path} was not written with this user's secret, or was changed: give back "
                        f"the secret that it was written with, or remove it and the job's state with it"
                    ) from error
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value
        yield from table.items()


def _ends_in_zeros(record: bytes, rest: bytes) -> bool:
    """Whether ``record`` is the last one, and was not written to its end before the host went down: a file
    system may have made the file longer first, and what it did not write then is zeros."""
    written = len((record + rest).rstrip(b"\0"))
    return written < len(record) and len(record) + len(rest) - written >= _LEAST_ZEROS
