"""A rank that is a process of its own, one link of which it was given; its parent in the tree stops it."""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgpack

from reft.control.transport import Limits
from reft.control.tree import Tree
from reft.control.wire import Channel

SECRET = b"s" * 32
RANKS = 3
LONG_BYTES = 40 * 2**20
"""In several frames, each longer than the kernel keeps of a connection."""
DEADLINE_SECS = 300.0


def main(fd: int, role: str) -> None:
    channel = Channel(socket.socket(fileno=fd), SECRET, server=False)
    channel.peer = "rank 0"
    tree = Tree(1, RANKS, channel, (), Limits(DEADLINE_SECS))
    if role == "sends":
        gathered = tree.gather(b"x" * LONG_BYTES)
    else:
        channel.send([1, msgpack.packb(["gather, number 1", [[1], [b"x"]]])])
        os.kill(os.getpid(), signal.SIGSTOP)  # before it reads what comes
        parts, body = channel.receive()
        gathered = msgpack.unpackb(b"".join([body, *(channel.receive() for _ in range(parts - 1))]))
    print(sum(map(len, gathered)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
