"""`reft rendezvous`: the store as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from reft.control.keyvalue import Journal, KeyValueStore
from reft.errors import AuthenticationError, ConfigError
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


@pytest.mark.process
def test_a_hang_up_that_nohup_keeps_off_does_not_end_it() -> None:
    command = ["nohup", *COMMAND, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENV
    )
    try:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGHUP)
        assert is_served_by_reft(KeyValueStore(info["endpoint"], SECRET))
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
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


SECRET = b"s" * 32


def test_what_was_stored_is_there_again(tmp_path: Path) -> None:
    for life in range(3):
        server = RendezvousServer("127.0.0.1", 0, SECRET, tmp_path / "state")
        store = KeyValueStore(server.endpoint, SECRET)
        assert store.add("lives", 1) == life + 1
        store.set("gone", "x")
        store.delete("gone")
        assert store.compare_set("k", str(life).encode() if life else None, str(life + 1).encode())[
            0
        ]
        store.close()
        server.close()
    assert Journal(tmp_path / "state", SECRET).table.keys() - {"reft/rendezvous"} == {"lives", "k"}


def test_p3_what_was_written_last_may_be_cut_off_or_left_as_zeros_and_nothing_before_it(
    tmp_path: Path,
) -> None:
    """As by a host that went down: the images of a journal that is open."""
    journal = Journal(tmp_path / "open", SECRET)
    journal.write({"a": b"1"}, "a")
    log = next((tmp_path / "open").glob("*-wal"))
    before = log.stat().st_size
    journal.write({"b": b"2"}, "b")
    whole = log.read_bytes()
    for kept in range(before, len(whole), 53):
        for zeros in (0, len(whole) - kept, 4096):
            image = tmp_path / f"{kept}-{zeros}"
            shutil.copytree(tmp_path / "open", image)
            (image / log.name).write_bytes(whole[:kept] + bytes(zeros))
            again = Journal(image, SECRET)
            assert again.table == {"a": b"1"}
            again.close()
    shutil.copytree(tmp_path / "open", tmp_path / "killed")
    assert Journal(tmp_path / "killed", SECRET).table == {"a": b"1", "b": b"2"}


def test_p11_what_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SECRET)
    for key, value in (("a", b"1"), ("b", b"2")):
        journal.write({key: value}, key)
    journal.close()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(AuthenticationError, match="secret"):
        Journal(tmp_path, b"t" * 32)
    right = file.read_bytes()
    for change in (
        "UPDATE entries SET value = x'00'",
        "UPDATE entries SET value = (SELECT value FROM entries WHERE key = 'b') WHERE key = 'a'",
    ):
        with closing(sqlite3.connect(file, isolation_level=None)) as base:
            base.execute(change)
        with pytest.raises(AuthenticationError, match="changed"):
            Journal(tmp_path, SECRET)
        file.write_bytes(right)
    file.write_bytes(b"junk" * 999)
    with pytest.raises(AuthenticationError, match="changed"):
        Journal(tmp_path, SECRET)


FULL = """
import resource, sys
from pathlib import Path
from reft.control.keyvalue import Journal

journal = Journal(Path(sys.argv[1]), b"s" * 32)
table = {"a": b"1"}
journal.write(table, "a")
room = next(Path(sys.argv[1]).glob("*-wal")).stat().st_size + 20
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
journal.write(table | {"b": b"2"}, "b")
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
for number in range(20):
    journal.write({"c": b"3" * number}, "c")
"""


@pytest.mark.process
def test_p6_a_disk_that_takes_a_part_of_a_record_ends_the_journal(tmp_path: Path) -> None:
    """What came after it could not be read."""
    words = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert "state is no longer saved" in done.stderr
    assert Journal(tmp_path, SECRET).table == {}


def test_one_server_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--state-dir"):
        Journal(Path("/proc/none"), SECRET)
    first = Journal(tmp_path, SECRET)
    with pytest.raises(ConfigError, match="another `reft rendezvous`"):
        Journal(tmp_path, SECRET)
    first.close()
    Journal(tmp_path, SECRET).close()


def test_p9_a_journal_does_not_grow_without_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SECRET)
    for number in range(1000):
        table = {"state": bytes([number % 256]) * 20_000}
        journal.write(table, "state")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8 * 2**20
    journal.close()
    assert Journal(tmp_path, SECRET).table == table
