"""Versions written from the memory of several nodes: complete and verified, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reft.config import FaultConfig, FaultPoint, ReftConfig
from reft.errors import ArenaError, OvertakenError, PersistError
from reft.grid import Section, VersionId
from reft.memory.arena import Arena
from reft.storage import fence, offline
from reft.storage.deepspeed_format import host_file_name, read_host_file
from reft.storage.offline import export_stored, persist_offline
from reft.storage.persist import PersistProgress, persist_label
from reft.storage.persisted import job_directory, latest_tag
from reft.storage.persister import Persister
from reft.storage.publish import WorkDir
from reft.storage.template import same_value
from tests.commands import command
from tests.job.daemons import wait_for
from tests.spawn import RankError, spawn
from tests.storage.job_memory import (
    DEGREES,
    JOB,
    NODES,
    Memory,
    expected_files,
    host_state,
    latest_persisted,
    made_up_images,
    verify_persisted,
)

V4, V8, V12 = VersionId(1, 4), VersionId(1, 8), VersionId(1, 12)
LIMIT_SECS = 200


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "memory")
    memory.write(V4, made_up_images(4))
    return memory


@pytest.fixture(scope="module")
def step_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("step4")
    memory = Memory(root / "memory")
    memory.write(V4, made_up_images(4))
    persist_offline([memory.job_dir(n).path for n in NODES], root / "checkpoints")
    return root / "checkpoints"


def persist_on_all(memory: Memory, label: VersionId, config: ReftConfig) -> dict[str, Any]:
    with ThreadPoolExecutor(len(NODES)) as pool:
        futures: dict[str, Future[Path]] = {
            node: pool.submit(persist_label, memory.job_dir(node), label, config) for node in NODES
        }
        return {n: f.exception(LIMIT_SECS) or f.result(LIMIT_SECS) for n, f in futures.items()}


def persist_or_die(node: int, root: str, step: int, config: str, kill_at: str) -> None:
    """In a process of a node; the first one kills itself when it reaches the phase ``kill_at``."""

    def progress(at: PersistProgress) -> None:
        if node == 0 and at.phase == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    job_dir = Memory(Path(root)).job_dir(NODES[node])
    persist_label(
        job_dir, VersionId(1, step), ReftConfig.model_validate_json(config), progress=progress
    )


def check_checkpoint(directory: Path, label: VersionId) -> None:
    """Every file is what the version holds, and nothing else is left in the directory."""
    directory = job_directory(directory, JOB)
    info = latest_persisted(directory)
    assert info is not None
    assert (info.label, info.job_id, info.degrees) == (label, JOB, DEGREES)
    assert latest_tag(directory) == info.tag
    assert verify_persisted(directory, info.tag) == []
    names = {"reft.json"}
    if info.arenas:
        names |= {f"{at}.arena" for at in DEGREES.coordinates()}
        assert {p.name for p in info.path.iterdir()} == names
        export_stored(directory, exported := directory.parent.parent / f"exported-{label}")
        return check_checkpoint(exported, label)
    for at in DEGREES.coordinates():
        for name, expected in expected_files(at, label.step).items():
            assert same_value(torch.load(info.path / name, weights_only=True), expected), name
            names.add(name)
        assert read_host_file(info.path / host_file_name(at)) == host_state(at, label.step)
        names.add(host_file_name(at))
    assert {p.name for p in info.path.iterdir()} == names


def no_debris(directory: Path) -> bool:
    return all(p.name.startswith(".incarnation-") for p in directory.glob("**/.*"))


@pytest.mark.process
def test_two_nodes_write_one_checkpoint_and_keep_the_newest(
    memory: Memory, step_4: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(step_4, tmp_path / "checkpoints"))
    check_checkpoint(directory, V4)
    config = memory.config(directory, keep=1)
    memory.write(V8, made_up_images(8), slot=1)
    written = directory / JOB / "global_step8"
    assert persist_on_all(memory, V8, config) == dict.fromkeys(NODES, written)
    check_checkpoint(directory, V8)
    assert no_debris(directory)
    assert not (directory / JOB / "global_step4").exists()
    # Written again: it is there already.
    assert persist_label(memory.job_dir("n1"), V8, config) == written
    with pytest.raises(PersistError, match="older version of the job"):
        persist_label(memory.job_dir("n0"), V4, config)


@pytest.mark.integration
def test_killed_while_writing_the_previous_checkpoint_stays(
    memory: Memory, step_4: Path, tmp_path: Path
) -> None:
    """SIGKILL in the middle of writing, after writing, and before the name is given."""
    directory = Path(shutil.copytree(step_4, tmp_path / "checkpoints"))
    config = memory.config(directory, keep=1)
    memory.write(V8, made_up_images(8), slot=1)
    fault = FaultConfig(point=FaultPoint.DURING_PERSIST, step=8, pp=0, dp=0)
    faulty = config.model_copy(update={"faults": (fault,)})
    for phase, of_leader, nodes in (
        ("fault", faulty, 1),
        ("written", config, 1),
        ("renaming", config, 2),
    ):
        with pytest.raises(RankError, match="rank 0: SIGKILL"):
            spawn(
                persist_or_die,
                str(memory.root),
                8,
                of_leader.model_dump_json(),
                phase,
                nprocs=nodes,
            )
        check_checkpoint(directory, V4)
    # Another attempt on the same nodes succeeds, over what the killed ones left.
    assert not no_debris(directory)
    persist_on_all(memory, V8, config)
    check_checkpoint(directory, V8)
    assert no_debris(directory)


def test_a_corrupt_block_is_not_written_and_the_others_hear_of_it(
    memory: Memory, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    job = memory.job_dir("n1")
    with Arena.open(job.path / "rank0-slot0.arena", job.secret, writable=True) as found:
        header = found.header()
        assert header is not None
        entry = next(e for e in header.entries if e.key.section is Section.OWNED and e.owner)
        found.data[entry.arena_offset + entry.nbytes // 2] ^= 4
    results = persist_on_all(memory, V4, memory.config(directory))
    assert "owned block 0 of member 1" in str(results["n1"])
    assert "rank0-slot0.arena does not match the checksum" in str(results["n1"])
    assert isinstance(results["n0"], PersistError)
    assert "node n1 gave up: PersistError: owned block 0" in str(results["n0"])
    assert latest_persisted(directory / JOB) is None
    assert no_debris(directory)


def test_a_missing_peer_is_named_after_the_timeout(memory: Memory, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    config = memory.config(directory, timeout_secs=0.3)
    with pytest.raises(
        PersistError, match=r"the part of pp0\.dp1\.tp0, the part of pp1\.dp1\.tp0; check"
    ):
        persist_label(memory.job_dir("n0"), V4, config)
    assert no_debris(directory)
    with pytest.raises(PersistError, match=r"the part of pp0\.dp0\.tp0"):
        persist_label(memory.job_dir("n1"), V4, config)
    # What a node without the leader leaves is cleaned up by the next attempt of the leader.
    assert not no_debris(directory)
    memory.write(V8, made_up_images(8), slot=1)
    with pytest.raises(PersistError):
        persist_label(memory.job_dir("n0"), V8, config)
    assert no_debris(directory)


@pytest.mark.integration
@pytest.mark.parametrize("missing", NODES)
def test_p6_a_node_whose_memory_went_on_tells_the_others(
    memory: Memory, tmp_path: Path, missing: str
) -> None:
    """They wait for no part of it, whoever comes first, and write what is due next."""
    directory = tmp_path / "checkpoints"
    config = memory.config(directory)
    (there,) = set(NODES) - {missing}
    ranks = [at for at in DEGREES.coordinates() if memory.topology.node_of(at) == there]
    memory.write(V8, made_up_images(8), slot=1, only=ranks)
    with pytest.raises(OvertakenError, match="no arena holds step 8"):
        persist_label(memory.job_dir(missing), V8, config)
    for _ in range(2):  # it stays told
        with pytest.raises(OvertakenError, match=f"node {missing} .*no arena holds step 8"):
            persist_label(memory.job_dir(there), V8, config)
    memory.write(V12, made_up_images(12), slot=2)
    persist_on_all(memory, V12, config)
    check_checkpoint(directory, V12)
    assert no_debris(directory)


def test_p6_a_node_that_is_waited_for_tells_that_its_memory_went_on(
    memory: Memory, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    config = memory.config(directory)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(persist_label, memory.job_dir("n0"), V4, config)
        wait_for(lambda: len(list(directory.glob("*/.*/.staging/part-*"))) == 2, "the parts of n0")
        memory.write(
            V8, made_up_images(8), only=[DEGREES.coordinates()[-1]]
        )  # one of n1's two trainers
        with pytest.raises(OvertakenError, match=r"pp1\.dp1\.tp0"):
            persist_label(memory.job_dir("n1"), V4, config)
        with pytest.raises(OvertakenError, match=r"node n1 .*pp1\.dp1\.tp0"):
            waiting.result(LIMIT_SECS)


def test_p6_a_node_that_is_cut_off_tells_nothing(memory: Memory, tmp_path: Path) -> None:
    """Its newer start writes there: what it missed is nobody's business."""
    directory = tmp_path / "checkpoints"
    (directory / JOB).mkdir(parents=True)
    fence.claim(directory / JOB, JOB, 2)
    with pytest.raises(OvertakenError):
        persist_label(memory.job_dir("n1"), V8, memory.config(directory))
    assert no_debris(directory)


