"""Job directories: private, one secret, found when orphaned, never removed while alive."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from arena_tools import SECRET, answer, header, holder, make

from reft.errors import ArenaError, AuthenticationError, ConfigError
from reft.memory.arena import Arena
from reft.memory.job_secret import SECRET_FILE, read_secret, user_secret
from reft.memory.jobdir import (
    JOB_FILE,
    JobDir,
    find_jobs,
    is_running,
    list_jobs,
    process_identity,
    read_json,
    remove_job,
)
from tests.machine import can_give_away

STRANGER = 12345
needs_root = pytest.mark.skipif(
    not can_give_away(STRANGER), reason="needs root to give a file to somebody else"
)


@pytest.fixture(autouse=True)
def no_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFT_SECRET", raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.timeout(60)
def test_p11_the_directory_and_its_secret_are_private(tmp_path: Path) -> None:
    job = JobDir.open_or_create(tmp_path / "deep" / "memory", "job", "node0")
    assert mode(job.path) == 0o700
    assert {p.name: mode(p) for p in job.path.iterdir()} == {SECRET_FILE: 0o600, JOB_FILE: 0o600}
    assert len(job.secret) == 32
    again = JobDir.open_or_create(tmp_path / "deep" / "memory", "job", "node0")
    assert again.secret == job.secret == JobDir.open(job.path).secret
    assert mode(tmp_path / "deep" / "memory") == 0o700
    found = read_json(job.path / JOB_FILE)
    assert (found["job_id"], found["node"], found["owner_uid"]) == ("job", "node0", os.geteuid())


@pytest.mark.timeout(60)
def test_the_given_secret_is_used_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir.open_or_create(tmp_path, "job", "node0", secret=b"a" * 32)
    assert job.secret == b"a" * 32
    with pytest.raises(AuthenticationError, match="made with another secret"):
        JobDir.open_or_create(tmp_path, "job", "node0", secret=b"b" * 32)
    monkeypatch.setenv("REFT_SECRET", (b"c" * 32).hex())
    assert JobDir.open_or_create(tmp_path, "other", "node0").secret == b"c" * 32
    monkeypatch.setenv("REFT_SECRET", "xyz")
    with pytest.raises(AuthenticationError, match="REFT_SECRET: not a secret"):
        JobDir.open_or_create(tmp_path, "third", "node0")


@pytest.mark.timeout(60)
def test_many_that_attach_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    for attempt in range(40):
        found: list[bytes] = []
        start = threading.Barrier(8)

        def attach(name: str = f"job{attempt}", start: threading.Barrier = start) -> None:
            start.wait()
            found.append(JobDir.open_or_create(tmp_path, name, "node0").secret)  # noqa: B023

        threads = [threading.Thread(target=attach) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1
        assert sorted(p.name for p in (tmp_path / f"job{attempt}").iterdir()) == [
            JOB_FILE,
            SECRET_FILE,
        ]


@pytest.mark.timeout(60)
def test_p11_what_others_could_have_read_or_made_is_refused(tmp_path: Path) -> None:
    job = JobDir.open_or_create(tmp_path, "job", "node0")
    secret = job.path / SECRET_FILE
    secret.chmod(0o640)
    with pytest.raises(AuthenticationError, match=r"others may use it.*chmod go="):
        read_secret(job.path)
    secret.chmod(0o600)
    job.path.chmod(0o750)
    with pytest.raises(AuthenticationError, match="others may use it"):
        JobDir.open_or_create(tmp_path, "job", "node0")
    job.path.chmod(0o700)
    secret.write_text("short")
    with pytest.raises(AuthenticationError, match="expected 32 bytes"):
        read_secret(job.path)
    secret.unlink()
    with pytest.raises(AuthenticationError, match="cannot be read"):
        read_secret(job.path)
    secret.symlink_to("/etc/hostname")
    with pytest.raises(AuthenticationError, match="cannot be read"):
        read_secret(job.path)
    (tmp_path / "link").symlink_to(job.path)
    with pytest.raises(AuthenticationError, match="expected a directory"):
        JobDir.open_or_create(tmp_path, "link", "node0")
    with pytest.raises(ArenaError, match="not a job's memory"):
        JobDir.open(tmp_path)


@pytest.mark.timeout(60)
@needs_root
def test_p11_what_belongs_to_somebody_else_is_refused(tmp_path: Path) -> None:
    job = JobDir.open_or_create(tmp_path, "job", "node0")
    os.chown(job.path / SECRET_FILE, STRANGER, -1)
    with pytest.raises(AuthenticationError, match=f"belongs to uid {STRANGER}"):
        read_secret(job.path)
    os.chown(job.path, STRANGER, -1)
    with pytest.raises(AuthenticationError, match=f"belongs to uid {STRANGER}"):
        JobDir.open(job.path)
    with pytest.raises(ArenaError, match="only its owner"):
        remove_job(job.path)
    (summary,) = list_jobs(tmp_path)
    assert summary.problem is not None
    assert summary.owner_uid == STRANGER


@pytest.mark.timeout(60)
@needs_root
def test_p11_a_strangers_link_on_the_way_is_refused_and_the_users_own_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "scratch"
    link.symlink_to(tmp_path / "disk")
    assert JobDir.open_or_create(link / "reft", "mine", "node0").path.is_dir()
    os.lchown(link, STRANGER, -1)
    with pytest.raises(AuthenticationError, match=f"uid {STRANGER}"):
        JobDir.open_or_create(link / "reft", "other", "node0")
    assert not (tmp_path / "disk" / "reft" / "other").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("mode", "owner", "says"),
    [
        *(
            pytest.param(m, STRANGER, f"belongs to uid {STRANGER}", marks=needs_root)
            for m in (0o700, 0o1777)
        ),
        (0o777, os.geteuid(), "chmod"),
        (0o1777, os.geteuid(), None),  # as an administrator makes one for all users
    ],
)
def test_p11_a_memory_directory_where_others_can_exchange_jobs_is_refused(
    tmp_path: Path, mode: int, owner: int, says: str | None
) -> None:
    memory_dir = tmp_path / "reft"
    memory_dir.mkdir()
    memory_dir.chmod(mode)
    os.chown(memory_dir, owner, -1)
    if says is None:
        assert JobDir.open_or_create(memory_dir, "job", "node0").path.is_dir()
        return
    with pytest.raises(AuthenticationError, match=says):
        JobDir.open_or_create(memory_dir, "job", "node0")
    assert list(memory_dir.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("job_id", ["..", ".", "/", "../elsewhere", "/tmp", "a/b", ".x", "x" * 129])
def test_p7_a_job_id_that_is_a_path_is_refused(tmp_path: Path, job_id: str) -> None:
    memory_dir = tmp_path / "deep" / "reft"
    with pytest.raises(ConfigError, match="job_id"):
        JobDir.open_or_create(memory_dir, job_id, "node0")
    assert not memory_dir.exists()


@pytest.mark.timeout(60)
def test_another_name_of_a_node_is_recorded_and_one_of_a_job_refused(tmp_path: Path) -> None:
    first = JobDir.open_or_create(tmp_path, "job", "node0")
    created = (read_json(first.path / JOB_FILE) or {})["created"]
    JobDir.open_or_create(tmp_path, "job", "node7")
    assert JobDir.open(first.path).node == "node7"
    assert (read_json(first.path / JOB_FILE) or {})["created"] == created
    first.path.rename(tmp_path / "renamed")
    with pytest.raises(ArenaError, match="memory of job 'job', expected 'renamed'"):
        JobDir.open_or_create(tmp_path, "renamed", "node0")


@pytest.mark.timeout(60)
def test_the_newest_incarnation_is_the_highest_that_any_arena_names(tmp_path: Path) -> None:
    job = JobDir.open_or_create(tmp_path, "job", "node0")
    assert job.newest_incarnation() == 0
    for slot, incarnation in enumerate((2, 5, 3)):
        with make(job.path / f"rank0-slot{slot}.arena", secret=job.secret) as arena:
            arena.begin(header(1, incarnation))
    (job.path / "rank1-slot0.arena").write_bytes(b"junk")
    assert job.newest_incarnation() == 5


@pytest.mark.timeout(60)
@pytest.mark.process
def test_a_process_is_told_from_a_later_one_with_its_pid(tmp_path: Path) -> None:
    me = process_identity()
    assert is_running(me)
    assert not is_running({**me, "start_time": me["start_time"] - 60})
    assert not is_running({"pid": me["pid"]})
    assert not is_running({"pid": "x", "start_time": None})
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(child.pid)
    assert is_running(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(identity)  # a zombie
    child.communicate(timeout=30)
    assert not is_running(identity)


DAEMON = "(arena.close(), __import__('reft.memory.jobdir').memory.jobdir.JobDir.open(path.parent).record_daemon())"


@pytest.mark.timeout(60)
@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "why"), [("arena.state", "open for writing"), (DAEMON, "daemon runs")]
)
def test_a_live_job_is_not_removed_and_an_orphan_is(tmp_path: Path, how: str, why: str) -> None:
    job = JobDir.open_or_create(tmp_path, "live", "node0", SECRET)
    make(job.path / "rank0-slot0.arena").close()
    with holder(job.path / "rank0-slot0.arena", how) as process:
        answer(process)
        (summary,) = list_jobs(tmp_path)
        assert summary.alive
        assert why in summary.alive_because[0]
        with pytest.raises(ArenaError, match=why):
            remove_job(summary.path)
        assert summary.path.exists()
    (summary,) = list_jobs(tmp_path)
    assert not summary.alive
    assert summary.arenas == 1
    assert remove_job(summary.path) == summary.nbytes > 4096
    assert list_jobs(tmp_path) == []


@pytest.mark.timeout(60)
def test_nobody_attaches_while_a_directory_is_removed(tmp_path: Path) -> None:
    import fcntl

    job = JobDir.open_or_create(tmp_path, "job", "node0")
    make(job.path / "rank0-slot0.arena", secret=job.secret).close()
    fd = os.open(job.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(ArenaError, match="is being removed"):
            Arena.open(job.path / "rank0-slot0.arena", job.secret, writable=True)
        Arena.open(job.path / "rank0-slot0.arena", job.secret).close()
    finally:
        os.close(fd)


@pytest.mark.timeout(60)
def test_only_job_directories_are_listed_and_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    JobDir.open_or_create(tmp_path, "b", "node0")
    JobDir.open_or_create(tmp_path, "a", "node0")
    assert [p.name for p in find_jobs(tmp_path)] == ["a", "b"]
    assert find_jobs(tmp_path / "nowhere") == []
    with pytest.raises(ArenaError, match="nothing was removed"):
        remove_job(tmp_path / "notes")
    assert (tmp_path / "notes" / "precious.txt").exists()
    (summary, _) = list_jobs(tmp_path)
    assert json.loads(json.dumps(summary.to_json()))["job_id"] == "a"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".reft" / "secret"


def test_p11_many_that_ask_at_once_get_the_same(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_secret(), range(16)))
    assert len(found) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_p11_the_environment_comes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFT_SECRET", "ab" * 32)
    assert user_secret() == b"\xab" * 32
    assert not path.parent.exists()
    monkeypatch.setenv("REFT_SECRET", "ab" * 31)
    with pytest.raises(AuthenticationError, match="64 digits"):
        user_secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_p11_a_file_that_others_can_use_is_refused(path: Path, mode: int) -> None:
    user_secret()
    path.chmod(mode)
    with pytest.raises(
        AuthenticationError, match=rf"mode 0{mode:o}\); expected 0600.*chmod go=.*remove it"
    ):
        user_secret()


def test_p11_a_link_and_anothers_file_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_secret()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AuthenticationError, match=r"belongs to uid .* remove it"):
        user_secret()
    monkeypatch.undo()
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(path.parent.parent))
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="REFT_SECRET"):
        user_secret()


def test_p11_a_damaged_file_is_not_replaced(path: Path) -> None:
    user_secret()
    path.write_text("half")
    with pytest.raises(AuthenticationError, match="not a secret"):
        user_secret()
    assert path.read_text() == "half"


def test_p11_without_a_home_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(ConfigError, match=r"HOME is not set.*REFT_SECRET to 64"):
        user_secret()
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot be kept"):
        user_secret()
