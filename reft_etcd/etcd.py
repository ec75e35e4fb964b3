"""The rendezvous store in an etcd cluster: any minority of its hosts may die.

Every write is a transaction that compares the key's ``mod_revision``, so that a request that was
slow, or done twice because its answer was lost, never undoes a newer one. Whoever may write to etcd
could have written what is read here: a value carries a code keyed with the user's secret over its
key and its bytes, which is checked before anything is parsed (P11). Values are readable to whoever
may read etcd, and hold no secret.

What a run writes hangs on one lease of the run, which every launcher of it keeps alive: it is gone
a minute after the last one. Who lives is told by a lease of each launcher's own, not by rewriting
the state.
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
from reft.control.wire import address_towards, format_endpoint, is_loopback, parse_endpoint
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

DEFAULT_PORT = 2379
_SCHEMES = ("http://", "https://")
_ENVIRONMENT = {
    "user": ENV_ETCD_USER,
    "cacert": ENV_ETCD_CACERT,
    "cert": ENV_ETCD_CERT,
    "key": ENV_ETCD_KEY,
}
"""What ``--rdzv-conf`` takes, and the variable that says it where that does not; the keys are
etcdctl's."""
_MOST_PASSWORD_BYTES = 4096
_TRY_SECS = 2.0  # For one member, the first time round; twice as long the next time
_PAUSE_SECS = 0.1
_OPTIONS = (
    # Straight to the members, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_RENEW = ("invalid auth token", "revision of auth store is old", "revision in header is old")
_ELSEWHERE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "CANCELLED", "UNKNOWN", "ABORTED")
"""Codes of gRPC after which another member is asked."""
_WHEN_FULL = (
    ". Start etcd with --auto-compaction-retention=10m; now: etcdctl compact REVISION, etcdctl "
    "defrag, "
    "etcdctl alarm disarm"
)
ROOT = "reft/"  # Before every key in etcd
RUN_LEASE_SECS = 60
_PURPOSE = b"etcd value"
_ANSWER_SECS = 10.0
_DOUBT_SECS = 2.0
"""For a request after one that was not answered: whoever asks has other work, and asks again."""
_LEAVE_SECS = 1.0
_NONCE_BYTES = 16


@dataclass(frozen=True)
class EtcdSettings:
    endpoints: tuple[str, ...]  # ``host:port`` of its members, at least one
    tls: bool = False
    user: str | None = None  # with ``password``; None where etcd's authentication is off
    password: str | None = field(default=None, repr=False)
    # file with the certificates that sign the members'; None: those that gRPC comes with
    ca_cert: Path | None = None
    cert: Path | None = None  # cert, key: files of this client, where etcd asks for them
    key: Path | None = None

    @classmethod
    def parse(
        cls, endpoint: str, conf: Mapping[str, Any], environ: Mapping[str, str]
    ) -> EtcdSettings:
        """Read ``--rdzv-endpoint``, ``--rdzv-conf`` and the environment; the command line goes
        first. Raises ConfigError: something is missing or does not fit together; says what to
        write."""
        if "password" in conf:
            raise ConfigError(
                f"--rdzv-conf password=... would show it to everybody on this host, in /proc: set "
                f"{ENV_ETCD_PASSWORD}, or {ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
            )
        said = {
            name: str(conf.get(name) or environ.get(env, "")) for name, env in _ENVIRONMENT.items()
        }
        endpoints, tls = _members(endpoint)
        files = {name: _file(name, said[name]) for name in ("cacert", "cert", "key")}
        if (files["cert"] is None) != (files["key"] is None):
            there, missing = ("cert", "key") if files["cert"] else ("key", "cert")
            raise ConfigError(
                f"etcd's {there} is given without {missing}: {_describe_setting(missing)}"
            )
        password = _password(environ)
        if bool(said["user"]) != (password is not None):
            raise ConfigError(
                f"etcd's user is {said['user']!r}, without a password: set {ENV_ETCD_PASSWORD}, or "
                f"{ENV_ETCD_PASSWORD_FILE} to a file that only you can read"
                if said["user"]
                else f"there is a password for etcd, and no user: {_describe_setting('user')}"
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
            f"--rdzv-backend {ETCD_BACKEND} needs the members of the etcd cluster: --rdzv-endpoint "
            f"HOST1:{DEFAULT_PORT},HOST2:{DEFAULT_PORT},HOST3:{DEFAULT_PORT}"
        )
    schemes = {next((s for s in _SCHEMES if e.startswith(s)), "") for e in given}
    if {"http://", "https://"} <= schemes:
        raise ConfigError(
            f"--rdzv-endpoint is {endpoint}: write either http:// or https:// for all members"
        )
    bare = [e.removeprefix("http://").removeprefix("https://").rstrip("/") for e in given]
    members = [format_endpoint(*parse_endpoint(e, DEFAULT_PORT)) for e in bare]
    return tuple(dict.fromkeys(members)), "https://" in schemes


