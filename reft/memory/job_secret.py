"""The secret of a job: 32 bytes with which its processes authenticate each other (P11)."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from reft.durable import whole_file
from reft.env import ENV_SECRET
from reft.errors import AuthenticationError, ConfigError
from reft.memory.ownership import OTHER_MEMORY, check_private_stat

SECRET_FILE = "secret"
SECRET_BYTES = 32
_HINT = f"or set {ENV_SECRET} to {2 * SECRET_BYTES} hexadecimal digits on every host"


def parse_secret(text: str, origin: str) -> bytes:
    """Decode a secret that is written in hexadecimal.

    Args:
        text: 64 hexadecimal digits.
        origin: description of where the text is from, for the message.

    Raises:
        AuthenticationError: the text is not a secret.
    """
    with suppress(ValueError):
        value = bytes.fromhex(text.strip())
        if len(value) == SECRET_BYTES:
            return value
    raise AuthenticationError(
        f"{origin}: not a secret; expected {SECRET_BYTES} bytes in hexadecimal ({2 * SECRET_BYTES} "
        "digits)"
    )


def read_environment_secret() -> bytes | None:
    """Return the job's secret that the launcher passes to its trainers in the environment; None
    without a launcher."""
    text = os.environ.get(ENV_SECRET)
    return parse_secret(text, ENV_SECRET) if text else None


def read_secret(path: Path) -> bytes:
    """Return the secret of a job's directory.

    Raises:
        AuthenticationError: the file is missing or malformed, belongs to another user, or can be
            read by others.
    """
    file = path / SECRET_FILE
    try:
        return _read_secret_file(file)
    except OSError as error:
        if isinstance(error, AuthenticationError):
            raise
        raise AuthenticationError(
            f"{file}: the job's secret cannot be read: {error.strerror}"
        ) from error


def ensure_secret(path: Path, expected: bytes | None) -> None:
    """Write a secret into a job's directory if it has none. Several processes may call this at
    once.

    Args:
        path: the job's directory.
        expected: the secret; None accepts the existing one, or makes a new one.

    Raises:
        AuthenticationError: the directory was made with another secret than expected.
    """
    file = path / SECRET_FILE
    if not os.path.lexists(file):
        # The complete file appears in one step and never replaces an existing file. So if several
        # processes do this at once, the secret of the first one is used.
        with whole_file(file, mode=0o600, sync=False, replace=False) as draft:
            draft.write((expected or secrets.token_bytes(SECRET_BYTES)).hex().encode())
    if expected is not None and read_secret(path) != expected:
        raise AuthenticationError(
            f"{file}: the memory of this job on this node was made with another secret than yours "
            f"now ({ENV_SECRET}, or ~/.reft/secret): another run with the same job_id. Give that "
            "run's secret to resume it, or remove its memory with 'reft clean' or choose another "
            "job_id"
        )


def user_secret() -> bytes:
    """Return the secret in ``REFT_SECRET`` or, if that is unset, in the user's file
    ``~/.reft/secret``, which is created at its first use.

    Raises:
        AuthenticationError: the text is not a secret, or others can read or write the file.
        ConfigError: the file cannot be made or read.
    """
    given = os.environ.get(ENV_SECRET)
    if given:
        return parse_secret(given, ENV_SECRET)
    home = os.environ.get("HOME")
    if not home:
        raise ConfigError(f"HOME is not set, so there is no ~/.reft/secret: set HOME, {_HINT}")
    path = Path(home) / ".reft" / "secret"
    try:
        if not os.path.lexists(path):
            # As for the job's file, but here processes on several hosts may do it at once: the
            # secret of the first one is used.
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with whole_file(path, mode=0o600, replace=False) as file:
                file.write(f"{secrets.token_hex(SECRET_BYTES)}\n".encode())
        return _read_secret_file(path, f"remove it, and reft makes one, {_HINT}")
    except OSError as error:
        if isinstance(error, AuthenticationError):
            raise
        raise ConfigError(
            f"the secret of your jobs cannot be kept in {path}: {error.strerror or error}; make "
            f"that directory usable, {_HINT}"
        ) from error


def _read_secret_file(file: Path, remedy: str = OTHER_MEMORY) -> bytes:
    # NONBLOCK, because opening a named pipe at this path would block.
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise AuthenticationError(f"{file}: expected a file, found something else; remove it")
        check_private_stat(file, info, remedy)
        return parse_secret(stream.read(4 * SECRET_BYTES).decode("ascii", "replace"), str(file))
