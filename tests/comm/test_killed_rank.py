"""P6: a rank that is killed is heard of by every other rank, whichever place it had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reft.store.door import listen
from reft.store.keyvalue import KeyValueServer

ROOT = Path(__file__).parents[2]
RANKS, PER_NODE = 6, 2
DEADLINE_SECS = 120


@pytest.mark.parametrize("lost", range(RANKS))
def test_p6_whichever_rank_is_killed_all_others_hear_of_it(lost: int) -> None:
    server = KeyValueServer(listen("127.0.0.1", 0), b"s" * 32)
    command = [sys.executable, "-m", "tests.comm.rank_job", f"127.0.0.1:{server.port}"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(PER_NODE)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "connected\n"
        ranks[lost].kill()
        for number, rank in enumerate(ranks):
            said, _ = rank.communicate(timeout=DEADLINE_SECS)
            assert said == ("" if number == lost else "heard\n"), number
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.close()
