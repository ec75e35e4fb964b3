"""The rendezvous store in an etcd cluster, which survives the loss of a minority of its hosts.

Every write is a transaction that compares the key's ``mod_revision``. So a request that was
delayed, or repeated because its reply was lost, never overwrites a newer value. Values read from
etcd may have been written by any process that has access to it. Therefore each value carries a
MAC, keyed with the user's secret, over its key and its bytes, which is checked before anything
is parsed (P11). The values are not encrypted, because they hold no secret.

The keys of a run are attached to one lease, which every launcher of the run renews: they expire
a minute after the last launcher has ended. Each launcher has a lease of its own as well, which
shows that it is alive, so heartbeats do not rewrite the shared state.
"""

from __future__ import annotations

import importlib
import math
import os
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from reft.authentication import authenticate, check_authentic, purpose_key
from reft.control.keyvalue import RendezvousStore, StoreError
from reft.control.wire import (
    address_towards,
    format_endpoint,
    is_loopback,
    parse_endpoint,
)
from reft.env import (
    ENV_ETCD_CACERT,
    ENV_ETCD_CERT,
    ENV_ETCD_KEY,
    ENV_ETCD_PASSWORD,
    ENV_ETCD_PASSWORD_FILE,
    ENV_ETCD_USER,
)
from reft.errors import AuthenticationError, ConfigError
from reft.job.options import ETCD_BACKEND

ROOT = "reft/"  # Prefix of every key in etcd
RUN_LEASE_SECS = 60
DEFAULT_PORT = 2379
_SCHEMES = ("http://", "https://")
_ENVIRONMENT = {
    "user": ENV_ETCD_USER,
    "cacert": ENV_ETCD_CACERT,
    "cert": ENV_ETCD_CERT,
    "key": ENV_ETCD_KEY,
}
"""Keys of ``--rdzv-conf``, named like etcdctl's options, and the environment variables that can
be used instead."""
_MAX_PASSWORD_BYTES = 4096
# Time-out in seconds per member in the first round through all members; doubled with each round
_MEMBER_SECS = 2.0
_PAUSE_SECS = 0.1
_CHANNEL_OPTIONS = (
    # Connect directly to the members, even if the environment names a proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_TOKEN_ERRORS = (
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
)
_RETRIED_CODES = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "CANCELLED",
    "UNKNOWN",
    "ABORTED",
)
"""gRPC status codes after which the request is sent to the next member."""
_WHEN_FULL = (
    ". Start etcd with --auto-compaction-retention=10m; now: etcdctl compact REVISION, etcdctl "
    "defrag, etcdctl alarm disarm"
)
_PURPOSE = b"etcd value"
_ANSWER_SECS = 10.0
_ANSWER_SECS_AFTER_FAILURE = 2.0
"""Time-out in seconds of requests after one that had no reply; shorter, because callers have
other work to do and retry."""
_REVOKE_SECS = 1.0
_NONCE_BYTES = 16


@dataclass(frozen=True)
class EtcdSettings:
    """The addresses and credentials by which a cluster is reached."""

    endpoints: tuple[str, ...]  # ``host:port`` of each member, at least one
    tls: bool = False
    user: str | None = None  # User name; None if etcd's authentication is off
    password: str | None = field(default=None, repr=False)
    # Certificate authority of the members' certificates; None for the authorities that gRPC
    # trusts
    ca_cert: Path | None = None
    cert: Path | None = None  # Certificate of this client, if etcd requires one
    key: Path | None = None  # Private key of ``cert``

    @classmethod
    def parse(
        cls, endpoint: str, conf: Mapping[str, Any], environ: Mapping[str, str]
    ) -> EtcdSettings:
        """Read the settings; the command line has priority over the environment.

        Args:
            endpoint: value of ``--rdzv-endpoint``.
            conf: values of ``--rdzv-conf``.
            environ: environment of this process.

        Raises:
            ConfigError: a setting is missing, or two contradict each other; the message says what
                to write.
        """
        if "password" in conf:
            raise ConfigError(
                f"--rdzv-conf password=... would show it to all users of this host, in /proc: set "
                f"{ENV_ETCD_PASSWORD}, or {ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
            )
        values = {
            name: str(conf.get(name) or environ.get(variable, ""))
            for name, variable in _ENVIRONMENT.items()
        }
        endpoints, https = _parse_members(endpoint)
        ca_cert = _readable_file("cacert", values["cacert"])
        cert = _readable_file("cert", values["cert"])
        key = _readable_file("key", values["key"])
        if (cert is None) != (key is None):
            given, missing = ("cert", "key") if cert else ("key", "cert")
            raise ConfigError(
                f"etcd's {given} is given without {missing}: {_describe_setting(missing)}"
            )
        user, password = values["user"], _read_password(environ)
        if user and password is None:
            raise ConfigError(
                f"etcd's user is {user!r}, without a password: set {ENV_ETCD_PASSWORD}, or "
                f"{ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
            )
        if password is not None and not user:
            raise ConfigError(
                f"there is a password for etcd, and no user: {_describe_setting('user')}"
            )
        return cls(
            endpoints=endpoints,
            tls=https or any((ca_cert, cert, key)),
            user=user or None,
            password=password,
            ca_cert=ca_cert,
            cert=cert,
            key=key,
        )


