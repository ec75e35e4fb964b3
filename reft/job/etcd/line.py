"""Requests to an etcd cluster: each has a deadline, and goes to the next member where one does not answer.

The protocol is PyPI's ``python3-etcd3``; its client is not used. That one retries nothing, leaves a member
that failed alone for minutes, keeps a token for ever, and its time-out holds for a single try.
"""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

from reft.control.rendezvous_store import StoreError
from reft.errors import AuthenticationError, ConfigError
from reft.job.etcd.settings import BACKEND, EtcdSettings

_TRY_SECS = 2.0
"""For one member, the first time round; twice as long the next time."""
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


class RefusedError(StoreError):
    """etcd answers, and says no.

    Attributes:
        code: gRPC's name of the reason.
        details: etcd's words.
    """

    def __init__(self, member: str, code: str, details: str) -> None:
        super().__init__(f"etcd at {member} refuses: {details or code}{_advice(details)}")
        self.code = code
        self.details = details


class EtcdLine:
    """Connections to the members of one cluster. Safe to use from several threads.

    Args:
        settings: of the cluster.

    Raises:
        ConfigError: ``python3-etcd3`` is not installed, or a certificate cannot be used.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        try:
            self._grpc: Any = importlib.import_module("grpc")
            self.messages: Any = importlib.import_module("etcd3.etcdrpc")
        except (ImportError, TypeError) as error:  # TypeError: etcd3's own messages, under a newer protobuf
            raise ConfigError(
                f"--rdzv-backend {BACKEND} needs PyPI's python3-etcd3 (not etcd3), which cannot be imported "
                f"({type(error).__name__}: {error}): pip install 'reft-ckpt[etcd]', or pip install "
                f"python3-etcd3"
            ) from error
        self.settings = settings
        credentials = self._credentials() if settings.tls else None
        self._channels = [self._channel(e, credentials) for e in settings.endpoints]
        self._lock = threading.Lock()
        self._current = 0
        self._token: str | None = None
        self._closed = False

    @property
    def member(self) -> str:
        """``host:port`` of the member that is asked first."""
        return self.settings.endpoints[self._current]

    def ask(self, service: str, method: str, request: Any, deadline: float) -> Any:
        """One request, which may be done twice where an answer was lost.

        Args:
            service: of etcd's protocol, as ``KV``.
            method: of the service, as ``Range``.
            request: its message.
            deadline: on the monotonic clock, whatever the members do.

        Raises:
            StoreError: no member answers in time; :class:`RefusedError`: one says no.
            AuthenticationError: user or password are wrong, or the user may not do this.
            ConfigError: etcd's authentication is off, and a user is given.
        """
        tried: dict[str, str] = {}
        patience, renewed = _TRY_SECS, False
        while True:
            for _ in self.settings.endpoints:
                at = self._current
                name = self.settings.endpoints[at]
                secs = min(patience, deadline - time.monotonic())
                if secs <= 0 or self._closed:
                    raise StoreError(self._silence(tried))
                try:
                    return self._ask_member(at, service, method, request, secs)
                except self._grpc.RpcError as error:
                    code, details = error.code().name, error.details() or ""
                    if not renewed and self._token is not None and any(w in details for w in _RENEW):
                        # Tokens end, and a member that was started again knows none.
                        self._token, renewed = None, True
                        continue
                    if code not in _ELSEWHERE:
                        raise self._refusal(name, code, details) from error
                    tried[name] = details or code
                    self._leave(at)
                except ValueError as error:  # gRPC's, for a closed channel
                    raise StoreError(f"the connection to etcd is closed: {error}") from error
            time.sleep(max(0.0, min(_PAUSE_SECS, deadline - time.monotonic())))
            patience *= 2  # no backoff: how long an answer is waited for, not a pause

    def leader_known_by(self, endpoint: str, secs: float) -> bool | None:
        """Whether the member at ``endpoint`` has a leader; None if it is none, or does not answer."""
        at = self.settings.endpoints.index(endpoint)
        try:
            status = self._ask_member(at, "Maintenance", "Status", self.messages.StatusRequest(), secs)
        except (self._grpc.RpcError, ValueError):
            return None
        return bool(status.leader)

    def close(self) -> None:
        """End all connections; requests under way fail."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _ask_member(self, at: int, service: str, method: str, request: Any, secs: float) -> Any:
        deadline = time.monotonic() + secs
        metadata = None
        if self.settings.user is not None and service != "Maintenance":
            metadata = (("token", self._token or self._sign_in(at, secs)),)
        call = getattr(getattr(self.messages, f"{service}Stub")(self._channels[at]), method)
        left = max(0.001, deadline - time.monotonic())
        if method == "LeaseKeepAlive":
            # A stream of requests, here of one; no answer is as good as a lease that is gone.
            answers = list(call(iter([request]), timeout=left, metadata=metadata))
            return answers[0] if answers else self.messages.LeaseKeepAliveResponse(ID=request.ID)
        return call(request, timeout=left, metadata=metadata)

    def _sign_in(self, at: int, secs: float) -> str:
        request = self.messages.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
        answer = self.messages.AuthStub(self._channels[at]).Authenticate(request, timeout=secs)
        self._token = str(answer.token)
        return self._token

    def _refusal(self, member: str, code: str, details: str) -> Exception:
        user = self.settings.user
        if "authentication is not enabled" in details:
            return ConfigError(
                f"etcd at {member} has its authentication off, so that everybody who reaches it may write: "
                f"switch it on (etcdctl auth enable), or leave out the user {user!r}"
            )
        if "user name is empty" in details:
            return AuthenticationError(
                f"etcd at {member} asks for a user: set REFT_ETCD_USER and REFT_ETCD_PASSWORD (or "
                f"REFT_ETCD_PASSWORD_FILE)"
            )
        if "authentication failed" in details:
            return AuthenticationError(
                f"etcd at {member} does not let user {user!r} in: {details}. Check REFT_ETCD_USER and "
                f"REFT_ETCD_PASSWORD (or REFT_ETCD_PASSWORD_FILE)"
            )
        if code == "PERMISSION_DENIED":
            return AuthenticationError(
                f"user {user!r} of etcd at {member} may not read and write the keys under reft/: etcdctl "
                f"role grant-permission ROLE --prefix=true readwrite reft/"
            )
        if code == "UNIMPLEMENTED":
            return ConfigError(f"{member} is no etcd of version 3 ({details}): check --rdzv-endpoint")
        return RefusedError(member, code, details)

    def _leave(self, at: int) -> None:
        with self._lock:
            if self._current == at:
                self._current = (at + 1) % len(self._channels)

    def _silence(self, tried: dict[str, str]) -> str:
        members = ", ".join(self.settings.endpoints)
        why = "; ".join(f"{member}: {said}" for member, said in tried.items())
        return f"the etcd cluster {members} does not answer" + (f" ({why})" if why else "")

    def _channel(self, endpoint: str, credentials: Any) -> Any:
        if credentials is None:
            return self._grpc.insecure_channel(endpoint, options=_OPTIONS)
        return self._grpc.secure_channel(endpoint, credentials, options=_OPTIONS)

    def _credentials(self) -> Any:
        settings = self.settings
        authority, key, cert = map(_read, (settings.ca_cert, settings.key, settings.cert))
        return self._grpc.ssl_channel_credentials(authority, key, cert)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _advice(details: str) -> str:
    if "database space exceeded" in details:
        return (
            ". Start etcd with --auto-compaction-retention=10m; now: etcdctl compact REVISION, etcdctl "
            "defrag, etcdctl alarm disarm"
        )
    return ""
