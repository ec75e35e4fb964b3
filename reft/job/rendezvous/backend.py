"""How one node meets the others, and comes back to them: at reft's own store, which one of the
nodes may have to serve, or at an etcd cluster."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from reft.control.keyvalue import (
    KeyValueServer,
    KeyValueStore,
    RendezvousStore,
    StoreError,
    relay_store,
)
from reft.control.wire import (
    AuthenticatedServer,
    format_endpoint,
    is_loopback,
    listen,
    parse_endpoint,
)
from reft.env import ENV_ETCD_PASSWORD
from reft.errors import ConfigError, ReftError
from reft.job.hosts import is_this_host
from reft.job.options import ETCD_BACKEND, LaunchOptions
from reft.job.rendezvous.etcd import RUN_LEASE_SECS, EtcdLine, EtcdSettings, EtcdStore
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.membership import NodeInfo
from reft.job.rendezvous.server import is_reachable, is_served_by_reft
from reft.job.trainer_store import LOOPBACK

logger = logging.getLogger(__name__)

_FIRST_CONTACT_SECS = 120.0
_PROBE_SECS = 2.0
_LOOK_SECS = 0.5
_SEEN_SECS, _HOLDERS_SECS = 5.0, 0.05
_READ_SECS = 30.0
_STATUS_SECS = 5.0


class JobEndedError(ReftError, RuntimeError):
    """The job cannot go on; the message says why and what was kept."""


class RendezvousBackend:
    """reft's own store: of a ``reft rendezvous``, or of a launcher. ``advice``: what to do when the
    store is lost. ``reopens``: when a run whose end the store has noted can be started again under
    its name."""

    advice = (
        "It lived in a launcher or process that died; serve it with `reft rendezvous` on a host "
        "that does "
        "not train, so that any node may die"
    )
    reopens = "restart `reft rendezvous`"

    def __init__(self, options: LaunchOptions, secret: bytes) -> None:
        self._options = options
        self._config: LaunchConfig = options.config
        self._secret = secret
        self._conf: dict[str, Any] = self._config.rdzv_configs
        self._contact_secs = float(self._conf.get("connect_timeout", _FIRST_CONTACT_SECS))
        self._read_secs = float(self._conf.get("read_timeout", _READ_SECS))
        self._server: KeyValueServer | AuthenticatedServer | None = None
        self._store: RendezvousStore | None = None

    def join(self) -> StoreRendezvous:
        """Connect to the store, or serve it, as torchrun does, where none is served and the
        endpoint is this machine's. Raises JobEndedError: nothing of reft's is served there;
        AuthenticationError: it has another secret; ConfigError: it cannot be served at this
        address, or an option cannot be used."""
        config, options = self._config, self._options
        store = self._store = self._open()
        info = NodeInfo(
            options.node, config.nproc_per_node, options.rank_turn, options.restarts_renew
        )
        try:
            rendezvous = StoreRendezvous(store, config, info, options.job_id)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the rendezvous options cannot be used: {error}") from error
        if config.max_nodes > 1 and not self._outlives_nodes(store):
            logger.warning(
                "the rendezvous store at %s lives in the launcher of a worker node and dies with "
                "it, and the "
                "job then cannot restart. Serve it with `reft rendezvous` on a host that does not "
                "train",
                config.rdzv_endpoint,
            )
        return rendezvous

    def reconnect(self) -> None:
        """Wait for a lost store to come back, as long as for a node. Raises JobEndedError: it does
        not; AuthenticationError: another came, with another secret."""
        timeout, endpoint = self._options.join_timeout_secs, self._config.rdzv_endpoint
        logger.warning("waiting up to %.0f s for the rendezvous store at %s", timeout, endpoint)
        deadline = time.monotonic() + timeout
        assert self._store is not None
        while True:
            with suppress(StoreError):
                if self._store.check([]):
                    return
            if time.monotonic() > deadline:
                raise JobEndedError(
                    f"the rendezvous store at {endpoint} is gone and did not come back in "
                    f"{timeout:.0f} s. {self.advice}"
                )
            time.sleep(_LOOK_SECS)

    def connect_for_status(self) -> RendezvousStore:
        """A connection of its own to the store, for what nobody has to wait for."""
        return self._make_client(_STATUS_SECS).with_prefix(f"reft/{self._config.run_id}/status")

    def _open(self) -> RendezvousStore:
        if self._has_to_serve():
            self._serve()
        endpoint, secs = self._config.rdzv_endpoint, min(self._contact_secs, self._read_secs)
        # What listens there may never answer: the first contact has a limit of its own.
        first = self._make_client(secs)
        try:
            first.check([])
        except StoreError as error:
            raise JobEndedError(
                f"what listens at the rendezvous endpoint {endpoint} did not answer within "
                f"{secs:.0f} s as "
                f"reft's rendezvous does ({error}). Check the address, start `reft rendezvous` "
                "there, or "
                "wait longer for a slow one with --rdzv-conf connect_timeout=SECS,read_timeout=SECS"
            ) from error
        finally:
            first.close()
        return self._make_client(self._read_secs)

    def _make_client(self, timeout_secs: float) -> RendezvousStore:
        """Another connection to the store; does not wait for it."""
        return KeyValueStore(self.trainers_endpoint(), self._secret, timeout_secs=timeout_secs)

    def trainers_endpoint(self) -> str:
        """``host:port`` where trainers reach the store."""
        host, port = parse_endpoint(self._config.rdzv_endpoint)
        return format_endpoint(host, self._server.port if self._server is not None else port)

    def _outlives_nodes(self, store: RendezvousStore) -> bool:
        with suppress(StoreError):
            return is_served_by_reft(store)
        return False

    def wait_for_others(self) -> None:
        """Where the store ends with this launcher, the other nodes read first what it holds."""
        deadline = time.monotonic() + _SEEN_SECS
        while isinstance(self._server, KeyValueServer) and len(self._server.holders()) > 1:
            if time.monotonic() > deadline:
                return
            time.sleep(_HOLDERS_SECS)

    def close(self) -> None:
        """End the connection, and the store if it was served here."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _has_to_serve(self) -> bool:
        endpoint = self._config.rdzv_endpoint
        host, port = parse_endpoint(endpoint)
        if "is_host" in self._conf:
            return str(self._conf["is_host"]).lower() in ("1", "true", "t", "yes", "y")
        if port == 0:
            return True
        if is_reachable(endpoint):
            return False
        if is_this_host(host):
            return True
        logger.info("waiting for the rendezvous store at %s", endpoint)
        deadline = time.monotonic() + self._contact_secs
        while not is_reachable(endpoint):
            if time.monotonic() > deadline:
                raise JobEndedError(
                    f"nothing answers at the rendezvous endpoint {endpoint}; start `reft "
                    "rendezvous` there "
                    "(or the launcher with --node-rank 0), and check that its port is open to "
                    "the nodes"
                )
            time.sleep(_LOOK_SECS)
        return False

    def _serve(self) -> None:
        endpoint = self._config.rdzv_endpoint
        host, port = parse_endpoint(endpoint)
        try:
            listener = listen(host, port, "--rdzv-endpoint")
        except ConfigError:
            # Another launcher on this machine may have been quicker.
            if port and is_reachable(endpoint):
                return
            raise
        server = self._server = KeyValueServer(listener, self._secret)
        if self._config.max_nodes > 1 and is_loopback(server.host) and not is_loopback(host):
            logger.warning(
                "%s is %s on this host, so other hosts cannot reach the rendezvous store here; "
                "give this "
                "host's address as --rdzv-endpoint (or --master-addr)",
                *(host, server.host),
            )


