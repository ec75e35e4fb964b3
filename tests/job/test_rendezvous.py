"""`reft rendezvous`: the store as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reft.control.keyvalue import KeyValueStore
from reft.errors import ConfigError
from reft.job.rendezvous.server import RendezvousServer, is_reachable, is_served_by_reft
from tests.job.conftest import SECRET

ROOT = Path(__file__).resolve().parents[2]

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "REFT_SECRET": SECRET.hex()}
COMMAND = [sys.executable, "-m", "reft.job.rendezvous.server", "--json"]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_told_to_end(number: signal.Signals) -> None:
    here = ["--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen([*COMMAND, *here], stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        assert info["pid"] == process.pid
        assert info["endpoint"].endswith(f":{info['port']}")
        store = KeyValueStore(info["endpoint"], SECRET)
        assert is_served_by_reft(store)
        store.set("key", "value")
        process.send_signal(number)
        assert process.wait(240) == 0
        assert not is_reachable(info["endpoint"])
        process.stdout.close()
    finally:
        process.kill()


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}.*another --port"):
            RendezvousServer("127.0.0.1", port, SECRET)
    with pytest.raises(ConfigError, match="--host"):
        RendezvousServer("192.0.2.1", 0, SECRET)  # no address of this machine
    with pytest.raises(ConfigError, match="65535"):
        RendezvousServer(None, 70_000, SECRET)
