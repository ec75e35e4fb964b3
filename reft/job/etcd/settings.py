"""Where an etcd cluster is, and how it is asked: from the command line and the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reft.control.door import format_endpoint, parse_endpoint
from reft.env import (
    ENV_ETCD_CACERT,
    ENV_ETCD_CERT,
    ENV_ETCD_KEY,
    ENV_ETCD_PASSWORD,
    ENV_ETCD_PASSWORD_FILE,
    ENV_ETCD_USER,
)
from reft.errors import ConfigError

BACKEND = "etcd-v3"
DEFAULT_PORT = 2379
_SCHEMES = ("http://", "https://")
_ENVIRONMENT = {
    "user": ENV_ETCD_USER,
    "cacert": ENV_ETCD_CACERT,
    "cert": ENV_ETCD_CERT,
    "key": ENV_ETCD_KEY,
}
"""What ``--rdzv-conf`` takes, and the variable that says it where that does not; the keys are etcdctl's."""
_MOST_PASSWORD_BYTES = 4096


@dataclass(frozen=True)
class EtcdSettings:
    """How to reach a cluster.

    Attributes:
        endpoints: ``host:port`` of its members, at least one.
        tls: speak TLS.
        user: etcd's user; None where its authentication is off.
        password: of that user.
        ca_cert: file with the certificates that sign the members'; None: those that gRPC comes with.
        cert: file with this client's certificate, where etcd asks for one.
        key: file with its key.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, endpoint: str, conf: Mapping[str, Any], environ: Mapping[str, str]) -> EtcdSettings:
        """Read ``--rdzv-endpoint``, ``--rdzv-conf`` and the environment; the command line goes first.

        Raises:
            ConfigError: something is missing or does not fit together; says what to write.
        """
        if "password" in conf:
            raise ConfigError(
                f"--rdzv-conf password=... would show it to everybody on this host, in /proc: set "
                f"{ENV_ETCD_PASSWORD}, or {ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
            )
        said = {name: str(conf.get(name) or environ.get(env, "")) for name, env in _ENVIRONMENT.items()}
        endpoints, tls = _members(endpoint)
        files = {name: _file(name, said[name]) for name in ("cacert", "cert", "key")}
        if (files["cert"] is None) != (files["key"] is None):
            there, missing = ("cert", "key") if files["cert"] else ("key", "cert")
            raise ConfigError(f"etcd's {there} is given without {missing}: {_how(missing)}")
        password = _password(environ)
        if bool(said["user"]) != (password is not None):
            raise ConfigError(
                f"etcd's user is {said['user']!r}, without a password: set {ENV_ETCD_PASSWORD}, or "
                f"{ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
                if said["user"]
                else f"there is a password for etcd, and no user: {_how('user')}"
            )
        return cls(
            endpoints=endpoints,
            tls=tls or any(files.values()),
            user=said["user"] or None,
            password=password,
            ca_cert=files["cacert"],
            cert=files["cert"],
            key=files["key"],
        )


def _members(endpoint: str) -> tuple[tuple[str, ...], bool]:
    """``host:port`` of each, and whether ``https://`` is said."""
    given = [e.strip() for e in endpoint.split(",") if e.strip()]
    if not given:
        raise ConfigError(
            f"--rdzv-backend {BACKEND} needs the members of the etcd cluster: --rdzv-endpoint "
            f"HOST1:{DEFAULT_PORT},HOST2:{DEFAULT_PORT},HOST3:{DEFAULT_PORT}"
        )
    schemes = {next((s for s in _SCHEMES if e.startswith(s)), "") for e in given}
    if {"http://", "https://"} <= schemes:
        raise ConfigError(f"--rdzv-endpoint is {endpoint}: write http:// or https:// for all members alike")
    bare = [e.removeprefix("http://").removeprefix("https://").rstrip("/") for e in given]
    members = [format_endpoint(*parse_endpoint(e, DEFAULT_PORT)) for e in bare]
    return tuple(dict.fromkeys(members)), "https://" in schemes


def _file(name: str, given: str) -> Path | None:
    if not given:
        return None
    path = Path(given)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ConfigError(f"etcd's {name} is {given}, which cannot be read; {_how(name)}")
    return path


def _how(name: str) -> str:
    return f"write --rdzv-conf {name}=... or set {_ENVIRONMENT[name]}"


def _password(environ: Mapping[str, str]) -> str | None:
    if given := environ.get(ENV_ETCD_PASSWORD):
        return given
    name = environ.get(ENV_ETCD_PASSWORD_FILE)
    if not name:
        return None
    try:
        with open(name, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                raise ConfigError(
                    f"{ENV_ETCD_PASSWORD_FILE} is {name}, which others can use (mode {mode:04o}): chmod 600 "
                    f"{name}"
                )
            return file.read(_MOST_PASSWORD_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{ENV_ETCD_PASSWORD_FILE} is {name}, which cannot be read ({error})") from error