def _parse_members(endpoint: str) -> tuple[tuple[str, ...], bool]:
    """Return ``host:port`` of each member, and whether the scheme is ``https://``."""
    urls = [url.strip() for url in endpoint.split(",") if url.strip()]
    if not urls:
        raise ConfigError(
            f"--rdzv-backend {ETCD_BACKEND} needs the members of the etcd cluster: --rdzv-endpoint "
            f"HOST1:{DEFAULT_PORT},HOST2:{DEFAULT_PORT},HOST3:{DEFAULT_PORT}"
        )
    schemes = {next((s for s in _SCHEMES if url.startswith(s)), "") for url in urls}
    if {"http://", "https://"} <= schemes:
        raise ConfigError(
            f"--rdzv-endpoint is {endpoint}: write either http:// or https:// for all members"
        )
    bare = [url.removeprefix("http://").removeprefix("https://").rstrip("/") for url in urls]
    members = [format_endpoint(*parse_endpoint(each, DEFAULT_PORT)) for each in bare]
    return tuple(dict.fromkeys(members)), "https://" in schemes


def _readable_file(name: str, value: str) -> Path | None:
    """Return the path in a setting, whose file must be readable; None if the setting is empty."""
    if not value:
        return None
    path = Path(value)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ConfigError(
            f"etcd's {name} is {value}, which cannot be read; {_describe_setting(name)}"
        )
    return path


def _describe_setting(name: str) -> str:
    return f"write --rdzv-conf {name}=... or set {_ENVIRONMENT[name]}"


def _read_password(environ: Mapping[str, str]) -> str | None:
    """Return the password from the environment or a file; None if neither has one."""
    if password := environ.get(ENV_ETCD_PASSWORD):
        return password
    path = environ.get(ENV_ETCD_PASSWORD_FILE)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            # Check the mode of the opened file, because the name could refer to another file
            # later.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{ENV_ETCD_PASSWORD_FILE} is {path}, which others can use (mode {mode:04o}): "
                    f"chmod 600 {path}"
                )
            return file.read(_MAX_PASSWORD_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{ENV_ETCD_PASSWORD_FILE} is {path}, which cannot be read ({error})"
        ) from error


# -- the connection --------------------------------------------------------------------------------


class RefusedError(StoreError):
    """etcd has refused a request.

    Attributes:
        code: gRPC's status code.
        details: etcd's message.
    """

    def __init__(self, member: str, code: str, details: str) -> None:
        is_full = "database space exceeded" in details
        hint = _WHEN_FULL if is_full else ""
        super().__init__(f"etcd at {member} refuses: {details or code}{hint}")
        self.code = code
        self.details = details


