"""`reft rendezvous --state-dir`: what the next server finds of the one before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reft.control.keyvalue import Journal, KeyValueStore
from reft.errors import AuthenticationError, ConfigError
from reft.job.rendezvous.server import RendezvousServer

SECRET = b"s" * 32


def journal_of(directory: Path) -> Path:
    return next(p for p in directory.iterdir() if p.suffix == ".journal")


def test_what_was_stored_is_there_again(tmp_path: Path) -> None:
    for life in range(3):
        server = RendezvousServer("127.0.0.1", 0, SECRET, tmp_path / "state")
        store = KeyValueStore(server.endpoint, SECRET)
        assert store.add("lives", 1) == life + 1
        store.set("gone", "x")
        store.delete("gone")
        assert store.compare_set("k", str(life).encode() if life else None, str(life + 1).encode())[0]
        store.close()
        server.close()
    assert Journal(tmp_path / "state", SECRET).table.keys() - {"reft/rendezvous"} == {"lives", "k"}


def two_records(directory: Path) -> tuple[bytes, int]:
    journal = Journal(directory, SECRET)
    table = {"a": b"1"}
    journal.note(table, "a")
    whole = journal_of(directory).stat().st_size
    journal.note(table | {"b": b"2"}, "b")
    journal.close()
    return journal_of(directory).read_bytes(), whole


def test_p3_a_record_that_was_cut_off_or_left_as_zeros_is_left_out_and_those_before_it_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, whole = two_records(tmp_path)
    for kept in range(whole, len(data)):
        for zeros in (0, len(data) - kept, 4096):
            if 0 < zeros < 4:
                continue
            caplog.clear()
            journal_of(tmp_path).write_bytes(data[:kept] + bytes(zeros))
            again = Journal(tmp_path, SECRET)
            assert again.table == {"a": b"1"}
            again.close()
            assert ("is zeros" in caplog.text) is bool(zeros)


def test_p11_what_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    data, whole = two_records(tmp_path)
    with pytest.raises(AuthenticationError, match="secret"):
        Journal(tmp_path, b"t" * 32)
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for changed in (flipped, data[:whole] + bytes(len(data) - whole) + data[whole:]):
        journal_of(tmp_path).write_bytes(changed)
        with pytest.raises(AuthenticationError, match="changed"):
            Journal(tmp_path, SECRET)


FULL = """
import resource, sys
from pathlib import Path
from reft.control.keyvalue import Journal

journal = Journal(Path(sys.argv[1]), b"s" * 32)
table = {"a": b"1"}
journal.note(table, "a")
room = next(Path(sys.argv[1]).glob("*.journal")).stat().st_size + 20
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
journal.note(table | {"b": b"2"}, "b")
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
for number in range(20):
    journal.note({"c": b"3" * number}, "c")
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
    for number in range(300):
        table = {"state": bytes([number % 256]) * 20_000}
        journal.note(table, "state")
    journal.close()
    assert journal_of(tmp_path).stat().st_size < 2 * 2**20
    assert Journal(tmp_path, SECRET).table == table