def test_records_of_another_job_are_refused(memory: Memory, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    config = memory.config(directory, timeout_secs=0.2)
    with pytest.raises(PersistError):
        persist_label(memory.job_dir("n1"), V4, config)
    part = next(WorkDir.of(directory / JOB, JOB, V4).staging.glob("failed-*.json"))
    part.write_text(part.read_text().replace("n1", "n7"))
    with pytest.raises(Exception, match="does not carry the job's secret"):
        persist_label(memory.job_dir("n0"), V4, config)


@pytest.mark.integration
def test_offline_the_copies_replace_a_lost_node_and_the_result_is_the_same(
    memory: Memory, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "memory" / "n0")
    seen: list[str] = []
    directory = tmp_path / "checkpoints"
    result = persist_offline(
        [memory.job_dir("n1").path],
        directory,
        progress=lambda progress: seen.append(progress.phase),
    )
    assert result.corrupt_blocks == 0
    check_checkpoint(directory, V4)
    assert list(dict.fromkeys(seen)) == ["writing", "written", "renaming", "renamed", "latest"]


class RunningJob:
    """Commits versions into two slots in turn. A rank that cannot write, as a reader holds its arena, keeps all
    from committing the version."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.step, self.committed, self.slot = memory, V4.step, V4.step, 0
        self.options = [word for node in NODES for word in ("--memory-dir", memory.root / node)]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step, written, images = self.step + 1, 0, made_up_images(self.step + 1)
            for at in DEGREES.coordinates():
                with suppress(ArenaError):
                    self.memory.write(
                        VersionId(1, self.step), images, slot=1 - self.slot, only=[at]
                    )
                    written += 1
            if written == DEGREES.world_size:
                self.committed, self.slot = self.step, 1 - self.slot


def test_a_version_of_a_running_job_is_held_while_it_is_exported(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, plan_verified = RunningJob(memory), offline.plan_verified
    job.train(2)

    def plan_while_the_job_trains_on(*arguments: Any, **options: Any) -> Any:
        found = plan_verified(*arguments, **options)
        job.train(3)
        return found

    monkeypatch.setattr(offline, "plan_verified", plan_while_the_job_trains_on)
    answer = command("persist", *job.options, "--out", tmp_path / "out", "--json")
    assert (answer.code, answer.json["step"]) == (0, 6), answer.err
    check_checkpoint(tmp_path / "out", VersionId(1, 6))
    assert "running" not in answer.err  # no process holds this memory
    job.train(2)  # nothing is held any more
    assert job.committed == job.step


def test_nodes_of_a_running_job_that_are_a_version_apart_are_held_at_the_newer_one(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first node is visited, version 7 is being written; before the second one is, it is committed."""
    job, lock_shared = RunningJob(replace(memory, copies=0)), Arena.lock_shared
    job.train(2)

    def lock(arena: Arena) -> bool:
        if job.step == 6 and arena.path.parent == memory.job_dir("n1").path:
            job.train(2)  # version 8 is written on the second node only, over version 6
        being_written = job.step == 6 and "slot1" in arena.path.name
        return not being_written and lock_shared(arena)

    monkeypatch.setattr(Arena, "lock_shared", lock)
    answer = command("persist", *job.options, "--out", tmp_path / "out", "--json")
    assert (answer.code, answer.json["step"]) == (0, 7), answer.err
    assert (job.committed, job.step) == (7, 8)
    check_checkpoint(tmp_path / "out", VersionId(1, 7))


def test_what_a_running_job_overwrites_is_no_damage(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, lock_shared = RunningJob(memory), Arena.lock_shared
    job.train(2)

    def train_on_and_lock(arena: Arena) -> bool:
        job.train(2)
        return lock_shared(arena)

    monkeypatch.setattr(Arena, "lock_shared", train_on_and_lock)
    assert command("verify", *job.options, "--json").json["bad_blocks"] == 0


def test_a_persist_directory_that_cannot_be_written_is_not_short_of_room(
    memory: Memory, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PersistError, match="mount it or make it writable") as refused:
        persist_label(memory.job_dir("n0"), V4, memory.config(tmp_path / "file" / "below"))
    assert "make room" not in str(refused.value)


def test_storage_that_fails_is_not_said_to_be_slow(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    persister = Persister(memory.job_dir("n0"))
    persister.configure(memory.config(tmp_path / "file" / "below", interval_steps=2))
    persister.start()
    persister.offer(V4)
    wait_for(lambda: persister.status.stale_since_step is not None, "the failure")
    for step in range(5, 12):
        persister.offer(VersionId(1, step))
    persister.close()
    assert "cannot be persisted" in caplog.text
    assert "takes longer" not in caplog.text