class EtcdClient:
    """Connections to the members of one cluster. Safe to use from several threads.

    Raises:
        ConfigError: ``python3-etcd3`` is not installed, or a certificate cannot be used.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        try:
            self._grpc: Any = importlib.import_module("grpc")
            self.messages: Any = importlib.import_module("etcd3.etcdrpc")
        # The package etcd3, which has the same module name, raises TypeError: its messages need
        # an older protobuf.
        except (ImportError, TypeError) as error:
            raise ConfigError(
                f"--rdzv-backend {ETCD_BACKEND} needs PyPI's python3-etcd3 (not etcd3), which "
                f"cannot be imported ({type(error).__name__}: {error}): pip install "
                f"'reft-ckpt[etcd]', or pip install python3-etcd3"
            ) from error
        self.settings = settings
        if settings.tls:
            credentials = self._grpc.ssl_channel_credentials(
                _read_file(settings.ca_cert), _read_file(settings.key), _read_file(settings.cert)
            )
            self._channels = [
                self._grpc.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)
                for endpoint in settings.endpoints
            ]
        else:
            self._channels = [
                self._grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
                for endpoint in settings.endpoints
            ]
        # Guards _current: if requests of several threads fail on one member, only one thread
        # switches to the next member.
        self._lock = threading.Lock()
        self._current = 0
        self._token: str | None = None
        self._closed = False

    @property
    def member(self) -> str:
        """``host:port`` of the member to which the next request is sent first."""
        return self.settings.endpoints[self._current]

    def request(self, service: str, method: str, message: Any, deadline: float) -> Any:
        """Send a request to one member after another until one answers.

        A request whose reply was lost is repeated, so etcd may carry it out twice.

        Args:
            service: service of etcd's API, such as ``KV``.
            method: method of the service.
            message: the request.
            deadline: time on the monotonic clock, in seconds, until which to try.

        Raises:
            StoreError: no member has answered in time, or etcd has refused the request
                (RefusedError).
            AuthenticationError: user or password are wrong, or the user lacks a permission.
            ConfigError: a user is given, but etcd's authentication is off.
        """
        failures: dict[str, str] = {}
        member_secs, has_renewed_token = _MEMBER_SECS, False
        while True:
            for _ in self.settings.endpoints:
                index = self._current
                member = self.settings.endpoints[index]
                secs = min(member_secs, deadline - time.monotonic())
                if secs <= 0 or self._closed:
                    raise self._no_answer(failures)
                try:
                    return self._request_member(index, service, method, message, secs)
                except self._grpc.RpcError as error:
                    code, details = error.code().name, error.details() or ""
                    is_token_error = any(words in details for words in _TOKEN_ERRORS)
                    if is_token_error and self._token is not None and not has_renewed_token:
                        # Log in again: tokens expire, and a restarted member accepts no old
                        # ones.
                        self._token, has_renewed_token = None, True
                        continue
                    if code not in _RETRIED_CODES:
                        raise self._refusal(member, code, details) from error
                    failures[member] = details or code
                    with self._lock:
                        if self._current == index:
                            self._current = (index + 1) % len(self._channels)
                except ValueError as error:  # Raised by gRPC if the channel was closed
                    raise StoreError(f"the connection to etcd is closed: {error}") from error
            time.sleep(max(0.0, min(_PAUSE_SECS, deadline - time.monotonic())))
            member_secs *= 2  # Give a member that is slow under load more time in the next round

    def _no_answer(self, failures: Mapping[str, str]) -> StoreError:
        members = ", ".join(self.settings.endpoints)
        reasons = "; ".join(f"{member}: {reason}" for member, reason in failures.items())
        in_parentheses = f" ({reasons})" if reasons else ""
        return StoreError(f"the etcd cluster {members} does not answer{in_parentheses}")

    def leader_known_by(self, endpoint: str, secs: float) -> bool | None:
        """Return whether a member knows a leader of the cluster; None if it does not answer."""
        index = self.settings.endpoints.index(endpoint)
        message = self.messages.StatusRequest()
        try:
            status = self._request_member(index, "Maintenance", "Status", message, secs)
        except (self._grpc.RpcError, ValueError):
            return None
        return bool(status.leader)

    def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _request_member(
        self, index: int, service: str, method: str, message: Any, secs: float
    ) -> Any:
        """Send a request to one member, after logging in if a user name is set."""
        deadline = time.monotonic() + secs
        channel = self._channels[index]
        metadata = None
        if self.settings.user is not None and service != "Maintenance":
            token = self._token
            if token is None:
                credentials = self.messages.AuthenticateRequest(
                    name=self.settings.user, password=self.settings.password
                )
                auth = self.messages.AuthStub(channel)
                answer = auth.Authenticate(credentials, timeout=secs)
                token = self._token = str(answer.token)
            metadata = (("token", token),)
        stub = getattr(self.messages, f"{service}Stub")(channel)
        call = getattr(stub, method)
        left_secs = max(0.001, deadline - time.monotonic())
        if method == "LeaseKeepAlive":
            # This method streams requests and replies. No reply means that the lease no longer
            # exists.
            answers = list(call(iter([message]), timeout=left_secs, metadata=metadata))
            return answers[0] if answers else self.messages.LeaseKeepAliveResponse(ID=message.ID)
        return call(message, timeout=left_secs, metadata=metadata)

    def _refusal(self, member: str, code: str, details: str) -> Exception:
        user = self.settings.user
        if "authentication is not enabled" in details:
            return ConfigError(
                f"etcd at {member} has authentication switched off, so anyone who reaches it can "
                f"write: switch it on (etcdctl auth enable), or remove the user {user!r}"
            )
        if "user name is empty" in details:
            return AuthenticationError(
                f"etcd at {member} asks for a user: set REFT_ETCD_USER and REFT_ETCD_PASSWORD (or "
                f"REFT_ETCD_PASSWORD_FILE)"
            )
        if "authentication failed" in details:
            return AuthenticationError(
                f"etcd at {member} does not let user {user!r} in: {details}. Check REFT_ETCD_USER "
                f"and REFT_ETCD_PASSWORD (or REFT_ETCD_PASSWORD_FILE)"
            )
        if code == "PERMISSION_DENIED":
            return AuthenticationError(
                f"user {user!r} of etcd at {member} may not read and write the keys under reft/: "
                f"etcdctl role grant-permission ROLE --prefix=true readwrite reft/"
            )
        if code == "UNIMPLEMENTED":
            return ConfigError(
                f"{member} is not an etcd v3 server ({details}): check --rdzv-endpoint"
            )
        return RefusedError(member, code, details)


def _read_file(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


# -- the store -------------------------------------------------------------------------------------


class EtcdStore(RendezvousStore):
    """A client of an etcd cluster. Its keys are attached to the lease of the run.

    Args:
        client: client of the cluster.
        secret: the user's secret.
        run_id: id of the job's run.
        timeout_secs: time for which :meth:`get` waits for a key to get a value. A single request
            has the same time-out, but at most 10 s.
    """

    keeps_leases = True

    def __init__(
        self, client: EtcdClient, secret: bytes, run_id: str, *, timeout_secs: float = 30.0
    ) -> None:
        self._client = client
        self._secret = purpose_key(secret, "etcd")
        self._timeout_secs = timeout_secs
        self._run_id = run_id
        self._leases = _Leases(client)
        self._run_lease: int | None = _lease_number(self._secret + run_id.encode())
        self._own_lease = _lease_number(os.urandom(_NONCE_BYTES))
        self._names = _Names()
        self._answer_secs = min(_ANSWER_SECS, timeout_secs)
        # Whether the last request had no reply. A dict, because all views of the store share it
        self._health = {"in doubt": False}
        # Held during a write, so that writes are carried out in the order of the calls
        self._writing = threading.Lock()

    def lasting(self) -> EtcdStore:
        """Return a view of the store whose keys remain after the run has ended."""
        view = self.with_prefix("")
        view.prefix, view._run_lease = self.prefix, None
        return view

    def greet(self) -> None:
        """Check within seconds that the cluster can be used; if not, raise the error."""
        message = self._client.messages.RangeRequest(key=ROOT.encode(), count_only=True)
        deadline = time.monotonic() + _ANSWER_SECS_AFTER_FAILURE
        self._client.request("KV", "Range", message, deadline)

    @property
    def endpoint(self) -> str:
        return self._client.member

    # -- values ------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        name = self._name(key)
        sealed = self._seal(name, value.encode() if isinstance(value, str) else value)
        with self._write_deadline() as deadline:
            # Repeat if another client has written in between.
            while not self._swap(name, self._read(name, deadline).revision, sealed, deadline):
                pass

    def peek(self, key: str) -> bytes | None:
        with self._deadline() as deadline:
            name = self._name(key)
            return self._open(name, self._read(name, deadline).sealed)

    def delete(self, key: str) -> bool:
        message = self._client.messages.DeleteRangeRequest(key=self._name(key))
        with self._write_deadline() as deadline:
            return bool(self._client.request("KV", "DeleteRange", message, deadline).deleted)

    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        name = self._name(key)
        with self._write_deadline() as deadline:
            entry = self._read(name, deadline)
            current = self._open(name, entry.sealed)
            if current != expected:
                return False, current
            if self._swap(name, entry.revision, self._seal(name, value), deadline):
                return True, value
            return False, self._open(name, self._read(name, deadline).sealed)

    # -- names of living processes -----------------------------------------------------------------

    def hold(self, name: str, secs: float) -> None:
        key, held = self._name(name), self._names.held
        with self._deadline() as deadline:
            if self._run_lease is not None:
                self._leases.renew(self._run_lease, RUN_LEASE_SECS, deadline)
            if not self._leases.renew(self._own_lease, max(2, math.ceil(secs)), deadline):
                held.clear()  # The names have expired with the lease
            if key not in held:
                value = self._seal(key, b"")
                message = self._client.messages.PutRequest(
                    key=key, value=value, lease=self._own_lease
                )
                self._client.request("KV", "Put", message, deadline)
                held.add(key)

    def alive(self, prefix: str) -> frozenset[str]:
        first = self._name(prefix)
        with self._deadline() as deadline:
            # The first possible key after those with the prefix
            end = first[:-1] + bytes([first[-1] + 1])
            message = self._client.messages.RangeRequest(key=first, range_end=end)
            answer = self._client.request("KV", "Range", message, deadline)
        values = {bytes(entry.key): bytes(entry.value) for entry in answer.kvs}
        for key, value in values.items():
            self._open(key, value)  # Raises if another user has written the value
        if self._names.update(first, values.keys()):
            # This client's lease has expired or was revoked; the next heartbeat will grant it
            # again.
            self._leases.forget(self._own_lease)
        return frozenset(self._strip(key) for key in values)

    def left(self, prefix: str) -> dict[str, float]:
        """Return names with a prefix that are no longer held, and for how many seconds.

        The time counts from when this client first missed the name. Sends no request.
        """
        first, now = self._name(prefix), time.monotonic()
        return {
            self._strip(key): now - missed_at
            for key, missed_at in self._names.missed_at.items()
            if key.startswith(first)
        }

    def _strip(self, key: bytes) -> str:
        """Return a key of etcd without the prefix of this store."""
        return key[len(self._name("")) :].decode()

    # -- helpers -----------------------------------------------------------------------------------

    def local_address(self) -> str:
        """Return this host's address on the route to a member, preferably on another host."""
        members = [parse_endpoint(endpoint) for endpoint in self._client.settings.endpoints]
        addresses = [address_towards(host, port) for host, port in members]
        reachable = [address for address in addresses if address is not None]
        if not reachable:
            raise StoreError(
                f"cannot reach the etcd members {', '.join(self._client.settings.endpoints)}"
            )
        return next((a for a in reachable if not is_loopback(a)), reachable[0])

    def close(self) -> None:
        if self._names.held:
            # Revoke the lease, so that the other nodes need not wait until it expires.
            message = self._client.messages.LeaseRevokeRequest(ID=self._own_lease)
            deadline = time.monotonic() + _REVOKE_SECS
            with suppress(StoreError, AuthenticationError, ConfigError):
                self._client.request("Lease", "LeaseRevoke", message, deadline)
        self._client.close()

    def _name(self, key: str) -> bytes:
        return f"{ROOT}{self.prefix}{key}".encode()

    def _seal(self, name: bytes, value: bytes) -> bytes:
        """Return the value with a MAC and a nonce, so that equal values differ when sealed."""
        nonce = os.urandom(_NONCE_BYTES)
        return authenticate(nonce + value, self._key_of(name), _PURPOSE)

    def _open(self, name: bytes, sealed: bytes | None) -> bytes | None:
        """Check and unpack what :meth:`_seal` returned."""
        if sealed is None:
            return None
        try:
            return check_authentic(sealed, self._key_of(name), _PURPOSE)[_NONCE_BYTES:]
        except AuthenticationError as error:
            raise AuthenticationError(
                f"etcd's key {name.decode(errors='replace')} was not written with this user's "
                f"secret: another user has the run {self._run_id!r}, or the key was changed. Every "
                f"launcher needs the same ~/.reft/secret or REFT_SECRET; take another --rdzv-id, "
                f"or etcdctl del it"
            ) from error

    def _key_of(self, name: bytes) -> bytes:
        """Return the MAC key of one entry; with one key for all, values could be swapped."""
        return sha256(self._secret + name).digest()

    @contextmanager
    def _deadline(self) -> Iterator[float]:
        """Yield the deadline of one request, which is shorter after a request without a reply."""
        secs = self._answer_secs
        if self._health["in doubt"]:
            secs = min(secs, _ANSWER_SECS_AFTER_FAILURE)
        try:
            yield time.monotonic() + secs
        except RefusedError:
            raise
        except StoreError:
            self._health["in doubt"] = True
            raise
        self._health["in doubt"] = False

    @contextmanager
    def _write_deadline(self) -> Iterator[float]:
        """Yield the deadline of a write; the lock that admits one write at a time is held."""
        with self._deadline() as deadline:
            if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise StoreError(
                    f"the etcd cluster at {self.endpoint} has not taken an earlier write yet"
                )
            try:
                yield deadline
            finally:
                self._writing.release()

    def _read(self, name: bytes, deadline: float) -> _Entry:
        message = self._client.messages.RangeRequest(key=name)
        return _first_entry(self._client.request("KV", "Range", message, deadline).kvs)

    def _swap(self, name: bytes, revision: int, sealed: bytes, deadline: float) -> bool:
        """Write a value if the key still has the given revision (0: the key does not exist).

        Returns:
            Whether the value was written.
        """
        messages, lease = self._client.messages, self._run_lease or 0
        is_unchanged = messages.Compare(
            target=messages.Compare.MOD,
            result=messages.Compare.EQUAL,
            key=name,
            mod_revision=revision,
        )
        put = messages.RequestOp(
            request_put=messages.PutRequest(key=name, value=sealed, lease=lease)
        )
        read = messages.RequestOp(request_range=messages.RangeRequest(key=name))
        transaction = messages.TxnRequest(compare=[is_unchanged], success=[put], failure=[read])
        if lease:
            self._leases.renew(lease, RUN_LEASE_SECS, deadline)
        try:
            answer = self._client.request("KV", "Txn", transaction, deadline)
        except RefusedError as error:
            if error.code != "NOT_FOUND":
                raise
            # The lease has expired since it was renewed; the next attempt will grant it.
            self._leases.forget(lease)
            return False
        if answer.succeeded:
            return True
        # If the request was repeated because its reply was lost, the first one may have written
        # the value.
        return _first_entry(answer.responses[0].response_range.kvs).sealed == sealed


