"""Versions on disks that only their own node sees: complete on all of them, or not called so (P3)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reft.config import PersistConfig, ReftConfig, parse_block
from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueServer
from reft.control.wire import listen
from reft.env import ENV_STORE
from reft.errors import OvertakenError, PersistError
from reft.grid import VersionId
from reft.memory.arena import Arena
from reft.memory.job_secret import user_secret
from reft.storage.load import find_on_disk, merge_found
from reft.storage.local_disks import (
    GivenUpElsewhereError,
    OvertakenElsewhereError,
    PartsRecord,
    StoreSilentError,
    find_local_disks,
    with_failure,
    with_part,
)
from reft.storage.offline import export_stored
from reft.storage.persist import persist_label
from reft.storage.persisted import job_directory, latest_tag
from tests.job.daemons import wait_for
from tests.storage.job_memory import JOB, NODES, Memory, made_up_images, verify_persisted

V4, V8, V12 = VersionId(1, 4), VersionId(1, 8), VersionId(1, 12)
LIMIT_SECS = 200


class Threads:
    """Ranks as threads, which gather what each of them gives."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(ranks), [b""] * ranks

    def rank(self, rank: int) -> SimpleNamespace:
        def gather_bytes(data: bytes) -> list[bytes]:
            self.given[rank] = data
            self.barrier.wait(LIMIT_SECS)
            given = list(self.given)
            self.barrier.wait(LIMIT_SECS)
            return given

        def gather_ints(values: list[int]) -> list[list[int]]:
            return [[*map(int, row)] for row in gather_bytes(bytes(values))]

        return SimpleNamespace(rank=rank, gather_bytes=gather_bytes, gather_ints=gather_ints)


@pytest.mark.parametrize(
    ("directories", "local", "blind"),
    [
        (("shared", "shared", "shared"), False, ""),
        (("a", "b", "c"), True, ""),
        (("shared", "c", "shared"), False, "n1"),
        (("shared", "not/mounted", "shared"), False, ""),
    ],
    ids=("shared", "local", "one apart", "one missing"),
)
def test_p12_it_is_found_out_which_nodes_share_a_directory(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    directories: tuple[str, ...],
    local: bool,
    blind: str,
) -> None:
    threads = Threads(len(directories))

    def find(rank: int) -> bool:
        config = parse_block({"persist": {"dir": str(tmp_path / directories[rank])}})
        control = cast(ControlGroup, threads.rank(rank))
        return find_local_disks(config, control, ("n0", "n1", "n2")).persist.local

    with ThreadPoolExecutor(len(directories)) as pool:
        assert list(pool.map(find, range(len(directories)))) == [local] * len(directories)
    assert (f"node {blind} does not see what node n0 writes" in caplog.text) == bool(blind)
    assert not list(tmp_path.glob("*/.probe-*"))


def test_a_version_is_complete_with_its_last_part() -> None:
    first = with_part(None, V4, "n0", 2, world_size=4)
    assert first.complete is None
    assert with_part(first, V4, "n0", 2, world_size=4) == first  # A node counts once
    both = with_part(first, V4, "n1", 2, world_size=4)
    assert (both.complete, PartsRecord.decode(both.encode())) == (V4, both)
    # A complete version is not given up, and stays complete while the next one is written.
    assert with_failure(both, V4, "n1 is late", overtaken=False) == both
    newer = with_part(both, V8, "n0", 2, world_size=4)
    newer.require_open(V4)
    assert (newer.label, newer.complete) == (V8, V4)


def test_what_one_node_gives_up_no_other_completes() -> None:
    written = with_part(None, V4, "n0", 2, world_size=4)
    failed = with_failure(written, V4, "the disk of n1 is full", overtaken=False)
    with pytest.raises(GivenUpElsewhereError, match="the disk of n1 is full"):
        with_part(failed, V4, "n1", 2, world_size=4)
    overtaken = with_failure(written, V4, "memory went on", overtaken=True)
    for record in (overtaken, with_part(written, V8, "n1", 2, world_size=4)):
        with pytest.raises(OvertakenElsewhereError):
            record.require_open(V4)
    # A failure that comes late does not stop the next version.
    assert with_failure(PartsRecord(V8), V4, "late", overtaken=False) == PartsRecord(V8)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyValueServer]:
    with closing(KeyValueServer(listen("127.0.0.1", 0), user_secret())) as server:
        monkeypatch.setenv(ENV_STORE, f"127.0.0.1:{server.port}")
        yield server


@pytest.fixture
def memory(tmp_path: Path, store: KeyValueServer) -> Memory:
    memory = Memory(tmp_path / "memory")
    memory.write(V4, made_up_images(4))
    return memory


def disk(tmp_path: Path, node: str) -> Path:
    return tmp_path / f"disk-{node}"


def persist(memory: Memory, tmp_path: Path, label: VersionId, **block: Any) -> dict[str, Any]:
    """What each node returns, or its error, when all write the version."""

    def on_node(node: str) -> Path:
        config = local(memory.config(disk(tmp_path, node), **block))
        return persist_label(memory.job_dir(node), label, config)

    with ThreadPoolExecutor(len(NODES)) as pool:
        futures = {node: pool.submit(on_node, node) for node in NODES}
        return {n: f.exception(LIMIT_SECS) or f.result(LIMIT_SECS) for n, f in futures.items()}


