"""Authenticated connections between processes that know the job's secret, and servers (P11).

A message is one msgpack frame with a keyed MAC. Before anything else is read, each side proves that
it knows the secret by answering the other side's challenge. Every later frame carries a MAC over
its direction, its number and its bytes, so no frame can be forged, replayed or reordered. Nothing
is unpickled. Frames are not encrypted.

The standard library's ``multiprocessing.connection`` has the same challenge, but unpickles the
messages that follow and does not authenticate them. TLS would need certificates, or pre-shared
keys, which ``ssl`` offers from Python 3.13 on.

A server listens on one address, for other hosts (TCP) or for processes of this host (Unix). Until
the other side has proved that it knows the secret, exactly one challenge and one proof, 48 bytes,
are read from a connection.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack

from reft.authentication import MAC_BYTES, derive_key, is_same, mac, purpose_key
from reft.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 2**20
_NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_PROOF, _SESSION, _FRAME = b"reft-proof", b"reft-session", b"reft-frame"
_HEAD_BYTES = _LENGTH.size + MAC_BYTES
_PART_BYTES = 2**20  # Largest single read


class Channel:
    """An authenticated, ordered stream of messages over a connected socket.

    Args:
        connection: connected socket, whose time-out applies to every read and write.
        secret: secret that both sides know: the job's, or a key derived from that.
        server: whether this is the server's side.
        line: name of the connection in error messages.
        handshake_secs: longest duration of the whole handshake.

    Attributes:
        peer: name of the other side, for log messages; empty until it is known.

    Raises:
        AuthenticationError: the other side does not know the secret.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        *,
        server: bool,
        line: str,
        handshake_secs: float,
    ) -> None:
        self._socket = connection
        self._line = line
        self.peer = ""
        self._outgoing = b"s" if server else b"c"
        self._incoming = b"c" if server else b"s"
        self._sent = 0
        self._received = 0
        self._frame = bytearray()  # The part of the next frame that has arrived
        timeout_secs = connection.gettimeout()
        self._key = self._handshake(secret, time.monotonic() + handshake_secs)
        connection.settimeout(timeout_secs)

    def _handshake(self, secret: bytes, deadline: float) -> bytes:
        """Exchange challenges and proofs, and derive the key of this connection."""
        own_nonce = os.urandom(_NONCE_BYTES)
        self._socket.sendall(own_nonce)
        peer_nonce = self._read_exactly(_NONCE_BYTES, deadline)
        self._socket.sendall(mac(self._outgoing + own_nonce + peer_nonce, secret, _PROOF))
        proof = self._read_exactly(MAC_BYTES, deadline)
        # P11: parse no input before the other side has proved that it knows the secret. The proof
        # includes the direction, so that the other side cannot return our own proof.
        if not is_same(proof, mac(self._incoming + peer_nonce + own_nonce, secret, _PROOF)):
            raise AuthenticationError(
                f"the other side of {self._line} does not know this job's secret: it belongs to "
                f"another job or run, or to another user"
            )
        return derive_key(secret, _SESSION, b"".join(sorted((own_nonce, peer_nonce))))

    def send(self, message: Any) -> None:
        """Send one message; raise ValueError if it is too large."""
        self._socket.sendall(self.make_frame(message))

    def make_frame(self, message: Any) -> bytes:
        """Make the frame of the next message, to be sent by :meth:`send_some`.

        Raises:
            ValueError: the message is too large.
        """
        body: bytes = msgpack.packb(message, use_bin_type=True)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
        code = self._code(self._outgoing, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + code + body

    def send_some(self, frame: memoryview) -> int:
        """Send as much of a frame as the other side accepts within the connection's time-out.

        Send the whole frame, by repeated calls, before the next one.

        Returns:
            Number of bytes sent.
        """
        return self._socket.send(frame)

    def receive(self) -> Any:
        """Return the next message; raise EOFError if the other side has closed the connection."""
        while True:
            received = self.receive_some()
            if received is not None:
                return received[0]

    def receive_some(self) -> tuple[Any] | None:
        """Wait for bytes, and read some of the next message but nothing after it.

        Returns:
            A tuple with the message if that is complete now; otherwise None.
        """
        missing = self._frame_bytes() - len(self._frame)
        part = self._socket.recv(min(missing, _PART_BYTES))
        if not part:
            raise EOFError(f"{self._line} was closed by the other side")
        self._frame += part
        if len(self._frame) < self._frame_bytes():
            return None
        frame, self._frame = self._frame, bytearray()
        code, body = bytes(frame[_LENGTH.size : _HEAD_BYTES]), bytes(frame[_HEAD_BYTES:])
        # P11: check the MAC before unpacking the body. The MAC covers the frame's number, so that
        # repeated and reordered frames are refused.
        if not is_same(code, self._code(self._incoming, self._received, body)):
            raise AuthenticationError(
                f"a message on {self._line} was changed, repeated or reordered"
            )
        self._received += 1
        return (msgpack.unpackb(body, raw=False, strict_map_key=False),)

    def _frame_bytes(self) -> int:
        """Return the number of bytes to read next.

        These are first the bytes of the frame's length field. Once that field has arrived, they
        are the bytes of the frame.
        """
        if len(self._frame) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._frame)
        if length > MAX_FRAME_BYTES:
            raise AuthenticationError(
                f"frame of {length} bytes announced; at most {MAX_FRAME_BYTES} are read"
            )
        return _HEAD_BYTES + int(length)

    def _code(self, direction: bytes, number: int, body: bytes) -> bytes:
        # Direction and number have fixed sizes, so no two frames have the same input to the MAC.
        return mac(b"".join((direction, _NUMBER.pack(number), body)), self._key, _FRAME)

    def _read_exactly(self, nbytes: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < nbytes:
            # One deadline for all bytes: a peer that sends them one by one gains no time.
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(nbytes - len(received))
            if not part:
                raise EOFError(f"{self._line} was closed by the other side")
            received += part
        return bytes(received)

    def settimeout(self, secs: float | None) -> None:
        """Set the time-out of every later read and write; None: no time-out."""
        self._socket.settimeout(secs)

    def fileno(self) -> int:
        """Return the descriptor for ``poll``, which sees every message: this class buffers none."""
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """Return the socket itself, for bytes without MAC that have checksums of their own.

        Messages can no longer be sent or received afterwards.
        """
        return self._socket

    def shutdown(self) -> None:
        """End the connection; a thread that is receiving gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


# -- addresses -------------------------------------------------------------------------------------

DEFAULT_PORT = 29400


def parse_endpoint(endpoint: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split ``host[:port]``; an IPv6 address is in brackets.

    Raises:
        ConfigError: the port is not a number from 0 to 65535.
    """
    host, separator, port = endpoint.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = endpoint.strip(), str(default_port)
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ConfigError(
            f"rendezvous endpoint is {endpoint!r}; expected host:port with a port to 65535"
        )
    return host.strip("[]") or "localhost", int(port)


def format_endpoint(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, reaches this host only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_towards(host: str, port: int) -> str | None:
    """Return this host's address on the route to ``host``; None if there is no route.

    Nothing is sent: connecting a UDP socket only looks up the route.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


# -- clients and servers ---------------------------------------------------------------------------

HANDSHAKE_SECS = 10.0
_BACKLOG = 2048
_MAX_STRANGERS = 256  # Most connections in the handshake at once; further ones are closed
_MAX_LOGGED_ADDRESSES = 100
_ACCEPT_RETRY_SECS = 0.1
_IDLE_SECS, _PROBE_SECS, _PROBES = 60, 15, 4


def listen(host: str, port: int, option: str = "--host") -> socket.socket:
    """Listen on the address that ``host`` resolves to on this machine, and on no other.

    Args:
        host: name or address of this machine.
        port: port number; 0: any free port.
        option: command-line option that the error message tells the user to change.

    Raises:
        ConfigError: the address is not this machine's, or the port is in use.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; expected 0 (any free one) to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if is_loopback(host):
            # Prefer IPv4: trainers connect to 127.0.0.1, but "localhost" may be ::1 first.
            addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
        family, _, _, _, address = addresses[0]
        return socket.create_server(
            address[:2], family=socket.AddressFamily(family), backlog=_BACKLOG
        )
    except OSError as error:
        hint = f"give an address of this machine with {option}"
        if error.errno == errno.EADDRINUSE:
            hint = (
                "another process listens there: end it, or take another --port (0 finds a free one)"
            )
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; {hint}"
        ) from error


def listen_locally(name: str) -> socket.socket:
    """Listen on an abstract Unix socket, which processes of this network namespace can reach.

    The endpoint to give to :func:`connect_authenticated` is ``@name``.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)
    return listener


def connect_authenticated(
    endpoint: str, secret: bytes, purpose: str, timeout_secs: float
) -> Channel:
    """Connect to a server; both sides prove that they know the secret.

    Args:
        endpoint: ``host:port``, or ``@name`` of an abstract Unix socket.
        secret: secret of the job.
        purpose: name of the service; a server with a different purpose refuses the connection.
        timeout_secs: time-out of connecting, of the handshake, and of every later read and write.

    Raises:
        AuthenticationError: the server has a different secret or purpose.
        ConnectionError, TimeoutError: the server does not answer.
    """
    if endpoint.startswith("@"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection(parse_endpoint(endpoint), timeout=timeout_secs)
    _SOCKETS.add(connection)
    try:
        if endpoint.startswith("@"):
            connection.settimeout(timeout_secs)
            connection.connect(f"\0{endpoint[1:]}")
        _enable_keepalive(connection)
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
            f"the {purpose} at {endpoint} has another secret than this node, or is not reft's. "
            "Every process of a job needs the same secret: share ~/.reft/secret between the hosts, "
            "or set REFT_SECRET to the same 64 hexadecimal digits everywhere, and check the address"
        ) from error
    except EOFError as error:
        connection.close()
        raise ConnectionError(f"{endpoint} closed the connection: {error}") from error
    except BaseException:
        connection.close()
        raise


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of all servers and clients of this process."""


def _close_in_child() -> None:
    # DataLoaders fork worker processes. If a worker kept its copy of a connection open, the other
    # side would not notice the death of this process. If it kept a listening socket open, a client
    # could still connect, but nobody would answer.
    for connection in list(_SOCKETS):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def accept(
    listener: socket.socket,
    name: str,
    admit: Callable[[socket.socket, Any], object],
    is_closed: Callable[[], bool],
) -> None:
    """Accept connections in a new thread until the listener is closed.

    Args:
        listener: listening socket.
        name: name of the server in log messages.
        admit: called with each new connection and its address.
        is_closed: returns whether the listener was closed on purpose, so that errors are expected.
    """

    def run() -> None:
        has_warned = False
        while True:
            try:
                admit(*listener.accept())
                has_warned = False
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if is_closed():
                    return
                if not has_warned:
                    logger.warning("%s cannot accept connections: %s", name, error)
                has_warned = True
                time.sleep(_ACCEPT_RETRY_SECS)

    threading.Thread(target=run, name=name, daemon=True).start()


class AuthenticatedServer:
    """Accepts connections, and serves each client that knows the secret in a thread of its own.

    Args:
        listener: a listening TCP or Unix socket.
        secret: secret of the job.
        purpose: name of the service; clients have to give the same name.
        serve: called with the channel to one client, and serves that client until it returns or
            raises EOFError or OSError. Then the channel is closed, unless ``serve`` returned True
            because it has passed the channel on.

    Attributes:
        host: address on which the server listens; empty for a Unix socket.
        port: port number; 0 for a Unix socket.
        endpoint: address for :func:`connect_authenticated`.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        purpose: str,
        serve: Callable[[Channel], bool | None],
    ) -> None:
        self._listener = listener
        _SOCKETS.add(listener)
        self._secret = purpose_key(secret, purpose)
        self._purpose = purpose
        self._serve = serve
        # Guards the connections and the number of handshakes (strangers), which the accepting
        # thread, the threads of the connections and close() share.
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers = 0
        self._logged_addresses: set[str] = set()
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
        accept(listener, f"the {purpose}", self._admit, lambda: self._closed)

    def stop_listening(self) -> None:
        """Accept no further connections; open connections stay open."""
        self._closed = True
        with suppress(OSError):
            # shutdown() wakes the accepting thread. After close() alone, the port would stay open
            # until that thread's accept() returns.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Stop listening, and end all connections that are being served."""
        self.stop_listening()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: socket.socket, address: tuple[Any, ...] | str) -> None:
        """Start a thread for a new connection, unless too many handshakes are pending."""
        with self._lock:
            if self._closed or self._strangers >= _MAX_STRANGERS:
                connection.close()
                return
            self._strangers += 1
            self._connections.add(connection)
            _SOCKETS.add(connection)
        thread = threading.Thread(
            target=self._run_connection,
            args=(connection, str(address[0]) if address else "this host"),
            name=self._purpose,
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._strangers -= 1
                self._connections.discard(connection)
            connection.close()
            raise

    def _run_connection(self, connection: socket.socket, address: str) -> None:
        handed_on = None
        try:
            channel = self._shake_hands(connection, address)
            if channel is not None:
                handed_on = self._serve(channel)
        except AuthenticationError as error:
            logger.warning("%s: %s; the connection is closed", address, error)
        except (EOFError, OSError, ValueError):  # ValueError: an invalid message
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            if not handed_on:
                connection.close()

    def _shake_hands(self, connection: socket.socket, address: str) -> Channel | None:
        """Return the channel to a client that has proved to know the secret; otherwise None."""
        try:
            _enable_keepalive(connection)
            return Channel(
                connection,
                self._secret,
                server=True,
                line=f"the {self._purpose}",
                handshake_secs=HANDSHAKE_SECS,
            )
        except AuthenticationError:
            # Log each address once, up to a limit: an attacker must not fill the log.
            logged = self._logged_addresses
            if address not in logged and len(logged) < _MAX_LOGGED_ADDRESSES:
                logged.add(address)
                logger.warning(
                    "%s was refused at the %s: it does not know the secret", address, self._purpose
                )
            return None
        finally:
            with self._lock:
                self._strangers -= 1


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect a peer whose host is gone, even if nothing is sent for hours."""
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
