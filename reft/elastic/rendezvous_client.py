"""Where the agents meet: connecting to the rendezvous, and coming back to it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher.api import LaunchConfig

from reft.elastic.agent import JobEndedError
from reft.elastic.handler import StaticRendezvous, StoreRendezvous
from reft.elastic.options import LaunchOptions
from reft.elastic.rendezvous import is_reachable, is_served_by_reft
from reft.errors import ConfigError
from reft.store.door import format_endpoint, is_loopback, listen, parse_endpoint
from reft.store.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.store.label import committed_key

logger = logging.getLogger(__name__)

_FIRST_CONTACT_SECS = 120.0
_STATIC_CONTACT_SECS = 900
_ASK_SECS = 0.5
_STATUS_SECS = 5.0


class RendezvousClient:
    """The rendezvous of one job, seen from one node.

    Args:
        options: of ``reft launch``.
        secret: the user's; who does not know it, meets nobody (P11).
    """

    def __init__(self, options: LaunchOptions, secret: bytes) -> None:
        self._options = options
        self._config: LaunchConfig = options.config
        self._secret = secret
        self._outcome_key = f"reft/{self._config.run_id}/outcome"
        self._server: KeyValueServer | None = None
        self._store: KeyValueStore | None = None
        self.handler: RendezvousHandler | None = None

    @property
    def endpoint(self) -> str:
        return str(self._config.rdzv_endpoint)

    def connect(self) -> RendezvousHandler:
        """Join as a client where a store is served; serve it, as torchrun does, where none is and the
        endpoint is this machine's.

        Raises:
            JobEndedError: nothing of reft's is served there.
            AuthenticationError: it has another secret.
            ConfigError: it cannot be served at this address, or an option cannot be used.
        """
        config = self._config
        if self._has_to_serve():
            self._serve()
        timeout = float(config.rdzv_configs.get("read_timeout", 30))
        self._store = KeyValueStore(self.store_endpoint(), self._secret, timeout_secs=timeout)
        try:
            self._store.check([])
        except StoreError as error:
            raise JobEndedError(f"the rendezvous endpoint {self.endpoint} cannot be used: {error}") from error
        self.handler = self._make_handler(self._store)
        if not self._options.is_static and config.max_nodes > 1 and not self._outlives_nodes():
            logger.warning(
                "the rendezvous store at %s lives in the launcher of a worker node and dies with it, and the "
                "job then cannot restart. Serve it with `reft rendezvous` on a host that does not train",
                self.endpoint,
            )
        return self.handler

    def reconnect(self) -> None:
        """Wait for a lost store to come back, as long as for a node.

        Raises:
            JobEndedError: it does not.
            AuthenticationError: another came, with another secret.
        """
        timeout = self._options.join_timeout_secs
        logger.warning("waiting up to %.0f s for the rendezvous store at %s", timeout, self.endpoint)
        deadline = time.monotonic() + timeout
        while not self._answers():
            if time.monotonic() > deadline:
                raise JobEndedError(
                    f"the rendezvous store at {self.endpoint} is gone and did not come back in {timeout:.0f} "
                    f"s. It lived in a launcher or process that died; serve it with `reft rendezvous` on a "
                    f"host that does not train, so that any node may die"
                )
            time.sleep(_ASK_SECS)

    def store_endpoint(self) -> str:
        """``host:port`` of the store, for trainers."""
        host, port = parse_endpoint(self.endpoint)
        return format_endpoint(host, self._server.port if self._server is not None else port)

    def connect_for_status(self) -> KeyValueStore:
        """A connection of its own to the store, for what nobody has to wait for."""
        store = KeyValueStore(self.store_endpoint(), self._secret, timeout_secs=_STATUS_SECS)
        return store.with_prefix(f"reft/{self._config.run_id}/status")

    def is_spare(self) -> bool:
        """Whether this node waits for the place of another one."""
        return bool(getattr(self.handler, "is_spare", False))

    def close(self, outcome: str) -> None:
        """Tell all nodes, also those yet to come, that the job has ended."""
        if self.handler is None or self._store is None:
            return
        with suppress(StoreError):
            self._store.set(self._outcome_key, outcome)
        try:
            self.handler.shutdown()
        except (RuntimeError, RendezvousError) as error:
            logger.debug("the rendezvous could not be closed: %s", error)

    def forget_commits(self) -> None:
        """The job's memory goes on purpose: a later start is not refused for want of it. Best effort."""
        if self._store is not None:
            with suppress(StoreError):
                self._store.delete(committed_key(self._options.job_id))

    def outcome(self) -> str | None:
        """What was said when the rendezvous was closed."""
        if self._store is None:
            return None
        with suppress(StoreError):
            said = self._store.peek(self._outcome_key)
            return said.decode(errors="replace") if said is not None else None
        return None

    def leave(self) -> None:
        """End the connection, and the store if it was served here."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    def _has_to_serve(self) -> bool:
        """Whether this node has to serve the store itself."""
        conf: dict[str, Any] = self._config.rdzv_configs
        host, port = parse_endpoint(self.endpoint)
        if self._options.is_static and int(conf["rank"]) == 0:
            return True
        if "is_host" in conf and not self._options.is_static:
            return str(conf["is_host"]).lower() in ("1", "true", "t", "yes", "y")
        if not self._options.is_static:
            if port == 0:
                return True
            if is_reachable(self.endpoint):
                return False
            if _matches_machine_hostname(host):
                return True
        self._wait_for_the_store(conf)
        return False

    def _wait_for_the_store(self, conf: dict[str, Any]) -> None:
        patience = _FIRST_CONTACT_SECS
        if self._options.is_static:
            patience = float(conf.get("timeout", _STATIC_CONTACT_SECS))
        logger.info("waiting for the rendezvous store at %s", self.endpoint)
        deadline = time.monotonic() + patience
        while not is_reachable(self.endpoint):
            if time.monotonic() > deadline:
                hint = "start the launcher with --node-rank 0" if self._options.is_static else ""
                raise JobEndedError(
                    f"nothing answers at the rendezvous endpoint {self.endpoint}; "
                    f"{hint or 'start `reft rendezvous`'} there, and check that its port is open to the nodes"
                )
            time.sleep(_ASK_SECS)

    def _serve(self) -> None:
        host, port = parse_endpoint(self.endpoint)
        try:
            listener = listen(host, port, "--master-addr" if self._options.is_static else "--rdzv-endpoint")
        except ConfigError:
            # Another launcher on this machine may have been quicker.
            if port and not self._options.is_static and is_reachable(self.endpoint):
                return
            raise
        self._server = KeyValueServer(listener, self._secret)
        if self._config.max_nodes > 1 and is_loopback(self._server.host) and not is_loopback(host):
            logger.warning(
                "%s is %s on this host, so other hosts cannot reach the rendezvous store here; give this "
                "host's address as --rdzv-endpoint (or --master-addr)",
                host,
                self._server.host,
            )

    def _make_handler(self, store: KeyValueStore) -> RendezvousHandler:
        config = self._config
        if self._options.is_static:
            return StaticRendezvous(store, int(config.rdzv_configs["rank"]), config.max_nodes, config.run_id)
        try:
            parameters = RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
            return StoreRendezvous(store, parameters)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the rendezvous options cannot be used: {error}") from error

    def _answers(self) -> bool:
        assert self._store is not None
        try:
            return self._store.check([])
        except StoreError:
            return False

    def _outlives_nodes(self) -> bool:
        assert self._store is not None
        with suppress(StoreError):
            return is_served_by_reft(self._store)
        return False
