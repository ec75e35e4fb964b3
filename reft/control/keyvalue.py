"""The rendezvous store: a key-value table for processes that know the secret (P11).

It replaces torch's TCPStore, which serves every process that reaches its port and has no option for
a secret. The store is served by a launcher or by ``reft rendezvous`` and is lost with that process;
an etcd cluster (:mod:`reft_etcd`) can be used instead, which survives the loss of a host but has to
be installed and maintained.

Every request has one reply. A request is ``[operation, arguments...]``, a reply is ``[True,
result]`` or ``[False, reason]``.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from reft.authentication import authenticate, check_authentic, derive_key
from reft.backoff import Backoff
from reft.control.wire import (
    AuthenticatedServer,
    Channel,
    address_towards,
    connect_authenticated,
    parse_endpoint,
)
from reft.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

PURPOSE = "rendezvous"
_RETRY_SECS = 1.0
_FIRST_POLL_SECS, _LONGEST_POLL_SECS = 0.01, 0.25
_REPEATABLE = ("get", "set", "check", "delete", "compare_set", "left", "time")
"""Operations that are sent again if their reply was lost: running one twice does no harm."""
# Time for which the server remembers names after their processes have disconnected
_LEFT_SECS = 600.0
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
_JOURNAL_FILE = "rendezvous.sqlite"
_JOURNAL_PURPOSE = b"rendezvous state"


class StoreError(RuntimeError):
    """Raised if the store does not answer, or refuses an operation."""


class RendezvousStore(ABC):
    """A client of a rendezvous store.

    It offers the part of ``torch.distributed.Store`` that reft uses. In addition, a process can
    hold a name in the store, so that others see whether the process is alive. Thread-safe. Every
    method is bounded in time, and raises StoreError if the store does not answer.

    Attributes:
        prefix: text that is put before every key and name.
        keeps_leases: True if a held name is a lease, which expires unless the process renews it;
            False if a name is held as long as its process is connected.
    """

    prefix: str = ""
    _timeout_secs = 30.0
    keeps_leases = False

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """``host:port`` of the server that answers the requests."""

    def with_prefix(self, prefix: str) -> Self:
        """Return a view of the store over the same connection, with ``prefix/`` before its keys."""
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__, prefix=f"{self.prefix}{prefix}/")
        return view

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Write a value; overwrite an older one."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; wait until it is written, or raise TimeoutError."""
        value = self.peek(key)
        if value is None:
            self.wait([key])
            value = self.peek(key)
        if value is None:
            raise StoreError(f"the rendezvous store has lost {key!r}")
        return value

    @abstractmethod
    def peek(self, key: str) -> bytes | None:
        """Return the current value of ``key``; None if there is none."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` have a value; without keys, whether the store answers."""
        values = [self.peek(key) for key in keys or [""]]
        return not keys or None not in values

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""

    @abstractmethod
    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        """Write a value if the key's current value is ``expected``.

        Args:
            key: the key.
            expected: the value that the key must have; None: it must have no value.
            value: the new value.

        Returns:
            Whether the value was written, and the key's value afterwards.
        """

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value; raise TimeoutError if that takes too long."""
        secs = self._timeout_secs if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + secs
        pauses = Backoff(_FIRST_POLL_SECS, _LONGEST_POLL_SECS)
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no node wrote {', '.join(keys)} to the rendezvous store in {secs:.0f} s"
                )
            time.sleep(pauses.failed())

    @abstractmethod
    def hold(self, name: str, secs: float) -> None:
        """Hold a name, so that other processes see that this process is alive.

        Args:
            name: name of this process.
            secs: length of the lease; ignored by a store without leases, in which the name is held
                as long as the process is connected.
        """

    def alive(self, prefix: str) -> frozenset[str]:
        """Return the names with a prefix that are held now.

        A store without leases returns none; its clients write heartbeats into a value instead.
        """
        return frozenset()

    @abstractmethod
    def left(self, prefix: str) -> dict[str, float]:
        """Return names with a prefix that are no longer held, and for how many seconds."""

    def time(self) -> float | None:
        """Return the seconds since 1970 by the store's clock; None if clients cannot read it."""
        return None

    def local_address(self) -> str:
        """Return this host's address on the route to the store."""
        address = address_towards(*parse_endpoint(self.endpoint))
        if address is None:
            raise StoreError(f"the rendezvous store at {self.endpoint} cannot be reached")
        return address

    @abstractmethod
    def close(self) -> None:
        """Close the connection, which all views share; a request that is under way fails."""


