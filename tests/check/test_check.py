"""Four nodes of this machine are checked; one of them is held back, or hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from reft.cli import EXIT_NOT_WELL, EXIT_WELL, EXIT_WRONG_USE
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.control.wire import listen
from reft.memory.jobdir import user_secret
from tests.commands import command
from tests.prefork import Popen

NODES, BAD = 4, 2


def check(folder: Path, *options: str, disturb: Any = None) -> list[tuple[int | None, dict[str, Any]]]:
    """Exit code and JSON of every node; a node that ``disturb`` keeps from ending has none."""
    server = KeyValueServer(listen("127.0.0.1", 0), user_secret())
    outputs = [folder / f"node{n}.json" for n in range(NODES)]
    words = [sys.executable, "-m", "reft.cli", "check", "--json", "--nnodes", str(NODES), *options]
    words += ["--rdzv-endpoint", f"127.0.0.1:{server.port}"]
    nodes = [
        Popen(
            [*words, "--node-id", f"node{n}"],
            stdout=out.open("wb"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for n, out in enumerate(outputs)
    ]
    ended = threading.Event()
    store = KeyValueStore(f"127.0.0.1:{server.port}", user_secret(), prefix="reft-check/check/")
    args = (nodes[BAD].pid, ended, store)
    disturber = threading.Thread(target=disturb, args=args) if disturb else None
    try:
        if disturber is not None:
            disturber.start()
        codes = [p.wait(400) if n != BAD or disturb is not hang else None for n, p in enumerate(nodes)]
    finally:
        ended.set()
        if disturber is not None:
            disturber.join()
        for process in nodes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(30)
        server.close()
    return [(c, {} if c is None else json.loads(o.read_text())) for c, o in zip(codes, outputs, strict=True)]


def throttle(pid: int, ended: threading.Event, _: KeyValueStore) -> None:
    with suppress(ProcessLookupError):
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.04)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)


def hang(pid: int, ended: threading.Event, store: KeyValueStore) -> None:
    while not ended.is_set() and not store.check([f"name/{n}" for n in range(NODES)]):
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.nightly
@pytest.mark.parametrize("disturb", [throttle, hang])
def test_the_bad_one_of_four_is_named_by_all(tmp_path: Path, disturb: Any) -> None:
    told = check(tmp_path, "--secs", "3", "--factor", "2", "--timeout", "90", disturb=disturb)
    heard = [(code, found) for code, found in told if code is not None]
    assert len(heard) >= NODES - 1
    for code, found in heard:
        assert code == EXIT_NOT_WELL
        if disturb is throttle:
            (bad,) = found["bad"]
            assert bad["node"] == f"node{BAD}"
            assert any("multiplies matrices" in why for why in bad["reasons"])
        else:
            assert found["bad"] == [{"node": f"node{BAD}", "reasons": ["it does not answer"]}]


def test_one_node_is_checked_by_itself() -> None:
    answer = command("check", "--json", "--secs", "0.1")
    assert answer.code == EXIT_WELL
    (node,) = answer.json["nodes"]
    assert node["alone"]["matmul_flops"] > 1e8
    assert node["alone"]["memory_bytes"] > 1e7
    assert answer.json["well"]
    answer = command("check", "--secs", "0.1")
    assert answer.code == EXIT_WELL
    assert "all nodes are well" in answer.out


def test_several_nodes_need_a_place_to_meet() -> None:
    answer = command("check", "--nnodes", "2")
    assert answer.code == EXIT_WRONG_USE
    assert "reft rendezvous" in answer.err


def test_an_id_of_an_earlier_check_is_refused_instead_of_telling_its_result() -> None:
    with closing(KeyValueServer(listen("127.0.0.1", 0), user_secret())) as server:
        arguments = ["check", "--rdzv-endpoint", f"127.0.0.1:{server.port}", "--secs", "0.1"]
        assert command(*arguments).code == EXIT_WELL
        refused = command(*arguments)
        assert refused.code == EXIT_WRONG_USE
        assert "another --rdzv-id" in refused.err
        assert command(*arguments, "--rdzv-id", "next").code == EXIT_WELL


def test_a_rendezvous_that_is_not_there_is_said() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    answer = command("check", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--secs", "0.1")
    assert answer.code == EXIT_NOT_WELL
    assert "does not answer" in answer.err
