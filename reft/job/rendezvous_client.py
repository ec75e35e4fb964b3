"""How one node meets the others: connecting to the rendezvous, and coming back to it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from reft.control.rendezvous_store import RendezvousStore, StoreError
from reft.errors import ConfigError
from reft.job.agent import JobEndedError
from reft.job.handler import StoreRendezvous
from reft.job.incarnation import IncarnationRecord
from reft.job.options import LaunchOptions
from reft.job.places import place_of
from reft.label import committed_key
from reft.memory.jobdir import read_json
from reft.node.daemon import CONFIG_FILE

logger = logging.getLogger(__name__)

_ASK_SECS = 0.5
_STATUS_SECS = 5.0


class RendezvousClient:
    """The rendezvous of one job, seen from one node.

    Args:
        options: of ``reft launch``.
        secret: the user's; who does not know it, meets nobody (P11).

    Raises:
        ConfigError: the place cannot be used by what is written.
    """

    def __init__(self, options: LaunchOptions, secret: bytes) -> None:
        self._options = options
        self._config: LaunchConfig = options.config
        self._outcome_key = f"reft/{self._config.run_id}/outcome"
        self._place = place_of(options, secret)
        self._store: RendezvousStore | None = None
        self.handler: RendezvousHandler | None = None
        self.incarnations: IncarnationRecord | None = None
        """What the store knows of the starts of the job, once it is connected."""

    @property
    def endpoint(self) -> str:
        return str(self._config.rdzv_endpoint)

    @property
    def serves(self) -> bool:
        """Whether this launcher serves the store, which ends with it."""
        return self._place.serves

    @property
    def reopens(self) -> str:
        """What to do to start a run again, under its name, that has ended."""
        return self._place.reopens

    def connect(self) -> RendezvousHandler:
        """Join as a client where a store is served; serve it, as torchrun does, where none is and the
        endpoint is this machine's.

        Raises:
            JobEndedError: nothing of reft's is served there.
            AuthenticationError: it has another secret.
            ConfigError: it cannot be served at this address, or an option cannot be used.
        """
        config = self._config
        self._store = self._place.open()
        self.incarnations = IncarnationRecord(self._store, self._options.job_id)
        self.handler = self._make_handler(self._store)
        if config.max_nodes > 1 and not self._place.outlives_nodes(self._store):
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
                    f"s. {self._place.advice}"
                )
            time.sleep(_ASK_SECS)

    def store_endpoint(self) -> str:
        """``host:port`` of the store, for trainers."""
        return self._place.trainers_endpoint()

    def connect_for_status(self) -> RendezvousStore:
        """A connection of its own to the store, for what nobody has to wait for."""
        store = self._place.make_client(_STATUS_SECS)
        return store.with_prefix(f"reft/{self._config.run_id}/status")

    def wait_as_told(self, job_dir: Path) -> None:
        """Have the next round wait for others in the place of lost nodes as long as the job's ``reft`` block
        says, which the daemon was told."""
        if isinstance(self.handler, StoreRendezvous):
            told = (read_json(job_dir / CONFIG_FILE) or {}).get("elastic", {})
            self.handler.wait_secs = told.get("wait_secs")

    def is_spare(self) -> bool:
        """Whether this node waits for the place of another one."""
        return bool(getattr(self.handler, "is_spare", False))

    def close(self, outcome: str) -> None:
        """Tell all nodes, also those yet to come, that the job has ended; not from a node that it goes on
        without."""
        if self.handler is None or self._store is None:
            return
        mine, newest = self._incarnations()
        if newest > mine > 0 and not self._has_place():
            logger.error("the job goes on as start %d without this node, which is of start %d", newest, mine)
            return
        with suppress(StoreError):
            self._store.set(self._outcome_key, outcome)
        try:
            self.handler.shutdown()
        except (RuntimeError, RendezvousError) as error:
            logger.debug("the rendezvous could not be closed: %s", error)

    def has_taken_part(self) -> bool:
        """Whether this node was in a start of the job."""
        return self._incarnations()[0] > 0

    def _has_place(self) -> bool:
        """Whether this node still takes part: a later start may be one that it was to take part in, and that
        did not come about."""
        handler: Any = self.handler
        with suppress(RendezvousError):
            handler.is_closed()  # looks at the store
        return bool(handler.has_place)

    def _incarnations(self) -> tuple[int, int]:
        """This node's start of the job, and the newest one that the store knows of."""
        newest = 0
        if self.incarnations is not None:
            with suppress(StoreError):
                newest = self.incarnations.read()
        return int(getattr(self.handler, "incarnation", 0)), newest

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
        self._place.close()

    def _make_handler(self, store: RendezvousStore) -> RendezvousHandler:
        config = self._config
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
            handler = StoreRendezvous(store, parameters)
            handler.incarnations = self.incarnations
            return handler
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the rendezvous options cannot be used: {error}") from error

    def _answers(self) -> bool:
        assert self._store is not None
        try:
            return self._store.check([])
        except StoreError:
            return False