# -- the server ------------------------------------------------------------------------------------


class KeyValueServer:
    """Serves a key-value table to every process that knows the secret.

    Args:
        listener: a listening socket.
        secret: the user's secret.
        table: initial entries.
        journal: copy of the table on disk, with the entries of an earlier server; None: the table
            is in memory only.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        table: Mapping[str, bytes] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal
        self._table: dict[str, bytes] = {**(journal.table if journal else {}), **(table or {})}
        # Taken for each operation, because every client is served by a thread of its own.
        self._lock = threading.Lock()
        self._holders: dict[str, Channel] = {}
        self._left_at: dict[str, float] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "get": self._table.get,
            "set": self._set,
            "add": self._add,
            "check": lambda keys: all(key in self._table for key in keys),
            "delete": self._delete,
            "compare_set": self._compare_set,
            "time": time.time,
            "left": self._left,
        }
        self._server = AuthenticatedServer(listener, secret, PURPOSE, self._serve_client)
        self.host, self.port = self._server.host, self._server.port

    def close(self) -> None:
        self._server.close()
        with self._lock:
            if self._journal is not None:
                self._journal.close()

    def holders(self) -> set[str]:
        """Return the names that connected clients hold."""
        with self._lock:
            return set(self._holders)

    def _serve_client(self, channel: Channel) -> None:
        def hold(name: str) -> None:
            self._holders[name] = channel
            self._left_at.pop(name, None)

        try:
            _serve(channel, {**self._operations, "hold": hold}, self._lock)
        finally:
            now = time.monotonic()
            with self._lock:
                held = [name for name, holder in self._holders.items() if holder is channel]
                for name in held:
                    del self._holders[name]
                    self._left_at[name] = now
                self._left_at = {
                    name: left_at
                    for name, left_at in self._left_at.items()
                    if now - left_at < _LEFT_SECS
                }

    # -- operations; called with the lock held -----------------------------------------------------

    def _set(self, key: str, value: bytes) -> None:
        if not isinstance(key, str) or not isinstance(value, bytes):
            raise TypeError(
                f"found {type(key).__name__} and {type(value).__name__}; expected a key of text "
                f"and bytes"
            )
        self._table[key] = value
        if self._journal is not None:
            self._journal.write(self._table, key)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._table.get(key, b"0")) + int(amount)
        self._set(key, str(total).encode())
        return total

    def _delete(self, key: str) -> bool:
        was_there = self._table.pop(key, None) is not None
        if was_there and self._journal is not None:
            self._journal.write(self._table, key)
        return was_there

    def _compare_set(self, key: str, expected: bytes | None, value: bytes) -> list[Any]:
        current = self._table.get(key)
        if current != expected:
            return [False, current]
        self._set(key, value)
        return [True, value]

    def _left(self, prefix: str) -> dict[str, float]:
        now = time.monotonic()
        return {
            name: now - left_at
            for name, left_at in self._left_at.items()
            if name.startswith(prefix)
        }


def relay_store(
    listener: socket.socket, secret: bytes, store: RendezvousStore
) -> AuthenticatedServer:
    """Relay the requests of clients, in the protocol of KeyValueServer, to another store."""
    operations: dict[str, Callable[..., Any]] = {
        "get": store.peek,
        "set": store.set,
        "check": store.check,
        "delete": store.delete,
        "compare_set": store.compare_set,
    }
    # No lock is needed, because the store is thread-safe.
    serve = partial(_serve, operations=operations, lock=nullcontext())
    return AuthenticatedServer(listener, secret, PURPOSE, serve)


def _serve(
    channel: Channel,
    operations: Mapping[str, Callable[..., Any]],
    lock: AbstractContextManager[object],
) -> None:
    """Answer the requests of one client until it closes the connection."""
    while True:
        request = channel.receive()
        try:
            name, *arguments = request
            with lock:
                answer = [True, operations[name](*arguments)]
        except (KeyError, TypeError, ValueError, StoreError, AuthenticationError) as error:
            answer = [False, f"{type(error).__name__}: {error}"]
        channel.send(answer)


# -- the client ------------------------------------------------------------------------------------


class KeyValueStore(RendezvousStore):
    """A client of :class:`KeyValueServer`.

    It connects at the first request. If the connection was lost, the next request connects again.

    Args:
        endpoint: ``host:port`` of the server.
        secret: the user's secret.
        timeout_secs: time-out of every request, and of the wait in :meth:`get` for a value.
        prefix: text that is put before every key and name.
    """

    def __init__(
        self, endpoint: str, secret: bytes, *, timeout_secs: float = 30.0, prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self._endpoint = endpoint
        self._connection = _Connection(endpoint, secret, timeout_secs)
        self._timeout_secs = timeout_secs

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def set(self, key: str, value: str | bytes) -> None:
        body = value.encode() if isinstance(value, str) else value
        self._connection.request("set", self.prefix + key, body)

    def peek(self, key: str) -> bytes | None:
        value: bytes | None = self._connection.request("get", self.prefix + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number that ``key`` holds, initially 0; return the sum."""
        return int(self._connection.request("add", self.prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._connection.request("check", [self.prefix + key for key in keys]))

    def delete(self, key: str) -> bool:
        return bool(self._connection.request("delete", self.prefix + key))

    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        done, current = self._connection.request("compare_set", self.prefix + key, expected, value)
        return bool(done), current

    def hold(self, name: str, secs: float = 0.0) -> None:
        """Hold a name, as a sign that this process is alive; does not wait for the store."""
        self._connection.hold(self.prefix + name)

    def left(self, prefix: str) -> dict[str, float]:
        """Return names that are no longer held, each with the seconds since it was held.

        If a process dies, the kernel closes its connection, and its names appear here. If a whole
        host dies, its connections and so its names stay.
        """
        left: dict[str, float] = self._connection.request("left", self.prefix + prefix)
        return {name.removeprefix(self.prefix): secs for name, secs in left.items()}

    def time(self) -> float | None:
        return float(self._connection.request("time"))

    def close(self) -> None:
        self._connection.close()


class _Connection:
    """The connection to a server that all views of a store share."""

    def __init__(self, endpoint: str, secret: bytes, timeout_secs: float) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._timeout_secs = timeout_secs
        self._lock = threading.Lock()  # One request at a time, because replies come in order
        self._channel: Channel | None = None
        self._refused_until = 0.0
        self._held_names: dict[str, _HeldName] = {}

    def hold(self, name: str) -> None:
        """Start to hold a name; further calls with the same name do nothing."""
        if name not in self._held_names:
            self._held_names[name] = _HeldName(self._connect, name)

    def request(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            was_connected = self._channel is not None
            if not was_connected and time.monotonic() < self._refused_until:
                raise StoreError(
                    f"the rendezvous store at {self._endpoint} did not answer its last request"
                )
            try:
                try:
                    done, result = self._request_once(operation, *arguments)
                except (ConnectionError, EOFError):
                    if not was_connected or operation not in _REPEATABLE:
                        raise
                    # The server was restarted since the last request.
                    self._drop()
                    done, result = self._request_once(operation, *arguments)
            except AuthenticationError:
                self._drop()
                raise
            except (OSError, EOFError) as error:
                self._drop()
                # Let threads that wait for the lock fail at once, not after a time-out each.
                self._refused_until = time.monotonic() + _RETRY_SECS
                raise StoreError(
                    f"the rendezvous store at {self._endpoint} does not answer: {error}"
                ) from error
            except BaseException:
                # After any other exception, such as one from a signal handler, the reply is still
                # unread, and the next request would take it for its own.
                self._drop()
                raise
        if not done:
            raise StoreError(f"the rendezvous store refuses {operation}: {result}")
        return result

    def close(self) -> None:
        for held_name in self._held_names.values():
            held_name.close()
        # Do not take the lock: a request to a store that hangs holds it until its time-out.
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _request_once(self, operation: str, *arguments: Any) -> list[Any]:
        if self._channel is None:
            self._channel = self._connect()
        self._channel.send([operation, *arguments])
        answer: list[Any] = self._channel.receive()
        return answer

    def _connect(self) -> Channel:
        return connect_authenticated(self._endpoint, self._secret, PURPOSE, self._timeout_secs)

    def _drop(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.close()
        self._channel = None


class _HeldName:
    """Holds a name in the store while this process lives.

    A thread keeps a connection open for the name, and connects again at once if it breaks.
    """

    def __init__(self, connect: Callable[[], Channel], name: str) -> None:
        self._connect = connect
        self._name = name
        # Guards _channel and _ended: a connection that the thread opens during close() must not
        # stay open.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._channel: Channel | None = None
        threading.Thread(target=self._run, name="presence", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._ended.set()
            if self._channel is not None:
                self._channel.shutdown()

    def _run(self) -> None:
        pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        pause = pauses.pause
        while not self._ended.wait(pause):
            try:
                channel = self._connect()
            except AuthenticationError:
                return  # The client's next request will raise the same error
            except OSError:
                pause = pauses.failed()
                continue
            try:
                self._hold(channel)
            except (OSError, EOFError, AuthenticationError):
                pauses.reset()
                pause = pauses.pause
            finally:
                channel.close()

    def _hold(self, channel: Channel) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._channel = channel
        channel.send(["hold", self._name])
        channel.receive()
        channel.settimeout(None)
        channel.receive()  # Returns only when the connection has ended


# -- on disk ---------------------------------------------------------------------------------------


class Journal:
    """Keeps a server's entries on disk, for one server at a time.

    Args:
        directory: directory of the journal. If it is missing, it is created, for this user only.
        secret: the user's secret; every entry carries a MAC (P11).

    Attributes:
        table: the entries that an earlier server left.

    Raises:
        ConfigError: the directory cannot be used, or another server uses it.
        AuthenticationError: the entries were written with another secret.
    """

    def __init__(self, directory: Path, secret: bytes) -> None:
        self._path = directory / _JOURNAL_FILE
        self._secret = secret
        unusable = (
            f"--state-dir {directory} cannot be used: {{}}; give a directory that you may write to"
        )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Create the file here with mode 0600: SQLite's mode would depend on the umask.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(unusable.format(error.strerror or error)) from error
        database = sqlite3.connect(
            self._path, timeout=0, isolation_level=None, check_same_thread=False
        )
        self._database: sqlite3.Connection | None = database
        try:
            # EXCLUSIVE: the lock is held as long as the database is open. NORMAL: writes are not
            # synced one by one, so a crash of the host may lose the newest entries; the launchers
            # write these again with their next heartbeat.
            for setting in (
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "synchronous = NORMAL",
            ):
                database.execute(f"PRAGMA {setting}")
            database.execute(
                "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB)"
            )
            rows = database.execute("SELECT key, value FROM entries")
            self.table = {
                key: check_authentic(value, self._key_of(key), _JOURNAL_PURPOSE)
                for key, value in rows
            }
        except (sqlite3.Error, AuthenticationError) as error:
            self.close()
            if isinstance(error, sqlite3.OperationalError):
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise ConfigError(unusable.format(error)) from error
                raise ConfigError(
                    f"another `reft rendezvous` keeps its state in {directory}: end it, or give "
                    f"this one its own --state-dir"
                ) from error
            raise AuthenticationError(
                f"{self._path} was not written with this user's secret, or was changed: give back "
                f"the secret that it was written with, or remove it and the job's state with it"
            ) from error

    def write(self, table: Mapping[str, bytes], key: str) -> None:
        """Write an entry that was changed or deleted.

        If the disk fails, the journal is removed: a later server must not read outdated entries.

        Args:
            table: the server's table, in which the entry is already changed.
            key: key of the entry.
        """
        if self._database is None:
            return
        try:
            value = table.get(key)
            if value is None:
                self._database.execute("DELETE FROM entries WHERE key = ?", (key,))
            else:
                sealed = authenticate(value, self._key_of(key), _JOURNAL_PURPOSE)
                self._database.execute("REPLACE INTO entries VALUES (?, ?)", (key, sealed))
        except sqlite3.Error as error:
            logger.warning("the rendezvous state is no longer saved: %s", error)
            self.close()
            for path in self._path.parent.glob(f"{_JOURNAL_FILE}*"):
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Close the database; another server may then use it."""
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    def _key_of(self, key: str) -> bytes:
        """Derive the MAC key of one entry.

        Each entry has its own key, so that the values of two entries cannot be swapped unnoticed.
        """
        return derive_key(self._secret, _JOURNAL_PURPOSE, key.encode())