def _file(name: str, given: str) -> Path | None:
    if not given:
        return None
    path = Path(given)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ConfigError(
            f"etcd's {name} is {given}, which cannot be read; {_describe_setting(name)}"
        )
    return path


def _describe_setting(name: str) -> str:
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
                    f"{ENV_ETCD_PASSWORD_FILE} is {name}, which others can use (mode {mode:04o}): "
                    "chmod 600 "
                    f"{name}"
                )
            return file.read(_MOST_PASSWORD_BYTES).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{ENV_ETCD_PASSWORD_FILE} is {name}, which cannot be read ({error})"
        ) from error


class RefusedError(StoreError):
    """etcd answers, and says no: gRPC's ``code`` of the reason, and etcd's words."""

    def __init__(self, member: str, code: str, details: str) -> None:
        full = "database space exceeded" in details
        super().__init__(f"etcd at {member} refuses: {details or code}{_WHEN_FULL if full else ''}")
        self.code = code
        self.details = details


class EtcdLine:
    """Connections to the members of one cluster. Safe to use from several threads. Raises
    ConfigError: ``python3-etcd3`` is not installed, or a certificate cannot be used."""

    def __init__(self, settings: EtcdSettings) -> None:
        try:
            self._grpc: Any = importlib.import_module("grpc")
            self.messages: Any = importlib.import_module("etcd3.etcdrpc")
        # TypeError: etcd3's own messages, under a newer protobuf
        except (ImportError, TypeError) as error:
            raise ConfigError(
                f"--rdzv-backend {ETCD_BACKEND} needs PyPI's python3-etcd3 (not etcd3), which "
                "cannot be "
                f"imported ({type(error).__name__}: {error}): pip install 'reft-ckpt[etcd]', or "
                "pip install "
                f"python3-etcd3"
            ) from error
        self.settings = settings
        make, credentials = self._grpc.insecure_channel, tuple[Any, ...]()
        if settings.tls:
            authority, key, cert = map(_read, (settings.ca_cert, settings.key, settings.cert))
            make = self._grpc.secure_channel
            credentials = (self._grpc.ssl_channel_credentials(authority, key, cert),)
        self._channels = [make(e, *credentials, options=_OPTIONS) for e in settings.endpoints]
        self._lock = threading.Lock()
        self._current = 0
        self._token: str | None = None
        self._closed = False

    @property
    def member(self) -> str:
        """``host:port`` of the member that is asked first."""
        return self.settings.endpoints[self._current]

    def ask(self, service: str, method: str, request: Any, deadline: float) -> Any:
        """One request, which may be done twice where an answer was lost, until a deadline on the
        monotonic clock. Raises AuthenticationError: user or password are wrong, or the user may not
        do this. Raises ConfigError: etcd's authentication is off, and a user is given."""
        tried: dict[str, str] = {}
        patience, renewed = _TRY_SECS, False
        while True:
            for _ in self.settings.endpoints:
                at = self._current
                name = self.settings.endpoints[at]
                secs = min(patience, deadline - time.monotonic())
                if secs <= 0 or self._closed:
                    members = ", ".join(self.settings.endpoints)
                    why = "; ".join(f"{member}: {said}" for member, said in tried.items())
                    said = f" ({why})" if why else ""
                    raise StoreError(f"the etcd cluster {members} does not answer{said}")
                try:
                    return self._ask_member(at, service, method, request, secs)
                except self._grpc.RpcError as error:
                    code, details = error.code().name, error.details() or ""
                    if (
                        not renewed
                        and self._token is not None
                        and any(w in details for w in _RENEW)
                    ):
                        # Tokens end, and a member that was started again knows none.
                        self._token, renewed = None, True
                        continue
                    if code not in _ELSEWHERE:
                        raise self._refusal(name, code, details) from error
                    tried[name] = details or code
                    with self._lock:
                        if self._current == at:
                            self._current = (at + 1) % len(self._channels)
                except ValueError as error:  # gRPC's, for a closed channel
                    raise StoreError(f"the connection to etcd is closed: {error}") from error
            time.sleep(max(0.0, min(_PAUSE_SECS, deadline - time.monotonic())))
            patience *= 2  # no backoff: how long an answer is waited for, not a pause

    def leader_known_by(self, endpoint: str, secs: float) -> bool | None:
        """Whether the member at ``endpoint`` has a leader; None if it is none, or does not
        answer."""
        at = self.settings.endpoints.index(endpoint)
        try:
            status = self._ask_member(
                at, "Maintenance", "Status", self.messages.StatusRequest(), secs
            )
        except (self._grpc.RpcError, ValueError):
            return None
        return bool(status.leader)

    def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _ask_member(self, at: int, service: str, method: str, request: Any, secs: float) -> Any:
        deadline = time.monotonic() + secs
        metadata = None
        if (user := self.settings.user) is not None and service != "Maintenance":
            if (token := self._token) is None:
                who = self.messages.AuthenticateRequest(name=user, password=self.settings.password)
                answer = self.messages.AuthStub(self._channels[at]).Authenticate(who, timeout=secs)
                token = self._token = str(answer.token)
            metadata = (("token", token),)
        call = getattr(getattr(self.messages, f"{service}Stub")(self._channels[at]), method)
        left = max(0.001, deadline - time.monotonic())
        if method == "LeaseKeepAlive":
            # A stream of requests, here of one; no answer is as good as a lease that is gone.
            answers = list(call(iter([request]), timeout=left, metadata=metadata))
            return answers[0] if answers else self.messages.LeaseKeepAliveResponse(ID=request.ID)
        return call(request, timeout=left, metadata=metadata)

    def _refusal(self, member: str, code: str, details: str) -> Exception:
        user = self.settings.user
        if "authentication is not enabled" in details:
            return ConfigError(
                f"etcd at {member} has authentication switched off, so anyone who reaches it can "
                "write: "
                f"switch it on (etcdctl auth enable), or remove the user {user!r}"
            )
        if "user name is empty" in details:
            return AuthenticationError(
                f"etcd at {member} asks for a user: set REFT_ETCD_USER and REFT_ETCD_PASSWORD (or "
                f"REFT_ETCD_PASSWORD_FILE)"
            )
        if "authentication failed" in details:
            return AuthenticationError(
                f"etcd at {member} does not let user {user!r} in: {details}. Check REFT_ETCD_USER "
                "and "
                f"REFT_ETCD_PASSWORD (or REFT_ETCD_PASSWORD_FILE)"
            )
        if code == "PERMISSION_DENIED":
            return AuthenticationError(
                f"user {user!r} of etcd at {member} may not read and write the keys under reft/: "
                "etcdctl "
                f"role grant-permission ROLE --prefix=true readwrite reft/"
            )
        if code == "UNIMPLEMENTED":
            return ConfigError(
                f"{member} is not an etcd v3 server ({details}): check --rdzv-endpoint"
            )
        return RefusedError(member, code, details)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


