"""A process that is stopped in the middle of a message is named, to all who wait for it (P6)."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from reft.control.transport import Limits
from reft.control.tree import Tree
from reft.control.wire import Channel

from .stopped_job import DEADLINE_SECS, LONG_BYTES, RANKS, SECRET

pytestmark = pytest.mark.integration

NAME = "rank 1 on node a"
NAMED_SECS = 60.0


@dataclass
class Three:
    """Rank 0 at the root and rank 2 are threads of this process, rank 1 is another."""

    process: subprocess.Popen[str]
    link: Channel
    trees: list[Tree]
    named: list[threading.Event] = field(default_factory=lambda: [threading.Event() for _ in range(2)])

    def gather(self, mine: list[bytes]) -> list[Future[list[bytes]]]:
        for tree, event in zip(self.trees, self.named, strict=True):
            tree.limits.patience_secs = 0.3
            tree.limits.on_silence = lambda missing, secs, event=event: (
                event.set() if missing == [NAME] else None
            )
        pool = ThreadPoolExecutor(2)
        gathered = [pool.submit(tree.gather, one) for tree, one in zip(self.trees, mine, strict=True)]
        pool.shutdown(wait=False)
        return gathered

    def check_named(self) -> None:
        deadline = time.monotonic() + NAMED_SECS
        named = [event.wait(max(0.0, deadline - time.monotonic())) for event in self.named]
        assert named == [True, True], "by the root, and by a rank that waits for the root"

    def state(self) -> str:
        return open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()[0]

    def await_state(self, state: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECS
        while self.state() != state:
            assert time.monotonic() < deadline, self.state()
            time.sleep(0.01)

    def go_on(self) -> int:
        """Bytes that rank 1 has gathered in the end."""
        os.kill(self.process.pid, signal.SIGCONT)
        told, _ = self.process.communicate(timeout=DEADLINE_SECS)
        return int(told)


@pytest.fixture
def three(request: pytest.FixtureRequest) -> Iterator[Three]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.control.stopped_job", str(theirs.fileno()), request.param]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    ours.settimeout(DEADLINE_SECS)
    links = [Channel(ours, SECRET, server=True)]
    up, down = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(Channel, up, SECRET, server=True), pool.submit(Channel, down, SECRET, server=False)
        to_two, of_two = (end.result(DEADLINE_SECS) for end in ends)
    links[0].peer, to_two.peer, of_two.peer = NAME, "rank 2 on node a", "rank 0 on node a"
    trees = [
        Tree(0, RANKS, None, (links[0], to_two), Limits(DEADLINE_SECS)),
        Tree(2, RANKS, of_two, (), Limits(DEADLINE_SECS)),
    ]
    yield Three(process, links[0], trees)
    for tree in trees:
        tree.close()
    process.kill()
    process.wait()


def waiting_bytes(link: Channel) -> int:
    found = array.array("i", [0])
    fcntl.ioctl(link.fileno(), termios.FIONREAD, found)
    return found[0]


@pytest.mark.parametrize("three", ["sends"], indirect=True)
def test_p6_a_process_stopped_in_the_middle_of_a_message_is_named_and_the_rest_of_it_taken(
    three: Three,
) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while not waiting_bytes(three.link):  # it has begun a frame that does not fit into the connection
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(three.process.pid, signal.SIGSTOP)
    three.await_state("T")
    gathered = three.gather([b"y", b"z"])
    three.check_named()
    assert three.go_on() == LONG_BYTES + 2
    for result in gathered:
        assert result.result(DEADLINE_SECS) == [b"y", b"x" * LONG_BYTES, b"z"]


@pytest.mark.parametrize("three", ["receives"], indirect=True)
def test_p6_a_process_that_is_stopped_and_takes_nothing_is_named_and_gets_it_later(three: Three) -> None:
    three.await_state("T")
    gathered = three.gather([b"y" * LONG_BYTES, b"z"])
    three.check_named()
    assert three.go_on() == LONG_BYTES + 2
    for result in gathered:
        assert [len(one) for one in result.result(DEADLINE_SECS)] == [LONG_BYTES, 1, 1]
