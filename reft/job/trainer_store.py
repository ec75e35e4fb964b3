"""Where the trainers of one round find each other: torch's TCPStore, on loopback only (P11).

Torch's store serves whoever reaches its port, so the launcher of the first node serves it to its
own host alone. The other launchers listen on their own loopback and relay their trainers'
connections, through an authenticated server, to that launcher. Trainers on every node find it at
``127.0.0.1``.
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
    """The store of one round, in which the trainers of one start of the job meet, served or
    relayed."""

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
        """Serve the store on the first node, and relay to it on the others. ``store``: the agents'
        own, with the round's prefix. ``nodes``: of this round; a single one serves itself alone.
        ``local_addr``: ``--local-addr``; None: the address that the rendezvous sees. Raises
        ConfigError: the address cannot be listened on. Raises TimeoutError, StoreError: the first
        node did not say where it serves."""
        if group_rank:
            return cls.relay(store.get(_ENDPOINT_KEY).decode(), secret, incarnation)
        served = cls.serve(incarnation)
        if nodes > 1:
            rendezvous, _ = parse_endpoint(store.endpoint)
            host = local_addr or store.local_address()
            if not local_addr and is_loopback(host) and not is_loopback(rendezvous):
                raise ConfigError(
                    f"the rendezvous host {rendezvous} is {host} on this machine, which other "
                    "nodes cannot "
                    f"reach: give this machine's address with --local-addr"
                )
            port = served.let_relays_in(listen(host, 0, "--local-addr"), secret)
            store.set(_ENDPOINT_KEY, format_endpoint(host, port))
        return served

    def let_relays_in(self, listener: socket.socket, secret: bytes) -> int:
        """Let the relays of the other nodes in; the port that they connect to."""
        self._server = AuthenticatedServer(listener, secret, PURPOSE, self._pass_on)
        return self._server.port

    @classmethod
    def serve(cls, incarnation: int = 0) -> TrainerStore:
        """Serve it to this host alone."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = listen(LOOPBACK, 0)
        served = cls(int(listener.getsockname()[1]), incarnation)
        # The store takes over the descriptor: torch would listen on all interfaces.
        options: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": listener.detach(),
        }
        try:
            served._store = TCPStore(LOOPBACK, served.port, **options)
        except NotImplementedError:
            # Torch 2.4: its store on libuv, which is the default, takes no descriptor.
            served._store = TCPStore(LOOPBACK, served.port, **options, use_libuv=False)
        return served

    @classmethod
    def relay(cls, endpoint: str, secret: bytes, incarnation: int = 0) -> TrainerStore:
        listener = listen(LOOPBACK, 0)
        relay = cls(int(listener.getsockname()[1]), incarnation)
        relay._listener = listener

        def let_in(trainer: socket.socket, _: Any) -> None:
            carry = threading.Thread(
                target=_carry,
                args=(trainer, endpoint, secret, incarnation),
                name=PURPOSE,
                daemon=True,
            )
            try:
                carry.start()
            except RuntimeError:
                trainer.close()
                raise

        accept(listener, "the trainers' relay", let_in, relay._closed.is_set)
        return relay

    def _pass_on(self, channel: Channel) -> None:
        theirs = channel.receive()
        if theirs != self._incarnation:
            channel.send(
                f"it belongs to start {self._incarnation} of the job, and refuses start {theirs}"
            )
            return
        channel.send("")
        with socket.create_connection((LOOPBACK, self.port), timeout=_CONNECT_SECS) as trainer:
            _join(trainer, channel)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._closed.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._store = None


def deal_ranks(workers: Sequence[int], turn: int) -> tuple[tuple[int, ...], ...]:
    """Number the trainers of a job: the global ranks of each node, by local rank.

    DeepSpeed, and Megatron by default, number the data-parallel peers of a pipeline stage one after
    the other, with the slices of a tensor-parallel group side by side. torchrun gives a node all
    its ranks in a row, so that peers share nodes. Dealt out in turns as large as the
    tensor-parallel degree, neighbouring peers are on different nodes, and a tensor-parallel group
    stays on one.

    Args:
        workers: trainers of each node, by group rank.
        turn: ranks that a node gets in its turn; 0: all of them, as torchrun does.
    """
    dealt: list[list[int]] = [[] for _ in workers]
    rank = 0
    while rank < sum(workers):
        for ranks, count in zip(dealt, workers, strict=True):
            given = min(turn or count, count - len(ranks))
            ranks.extend(range(rank, rank + given))
            rank += given
    return tuple(map(tuple, dealt))


def trainer_environ(
    rank: tuple[int, int],
    local: tuple[int, int],
    node: tuple[int, int],
    port: int,
    restarts: tuple[int, int] = (0, 0),
) -> dict[str, str]:
    """What torch's trainers are told, with torchrun's names. ``rank``: and trainers of the job;
    ``local``: rank on the node, and trainers of the node; ``node``: its number, and nodes;
    ``port``: where the store of this start is here; ``restarts``: so far, and as many as are
    allowed."""
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
        # The launcher, or the node's first process, serves the store, or relays to it.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def _carry(trainer: socket.socket, endpoint: str, secret: bytes, incarnation: int) -> None:
    with trainer:
        try:
            channel = connect_authenticated(endpoint, secret, PURPOSE, _CONNECT_SECS)
        except OSError as error:
            logger.warning("the trainers' store at %s cannot be reached: %s", endpoint, error)
            return
        try:
            channel.send(incarnation)
            refused = channel.receive()
            if refused:
                logger.warning("the trainers' store at %s refuses this node: %s", endpoint, refused)
                return
            _join(trainer, channel)
        except (EOFError, OSError) as error:
            logger.warning("the trainers' store at %s has ended: %s", endpoint, error)
        finally:
            channel.close()


def _join(trainer: socket.socket, channel: Channel) -> None:
    """Pass bytes both ways until one side ends."""
    trainer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trainer.settimeout(None)
    channel.settimeout(None)
    outgoing = threading.Thread(
        target=_send, args=(trainer, channel), name="trainer's store", daemon=True
    )
    outgoing.start()
    try:
        while True:
            trainer.sendall(channel.receive())
    except (EOFError, OSError):
        pass
    finally:
        # Ends the other direction, too, wherever it waits.
        with suppress(OSError):
            trainer.shutdown(socket.SHUT_RDWR)
        channel.shutdown()
        outgoing.join()


def _send(trainer: socket.socket, channel: Channel) -> None:
    try:
        while data := trainer.recv(_CHUNK_BYTES):
            channel.send(data)
    except OSError:
        pass
    channel.shutdown()
