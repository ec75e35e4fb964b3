"""The secret that the processes of a user's jobs know each other by (P11)."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from reft.durable import whole_file
from reft.env import ENV_SECRET
from reft.errors import AuthenticationError, ConfigError
from reft.memory.jobdir import SECRET_BYTES, parse_secret

_HINT = f"or set {ENV_SECRET} to {2 * SECRET_BYTES} hexadecimal digits on every host"


def user_secret() -> bytes:
    """``REFT_SECRET``, else the user's file ``~/.reft/secret``, which is made at its first use.

    Raises:
        AuthenticationError: the value is no secret, or others can read or write the file.
        ConfigError: there is no home directory to keep it in.
    """
    given = os.environ.get(ENV_SECRET)
    if given:
        return parse_secret(given, ENV_SECRET)
    path = secret_path()
    try:
        if not os.path.lexists(path):
            _make(path)
        return _read(path)
    except OSError as error:
        if isinstance(error, AuthenticationError):
            raise
        raise ConfigError(
            f"the secret of your jobs cannot be kept in {path}: {error.strerror or error}; make that "
            f"directory usable, {_HINT}"
        ) from error


def secret_path() -> Path:
    """``~/.reft/secret``.

    Raises:
        ConfigError: ``HOME`` is not set.
    """
    home = os.environ.get("HOME")
    if not home:
        raise ConfigError(f"HOME is not set, so there is no ~/.reft/secret: set HOME, {_HINT}")
    return Path(home) / ".reft" / "secret"


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise AuthenticationError(
                f"{path} is not a regular file of yours (owner {facts.st_uid}, you are {os.geteuid()}): "
                f"remove it, and reft makes one, {_HINT}"
            )
        if facts.st_mode & 0o077:
            raise AuthenticationError(
                f"{path} can be used by others (mode {stat.S_IMODE(facts.st_mode):04o}; expected 0600). If "
                f"nobody else has seen it: chmod 600 {path}; otherwise remove it, and reft makes a new one"
            )
        return parse_secret(file.read(4 * SECRET_BYTES).decode("ascii", "replace"), str(path))


def _make(path: Path) -> None:
    """Write it whole or not at all: of several processes that try at once, on several hosts, one wins."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with whole_file(path, mode=0o600, replace=False) as file:
        file.write(f"{secrets.token_hex(SECRET_BYTES)}\n".encode())
