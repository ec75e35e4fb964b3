"""The job's message authentication code (P11) and the keys that are made of its secret: keyed BLAKE2b, apart
for every purpose. A purpose has at most 16 bytes; a secret at most 64."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from reft.errors import AuthenticationError

MAC_BYTES = 16
KEY_BYTES = 32


def mac(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """The code of ``body``, of :data:`MAC_BYTES` bytes."""
    return blake2b(body, key=secret, digest_size=MAC_BYTES, person=purpose).digest()


def derive_key(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    """A key of :data:`KEY_BYTES` bytes, for one purpose and context alone."""
    return blake2b(context, key=secret, digest_size=KEY_BYTES, person=purpose).digest()


def is_same(found: bytes, expected: bytes) -> bool:
    """Whether a code is the expected one; takes as long wherever they differ."""
    return hmac.compare_digest(found, expected)


def authenticate(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """``body`` with its code in front."""
    return mac(body, secret, purpose) + body


def check_authentic(data: bytes | memoryview, secret: bytes, purpose: bytes) -> bytes:
    """The body of an authenticated message."""
    raw = bytes(data)
    found, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not is_same(found, mac(body, secret, purpose)):
        raise AuthenticationError(
            f"a message of {len(raw)} bytes ({purpose.decode()}) does not carry the job's secret: it comes "
            f"from another job or was forged. Give every node the same REFT_SECRET"
        )
    return body