class _Entry(NamedTuple):
    """The current content of one key in etcd."""

    revision: int  # Revision of the last write to the key; 0 if the key does not exist
    sealed: bytes | None


class _Names:
    """The keys in etcd that show which clients are alive.

    Attributes:
        held: keys that this client owns.
        missed_at: for keys of other clients that have vanished, the time at which each was first
            missing, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.missed_at: dict[bytes, float] = {}
        self._known: set[bytes] = set()

    def update(self, prefix: bytes, keys: Collection[bytes]) -> bool:
        """Record which keys under ``prefix`` exist; return whether one of this client has gone."""
        now = time.monotonic()
        for key in self._known.difference(keys):
            if key.startswith(prefix):
                self.missed_at.setdefault(key, now)
        for key in keys:
            self.missed_at.pop(key, None)
        self._known.update(keys)
        lost = {key for key in self.held.difference(keys) if key.startswith(prefix)}
        self.held -= lost
        return bool(lost)


class _Leases:
    """The leases that this process renews. Their ids are chosen by reft, not by etcd."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._renewed_at: dict[int, float] = {}

    def renew(self, lease: int, ttl_secs: int, deadline: float) -> bool:
        """Grant a lease, or renew it if a third of its duration has passed.

        Returns:
            Whether the lease still existed; if not, the keys attached to it are gone.
        """
        now = time.monotonic()
        if now - self._renewed_at.get(lease, float("-inf")) < ttl_secs / 3:
            return True
        messages = self._client.messages
        keep_alive = messages.LeaseKeepAliveRequest(ID=lease)
        answer = self._client.request("Lease", "LeaseKeepAlive", keep_alive, deadline)
        existed = bool(answer.TTL > 0)
        if not existed:
            grant = messages.LeaseGrantRequest(ID=lease, TTL=ttl_secs)
            try:
                self._client.request("Lease", "LeaseGrant", grant, deadline)
            except RefusedError as error:
                # Another launcher has granted the lease first, or this request was carried out
                # twice.
                if "lease already exists" not in error.details:
                    raise
        self._renewed_at[lease] = now
        return existed

    def forget(self, lease: int) -> None:
        """Make the next :meth:`renew` contact etcd, however recently the lease was renewed."""
        self._renewed_at.pop(lease, None)


def _first_entry(entries: Any) -> _Entry:
    if not entries:
        return _Entry(0, None)
    return _Entry(int(entries[0].mod_revision), bytes(entries[0].value))


def _lease_number(seed: bytes) -> int:
    """Return an id for a lease that others cannot guess: 63 bits, above 0."""
    return int.from_bytes(sha256(b"lease" + seed).digest()[:8], "big") >> 1 or 1
