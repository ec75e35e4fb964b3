"""P6: a rank that is killed, or stopped, is heard of by every other rank, whichever place it had."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
RANKS, PER_NODE = 6, 2
DEADLINE_SECS = 120


@contextmanager
def voting(*more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that are connected and vote."""
    server = KeyValueServer(listen("127.0.0.1", 0), b"s" * 32)
    command = [sys.executable, "-m", "tests.control.rank_job", f"127.0.0.1:{server.port}"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(PER_NODE), *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert "connected\n" in iter(rank.stdout.readline, "")
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.close()


@pytest.mark.parametrize("lost", range(RANKS))
def test_p6_whichever_rank_is_killed_all_others_hear_of_it(lost: int) -> None:
    with voting() as ranks:
        ranks[lost].kill()
        for number, rank in enumerate(ranks):
            said, _ = rank.communicate(timeout=DEADLINE_SECS)
            assert said.endswith("heard\n") is (number != lost), number


@pytest.mark.parametrize("stopped", [0, RANKS - 1])
def test_p6_a_rank_that_is_stopped_is_named_in_the_logs_of_all_and_nothing_is_lost(
    stopped: int, tmp_path: Path
) -> None:
    name = f"rank {stopped} on node node{stopped // PER_NODE}"
    end = tmp_path / "end"
    with voting(str(end)) as ranks:
        watchdog = threading.Timer(DEADLINE_SECS, lambda: [rank.kill() for rank in ranks])
        watchdog.start()
        ranks[stopped].send_signal(signal.SIGSTOP)
        for number, rank in enumerate(ranks):
            assert rank.stdout is not None
            lines = iter(rank.stdout.readline, "")
            if number != stopped:
                assert any(name in line and "no answer for" in line for line in lines), number
        ranks[stopped].send_signal(signal.SIGCONT)
        end.touch()
        for number, rank in enumerate(ranks):
            said, _ = rank.communicate(timeout=DEADLINE_SECS)
            assert said.endswith("ended well\n"), number
        watchdog.cancel()
