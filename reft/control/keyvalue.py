"""The rendezvous store: a table of bytes for those who know the secret (P11), kept on disk where
wanted.

It takes the place of torch's TCPStore, which serves whoever reaches its port and has no option to
ask for a secret. etcd (:mod:`reft_etcd`) outlives its host, but is one more server
to install and to keep; this one lives in a launcher. One request, one answer: ``[operation,
arguments...]`` and ``[True, result]`` or ``[False, why not]``.
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

from reft.control.wire import (
    AuthenticatedServer,
    Backoff,
    Channel,
    address_towards,
    authenticate,
    check_authentic,
    connect_authenticated,
    derive_key,
    parse_endpoint,
)
from reft.errors import AuthenticationError, ConfigError


class StoreError(RuntimeError):
    """The store does not answer, or refuses an operation."""


class RendezvousStore(ABC):
    """A client; what reft needs of a ``torch.distributed.Store``. Safe to use from several threads.
    Every method is bounded and raises StoreError if the store does not answer in time.
    ``keeps_leases``: a holder of a name has to come back in time; otherwise it is its connection
    that tells."""

    prefix: str = ""  # put before every key
    _timeout_secs = 30.0
    keeps_leases = False

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """``host:port`` of the server that answers."""

    def with_prefix(self, prefix: str) -> Self:
        """The same store over the same connection, with ``prefix/`` before every key."""
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__, prefix=f"{self.prefix}{prefix}/")
        return view

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Write, whatever was there."""

    def get(self, key: str) -> bytes:
        """The value of ``key``, once there is one; raises TimeoutError if none comes."""
        value = self.peek(key)
        if value is None:
            self.wait([key])
            value = self.peek(key)
        if value is None:
            raise StoreError(f"the rendezvous store has lost {key!r}")
        return value

    @abstractmethod
    def peek(self, key: str) -> bytes | None:
        """The value of ``key``, or None."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there; with no keys, whether the store answers."""
        found = [self.peek(key) for key in keys or [""]]
        return not keys or None not in found

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Whether it was there."""

    @abstractmethod
    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        """Set ``key`` if it holds ``expected`` (None: nothing); whether it was set, and what it
        holds now."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; raises TimeoutError."""
        secs = self._timeout_secs if timeout is None else timeout.total_seconds()
        deadline, looks = time.monotonic() + secs, Backoff(_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS)
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no node wrote {', '.join(keys)} to the rendezvous store in {secs:.0f} s"
                )
            time.sleep(looks.failed())

    @abstractmethod
    def hold(self, name: str, secs: float) -> None:
        """Be known by ``name`` for as long as this process is connected; where the store keeps
        leases, for ``secs`` from now on."""

    def alive(self, prefix: str) -> frozenset[str]:
        """The names with that prefix whose holders live now; nobody where the store keeps no
        leases: its clients then tell each other by heartbeats in what they share."""
        return frozenset()

    @abstractmethod
    def left(self, prefix: str) -> dict[str, float]:
        """Who held a name that begins with ``prefix`` and does so no more: seconds by name."""

    def time(self) -> float | None:
        """Seconds since 1970 by the store's clock, which its clients share; None where it tells no
        time."""
        return None

    def local_address(self) -> str:
        """The address of this host on its way to the store."""
        found = address_towards(*parse_endpoint(self.endpoint))
        if found is None:
            raise StoreError(f"the rendezvous store at {self.endpoint} cannot be reached")
        return found

    @abstractmethod
    def close(self) -> None:
        """End the connection, also for all views of this store; a request under way fails."""


logger = logging.getLogger(__name__)

PURPOSE = "rendezvous"
_RETRY_SECS = 1.0
_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS = 0.01, 0.25
_REPEATABLE = ("get", "set", "check", "delete", "compare_set", "left", "time")
"""Doing these twice leaves what doing them once does; a lost answer is asked for again."""
_LEFT_SECS = 600.0  # Whose connection has ended is known for so long
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
_FILE = "rendezvous.sqlite"
_PURPOSE = b"rendezvous state"


