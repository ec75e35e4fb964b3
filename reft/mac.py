"""The job's message authentication code (P11): keyed BLAKE2b, 16 bytes, apart for every kind of message."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from reft.errors import AuthenticationError

MAC_BYTES = 16


def mac(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """The code of ``body``. ``purpose`` (at most 16 bytes) keeps kinds of messages apart."""
    return blake2b(body, key=secret, digest_size=MAC_BYTES, person=purpose).digest()


def authenticate(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """``body`` with its code in front."""
    return mac(body, secret, purpose) + body


def check_authentic(data: bytes | memoryview, secret: bytes, purpose: bytes) -> bytes:
    """The body of an authenticated message.

    Raises:
        AuthenticationError: if the code is not the one of this job, or of another kind of message.
    """
    raw = bytes(data)
    found, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not hmac.compare_digest(found, mac(body, secret, purpose)):
        raise AuthenticationError(
            f"a message of {len(raw)} bytes ({purpose.decode()}) does not carry the job's secret: it comes "
            f"from another job or was forged. Give every node the same REFT_SECRET"
        )
    return body
