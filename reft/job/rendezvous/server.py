"""``reft rendezvous``: serves the rendezvous store in a process of its own.

Without this command the launcher of one worker node serves the store, and the job ends with that
node. If the command runs on a host that does not train, such as a login host, the job survives the
loss of any worker node.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from reft.control.keyvalue import Journal, KeyValueServer, RendezvousStore
from reft.control.wire import DEFAULT_PORT, format_endpoint, is_loopback, listen, parse_endpoint
from reft.errors import AuthenticationError, ConfigError
from reft.job.script import not_ignored
from reft.memory.job_secret import user_secret
from reft.refusal import Parser

logger = logging.getLogger(
    "reft.job.rendezvous.server"
)  # Run with -m, where __name__ is "__main__"

_SERVED_KEY = "reft/rendezvous"  # Only a store of ``reft rendezvous`` has this key


class RendezvousServer(KeyValueServer):
    """A rendezvous store outside the worker nodes, for clients that know the user's secret (P11).

    Args:
        host: name or address by which nodes reach this machine; the server listens on this address
            only. None: the machine's full host name.
        port: port to listen on; 0: any free port.
        secret: the secret that clients must know; None: the secret of this process's user.
        state_dir: directory that keeps the store's entries over a restart of the server; None: they
            are kept in memory only.

    Raises:
        ConfigError: the server cannot listen on the address, or cannot use the directory.
        AuthenticationError: the secret cannot be used, or is not that of the directory.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int = DEFAULT_PORT,
        secret: bytes | None = None,
        state_dir: Path | None = None,
    ) -> None:
        name, secret = host or socket.getfqdn(), secret or user_secret()
        journal = Journal(state_dir, secret) if state_dir is not None else None
        table = {_SERVED_KEY: str(os.getpid()).encode()}
        super().__init__(listen(name, port), secret, table, journal)
        self.name, self.endpoint = name, format_endpoint(name, self.port)


def is_reachable(endpoint: str) -> bool:
    """Whether a process listens at ``host:port``."""
    try:
        with socket.create_connection(parse_endpoint(endpoint), timeout=1.0):
            return True
    except OSError:
        return False


def is_served_by_reft(store: RendezvousStore) -> bool:
    """Whether ``reft rendezvous`` serves ``store``, which then survives the loss of any node."""
    return store.peek(_SERVED_KEY) is not None


def main(argv: Sequence[str]) -> int:
    """Run the command ``reft rendezvous``; return the exit code."""
    parser = Parser(
        prog="reft rendezvous",
        allow_abbrev=False,
        description="Serve the rendezvous store of `reft launch` from a host that is not a worker "
        "node, until SIGTERM or Ctrl-C. Nodes join with --rdzv-endpoint HOST:PORT, and need the "
        "same secret: the file ~/.reft/secret, which is created at its first use, or REFT_SECRET.",
    )
    parser.add_argument(
        "--host",
        help="name or address at which nodes reach this host; the store listens on that address "
        "only (default: this host's full name)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="keep the store's state in DIR, so that a rendezvous started again with the same port "
        "and directory continues where this one ended (default: keep it in memory only; the job "
        "continues after a restart of the rendezvous, but only its nodes then know what was "
        "committed)",
    )
    parser.add_argument("--json", action="store_true", help="print the endpoint as one JSON line")
    options = parser.parse_args(list(argv))
    # The handler only writes to a pipe: it may interrupt code that holds a lock.
    stop_read, stop_write = os.pipe()
    for number in not_ignored((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        signal.signal(number, lambda *_: os.write(stop_write, b"."))
    try:
        server = RendezvousServer(options.host, options.port, state_dir=options.state_dir)
    except (ConfigError, AuthenticationError) as error:
        print(f"reft rendezvous: {error}", file=sys.stderr)
        return 2
    if is_loopback(server.host) and not is_loopback(server.name):
        print(
            f"reft rendezvous: {server.name} is {server.host} on this host, so other hosts cannot "
            f"reach it; give an address of this host with --host",
            file=sys.stderr,
        )
    if options.json:
        fields = {
            "endpoint": server.endpoint,
            "host": server.name,
            "port": server.port,
            "pid": os.getpid(),
            "address": server.host,
        }
        print(json.dumps(fields), flush=True)
    else:
        print(f"rendezvous at {server.endpoint}, listening on {server.host} only", flush=True)
    select.select([stop_read], [], [])
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