def local(config: ReftConfig) -> ReftConfig:
    persist: PersistConfig = config.persist.model_copy(update={"local": True})
    return config.model_copy(update={"persist": persist})


def on_disk(tmp_path: Path, node: str) -> set[str]:
    return {p.name for p in job_directory(disk(tmp_path, node), JOB).glob("global_step*")}


def test_p3_each_node_keeps_its_part_and_the_last_complete_version(
    memory: Memory, tmp_path: Path
) -> None:
    own = {node: disk(tmp_path, node) / JOB / "global_step4" for node in NODES}
    assert persist(memory, tmp_path, V4, keep=1) == own
    for node, coordinates in (("n0", ("pp0.dp0.tp0", "pp1.dp0.tp0")), ("n1", ("pp0.dp1.tp0",))):
        names = {p.name for p in own[node].iterdir()}
        assert {f"{c}.arena" for c in coordinates} < names
        assert verify_persisted(disk(tmp_path, node) / JOB) == []
    # The disk of one node is lost: the copies of the other node's part replace it.
    exported = export_stored(disk(tmp_path, "n1") / JOB, tmp_path / "exported")
    assert exported.checkpoint.label == V4
    memory.write(V8, made_up_images(8), slot=1)
    corrupt(memory, "n1")
    failed = persist(memory, tmp_path, V8, keep=1)
    assert "does not match the checksum" in str(failed["n1"])
    assert "n1 gave up" in str(failed["n0"])
    for node in NODES:
        assert on_disk(tmp_path, node) == {"global_step4"}
    memory.write(V12, made_up_images(12), slot=2)
    assert all(isinstance(path, Path) for path in persist(memory, tmp_path, V12, keep=1).values())
    for node in NODES:
        assert on_disk(tmp_path, node) == {"global_step12"}
        assert latest_tag(disk(tmp_path, node) / JOB) == "global_step12"


def corrupt(memory: Memory, node: str) -> None:
    """Flip a bit in a block of the version in slot 1."""
    job = memory.job_dir(node)
    path = next(job.path.glob("*-slot1.arena"))
    with Arena.open(path, job.secret, writable=True) as arena:
        header = arena.header()
        assert header is not None
        arena.data[header.entries[0].arena_offset] ^= 1


def test_p6_a_node_whose_memory_went_on_tells_the_others(memory: Memory, tmp_path: Path) -> None:
    config = {node: local(memory.config(disk(tmp_path, node))) for node in NODES}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(persist_label, memory.job_dir("n0"), V4, config["n0"])
        wait_for(lambda: on_disk(tmp_path, "n0"), "the part of n0")
        with pytest.raises(OvertakenError):
            persist_label(memory.job_dir("n1"), V4, replace_slot(memory, config["n1"]))
        with pytest.raises(OvertakenError, match="node n1 gave up"):
            waiting.result(LIMIT_SECS)
    assert on_disk(tmp_path, "n0") == set()


def replace_slot(memory: Memory, config: ReftConfig) -> ReftConfig:
    """Overwrite the only version of node n1."""
    ranks = [at for at in memory.topology.coordinates if memory.topology.node_of(at) == "n1"]
    memory.write(V8, made_up_images(8), only=ranks)
    return config


def test_p3_without_the_store_one_part_is_written_and_nothing_is_removed(
    memory: Memory, tmp_path: Path, store: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    persist(memory, tmp_path, V4, keep=1)
    endpoint = f"127.0.0.1:{store.port}"
    monkeypatch.setenv(ENV_STORE, "127.0.0.1:1")
    for step, kept in ((8, {"global_step4", "global_step8"}),) * 2:
        memory.write(VersionId(1, step), made_up_images(step), slot=1)
        silent = persist(memory, tmp_path, VersionId(1, step), keep=1)
        assert {type(error) for error in silent.values()} == {StoreSilentError}
        assert [on_disk(tmp_path, node) for node in NODES] == [kept, kept]
        assert latest_tag(disk(tmp_path, "n0") / JOB) == "global_step4"
    monkeypatch.setenv(ENV_STORE, endpoint)
    persist(memory, tmp_path, V8, keep=1)
    assert on_disk(tmp_path, "n0") == {"global_step8"}
    assert latest_tag(disk(tmp_path, "n0") / JOB) == "global_step8"


def test_without_a_launcher_it_is_said_what_to_change(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_STORE)
    with pytest.raises(PersistError, match="start the job by 'reft launch'"):
        persist_label(memory.job_dir("n0"), V4, local(memory.config(disk(tmp_path, "n0"))))


def test_a_load_knows_the_versions_of_all_disks(memory: Memory, tmp_path: Path) -> None:
    persist(memory, tmp_path, V4)
    memory.write(V8, made_up_images(8), slot=1)
    persist(memory, tmp_path, V8)
    shutil.rmtree(disk(tmp_path, "n0") / JOB / "global_step8")
    found = [find_on_disk(None, disk(tmp_path, node), JOB) for node in NODES]
    merged = merge_found(found)
    assert [c.label for c in merged.checkpoints] == [V8, V4]
    (newest, older) = (replace(c, local=True) for c in merged.checkpoints)
    assert newest.part_at(disk(tmp_path, "n0")) is None
    for node in NODES:
        assert older.part_at(disk(tmp_path, node)) == disk(tmp_path, node) / JOB / "global_step4"
