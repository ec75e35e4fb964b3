"""Servers between hosts (TCP) and processes of a host (Unix): a client that does not prove that it knows the
secret gets nothing (P11).

A server listens on one address and speaks :class:`reft.control.wire.Channel`: before both sides have
proved the secret, exactly one challenge and one proof, 64 bytes, are read from a connection.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reft.control.wire import Channel, derive_key
from reft.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400
HANDSHAKE_SECS = 10.0
_BACKLOG = 2048
_MOST_STRANGERS = 256  # Connections that have not proved the secret yet; more are closed at once
_MOST_TOLD = 100
_TROUBLE_SECS = 0.1
_IDLE_SECS, _PROBE_SECS, _PROBES = 60, 15, 4


def parse_endpoint(endpoint: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split ``host[:port]``; IPv6 addresses are in brackets. Raises ConfigError: the port is no number."""
    host, separator, port = endpoint.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = endpoint.strip(), str(default_port)
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"rendezvous endpoint is {endpoint!r}; expected host:port with a port to 65535")
    return host.strip("[]") or "localhost", int(port)


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int, option: str = "--host") -> socket.socket:
    """Listen on the address that ``host`` resolves to on this machine, and no other; raises ConfigError."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; expected 0 (any free one) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if is_loopback(host):
            # "localhost" is ::1 first on some hosts; trainers look for 127.0.0.1.
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=socket.AddressFamily(family), backlog=_BACKLOG)
    except OSError as error:
        hint = f"give an address of this machine with {option}"
        if error.errno == errno.EADDRINUSE:
            hint = "another process listens there: end it, or take another --port (0 finds a free one)"
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; {hint}"
        ) from error


def listen_locally(name: str) -> socket.socket:
    """Listen on the abstract Unix socket ``name``, which processes of this network namespace can reach;
    :func:`connect_authenticated` calls it ``@name``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)
    return listener


def connect_authenticated(endpoint: str, secret: bytes, purpose: str, timeout_secs: float) -> Channel:
    """Connect to a server and prove the secret. ``endpoint``: ``host:port``, or ``@name`` of a Unix socket.
    ``purpose``: what the server is for; servers for something else refuse. ``timeout_secs``: bounds
    connecting, the handshake, and later every read and write."""
    connection = _dial(endpoint, timeout_secs)
    try:
        _keep_alive(connection)
        return Channel(
            connection,
            purpose_key(secret, purpose),
            server=False,
            line=f"the {purpose} at {endpoint}",
            handshake_secs=timeout_secs,
        )
    except AuthenticationError as error:
        connection.close()
        raise AuthenticationError(
            f"the {purpose} at {endpoint} has another secret than this node, or is not reft's. Every "
            f"process of a job needs the same secret: share ~/.reft/secret between the hosts, or set "
            f"REFT_SECRET to the same 64 hexadecimal digits everywhere, and check the address"
        ) from error
    except EOFError as error:
        connection.close()
        raise ConnectionError(f"{endpoint} closed the connection: {error}") from error
    except BaseException:
        connection.close()
        raise


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of all servers, and of their clients


def _close_in_child() -> None:
    # Loaders fork their workers: copies of connections would hide from the other side that a process died,
    # and who calls a copied listener would wait for an answer from the child.
    for each in list(_SOCKETS):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def _dial(endpoint: str, timeout_secs: float) -> socket.socket:
    if not endpoint.startswith("@"):
        connection = socket.create_connection(parse_endpoint(endpoint), timeout=timeout_secs)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_secs)
            connection.connect(f"\0{endpoint[1:]}")
        except BaseException:
            connection.close()
            raise
    _SOCKETS.add(connection)
    return connection


def accept(
    listener: socket.socket,
    what: str,
    let_in: Callable[[socket.socket, Any], object],
    is_closed: Callable[[], bool],
) -> None:
    """Take connections in a thread of its own until the listener is closed; trouble is said once."""

    def run() -> None:
        troubled = False
        while True:
            try:
                let_in(*listener.accept())
                troubled = False
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if is_closed():
                    return
                if not troubled:
                    logger.warning("%s cannot accept connections: %s", what, error)
                troubled = True
                time.sleep(_TROUBLE_SECS)

    threading.Thread(target=run, name=what, daemon=True).start()


class AuthenticatedServer:
    """Accepts connections and hands those that prove the secret to ``serve``, each in a thread. ``serve``:
    talks to one peer until it returns or raises EOFError or OSError; the channel is closed after it,
    unless it returns True: then it belongs to whoever it gave it to."""

    def __init__(
        self, listener: socket.socket, secret: bytes, purpose: str, serve: Callable[[Channel], bool | None]
    ) -> None:
        self._listener = listener
        _SOCKETS.add(listener)
        self._secret = purpose_key(secret, purpose)
        self._purpose = purpose
        self._serve = serve
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers = 0
        self._told: set[str] = set()
        self._closed = False
        address = listener.getsockname()
        self.host: str
        self.port: int
        self.host, self.port = ("", 0) if listener.family == socket.AF_UNIX else address[:2]
        if isinstance(address, str):
            self.endpoint = address
        elif isinstance(address, bytes):
            self.endpoint = f"@{address[1:].decode()}"
        else:
            self.endpoint = format_endpoint(self.host, self.port)
        accept(listener, f"the {purpose}", self._let_in, lambda: self._closed)

    def stop_listening(self) -> None:
        """Take no connection any more; those that are served go on."""
        self._closed = True
        with suppress(OSError):
            # Wakes the thread that accepts; closing alone would leave the port listening until then.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.stop_listening()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _let_in(self, connection: socket.socket, address: tuple[Any, ...] | str) -> None:
        with self._lock:
            if self._closed or self._strangers >= _MOST_STRANGERS:
                connection.close()
                return
            self._strangers += 1
            self._connections.add(connection)
            _SOCKETS.add(connection)
        talk = threading.Thread(
            target=self._talk,
            args=(connection, str(address[0]) if address else "this host"),
            name=self._purpose,
            daemon=True,
        )
        try:
            talk.start()
        except RuntimeError:
            with self._lock:
                self._strangers -= 1
                self._connections.discard(connection)
            connection.close()
            raise

    def _talk(self, connection: socket.socket, address: str) -> None:
        kept = None
        try:
            channel = self._admit(connection, address)
            if channel is not None:
                kept = self._serve(channel)
        except AuthenticationError as error:
            logger.warning("%s: %s; the connection is closed", address, error)
        except (EOFError, OSError, ValueError):  # ValueError: it sent no valid message
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            if not kept:
                connection.close()

    def _admit(self, connection: socket.socket, address: str) -> Channel | None:
        try:
            _keep_alive(connection)
            line = f"the {self._purpose}"
            return Channel(connection, self._secret, server=True, line=line, handshake_secs=HANDSHAKE_SECS)
        except AuthenticationError:
            if address not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(address)
                logger.warning(
                    "%s was refused at the %s: it does not know the secret", address, self._purpose
                )
            return None
        finally:
            with self._lock:
                self._strangers -= 1


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """A key of its own for every purpose: a proof made for one is none for another."""
    return derive_key(secret, b"reft-door", purpose.encode())


def _keep_alive(connection: socket.socket) -> None:
    """Notice peers whose host is gone, on connections that are silent for hours."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_SECS),
        (socket.TCP_KEEPINTVL, _PROBE_SECS),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