class EtcdStore(RendezvousStore):
    """A client of an etcd cluster. Its keys hang on the lease of the run; ``timeout_secs`` is for
    the keys that :meth:`get` waits for, a request has 10 s of it at most."""

    keeps_leases = True

    def __init__(
        self, line: EtcdLine, secret: bytes, run_id: str, *, timeout_secs: float = 30.0
    ) -> None:
        self._line = line
        self._secret = purpose_key(secret, "etcd")
        self._timeout_secs = timeout_secs
        self._run = run_id
        self._leases = _Leases(line)
        self._run_lease: int | None = _read_number(self._secret + run_id.encode())
        self._own_lease = _read_number(os.urandom(_NONCE_BYTES))
        self._names = _Names()
        self._answer_secs = min(_ANSWER_SECS, timeout_secs)
        self._health = {"in doubt": False}  # of all views
        self._writing = threading.Lock()

    def lasting(self) -> EtcdStore:
        """The same store; what is written through this view stays when the run is over."""
        view = self.with_prefix("")
        view.prefix, view._run_lease = self.prefix, None
        return view

    def greet(self) -> None:
        """Raise soon, and why, if the cluster cannot be used now."""
        request = self._line.messages.RangeRequest(key=ROOT.encode(), count_only=True)
        self._line.ask("KV", "Range", request, time.monotonic() + _DOUBT_SECS)

    @property
    def endpoint(self) -> str:
        return self._line.member

    # -- values ------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        name = self._name(key)
        sealed = self._seal(name, value.encode() if isinstance(value, str) else value)
        with self._write() as deadline:
            while not self._swap(name, self._read(name, deadline).revision, sealed, deadline):
                pass

    def peek(self, key: str) -> bytes | None:
        with self._asking() as deadline:
            name = self._name(key)
            return self._open(name, self._read(name, deadline).sealed)

    def delete(self, key: str) -> bool:
        request = self._line.messages.DeleteRangeRequest(key=self._name(key))
        with self._write() as deadline:
            return bool(self._line.ask("KV", "DeleteRange", request, deadline).deleted)

    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        name = self._name(key)
        with self._write() as deadline:
            held = self._read(name, deadline)
            found = self._open(name, held.sealed)
            if found != expected:
                return False, found
            if self._swap(name, held.revision, self._seal(name, value), deadline):
                return True, value
            return False, self._open(name, self._read(name, deadline).sealed)

    # -- who lives ---------------------------------------------------------------------------------

    def hold(self, name: str, secs: float) -> None:
        key, held = self._name(name), self._names.held
        with self._asking() as deadline:
            if self._run_lease is not None:
                self._leases.keep(self._run_lease, RUN_LEASE_SECS, deadline)
            if not self._leases.keep(self._own_lease, max(2, math.ceil(secs)), deadline):
                held.clear()
            if key not in held:
                value = self._seal(key, b"")
                request = self._line.messages.PutRequest(
                    key=key, value=value, lease=self._own_lease
                )
                self._line.ask("KV", "Put", request, deadline)
                held.add(key)

    def alive(self, prefix: str) -> frozenset[str]:
        first = self._name(prefix)
        with self._asking() as deadline:
            end = first[:-1] + bytes([first[-1] + 1])  # the first key after all with that prefix
            request = self._line.messages.RangeRequest(key=first, range_end=end)
            answer = self._line.ask("KV", "Range", request, deadline)
        found = {bytes(kv.key): bytes(kv.value) for kv in answer.kvs}
        for key, value in found.items():
            self._open(key, value)
        if self._names.see(first, found.keys()):
            # Ours has ended or was revoked: it is taken anew with the next heartbeat.
            self._leases.forget(self._own_lease)
        return frozenset(self._bare(key) for key in found)

    def left(self, prefix: str) -> dict[str, float]:
        """Since this client has seen the name missing; asks nobody."""
        first, now = self._name(prefix), time.monotonic()
        return {
            self._bare(k): now - at for k, at in self._names.missed.items() if k.startswith(first)
        }

    def _bare(self, key: bytes) -> str:
        return key[len(self._name("")) :].decode()

    # -- the rest ----------------------------------------------------------------------------------

    def local_address(self) -> str:
        """Towards the first member that is not on this host, if there is one."""
        members = [parse_endpoint(e) for e in self._line.settings.endpoints]
        found = [address_towards(host, port) for host, port in members]
        known = [address for address in found if address is not None]
        if not known:
            raise StoreError(
                f"cannot reach the etcd members {', '.join(self._line.settings.endpoints)}"
            )
        return next((a for a in known if not is_loopback(a)), known[0])

    def close(self) -> None:
        if self._names.held:
            # Nobody has to wait until it ends by itself.
            request = self._line.messages.LeaseRevokeRequest(ID=self._own_lease)
            with suppress(StoreError, AuthenticationError, ConfigError):
                self._line.ask("Lease", "LeaseRevoke", request, time.monotonic() + _LEAVE_SECS)
        self._line.close()

    def _name(self, key: str) -> bytes:
        return f"{ROOT}{self.prefix}{key}".encode()

    def _seal(self, name: bytes, value: bytes) -> bytes:
        """A value that was written once: two writes of the same bytes can be told apart."""
        nonce = os.urandom(_NONCE_BYTES)
        return authenticate(nonce + value, self._key_of(name), _PURPOSE)

    def _open(self, name: bytes, sealed: bytes | None) -> bytes | None:
        if sealed is None:
            return None
        try:
            return check_authentic(sealed, self._key_of(name), _PURPOSE)[_NONCE_BYTES:]
        except AuthenticationError as error:
            raise AuthenticationError(
                f"etcd's key {name.decode(errors='replace')} was not written with this user's "
                "secret: "
                f"another user has the run {self._run!r}, or somebody changed it. Every launcher "
                "needs the "
                f"same ~/.reft/secret or REFT_SECRET; take another --rdzv-id, or etcdctl del it"
            ) from error

    def _key_of(self, name: bytes) -> bytes:
        """A code is good for one key of etcd alone: values cannot be exchanged."""
        return sha256(self._secret + name).digest()

    @contextmanager
    def _asking(self) -> Iterator[float]:
        """For one request: its deadline on the monotonic clock, earlier while the cluster does not
        answer."""
        secs = (
            min(self._answer_secs, _DOUBT_SECS) if self._health["in doubt"] else self._answer_secs
        )
        try:
            yield time.monotonic() + secs
        except RefusedError:
            raise
        except StoreError:
            self._health["in doubt"] = True
            raise
        self._health["in doubt"] = False

    @contextmanager
    def _write(self) -> Iterator[float]:
        """One at a time, in the order in which they were asked for."""
        with self._asking() as deadline:
            if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise StoreError(
                    f"the etcd cluster at {self.endpoint} has not taken an earlier write yet"
                )
            try:
                yield deadline
            finally:
                self._writing.release()

    def _read(self, name: bytes, deadline: float) -> _Held:
        request = self._line.messages.RangeRequest(key=name)
        return _held(self._line.ask("KV", "Range", request, deadline).kvs)

    def _swap(self, name: bytes, revision: int, sealed: bytes, deadline: float) -> bool:
        """Write if the key has not changed since ``revision`` (0: is not there)."""
        messages, lease = self._line.messages, self._run_lease or 0
        changed = messages.Compare(
            target=messages.Compare.MOD,
            result=messages.Compare.EQUAL,
            key=name,
            mod_revision=revision,
        )
        put = messages.RequestOp(
            request_put=messages.PutRequest(key=name, value=sealed, lease=lease)
        )
        look = messages.RequestOp(request_range=messages.RangeRequest(key=name))
        request = messages.TxnRequest(compare=[changed], success=[put], failure=[look])
        if lease:
            self._leases.keep(lease, RUN_LEASE_SECS, deadline)
        try:
            answer = self._line.ask("KV", "Txn", request, deadline)
        except RefusedError as error:
            if error.code != "NOT_FOUND":
                raise
            self._leases.forget(lease)
            return False
        # Ours after all, where it was asked twice.
        return (
            bool(answer.succeeded) or _held(answer.responses[0].response_range.kvs).sealed == sealed
        )


