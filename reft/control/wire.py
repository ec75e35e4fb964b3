"""Messages between processes, and servers for those who know the job's secret (P11).

Messages are msgpack frames with a keyed MAC. Both sides prove that they know the secret by
answering the other's challenge, before anything else is read. Every later frame carries a MAC over
its direction, its number and its bytes, so that it can be neither forged nor replayed nor
reordered. Nothing is unpickled. Frames are not encrypted.

The standard library's ``multiprocessing.connection`` has the same challenge, but unpickles what
comes after it and does not authenticate it. TLS needs certificates, or pre-shared keys, which
``ssl`` offers from Python 3.13 on.

Servers listen on one address, between hosts (TCP) or processes of a host (Unix). Before both sides
have proved the secret, exactly one challenge and one proof, 64 bytes, are read from a connection.
"""

from __future__ import annotations

import errno
import hmac
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
from hashlib import blake2b
from typing import Any

import msgpack

from reft.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

MAC_BYTES = 16
KEY_BYTES = 32


def mac(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    return blake2b(body, key=secret, digest_size=MAC_BYTES, person=purpose).digest()


def derive_key(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    """A key of :data:`KEY_BYTES` bytes, for one purpose and context alone."""
    return blake2b(context, key=secret, digest_size=KEY_BYTES, person=purpose).digest()


def is_same(found: bytes, expected: bytes) -> bool:
    """Whether a code is the expected one; takes as long wherever they differ."""
    return hmac.compare_digest(found, expected)


def authenticate(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    return mac(body, secret, purpose) + body


def check_authentic(data: bytes | memoryview, secret: bytes, purpose: bytes) -> bytes:
    raw = bytes(data)
    found, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not is_same(found, mac(body, secret, purpose)):
        raise AuthenticationError(
            f"a message of {len(raw)} bytes ({purpose.decode()}) does not carry the job's secret: "
            "it comes "
            f"from another job or was forged. Give every node the same REFT_SECRET"
        )
    return body


MAX_FRAME_BYTES = 16 * 2**20
_NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_PROOF, _SESSION, _FRAME = b"reft-proof", b"reft-session", b"reft-frame"
_HEAD_BYTES = _LENGTH.size + MAC_BYTES
_PART_BYTES = 2**20  # most that is read at once


class Channel:
    """An authenticated, ordered stream of messages over a connected socket. ``connection``:
    connected; its timeout bounds every read and write. ``secret``: of both sides; the job's, or a
    key made of it. ``line``: name of the line in error messages. ``handshake_secs``: time for the
    whole handshake. Raises AuthenticationError: the other side does not know the secret."""

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
        self.peer = ""  # Who is on the other side, in words, where that is known
        self._outgoing = b"s" if server else b"c"
        self._incoming = b"c" if server else b"s"
        self._sent = 0
        self._received = 0
        self._frame = bytearray()  # what has come of the next frame
        patience = connection.gettimeout()
        self._key = self._handshake(secret, time.monotonic() + handshake_secs)
        connection.settimeout(patience)

    def _handshake(self, secret: bytes, deadline: float) -> bytes:
        mine = os.urandom(_NONCE_BYTES)
        self._socket.sendall(mine)
        theirs = self._read_exactly(_NONCE_BYTES, deadline)
        self._socket.sendall(mac(self._outgoing + mine + theirs, secret, _PROOF))
        proof = self._read_exactly(MAC_BYTES, deadline)
        # P11: nothing of the other side is parsed before it has proved that it knows the secret.
        if not is_same(proof, mac(self._incoming + theirs + mine, secret, _PROOF)):
            raise AuthenticationError(
                f"the other side of {self._line} does not know this job's secret: it belongs to "
                "another job "
                f"or run, or to another user"
            )
        return derive_key(secret, _SESSION, b"".join(sorted((mine, theirs))))

    def send(self, message: Any) -> None:
        """Send one message; raises ValueError if it is too large."""
        self._socket.sendall(self.to_send(message))

    def to_send(self, message: Any) -> bytes:
        """The frame of the next message, for :meth:`send_some`; raises ValueError if it is too
        large."""
        body: bytes = msgpack.packb(message, use_bin_type=True)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
        code = self._code(self._outgoing, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + code + body

    def send_some(self, frame: memoryview) -> int:
        """Send what the other side takes of a frame within the connection's timeout; returns how
        many bytes. All of it has to be taken before the next frame."""
        return self._socket.send(frame)

    def receive(self) -> Any:
        """The next message; raises EOFError when the other side has ended the connection."""
        while (received := self.receive_some()) is None:
            pass
        return received[0]

    def receive_some(self) -> tuple[Any] | None:
        """Wait for bytes of the next message, and read none after it; the message, once it is
        whole."""
        wanted = self._frame_bytes() - len(self._frame)
        part = self._socket.recv(min(wanted, _PART_BYTES))
        if not part:
            raise EOFError(f"{self._line} was closed by the other side")
        self._frame += part
        if len(self._frame) < self._frame_bytes():
            return None
        frame, self._frame = self._frame, bytearray()
        code, body = bytes(frame[_LENGTH.size : _HEAD_BYTES]), bytes(frame[_HEAD_BYTES:])
        # P11: checked before it is unpacked; the count in the code refuses what is repeated or
        # reordered.
        if not is_same(code, self._code(self._incoming, self._received, body)):
            raise AuthenticationError(
                f"a message on {self._line} was changed, repeated or reordered"
            )
        self._received += 1
        return (msgpack.unpackb(body, raw=False, strict_map_key=False),)

    def _frame_bytes(self) -> int:
        """Length of the next frame; of what tells it, until that is there."""
        if len(self._frame) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._frame)
        if length > MAX_FRAME_BYTES:
            raise AuthenticationError(
                f"frame of {length} bytes announced; at most {MAX_FRAME_BYTES} are read"
            )
        return _HEAD_BYTES + int(length)

    def _code(self, direction: bytes, number: int, body: bytes) -> bytes:
        """All but the last part have one size each: no two messages look alike."""
        return mac(b"".join((direction, _NUMBER.pack(number), body)), self._key, _FRAME)

    def _read_exactly(self, nbytes: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            # Whoever sends a byte now and then does not get more time by it.
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(nbytes - len(parts))
            if not part:
                raise EOFError(f"{self._line} was closed by the other side")
            parts += part
        return bytes(parts)

    def settimeout(self, secs: float | None) -> None:
        self._socket.settimeout(secs)

    def fileno(self) -> int:
        """For ``select`` and ``poll``: nothing that was received is kept back here."""
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """The connection itself, for bytes that are checked in another way. The channel is of no
        use then."""
        return self._socket

    def shutdown(self) -> None:
        """End the connection; a thread that receives sees its end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


# -- servers ---------------------------------------------------------------------------------------

DEFAULT_PORT = 29400
HANDSHAKE_SECS = 10.0
_BACKLOG = 2048
_MOST_STRANGERS = 256  # Connections that have not proved the secret yet; more are closed at once
_MOST_TOLD = 100
_TROUBLE_SECS = 0.1
_IDLE_SECS, _PROBE_SECS, _PROBES = 60, 15, 4


def parse_endpoint(endpoint: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split ``host[:port]``; IPv6 addresses are in brackets. Raises ConfigError: the port is no
    number."""
    host, separator, port = endpoint.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = endpoint.strip(), str(default_port)
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ConfigError(
            f"rendezvous endpoint is {endpoint!r}; expected host:port with a port to 65535"
        )
    return host.strip("[]") or "localhost", int(port)


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_towards(host: str, port: int) -> str | None:
    """This host's address on its way to ``host``; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError:
        return None


def listen(host: str, port: int, option: str = "--host") -> socket.socket:
    """Listen on the address that ``host`` resolves to on this machine, and no other; raises
    ConfigError."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; expected 0 (any free one) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if is_loopback(host):
            # "localhost" is ::1 first on some hosts; trainers look for 127.0.0.1.
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        family, _, _, _, address = found[0]
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
    """Listen on the abstract Unix socket ``name``, which processes of this network namespace can
    reach; :func:`connect_authenticated` calls it ``@name``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)
    return listener


def connect_authenticated(
    endpoint: str, secret: bytes, purpose: str, timeout_secs: float
) -> Channel:
    """Connect to a server and prove the secret. ``endpoint``: ``host:port``, or ``@name`` of a Unix
    socket. ``purpose``: what the server is for; servers for something else refuse.
    ``timeout_secs``: bounds connecting, the handshake, and later every read and write."""
    if endpoint.startswith("@"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection(parse_endpoint(endpoint), timeout=timeout_secs)
    _SOCKETS.add(connection)
    try:
        if endpoint.startswith("@"):
            connection.settimeout(timeout_secs)
            connection.connect(f"\0{endpoint[1:]}")
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
            f"the {purpose} at {endpoint} has another secret than this node, or is not reft's. "
            "Every "
            "process of a job needs the same secret: share ~/.reft/secret between the hosts, or "
            "set "
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
    # Loaders fork their workers: copies of connections would hide from the other side that a
    # process died, and who calls a copied listener would wait for an answer from the child.
    for each in list(_SOCKETS):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def accept(
    listener: socket.socket,
    what: str,
    let_in: Callable[[socket.socket, Any], object],
    is_closed: Callable[[], bool],
) -> None:
    """Take connections in a thread of its own until the listener is closed; trouble is said
    once."""

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
    """Accepts connections and hands those that prove the secret to ``serve``, each in a thread.
    ``serve``: talks to one peer until it returns or raises EOFError or OSError; the channel is
    closed after it, unless it returns True: then it belongs to whoever it gave it to."""

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
            # Wakes the thread that accepts; closing alone would leave the port listening until
            # then.
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
            return Channel(
                connection, self._secret, server=True, line=line, handshake_secs=HANDSHAKE_SECS
            )
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


class Backoff:
    """How long to leave alone what has failed: twice as long after every failure, until it works
    again. The caller goes on with other work meanwhile (tenacity would call a function again and
    again).

    ``first``: pause after the first failure, in seconds, versions or whatever the caller counts.
    ``most``: longest pause, in the same unit."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.pause = first  # what follows the next failure

    def failed(self) -> float:
        """Count a failure; returns the pause that follows it."""
        pause = self.pause
        self.pause = min(2 * pause, self._most)
        return pause

    def reset(self) -> None:
        """It works again."""
        self.pause = self._first
