"""The store by which the trainers of one round find each other: a TCPStore on loopback only (P11).

A round is one start of the trainers on all nodes. Torch's TCPStore does not authenticate: it serves
every process that reaches its port. Therefore the launcher of the first node serves the store on
loopback, to its own host only. The other launchers listen on their own loopback and relay their
trainers' connections to the first launcher, which accepts authenticated relays only. Trainers on
every node find the store at ``127.0.0.1``.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from reft.control.keyvalue import RendezvousStore
from reft.control.wire import (
    AuthenticatedServer,
    Channel,
    accept,
    connect_authenticated,
    format_endpoint,
    is_loopback,
    listen,
    parse_endpoint,
)
from reft.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PURPOSE = "trainers' store"
_CHUNK_BYTES = 1 << 16
_CONNECT_SECS = 30.0
_ENDPOINT_KEY = "trainers"


class TrainerStore:
    """One node's end of the trainers' store: it serves the store, or relays to the first node.

    Attributes:
        port: port on loopback at which the node's trainers find the store.
    """

    def __init__(self, port: int, incarnation: int = 0) -> None:
        self.port = port
        self._incarnation = incarnation
        self._store: Any = None
        self._server: AuthenticatedServer | None = None
        self._listener: socket.socket | None = None
        self._closed = threading.Event()

    @classmethod
    def open(
        cls,
        store: RendezvousStore,
        secret: bytes,
        group_rank: int,
        nodes: int,
        local_addr: str | None,
        *,
        incarnation: int = 0,
    ) -> TrainerStore:
        """Serve the store if this is the first node; otherwise relay to the first node.

        Args:
            store: the rendezvous store, with the round's prefix.
            secret: the user's secret.
            group_rank: group rank of this node; 0: the first node.
            nodes: number of nodes of this round; a single node accepts no relays.
            local_addr: value of ``--local-addr``, the address of this node for the other nodes;
                None: the address on the route to the rendezvous store.
            incarnation: number of this start of the job; relays of other starts are refused.

        Raises:
            ConfigError: other nodes cannot reach the address of this node.
            TimeoutError, StoreError: the first node did not publish its address.
        """
        if group_rank:
            return cls.relay(store.get(_ENDPOINT_KEY).decode(), secret, incarnation)
        served = cls.serve(incarnation)
        if nodes > 1:
            rendezvous_host, _ = parse_endpoint(store.endpoint)
            host = local_addr or store.local_address()
            if not local_addr and is_loopback(host) and not is_loopback(rendezvous_host):
                raise ConfigError(
                    f"the rendezvous host {rendezvous_host} is {host} on this machine, which other "
                    f"nodes cannot reach: give this machine's address with --local-addr"
                )
            port = served.admit_relays(listen(host, 0, "--local-addr"), secret)
            store.set(_ENDPOINT_KEY, format_endpoint(host, port))
        return served

    def admit_relays(self, listener: socket.socket, secret: bytes) -> int:
        """Accept the relays of the other nodes; return the port to which they connect."""
        self._server = AuthenticatedServer(listener, secret, PURPOSE, self._serve_relay)
        return self._server.port

    @classmethod
    def serve(cls, incarnation: int = 0) -> TrainerStore:
        """Start a store that serves this host only."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = listen(LOOPBACK, 0)
        served = cls(int(listener.getsockname()[1]), incarnation)
        # Pass a listening descriptor: TCPStore itself would open a port on all interfaces.
        options: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": listener.detach(),
        }
        try:
            served._store = TCPStore(LOOPBACK, served.port, **options)
        except NotImplementedError:
            # The default store of torch 2.4, which uses libuv, accepts no descriptor.
            served._store = TCPStore(LOOPBACK, served.port, **options, use_libuv=False)
        return served

    @classmethod
    def relay(cls, endpoint: str, secret: bytes, incarnation: int = 0) -> TrainerStore:
        """Relay the connections of this host's trainers to the launcher at ``endpoint``."""
        listener = listen(LOOPBACK, 0)
        relay = cls(int(listener.getsockname()[1]), incarnation)
        relay._listener = listener

        def admit(trainer: socket.socket, _: Any) -> None:
            thread = threading.Thread(
                target=_relay_connection,
                args=(trainer, endpoint, secret, incarnation),
                name=PURPOSE,
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:
                trainer.close()
                raise

        accept(listener, "the trainers' relay", admit, relay._closed.is_set)
        return relay

    def _serve_relay(self, channel: Channel) -> None:
        """Forward the bytes of one relayed connection between its node and the store."""
        incarnation = channel.receive()
        if incarnation != self._incarnation:
            channel.send(
                f"it belongs to start {self._incarnation} of the job, and refuses start "
                f"{incarnation}"
            )
            return
        channel.send("")
        with socket.create_connection((LOOPBACK, self.port), timeout=_CONNECT_SECS) as connection:
            _pass_bytes(connection, channel)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._closed.set()
        if self._listener is not None:
            with suppress(OSError):
                # Closing alone does not wake the thread that waits in accept(); shutdown does.
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._store = None


def deal_ranks(workers: Sequence[int], stride: int) -> tuple[tuple[int, ...], ...]:
    """Assign global ranks to the trainers of a job.

    In DeepSpeed, and in Megatron by default, the tensor-parallel index varies fastest with the
    rank, then the data-parallel index, then the pipeline stage. torchrun numbers each node's ranks
    consecutively, so data-parallel peers end up on the same node. A round-robin assignment with the
    tensor-parallel degree as stride puts neighbouring data-parallel peers on different nodes, and
    still keeps each tensor-parallel group on one node.

    Args:
        workers: number of trainers of each node, by group rank.
        stride: number of consecutive ranks that a node gets in each turn of the round-robin; 0: a
            node gets all its ranks at once, as in torchrun.

    Returns:
        The global ranks of each node, by local rank.
    """
    dealt: list[list[int]] = [[] for _ in workers]
    rank = 0
    while rank < sum(workers):
        for ranks, count in zip(dealt, workers, strict=True):
            size = min(stride or count, count - len(ranks))
            ranks.extend(range(rank, rank + size))
            rank += size
    return tuple(map(tuple, dealt))


def trainer_environ(
    rank: tuple[int, int],
    local: tuple[int, int],
    node: tuple[int, int],
    port: int,
    restarts: tuple[int, int] = (0, 0),
) -> dict[str, str]:
    """Return the environment variables that tell a trainer its rank, with torchrun's names.

    Args:
        rank: global rank, and number of trainers of the job.
        local: local rank, and number of trainers of the node.
        node: group rank of the node, and number of nodes.
        port: port of the trainers' store on this node.
        restarts: number of restarts so far, and number of allowed restarts.
    """
    return {
        "RANK": str(rank[0]),
        "WORLD_SIZE": str(rank[1]),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "GROUP_RANK": str(node[0]),
        "GROUP_WORLD_SIZE": str(node[1]),
        "ROLE_RANK": str(rank[0]),
        "ROLE_WORLD_SIZE": str(rank[1]),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts[0]),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
        # Tells torch that a store is already served at MASTER_PORT, so rank 0 must not start one.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def _relay_connection(
    trainer: socket.socket, endpoint: str, secret: bytes, incarnation: int
) -> None:
    """Relay one connection of a trainer to the launcher that serves the store."""
    with trainer:
        try:
            channel = connect_authenticated(endpoint, secret, PURPOSE, _CONNECT_SECS)
        except OSError as error:
            logger.warning("the trainers' store at %s cannot be reached: %s", endpoint, error)
            return
        try:
            channel.send(incarnation)
            refusal = channel.receive()
            if refusal:
                logger.warning("the trainers' store at %s refuses this node: %s", endpoint, refusal)
                return
            _pass_bytes(trainer, channel)
        except (EOFError, OSError) as error:
            logger.warning("the trainers' store at %s has ended: %s", endpoint, error)
        finally:
            channel.close()


def _pass_bytes(connection: socket.socket, channel: Channel) -> None:
    """Copy bytes between both connections, in both directions, until one side closes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    channel.settimeout(None)
    outgoing = threading.Thread(
        target=_send_all, args=(connection, channel), name="trainer's store", daemon=True
    )
    outgoing.start()
    try:
        while True:
            connection.sendall(channel.receive())
    except (EOFError, OSError):
        pass
    finally:
        # Shutting down both ends wakes the other thread, which waits for bytes or for buffer space.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        channel.shutdown()
        outgoing.join()


def _send_all(connection: socket.socket, channel: Channel) -> None:
    try:
        while data := connection.recv(_CHUNK_BYTES):
            channel.send(data)
    except OSError:
        pass
    channel.shutdown()
