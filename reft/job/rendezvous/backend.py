"""Connects a node to the rendezvous store, the key-value store by which a job's launchers meet.

This module is for reft's own store, which ``reft rendezvous`` or the launcher of one of the nodes
serves. Other stores are integrations (:mod:`reft.integrations`); ``--rdzv-backend`` selects one by
name.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from reft import integrations
from reft.control.keyvalue import KeyValueServer, KeyValueStore, RendezvousStore, StoreError
from reft.control.wire import (
    AuthenticatedServer,
    format_endpoint,
    is_loopback,
    listen,
    parse_endpoint,
)
from reft.errors import ConfigError, ReftError
from reft.job.hosts import is_this_host
from reft.job.options import REFT_BACKEND, LaunchOptions
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.membership import NodeInfo
from reft.job.rendezvous.server import is_reachable, is_served_by_reft

logger = logging.getLogger(__name__)

POLL_SECS = 0.5
_FIRST_CONTACT_SECS = 120.0
_OTHERS_READ_SECS, _HOLDERS_POLL_SECS = 5.0, 0.05
_READ_SECS = 30.0
_STATUS_SECS = 5.0


class JobEndedError(ReftError, RuntimeError):
    """Raised if the job cannot continue; the message says why."""


class RendezvousBackend:
    """Connects one node to reft's own store; subclasses connect to other stores.

    Attributes:
        advice: what a user should do when the store is lost, for messages.
        reopens: what a user has to do before a run that the store marks as ended can start again.
    """

    advice = (
        "It lived in a launcher or process that died; serve it with `reft rendezvous` on a host "
        "that does not train, so that any node may die"
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
        """Connect to the store; return this node's side of the rendezvous.

        As with torchrun, this node serves the store itself if no process does and the endpoint is
        an address of this machine.

        Raises:
            JobEndedError: no process at the endpoint answers, or it does not serve reft's store.
            AuthenticationError: the store has another secret.
            ConfigError: the store cannot be served at this address, or an option is invalid.
        """
        config, options = self._config, self._options
        store = self._store = self._open()
        info = NodeInfo(
            options.node, config.nproc_per_node, options.rank_stride, options.restarts_renew
        )
        try:
            rendezvous = StoreRendezvous(store, config, info, options.job_id)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the rendezvous options cannot be used: {error}") from error
        if config.max_nodes > 1 and not self._outlives_nodes(store):
            logger.warning(
                "the rendezvous store at %s lives in the launcher of a worker node and dies with "
                "it, and the job then cannot restart. Serve it with `reft rendezvous` on a host "
                "that does not train",
                config.rdzv_endpoint,
            )
        return rendezvous

    def reconnect(self) -> None:
        """Wait until a lost store answers again, for the time-out of joining a round at most.

        Raises:
            JobEndedError: the store does not come back.
            AuthenticationError: a store with another secret answers.
        """
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
            time.sleep(POLL_SECS)

    def connect_for_status(self) -> RendezvousStore:
        """Open a separate connection for status reports, so that they delay no rendezvous."""
        return self._make_client(_STATUS_SECS).with_prefix(f"reft/{self._config.run_id}/status")

    def trainers_endpoint(self) -> str:
        """Return ``host:port`` at which trainers reach the store."""
        host, port = parse_endpoint(self._config.rdzv_endpoint)
        return format_endpoint(host, self._server.port if self._server is not None else port)

    def wait_for_others(self) -> None:
        """If this launcher serves the store, wait until the other nodes have disconnected.

        The other nodes still have to read from the store how the job ended. The wait takes five
        seconds at most.
        """
        deadline = time.monotonic() + _OTHERS_READ_SECS
        while isinstance(self._server, KeyValueServer) and len(self._server.holders()) > 1:
            if time.monotonic() > deadline:
                return
            time.sleep(_HOLDERS_POLL_SECS)

    def close(self) -> None:
        """Close the connection, and the store if this launcher serves it."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _open(self) -> RendezvousStore:
        """Connect to the store, and check that it answers."""
        if self._has_to_serve():
            self._serve()
        endpoint, secs = self._config.rdzv_endpoint, min(self._contact_secs, self._read_secs)
        # A server that is not reft's may never answer, so the first request has a time-out of its
        # own.
        first = self._make_client(secs)
        try:
            first.check([])
        except StoreError as error:
            raise JobEndedError(
                f"what listens at the rendezvous endpoint {endpoint} did not answer within "
                f"{secs:.0f} s as reft's rendezvous does ({error}). Check the address, start `reft "
                "rendezvous` there, or wait longer for a slow one with --rdzv-conf "
                "connect_timeout=SECS,read_timeout=SECS"
            ) from error
        finally:
            first.close()
        return self._make_client(self._read_secs)

    def _make_client(self, timeout_secs: float) -> RendezvousStore:
        """Make a client that connects to the store at its first request."""
        return KeyValueStore(self.trainers_endpoint(), self._secret, timeout_secs=timeout_secs)

    def _outlives_nodes(self, store: RendezvousStore) -> bool:
        """Whether the store survives the loss of any node of the job."""
        with suppress(StoreError):
            return is_served_by_reft(store)
        return False

    def _has_to_serve(self) -> bool:
        """Whether this node has to serve the store; if not, wait until another process does.

        Raises:
            JobEndedError: no other process has served the store in time.
        """
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
                    f"rendezvous` there (or the launcher with --node-rank 0), and check that its "
                    f"port is open to the nodes"
                )
            time.sleep(POLL_SECS)
        return False

    def _serve(self) -> None:
        endpoint = self._config.rdzv_endpoint
        host, port = parse_endpoint(endpoint)
        try:
            listener = listen(host, port, "--rdzv-endpoint")
        except ConfigError:
            # Another launcher on this machine may have taken the port first.
            if port and is_reachable(endpoint):
                return
            raise
        server = self._server = KeyValueServer(listener, self._secret)
        if self._config.max_nodes > 1 and is_loopback(server.host) and not is_loopback(host):
            logger.warning(
                "%s is %s on this host, so other hosts cannot reach the rendezvous store here; "
                "give this host's address as --rdzv-endpoint (or --master-addr)",
                host,
                server.host,
            )


def find_backend(options: LaunchOptions, secret: bytes) -> RendezvousBackend:
    """Make the backend that connects this node to the job's rendezvous store.

    Args:
        options: options of the launcher.
        secret: the user's secret; the store refuses connections without it (P11).

    Raises:
        ConfigError: an option is invalid, or a package that the backend needs is missing.
    """
    name = options.config.rdzv_backend
    if name == REFT_BACKEND:
        return RendezvousBackend(options, secret)
    backend: RendezvousBackend = integrations.find("RENDEZVOUS", name)(options, secret)
    return backend
