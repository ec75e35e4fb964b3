"""P4: the host is what fails. Two launchers on one host are no two nodes, unless somebody declares it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attack.jobs import Started, launched
from tests.machine import free_port

SCRIPT = Path(__file__).with_name("identity_job.py")


@pytest.mark.process
@pytest.mark.parametrize("declared", [False, True])
def test_p4_launchers_on_one_host_are_one_node_unless_declared(tmp_path: Path, declared: bool) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:

        def start(index: int) -> Started:
            meet = f"--nnodes 2 --rdzv-endpoint {endpoint} --rdzv-id domains --local-addr 127.0.0.1"
            options = [*meet.split(), "--memory-dir", str(tmp_path / f"memory{index}")]
            options += ["--node-id", f"node{index}"] if declared else []
            arguments = ("--ckpt", str(tmp_path / "ckpt"), "--steps", "1", "--wait")
            env = {"REFT_SECRET": "5a" * 32}
            # One directory: each rank writes a file of its own there.
            where = {"cwd": tmp_path, "out": tmp_path / "out", "options": options, "env": env}
            return stack.enter_context(launched(SCRIPT, *arguments, **where))

        launchers = [start(0), start(1)]
        launchers[0].wait_for(lambda: len(launchers[0].history.current.nodes) == 2, "two ranks")
        tolerance = launchers[0].history.current.tolerance
        log = launchers[0].log.read_text()
    assert tolerance == (1 if declared else 0)
    if declared:
        assert "nodes node0, node1 are declared (--node-id or REFT_NODE_ID) and share a host" in log
    else:
        assert "TOLERANCE IS 0" in log
