"""P11, P7: a job's files are its own; no stranger's directory is used and no other job's memory is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from reft.config_read import load_config
from reft.errors import AuthenticationError, ConfigError
from reft.job.node import NodeMemory
from reft.job.options import parse_options
from reft.memory.jobdir import SECRET_FILE, JobDir
from reft.tools.demo.cluster import LocalCluster
from tests.machine import can_give_away, free_port

STRANGER = 12345
needs_root = pytest.mark.skipif(
    not can_give_away(STRANGER), reason="needs root to give a file to somebody else"
)


@pytest.fixture(autouse=True)
def no_secret_but_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.delenv("REFT_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


# -- the memory directory ----------------------------------------------------------------------------


def test_p11_a_link_in_the_place_of_the_memory_directory_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "reft").symlink_to(home)
    with pytest.raises(AuthenticationError, match=r"symbolic link to .*home"):
        JobDir.open_or_create(tmp_path / "reft", "job", "node0")
    assert list(home.iterdir()) == []


def test_p11_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "job").mkdir(parents=True)
    (home / "job" / SECRET_FILE).write_text("precious")
    (tmp_path / "reft").symlink_to(home)
    with pytest.raises(AuthenticationError, match="symbolic link"):
        NodeMemory(tmp_path / "reft", "job", "node0").prepare(bytes(32))
    (tmp_path / "memory").mkdir(mode=0o700)
    (tmp_path / "memory" / "job").symlink_to(home / "job")
    with pytest.raises(AuthenticationError, match="expected a directory"):
        NodeMemory(tmp_path / "memory", "job", "node0").prepare(bytes(32))
    assert [path.name for path in (home / "job").iterdir()] == [SECRET_FILE]


@needs_root
def test_p11_a_strangers_link_on_the_way_is_refused_and_the_users_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "scratch"
    link.symlink_to(tmp_path / "disk")
    assert JobDir.open_or_create(link / "reft", "mine", "node0").path.is_dir()
    os.lchown(link, STRANGER, -1)
    with pytest.raises(AuthenticationError, match=f"uid {STRANGER}"):
        JobDir.open_or_create(link / "reft", "other", "node0")
    assert not (tmp_path / "disk" / "reft" / "other").exists()


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_p11_a_strangers_memory_directory_is_refused(tmp_path: Path, mode: int) -> None:
    memory_dir = tmp_path / "reft"
    memory_dir.mkdir()
    memory_dir.chmod(mode)
    os.chown(memory_dir, STRANGER, -1)
    with pytest.raises(AuthenticationError, match=f"belongs to uid {STRANGER}"):
        JobDir.open_or_create(memory_dir, "job", "node0")
    assert list(memory_dir.iterdir()) == []


def test_p11_a_memory_directory_where_others_can_exchange_jobs_is_refused(tmp_path: Path) -> None:
    memory_dir = tmp_path / "reft"
    memory_dir.mkdir()
    memory_dir.chmod(0o777)
    with pytest.raises(AuthenticationError, match="chmod"):
        JobDir.open_or_create(memory_dir, "job", "node0")
    memory_dir.chmod(0o1777)  # as an administrator makes one for all users
    assert JobDir.open_or_create(memory_dir, "job", "node0").path.is_dir()


def test_p11_the_default_memory_directory_is_the_users_own() -> None:
    assert str(os.geteuid()) in load_config({}).memory_dir.name


# -- the name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("job_id", ["..", ".", "/", "../elsewhere", "/tmp", "a/b", ".x", "x" * 129])
def test_p7_a_job_id_that_is_a_path_is_refused_everywhere(tmp_path: Path, job_id: str) -> None:
    memory_dir = tmp_path / "deep" / "reft"
    with pytest.raises(ConfigError, match="job_id"):
        JobDir.open_or_create(memory_dir, job_id, "node0")
    assert not memory_dir.exists()
    with pytest.raises(ConfigError, match="job_id"):
        load_config({"reft": {"enabled": True, "job_id": job_id}})
    with pytest.raises(ConfigError, match=r"job.id"):
        parse_options(["--job-id", job_id, "train.py"])


# -- the secret --------------------------------------------------------------------------------------


def remembered(memory_dir: Path, job_id: str = "job") -> tuple[Path, str]:
    """A dead job's memory: its directory, and its secret."""
    job = JobDir.open_or_create(memory_dir, job_id, "node0")
    (job.path / "rank0-slot0.arena").write_bytes(b"x" * 100)
    return job.path, job.secret.hex()


@pytest.mark.parametrize("damage", ["readable by others", "short", "link"])
def test_p3_memory_whose_secret_cannot_be_read_stays(tmp_path: Path, damage: str) -> None:
    path, secret = remembered(tmp_path / "memory")
    file = path / SECRET_FILE
    if damage == "readable by others":
        file.chmod(0o644)
    elif damage == "short":
        file.write_text(secret[:10])
    else:
        file.rename(path / "moved")
        file.symlink_to("moved")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    node = NodeMemory(tmp_path / "memory", "job", "node0")
    with pytest.raises(AuthenticationError, match=r"secret.*reft clean"):
        node.prepare(bytes.fromhex(secret))
    after = {p.name: p.read_bytes() for p in path.iterdir()}
    assert {name: after.get(name) for name in before} == before


