"""The rendezvous backend for an etcd cluster.

Trainers reach the store through their launcher, over the loopback interface, so they need
neither etcd's client library nor the password.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from reft.control.keyvalue import RendezvousStore, StoreError, relay_store
from reft.control.wire import format_endpoint, listen, parse_endpoint
from reft.env import ENV_ETCD_PASSWORD
from reft.job.options import LaunchOptions
from reft.job.rendezvous.backend import POLL_SECS, JobEndedError, RendezvousBackend
from reft.job.trainer_store import LOOPBACK
from reft_etcd.etcd import RUN_LEASE_SECS, EtcdClient, EtcdSettings, EtcdStore

logger = logging.getLogger(f"reft.{__name__}")

_PROBE_SECS = 2.0


class EtcdBackend(RendezvousBackend):
    """Connects one node to an etcd cluster, and serves the store to the node's trainers."""

    advice = "Start the members of the etcd cluster again: it needs more than half of them"
    reopens = f"wait {RUN_LEASE_SECS} s: etcd then forgets a run that has no launcher any more"

    def __init__(self, options: LaunchOptions, secret: bytes) -> None:
        super().__init__(options, secret)
        endpoint = self._config.rdzv_endpoint
        settings = self._settings = EtcdSettings.parse(endpoint, self._conf, os.environ)
        self._client = EtcdClient(settings)
        # Remove the password: trainers inherit the environment, where any of their code could
        # read it.
        os.environ.pop(ENV_ETCD_PASSWORD, None)
        if settings.password is not None and not settings.tls:
            logger.warning(
                "the password of etcd's user %s crosses the network in the clear: set up TLS",
                settings.user,
            )

    def trainers_endpoint(self) -> str:
        assert self._server is not None
        return format_endpoint(LOOPBACK, self._server.port)

    def close(self) -> None:
        super().close()
        self._client.close()

    def _open(self) -> RendezvousStore:
        store = EtcdStore(
            self._client, self._secret, self._config.run_id, timeout_secs=self._read_secs
        )
        self._wait_for_cluster(store)
        self._server = relay_store(listen(LOOPBACK, 0), self._secret, store.lasting())
        return store

    def _make_client(self, timeout_secs: float) -> RendezvousStore:
        client = EtcdClient(self._settings)
        return EtcdStore(client, self._secret, self._config.run_id, timeout_secs=timeout_secs)

    def _outlives_nodes(self, store: RendezvousStore) -> bool:
        return True

    def _wait_for_cluster(self, store: EtcdStore) -> None:
        """Wait until the cluster can be used. Log the problem, and log again when it changes."""
        deadline, logged = time.monotonic() + self._contact_secs, ""
        while True:
            try:
                store.greet()
                return
            except StoreError as error:
                states = [self._describe_member(member) for member in self._settings.endpoints]
                reason = "; ".join(states)
                if time.monotonic() > deadline:
                    raise JobEndedError(
                        f"the etcd cluster {self._config.rdzv_endpoint} cannot be used: {reason}. "
                        "Start its members, and check that their client ports are open to the nodes"
                    ) from error
                if reason != logged:
                    logger.warning("waiting up to %.0f s for etcd: %s", self._contact_secs, reason)
                logged = reason
            time.sleep(POLL_SECS)

    def _describe_member(self, endpoint: str) -> str:
        """Describe the state of one member of the cluster."""
        has_leader = self._client.leader_known_by(endpoint, _PROBE_SECS)
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
            "--rdzv-endpoint (etcd's client port is 2379) and the certificates (--rdzv-conf "
            "cacert=FILE,cert=FILE,key=FILE)"
        )