class KeyValueServer:
    """Serves a table to everybody who knows the secret. ``table``: what it holds from the start.
    ``journal``: keeps the table on disk, and has that of an earlier server."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        table: Mapping[str, bytes] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal
        self._table: dict[str, bytes] = {**(journal.table if journal else {}), **(table or {})}
        self._lock = threading.Lock()
        self._holders: dict[str, Channel] = {}
        self._left: dict[str, float] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "get": self._table.get,
            "set": self._set,
            "add": self._add,
            "check": lambda keys: all(key in self._table for key in keys),
            "delete": self._delete,
            "compare_set": self._compare_set,
            "time": time.time,
            "left": lambda prefix: {
                name: time.monotonic() - at
                for name, at in self._left.items()
                if name.startswith(prefix)
            },
        }
        self._server = AuthenticatedServer(listener, secret, PURPOSE, self._serve_until_it_ends)
        self.host, self.port = self._server.host, self._server.port

    def close(self) -> None:
        self._server.close()
        with self._lock:
            if self._journal is not None:
                self._journal.close()

    def holders(self) -> set[str]:
        with self._lock:
            return set(self._holders)

    def _serve_until_it_ends(self, channel: Channel) -> None:
        def hold(name: str) -> None:
            self._holders[name] = channel
            self._left.pop(name, None)

        try:
            _serve(channel, {**self._operations, "hold": hold}, self._lock)
        finally:
            now = time.monotonic()
            with self._lock:
                for name in [n for n, holder in self._holders.items() if holder is channel]:
                    del self._holders[name]
                    self._left[name] = now
                self._left = {n: at for n, at in self._left.items() if now - at < _LEFT_SECS}

    # -- what is asked for, by one client after the other ------------------------------------------

    def _set(self, key: str, value: bytes) -> None:
        if not isinstance(key, str) or not isinstance(value, bytes):
            raise TypeError(
                f"found {type(key).__name__} and {type(value).__name__}; expected a key of text "
                "and bytes"
            )
        self._table[key] = value
        if self._journal is not None:
            self._journal.note(self._table, key)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._table.get(key, b"0")) + int(amount)
        self._set(key, str(total).encode())
        return total

    def _delete(self, key: str) -> bool:
        was_there = self._table.pop(key, None) is not None
        if was_there and self._journal is not None:
            self._journal.note(self._table, key)
        return was_there

    def _compare_set(self, key: str, expected: bytes | None, value: bytes) -> list[Any]:
        held = self._table.get(key)
        if held != expected:
            return [False, held]
        self._set(key, value)
        return [True, value]


def relay_store(
    listener: socket.socket, secret: bytes, store: RendezvousStore
) -> AuthenticatedServer:
    """Another store, for those on this host who speak to a :class:`KeyValueServer`."""
    operations: dict[str, Callable[..., Any]] = {
        "get": store.peek,
        "set": store.set,
        "check": store.check,
        "delete": store.delete,
        "compare_set": store.compare_set,
    }
    serve = partial(_serve, operations=operations, lock=nullcontext())
    return AuthenticatedServer(listener, secret, PURPOSE, serve)


def _serve(
    channel: Channel,
    operations: Mapping[str, Callable[..., Any]],
    lock: AbstractContextManager[object],
) -> None:
    while True:
        request = channel.receive()
        try:
            name, *arguments = request
            with lock:
                answer = [True, operations[name](*arguments)]
        except (KeyError, TypeError, ValueError, StoreError, AuthenticationError) as error:
            answer = [False, f"{type(error).__name__}: {error}"]
        channel.send(answer)


class KeyValueStore(RendezvousStore):
    """A client of :class:`KeyValueServer`. Connects at the first request and again at the next one
    after the connection broke. ``timeout_secs``: for every request, and for the keys that
    :meth:`get` waits for."""

    def __init__(
        self, endpoint: str, secret: bytes, *, timeout_secs: float = 30.0, prefix: str = ""
    ) -> None:
        self.prefix = prefix
        self._endpoint = endpoint
        self._line = _Line(endpoint, secret, timeout_secs)
        self._timeout_secs = timeout_secs

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def set(self, key: str, value: str | bytes) -> None:
        self._line.ask(
            "set", self.prefix + key, value.encode() if isinstance(value, str) else value
        )

    def peek(self, key: str) -> bytes | None:
        value: bytes | None = self._line.ask("get", self.prefix + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number that ``key`` holds (none: 0); the sum."""
        return int(self._line.ask("add", self.prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._line.ask("check", [self.prefix + k for k in keys]))

    def delete(self, key: str) -> bool:
        return bool(self._line.ask("delete", self.prefix + key))

    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        done, held = self._line.ask("compare_set", self.prefix + key, expected, value)
        return bool(done), held

    def hold(self, name: str, secs: float = 0.0) -> None:
        """Does not wait for the store."""
        self._line.hold(self.prefix + name)

    def left(self, prefix: str) -> dict[str, float]:
        """The kernel ends the connection of a process that dies; that of a host which dies
        stays."""
        found: dict[str, float] = self._line.ask("left", self.prefix + prefix)
        return {name.removeprefix(self.prefix): secs for name, secs in found.items()}

    def time(self) -> float | None:
        return float(self._line.ask("time"))

    def close(self) -> None:
        self._line.close()


class _Line:
    """The connection that all views of a store share."""

    def __init__(self, endpoint: str, secret: bytes, timeout_secs: float) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._timeout_secs = timeout_secs
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._refused_until = 0.0
        self._held_names: dict[str, _HeldName] = {}

    def hold(self, name: str) -> None:
        """Once: it is said again with every new connection."""
        if name not in self._held_names:
            self._held_names[name] = _HeldName(self._dial, name)

    def ask(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            was_connected = self._channel is not None
            if not was_connected and time.monotonic() < self._refused_until:
                raise StoreError(
                    f"the rendezvous store at {self._endpoint} did not answer its last request"
                )
            try:
                try:
                    done, result = self._ask_once(operation, *arguments)
                except (ConnectionError, EOFError):
                    if not was_connected or operation not in _REPEATABLE:
                        raise
                    # The server was started again since the last request.
                    self._drop()
                    done, result = self._ask_once(operation, *arguments)
            except AuthenticationError:
                self._drop()
                raise
            except (OSError, EOFError) as error:
                self._drop()
                # Others that wait for the lock are not made to wait as long each.
                self._refused_until = time.monotonic() + _RETRY_SECS
                raise StoreError(
                    f"the rendezvous store at {self._endpoint} does not answer: {error}"
                ) from error
            except BaseException:
                # A signal's exception, too: an answer left unread would be taken for the next
                # one's.
                self._drop()
                raise
        if not done:
            raise StoreError(f"the rendezvous store refuses {operation}: {result}")
        return result

    def close(self) -> None:
        for held in self._held_names.values():
            held.close()
        # Without the lock: a request under way, to a store that stands still, is not waited for.
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _ask_once(self, operation: str, *arguments: Any) -> list[Any]:
        if self._channel is None:
            self._channel = self._dial()
        self._channel.send([operation, *arguments])
        answer: list[Any] = self._channel.receive()
        return answer

    def _dial(self) -> Channel:
        return connect_authenticated(self._endpoint, self._secret, PURPOSE, self._timeout_secs)

    def _drop(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.close()
        self._channel = None


class _HeldName:
    """Keeps a name at the rendezvous store for as long as this process lives. A connection that
    breaks is made again at once, by a thread of its own."""

    def __init__(self, dial: Callable[[], Channel], name: str) -> None:
        self._dial = dial
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._channel: Channel | None = None
        threading.Thread(target=self._stay, name="presence", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._ended.set()
            if self._channel is not None:
                self._channel.shutdown()

    def _stay(self) -> None:
        pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        pause = pauses.pause
        while not self._ended.wait(pause):
            try:
                channel = self._dial()
            except AuthenticationError:
                return  # who asks for something hears of it
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
        channel.receive()


class Journal:
    """Of one server at a time. ``directory``: where it is kept; made if it is missing, for its user
    alone. Raises ConfigError: the directory cannot be used, or another server uses it. Raises
    AuthenticationError: somebody else has written there."""

    def __init__(self, directory: Path, secret: bytes) -> None:
        self._path = directory / _FILE
        self._secret = secret
        unusable = (
            f"--state-dir {directory} cannot be used: {{}}; give a directory that you may write to"
        )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(unusable.format(error.strerror or error)) from error
        base = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        self._base: sqlite3.Connection | None = base
        try:
            # Locked for as long as it is open. A host that goes down may take the newest entries
            # along.
            for setting in (
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "synchronous = NORMAL",
            ):
                base.execute(f"PRAGMA {setting}")
            base.execute("CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB)")
            found = base.execute("SELECT key, value FROM entries")
            self.table = {k: check_authentic(v, self._key_of(k), _PURPOSE) for k, v in found}
        except (sqlite3.Error, AuthenticationError) as error:
            self.close()
            if isinstance(error, sqlite3.OperationalError):
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise ConfigError(unusable.format(error)) from error
                raise ConfigError(
                    f"another `reft rendezvous` keeps its state in {directory}: end it, or give "
                    "this one its "
                    f"own --state-dir"
                ) from error
            raise AuthenticationError(
                f"{self._path} was not written with this user's secret, or was changed: give back "
                "the secret "
                f"that it was written with, or remove it and the job's state with it"
            ) from error

    def note(self, table: Mapping[str, bytes], key: str) -> None:
        """``key`` of ``table`` was changed, or deleted. A disk that fails is told once, and ends
        the journal: nothing that is out of date is read later."""
        if self._base is None:
            return
        try:
            if (value := table.get(key)) is None:
                self._base.execute("DELETE FROM entries WHERE key = ?", (key,))
            else:
                sealed = authenticate(value, self._key_of(key), _PURPOSE)
                self._base.execute("REPLACE INTO entries VALUES (?, ?)", (key, sealed))
        except sqlite3.Error as error:
            logger.warning("the rendezvous state is no longer saved: %s", error)
            self.close()
            for path in self._path.parent.glob(f"{_FILE}*"):
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Let another server have it."""
        base, self._base = self._base, None
        if base is not None:
            with suppress(sqlite3.Error):
                base.close()

    def _key_of(self, key: str) -> bytes:
        """A code is good for one entry alone: values cannot be exchanged."""
        return derive_key(self._secret, _PURPOSE, key.encode())