class _Held(NamedTuple):
    """What a key holds: its revision (0: nothing), and its sealed value."""

    revision: int
    sealed: bytes | None


class _Names:
    """Names under which somebody is alive, as keys of etcd: those ``held`` by this client, and when
    others were first ``missed``."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.missed: dict[bytes, float] = {}
        self._known: set[bytes] = set()

    def see(self, prefix: bytes, found: Collection[bytes]) -> bool:
        """These are all with that prefix; whether one of our own is missing."""
        now = time.monotonic()
        for key in self._known.difference(found):
            if key.startswith(prefix):
                self.missed.setdefault(key, now)
        for key in found:
            self.missed.pop(key, None)
        self._known.update(found)
        lost = {key for key in self.held.difference(found) if key.startswith(prefix)}
        self.held -= lost
        return bool(lost)


class _Leases:
    """Leases that this process keeps alive, by numbers of its own choice."""

    def __init__(self, line: EtcdLine) -> None:
        self._line = line
        self._kept: dict[int, float] = {}

    def keep(self, lease: int, ttl_secs: int, deadline: float) -> bool:
        """Grant the lease, or lengthen it where a third of its time is over; whether it was there:
        where not, its keys are gone."""
        now = time.monotonic()
        if now - self._kept.get(lease, float("-inf")) < ttl_secs / 3:
            return True
        messages = self._line.messages
        alive = messages.LeaseKeepAliveRequest(ID=lease)
        was_there = bool(self._line.ask("Lease", "LeaseKeepAlive", alive, deadline).TTL > 0)
        if not was_there:
            grant = messages.LeaseGrantRequest(ID=lease, TTL=ttl_secs)
            try:
                self._line.ask("Lease", "LeaseGrant", grant, deadline)
            except RefusedError as error:
                # Another launcher was quicker, or this request was done twice.
                if "lease already exists" not in error.details:
                    raise
        self._kept[lease] = now
        return was_there

    def forget(self, lease: int) -> None:
        self._kept.pop(lease, None)


def _held(found: Any) -> _Held:
    return _Held(int(found[0].mod_revision), bytes(found[0].value)) if found else _Held(0, None)


def _read_number(seed: bytes) -> int:
    """A number for a lease that others do not guess: 63 bits, above 0."""
    return int.from_bytes(sha256(b"lease" + seed).digest()[:8], "big") >> 1 or 1
