"""Where the agents meet: connecting to the rendezvous, and coming back to it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher.api import LaunchConfig

from reft.elastic.agent import JobEndedError
from reft.elastic.options import LaunchOptions
from reft.elastic.rendezvous import is_reachable, is_served_by_reft, parse_endpoint, wait_until_reachable

logger = logging.getLogger(__name__)

_FIRST_CONTACT_SECS = 120.0


class Meeting:
    """The rendezvous of one job, seen from one node.

    Args:
        options: of ``reft launch``.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._config: LaunchConfig = options.config
        self._outcome_key = f"reft/{self._config.run_id}/outcome"
        self.handler: RendezvousHandler | None = None

    @property
    def endpoint(self) -> str:
        return str(self._config.rdzv_endpoint)

    def connect(self) -> RendezvousHandler:
        """Join as a client where a store is served; serve it, as torchrun does, where none is and the
        endpoint is this machine's.

        Raises:
            JobEndedError: nothing is served there.
        """
        serves = self._connects_first()
        self.handler = self._make_handler({} if serves else self._as_client())
        if self._options.is_c10d and self._config.max_nodes > 1 and not self._outlives_nodes():
            logger.warning(
                "the rendezvous store at %s lives in the launcher of a worker node and dies with it, and the "
                "job then cannot restart. Serve it with `reft rendezvous` on a host that does not train",
                self.endpoint,
            )
        return self.handler

    def reconnect(self) -> RendezvousHandler:
        """Wait for a lost store to come back, as long as for a node.

        Raises:
            JobEndedError: it does not.
        """
        timeout = self._options.join_timeout_secs
        logger.warning("waiting up to %.0f s for the rendezvous store at %s", timeout, self.endpoint)
        if not wait_until_reachable(self.endpoint, timeout):
            raise JobEndedError(
                f"the rendezvous store at {self.endpoint} is gone and did not come back in {timeout:.0f} s. "
                f"It lived in a launcher or process that died; serve it with `reft rendezvous` on a host "
                f"that does not train, so that any node may die"
            )
        self.handler = self._make_handler(self._as_client())
        return self.handler

    def store_endpoint(self) -> str:
        """``host:port`` of the store, for trainers."""
        store = self._store()
        if store is None or not hasattr(store, "port"):
            return self.endpoint
        return f"{store.host}:{store.port}"

    def close(self, outcome: str) -> None:
        """Tell all nodes, also those yet to come, that the job has ended."""
        if self.handler is None:
            return
        with suppress(RuntimeError, AttributeError):
            self._store().set(self._outcome_key, outcome)
        try:
            self.handler.shutdown()
        except (RuntimeError, RendezvousError) as error:
            logger.debug("the rendezvous could not be closed: %s", error)

    def outcome(self) -> str | None:
        """What was said when the rendezvous was closed."""
        with suppress(RuntimeError, AttributeError):
            store = self._store()
            if store.check([self._outcome_key]):
                return str(store.get(self._outcome_key).decode())
        return None

    def _connects_first(self) -> bool:
        """Whether this node may have to serve the store itself."""
        config = self._config
        if not self._options.is_c10d or "is_host" in config.rdzv_configs:
            return True
        host, port = parse_endpoint(self.endpoint)
        if port == 0:
            return True
        if is_reachable(self.endpoint):
            return False
        if _matches_machine_hostname(host):
            return True
        logger.info("waiting for the rendezvous store at %s", self.endpoint)
        if not wait_until_reachable(self.endpoint, _FIRST_CONTACT_SECS):
            raise JobEndedError(
                f"nothing answers at the rendezvous endpoint {self.endpoint}; start `reft rendezvous` there, "
                f"and check that its port is open to the nodes"
            )
        return False

    def _as_client(self) -> dict[str, Any]:
        return {"is_host": "0"} if self._options.is_c10d else {}

    def _make_handler(self, extra: dict[str, Any]) -> RendezvousHandler:
        config = self._config
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **{**config.rdzv_configs, **extra},
        )
        try:
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError as error:
            raise JobEndedError(
                f"the rendezvous endpoint {self.endpoint} cannot be used: {error.__cause__ or error}"
            ) from error

    def _store(self) -> Any:
        return getattr(self.handler, "_store", None)

    def _outlives_nodes(self) -> bool:
        with suppress(RuntimeError, AttributeError):
            return is_served_by_reft(self._store())
        return False
