"""Message authentication codes, and keys derived from a secret (P11).

Codes and keys are computed by keyed BLAKE2b. Its ``person`` parameter separates purposes: a code
made for one purpose is never valid for another.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from reft.errors import AuthenticationError

MAC_BYTES = 16
KEY_BYTES = 32


def mac(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """Compute the authentication code of a message.

    Args:
        body: the message.
        secret: the key, 64 bytes at most.
        purpose: name of the purpose of the code, 16 bytes at most.

    Returns:
        The code, :data:`MAC_BYTES` bytes.
    """
    return blake2b(body, key=secret, digest_size=MAC_BYTES, person=purpose).digest()


def derive_key(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    """Derive a key of :data:`KEY_BYTES` bytes for one purpose and one context."""
    return blake2b(context, key=secret, digest_size=KEY_BYTES, person=purpose).digest()


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """Derive the key for one kind of server, so that a proof for one kind of server is useless for
    the others."""
    return derive_key(secret, b"reft-door", purpose.encode())


def is_same(code: bytes, expected: bytes) -> bool:
    """Compare two codes, in a time that does not depend on where they differ."""
    return hmac.compare_digest(code, expected)


def authenticate(body: bytes, secret: bytes, purpose: bytes) -> bytes:
    """Return the message with its authentication code in front."""
    return mac(body, secret, purpose) + body


def check_authentic(data: bytes | memoryview, secret: bytes, purpose: bytes) -> bytes:
    """Check the code of a message that :func:`authenticate` made; return the message without it.

    Raises:
        AuthenticationError: the code was made with a different secret or purpose, or the message
            was changed.
    """
    raw = bytes(data)
    code, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not is_same(code, mac(body, secret, purpose)):
        raise AuthenticationError(
            f"a message of {len(raw)} bytes ({purpose.decode()}) does not carry the job's secret: "
            f"it comes from another job or was forged. Give every node the same REFT_SECRET"
        )
    return body