class EtcdBackend(RendezvousBackend):
    """An etcd cluster; trainers reach it through this launcher, on loopback, and need neither its
    client nor its password."""

    advice = "Start the members of the etcd cluster again: it needs more than half of them"
    reopens = f"wait {RUN_LEASE_SECS} s: etcd then forgets a run that has no launcher any more"

    def __init__(self, options: LaunchOptions, secret: bytes) -> None:
        super().__init__(options, secret)
        settings = self._settings = EtcdSettings.of(
            self._config.rdzv_endpoint, self._conf, os.environ
        )
        self._line = EtcdLine(settings)
        # Whoever reads the environment of a trainer has no business with it.
        os.environ.pop(ENV_ETCD_PASSWORD, None)
        if settings.password is not None and not settings.tls:
            logger.warning(
                "the password of etcd's user %s crosses the network in the clear: set up TLS",
                settings.user,
            )

    def _open(self) -> RendezvousStore:
        store = EtcdStore(
            self._line, self._secret, self._config.run_id, timeout_secs=self._read_secs
        )
        self._wait_for_the_cluster(store)
        self._server = relay_store(listen(LOOPBACK, 0), self._secret, store.lasting())
        return store

    def _make_client(self, timeout_secs: float) -> RendezvousStore:
        line = EtcdLine(self._settings)
        return EtcdStore(line, self._secret, self._config.run_id, timeout_secs=timeout_secs)

    def trainers_endpoint(self) -> str:
        assert self._server is not None
        return format_endpoint(LOOPBACK, self._server.port)

    def _outlives_nodes(self, store: RendezvousStore) -> bool:
        return True

    def close(self) -> None:
        super().close()
        self._line.close()

    def _wait_for_the_cluster(self, store: EtcdStore) -> None:
        deadline, told = time.monotonic() + self._contact_secs, ""
        while True:
            try:
                store.greet()
                return
            except StoreError as error:
                why = "; ".join(map(self._state_of, self._settings.endpoints)) or str(error)
                if time.monotonic() > deadline:
                    raise JobEndedError(
                        f"the etcd cluster {self._config.rdzv_endpoint} cannot be used: {why}. "
                        "Start its "
                        f"members, and check that their client ports are open to the nodes"
                    ) from error
                if why != told:
                    logger.warning("waiting up to %.0f s for etcd: %s", self._contact_secs, why)
                told = why
            time.sleep(_LOOK_SECS)

    def _state_of(self, endpoint: str) -> str:
        """What is the matter with a member of the cluster, in words."""
        has_leader = self._line.leader_known_by(endpoint, _PROBE_SECS)
        if has_leader is not None:
            no_leader = "has no leader: most members are down or cut off"
            return f"{endpoint} {'answers' if has_leader else no_leader}"
        try:
            socket.create_connection(parse_endpoint(endpoint), timeout=_PROBE_SECS).close()
        except OSError as error:
            return f"{endpoint} cannot be reached ({error.strerror or error})"
        tls = "with" if self._settings.tls else "without"
        return (
            f"{endpoint} listens, but it is no etcd member that answers {tls} TLS: check "
            "--rdzv-endpoint "
            "(etcd's client port is 2379) and the certificates (--rdzv-conf "
            "cacert=FILE,cert=FILE,key=FILE)"
        )


def find_backend(options: LaunchOptions, secret: bytes) -> RendezvousBackend:
    """Where the job's nodes meet, for who knows the user's secret (P11). Raises ConfigError: it
    cannot be used by what is written."""
    make = EtcdBackend if options.config.rdzv_backend == ETCD_BACKEND else RendezvousBackend
    return make(options, secret)
