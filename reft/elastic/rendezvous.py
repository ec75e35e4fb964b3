"""``reft rendezvous``: the rendezvous store as a process of its own.

TorchElastic's c10d store lives in the launcher of one worker node and dies with it, taking the job
along. Served here, on a batch or login host, any worker node may die.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from reft.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400
_SERVED_KEY = "reft/rendezvous"


@dataclass(frozen=True)
class RendezvousInfo:
    """Where a store is served.

    Attributes:
        endpoint: ``host:port`` for ``--rdzv-endpoint``.
    """

    endpoint: str
    host: str
    port: int
    pid: int


class RendezvousServer:
    """A TCP store that belongs to no worker node.

    Args:
        host: name or address under which nodes reach this machine; None: its full host name, served
            on all interfaces.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str | None = None, port: int = DEFAULT_PORT) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = _listen(host, port)
        bound_port = int(listener.getsockname()[1])
        name = host or socket.getfqdn()
        bound = str(listener.getsockname()[0])
        address = "localhost" if bound in ("0.0.0.0", "::") else bound
        # The store takes over the descriptor: it listens before anybody is told the port.
        self._store: Any = TCPStore(
            address,
            bound_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )
        self._store.set(_SERVED_KEY, str(os.getpid()))
        shown = f"[{name}]" if ":" in name else name
        self.info = RendezvousInfo(f"{shown}:{bound_port}", name, bound_port, os.getpid())


def _listen(host: str | None, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; expected 0 (any free one) to 65535")
    try:
        if host is None:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=2048)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=socket.AddressFamily(family), backlog=2048)
    except OSError as error:
        hint = "give an address of this machine with --host"
        if error.errno == errno.EADDRINUSE:
            hint = "another process listens there: end it, or take another --port (0 finds a free one)"
        where = f"{host or 'any address'} port {port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; {hint}") from error


def parse_endpoint(endpoint: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split ``host[:port]``; IPv6 addresses are in brackets.

    Raises:
        ConfigError: the port is no number.
    """
    host, separator, port = endpoint.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = endpoint.strip(), str(default_port)
    if not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"rendezvous endpoint is {endpoint!r}; expected host:port with a port to 65535")
    return host.strip("[]") or "localhost", int(port)


def is_reachable(endpoint: str, timeout_secs: float = 1.0) -> bool:
    """Whether something listens at ``endpoint``."""
    try:
        with socket.create_connection(parse_endpoint(endpoint), timeout=timeout_secs):
            return True
    except OSError:
        return False


def wait_until_reachable(endpoint: str, timeout_secs: float) -> bool:
    """Wait for something to listen at ``endpoint``; False after ``timeout_secs``."""
    deadline = time.monotonic() + timeout_secs
    while not is_reachable(endpoint):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def is_served_by_reft(store: Any) -> bool:
    """Whether ``store`` belongs to ``reft rendezvous``, so that no node's death takes it along."""
    return bool(store.check([_SERVED_KEY]))


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft rendezvous``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="reft rendezvous",
        description="Serve the rendezvous store of `reft launch` and `torchrun` from a host that is not a "
        "worker node, until SIGTERM or Ctrl-C. Nodes join with --rdzv-backend c10d --rdzv-endpoint "
        "HOST:PORT.",
    )
    parser.add_argument("--host", help="address to serve and to be reached under (default: all, host name)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the endpoint as one JSON line")
    options = parser.parse_args(list(argv))
    # Blocked before the server's threads start, so that only this thread takes them.
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        server = RendezvousServer(options.host, options.port)
    except ConfigError as error:
        print(f"reft rendezvous: {error}", file=sys.stderr)
        return 2
    text = json.dumps(asdict(server.info)) if options.json else f"rendezvous at {server.info.endpoint}"
    print(text, flush=True)
    signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
