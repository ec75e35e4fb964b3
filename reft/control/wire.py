"""Messages between processes: msgpack frames with a keyed MAC (P11).

Both sides prove that they know the job's secret by answering the other's challenge, before anything else is
read. Every later frame carries a MAC over its direction, its number and its bytes, so that it can be neither
forged nor replayed nor reordered. Nothing is unpickled. Frames are not encrypted.

The standard library's ``multiprocessing.connection`` has the same challenge, but unpickles what comes after
it and does not authenticate it. TLS needs certificates, or pre-shared keys, which ``ssl`` offers from Python
3.13 on.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from reft.control.mac import MAC_BYTES, derive_key, is_same, mac
from reft.errors import AuthenticationError

SOCKET_NAME = "daemon.sock"
MAX_FRAME_BYTES = 16 * 2**20
_NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_PROOF, _SESSION, _FRAME = b"reft-proof", b"reft-session", b"reft-frame"
_HEAD_BYTES = _LENGTH.size + MAC_BYTES
_PART_BYTES = 2**20
"""Most that is read at once."""


class Channel:
    """An authenticated, ordered stream of messages over a connected socket.

    Attributes:
        peer: who is on the other side, in words, where that is known.

    Args:
        connection: connected; its timeout bounds every read and write.
        secret: the job's secret.
        server: which side this is.
        line: name of the line in error messages.
        handshake_secs: time for the whole handshake; None: the connection's timeout bounds each read.

    Raises:
        AuthenticationError: the other side does not know the secret.
        OSError: the connection broke or timed out.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        *,
        server: bool,
        line: str = "the daemon's socket",
        handshake_secs: float | None = None,
    ) -> None:
        self._socket = connection
        self._line = line
        self.peer = ""
        self._outgoing = b"s" if server else b"c"
        self._incoming = b"c" if server else b"s"
        self._sent = 0
        self._received = 0
        self._frame = bytearray()
        """What has come of the next frame."""
        patience = connection.gettimeout()
        deadline = None if handshake_secs is None else time.monotonic() + handshake_secs
        self._key = self._handshake(secret, deadline)
        connection.settimeout(patience)

    def _handshake(self, secret: bytes, deadline: float | None) -> bytes:
        mine = os.urandom(_NONCE_BYTES)
        self._socket.sendall(mine)
        theirs = self._read_exactly(_NONCE_BYTES, deadline)
        self._socket.sendall(mac(self._outgoing + mine + theirs, secret, _PROOF))
        proof = self._read_exactly(MAC_BYTES, deadline)
        # P11: nothing of the other side is parsed before it has proved that it knows the secret.
        if not is_same(proof, mac(self._incoming + theirs + mine, secret, _PROOF)):
            raise AuthenticationError(
                f"the other side of {self._line} does not know this job's secret: it belongs to another job "
                f"or run, or to another user"
            )
        return derive_key(secret, _SESSION, b"".join(sorted((mine, theirs))))

    def send(self, message: Any) -> None:
        """Send one message; raises ValueError if it is too large."""
        self._socket.sendall(self.to_send(message))

    def to_send(self, message: Any) -> bytes:
        """The frame of the next message, for :meth:`send_some`; raises ValueError if it is too large."""
        body: bytes = msgpack.packb(message, use_bin_type=True)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
        code = self._code(self._outgoing, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + code + body

    def send_some(self, frame: memoryview) -> int:
        """Send as much of a frame as the other side takes now. Waits for it to take something, as long as the
        connection's timeout.

        Returns:
            Bytes that were taken; all of the frame have to be before the next one.
        """
        return self._socket.send(frame)

    def receive(self) -> Any:
        """The next message; raises EOFError when the other side has ended the connection."""
        while (received := self.receive_some()) is None:
            pass
        return received[0]

    def receive_some(self) -> tuple[Any] | None:
        """Read on in the next message, and in none after it. Waits for a byte of it, as long as the
        connection's timeout.

        Returns:
            The message, once all of it is there; else None.
        """
        wanted = self._frame_bytes() - len(self._frame)
        part = self._socket.recv(min(wanted, _PART_BYTES))
        if not part:
            raise EOFError(f"{self._line} was closed by the other side")
        self._frame += part
        if len(self._frame) < self._frame_bytes():
            return None
        frame, self._frame = self._frame, bytearray()
        code, body = bytes(frame[_LENGTH.size : _HEAD_BYTES]), bytes(frame[_HEAD_BYTES:])
        # P11: checked before it is unpacked; the count in the code refuses what is repeated or reordered.
        if not is_same(code, self._code(self._incoming, self._received, body)):
            raise AuthenticationError(f"a message on {self._line} was changed, repeated or reordered")
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

    def _read_exactly(self, nbytes: int, deadline: float | None = None) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            if deadline is not None:
                # Whoever sends a byte now and then does not get more time by it.
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(nbytes - len(parts))
            if not part:
                raise EOFError(f"{self._line} was closed by the other side")
            parts += part
        return bytes(parts)

    @property
    def local_address(self) -> str:
        """This side's address on a TCP connection."""
        return str(self._socket.getsockname()[0])

    def settimeout(self, secs: float | None) -> None:
        """Bound every later read and write; None: wait for ever."""
        self._socket.settimeout(secs)

    def fileno(self) -> int:
        """For ``select`` and ``poll``: nothing that was received is kept back here."""
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """The connection itself, for bytes that are checked in another way. The channel is of no use then."""
        return self._socket

    def shutdown(self) -> None:
        """End the connection; a thread that receives sees its end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect(job_dir: Path, secret: bytes, timeout_secs: float) -> Channel:
    """Connect to the daemon of ``job_dir``.

    Raises:
        OSError: no daemon answers.
        AuthenticationError: it is not this job's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_secs)
    try:
        with ShortPath(job_dir) as path:
            connection.connect(path)
        return Channel(connection, secret, server=False)
    except BaseException:
        connection.close()
        raise


def listen(job_dir: Path) -> socket.socket:
    """Listen on the daemon's socket of ``job_dir``, mode 0600; replaces a dead daemon's."""
    (job_dir / SOCKET_NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        with ShortPath(job_dir) as path:
            listener.bind(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(old_mask)
    listener.listen(64)
    return listener


class ShortPath:
    """A name for the socket that fits ``sun_path`` (108 bytes), however deep the directory is."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir

    def __enter__(self) -> str:
        self._fd = os.open(self._job_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{SOCKET_NAME}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