def test_p3_memory_under_another_secret_stays(tmp_path: Path) -> None:
    path, secret = remembered(tmp_path / "memory")
    with pytest.raises(AuthenticationError, match=r"another secret.*is kept.*reft clean"):
        NodeMemory(tmp_path / "memory", "job", "node0").prepare(b"x" * 32)
    assert (path / "rank0-slot0.arena").exists()
    assert (path / SECRET_FILE).read_text().strip() == secret


def test_p3_memory_whose_secret_is_lost_is_opened_by_the_users(tmp_path: Path) -> None:
    from reft.memory.arena import Arena

    job = JobDir.open_or_create(tmp_path, "job", "node0")
    mine, other = job.path / "rank0-slot0.arena", job.path / "rank1-slot0.arena"
    Arena.create(mine, 4096, 4, job.secret).close()
    Arena.create(other, 4096, 4, bytes(32)).close()
    (job.path / SECRET_FILE).unlink()
    NodeMemory(tmp_path, "job", "node0").prepare(job.secret)
    assert mine.exists()
    assert not other.exists()


# -- what launchers leave ----------------------------------------------------------------------------


@pytest.mark.process
def test_p7_what_a_killed_launcher_left_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys, time\nmark = pathlib.Path(sys.argv[1])\n"
                      "if not mark.exists():\n    mark.touch()\n    time.sleep(300)\n")  # fmt: skip
    mark = tmp_path / "started"
    made = LocalCluster(
        command=[str(script), str(mark)],
        directory=tmp_path / "logs",
        nodes=1,
        options=("--no-daemon", "--keep-memory"),
        memory_root=tmp_path / "memory",
        external_rendezvous=False,
        job_id="exits",
    )
    with made:
        made.start()
        made.wait_until(mark.exists, 240, "the trainer")
        job_dir = made.job_dir(0)
        assert list(job_dir.glob("exits-*"))
        made.signal_node(0, signal.SIGKILL)
        made.current[0].process.wait(240)
        # The same node starts again, with the memory that it has.
        made.history.clear()
        made.start_rendezvous()
        made.start_node(0)
        assert made.wait(240) == {0: 0}
    assert list(job_dir.glob("exits-*")) == []


@pytest.mark.integration
def test_p7_a_refused_launch_leaves_nothing(tmp_path: Path) -> None:
    memory_dir = tmp_path / "memory"
    arguments = ["--memory-dir", str(memory_dir), "--nnodes", "2", "--rdzv-id", "refused", "--no-daemon"]
    # Nobody serves this address, which is not this machine's.
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", "is_host=0,read_timeout=1"]
    script = tmp_path / "train.py"
    script.touch()
    code = run_launcher([*arguments, *endpoint, str(script)])
    assert code == 1
    assert list(memory_dir.iterdir()) == []
    path, secret = remembered(memory_dir, "refused")
    assert run_launcher([*arguments, *endpoint, str(script)], REFT_SECRET=secret) == 1
    assert (path / "rank0-slot0.arena").exists(), "memory of an earlier run is not the refused launch's"


def run_launcher(arguments: list[str], **env: str) -> int:
    """`reft launch` in a process of its own: it sets signal handlers and the environment."""
    command = [sys.executable, "-m", "reft.job.launch", *arguments]
    return subprocess.run(command, check=False, timeout=240, env={**os.environ, **env}).returncode


# -- the fault kill_node -----------------------------------------------------------------------------

TRAINER = """
    import subprocess, sys
    from types import SimpleNamespace
    from reft.config_read import load_config
    from reft.naming import Label
    from reft.storage.persist import _fault_points
    from reft.grid import Coordinate

    fault = {"point": "during_persist", "step": 1, "action": "kill_node"}
    config = load_config({"reft": {"enabled": True, "job_id": "mine", "memory_dir": sys.argv[1],
                                   "faults": [fault]}})
    here = Coordinate(0, 0, 0)
    _fault_points(config, SimpleNamespace(label=Label(1, 1), blocks={here: ()}))(here)
"""


@pytest.mark.process
def test_p7_the_fault_kill_node_removes_the_memory_of_its_own_job_alone(tmp_path: Path) -> None:
    for job_id in ("mine", "another"):
        remembered(tmp_path, job_id)
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    ended = subprocess.run(
        [sys.executable, "-c", launcher, textwrap.dedent(TRAINER), str(tmp_path)],
        env={**os.environ, "REFT_NODE_ID": "node0", "REFT_JOB_ID": "", "REFT_MEMORY_DIR": ""},
        check=False,
        timeout=240,
    )
    assert ended.returncode == -signal.SIGKILL
    # The launcher died first; the trainer that killed it may not be through.
    deadline = time.monotonic() + 60
    while (tmp_path / "mine").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another"]
    assert (tmp_path / "another" / "rank0-slot0.arena").exists()
