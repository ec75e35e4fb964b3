"""Messages between processes: msgpack frames with a keyed MAC (P11).

Both sides prove that they know the job's secret by answering the other's challenge, before anything else is
read. Every later frame carries a MAC over its direction, its number and its bytes, so that it can be neither
forged nor replayed nor reordered. Nothing is unpickled. Frames are not encrypted.

The standard library's ``multiprocessing.connection`` has the same challenge, but unpickles what comes after
it and does not authenticate it. TLS needs certificates, or pre-shared keys, which ``ssl`` offers from Python
3.13 on.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgpack

from reft.errors import AuthenticationError

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
            f"a message of {len(raw)} bytes ({purpose.decode()}) does not carry the job's secret: it comes "
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
    """An authenticated, ordered stream of messages over a connected socket. ``connection``: connected; its
    timeout bounds every read and write. ``secret``: of both sides; the job's, or a key made of it.
    ``line``: name of the line in error messages. ``handshake_secs``: time for the whole handshake. Raises
    AuthenticationError: the other side does not know the secret."""

    def __init__(
        self, connection: socket.socket, secret: bytes, *, server: bool, line: str, handshake_secs: float
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
        """Send what the other side takes of a frame within the connection's timeout; returns how many bytes.
        All of it has to be taken before the next frame."""
        return self._socket.send(frame)

    def receive(self) -> Any:
        """The next message; raises EOFError when the other side has ended the connection."""
        while (received := self.receive_some()) is None:
            pass
        return received[0]

    def receive_some(self) -> tuple[Any] | None:
        """Wait for bytes of the next message, and read none after it; the message, once it is whole."""
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

    @property
    def local_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def settimeout(self, secs: float | None) -> None:
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
