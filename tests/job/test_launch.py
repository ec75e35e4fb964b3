"""`reft launch` on one node: errors, restarts, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft import cli
from reft.control.keyvalue import KeyValueStore
from reft.engine.build_locks import abandoned_locks
from reft.env import ENV_EXTENSIONS
from reft.errors import ConfigError
from reft.job.launch import Launcher, main
from reft.job.local import LocalNodes, handle_stop_signals
from reft.job.options import LaunchOptions, find_warnings, parse_options
from reft.job.rendezvous.backend import JobEndedError, find_backend
from reft.job.rendezvous.server import RendezvousServer
from reft.job.signals import StopSignals
from reft.job.trainers import Trainers
from reft.naming import safe_name
from reft.node.history import PARTS, note, read_history
from reft.node.progress import process_state
from tests.job.conftest import SECRET

from .cluster import WatchedCluster, cluster, deepspeed_json

ROOT = Path(__file__).resolve().parents[2]


def single(tmp_path: Path, *args: str, options: tuple[str, ...] = (), **more: object):
    return cluster(
        tmp_path, "light.py", *args, nodes=1, options=options, external_rendezvous=False, **more
    )


# -- options -----------------------------------------------------------------------------------------


def parse(*args: str) -> LaunchOptions:
    return parse_options([*args, "train.py", "--lr", "1"])


def test_scripts_run_through_the_hook() -> None:
    assert parse().arguments == ("-u", "-P", "-m", "reft.job.script", "train.py", "--lr", "1")
    assert parse("-m").arguments == (
        "-u",
        "-P",
        "-m",
        "reft.job.script",
        "-m",
        "train.py",
        "--lr",
        "1",
    )
    bare = parse("--no-python")
    assert (bare.entrypoint, bare.arguments) == ("train.py", ("--lr", "1"))


def test_the_rendezvous_defaults_suit_replacements() -> None:
    options = parse("--nnodes", "4", "--rdzv-endpoint", "login:29400", "--rdzv-id", "job7")
    assert (options.config.rdzv_backend, options.job_id) == ("c10d", "job7")
    conf = options.config.rdzv_configs
    assert (conf["keep_alive_interval"], conf["keep_alive_max_attempt"], conf["join_timeout"]) == (
        1,
        5,
        1800,
    )
    large = parse("--nnodes", "400", "--rdzv-endpoint", "login")
    assert large.config.rdzv_configs["keep_alive_interval"] == 5
    assert large.job_id == large.config.run_id
    assert large.job_id.startswith("train-")
    conf = "join_timeout=5,keep_alive_interval=9"
    own = parse("--nnodes", "4", "--rdzv-endpoint", "x", "--rdzv-conf", conf)
    assert own.config.rdzv_configs["join_timeout"] == "5"
    assert own.config.rdzv_configs["keep_alive_interval"] == "9"
    assert own.join_timeout_secs == 5.0
    spares = parse("--nnodes", "4", "--spares", "2", "--rdzv-endpoint", "x").config
    assert (spares.min_nodes, spares.max_nodes) == (4, 4), "spares never make a job larger"


@pytest.mark.parametrize(
    "order", ["spread", "across-nodes:0", "across-nodes:", "across-nodes:x", "by-node:2"]
)
def test_an_unknown_rank_order_is_refused(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--rank-order", order)
    assert stop.value.code == 2
    assert "write by-node, across-nodes, or across-nodes:N" in capsys.readouterr().err


def test_restarts_are_unlimited_only_between_new_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse().config.max_restarts, parse().restarts_renew) == (3, True)
    for given in (parse("--max-restarts", "5"), parse("--max_restarts=5")):
        assert (given.config.max_restarts, given.restarts_renew) == (5, False)
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert (parse().config.max_restarts, parse().restarts_renew) == (0, False)


def test_p7_a_job_without_an_id_has_the_same_name_at_every_start() -> None:
    name = parse("--nproc-per-node", "2").job_id
    assert parse("--standalone").job_id == parse("--rdzv-id", "").job_id == name
    assert parse("--standalone", "--rdzv-id", "job7").job_id == "job7"
    assert parse("--rdzv-id", "run 7/a").job_id == safe_name("run 7/a")
    assert parse("-m").job_id != name


@pytest.mark.parametrize("run_id", ["team/exp1", "/", "../a", "j" * 300, "ö" * 125])
def test_a_run_id_that_no_directory_can_have_gets_a_name_that_is_the_same_on_every_node(
    tmp_path: Path, run_id: str
) -> None:
    config = parse("--rdzv-id", run_id, "--log-dir", str(tmp_path)).config
    assert config.run_id == safe_name(run_id)
    config.logs_specs.reify(
        {0: {"TORCHELASTIC_RUN_ID": config.run_id, "TORCHELASTIC_RESTART_COUNT": "0"}}
    )
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    assert parse("--rdzv-id", "run 7, ä").config.run_id == "run 7, ä"


@pytest.mark.parametrize("rank", [0, 1])
def test_with_torchruns_older_options_node_0_serves_the_store(rank: int) -> None:
    config = parse("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.0.0.1").config
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
    assert config.rdzv_configs["is_host"] == str(rank == 0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--nnodes", "2"), "reft rendezvous"),
        (("--nnodes", "two", "--rdzv-endpoint", "x"), "two"),
        (("--nproc-per-node", "gpus"), "gpus"),
        (("--max-restarts", "-1"), "max_restarts"),
        (("--no-python", "-m"), "exclude each other"),
        (("--job-id", "a/b"), "--job-id"),
        (("--rdzv-conf", "join"), "rendezvous"),
        (("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "x"), "--rdzv-backend c10d"),
        (("--rdzv-backend", "zeus", "--rdzv-endpoint", "x"), "unpickles"),
        (("--rdzv-endpoint", "x", "--rdzv-conf", "store_type=file"), "store_type=file"),
        (("--nnodes", "2", "--node-rank", "5"), "--node-rank is 5; write 0 to 1"),
        (("--spares", "1"), r"--nnodes is 1:1 with --spares 1, but no option says where"),
        (
            ("--nnodes", "4", "--spares", "-1", "--rdzv-endpoint", "x"),
            "--spares is -1; write 0 or more",
        ),
        (
            ("--nnodes", "2", "--spares", "1", "--node-rank", "3", "--master-addr", "x"),
            "3; write 0 to 2",
        ),
        (("--memory-dir", ""), "--memory-dir is empty; write"),
        (("--memory-dir", "loop"), "--memory-dir.*loop"),
        ((), r"working directory.*removed"),
    ],
)
def test_wrong_use_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    (there := tmp_path / "there").mkdir()
    monkeypatch.chdir(there)
    Path("loop").symlink_to("loop")
    if not args:
        shutil.rmtree(there)
    with pytest.raises(ConfigError, match=says):
        parse(*args)


def test_a_job_without_a_block_and_a_memory_that_is_a_disk_are_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        "disk / ext4 rw 0 0",
        f"tmpfs {tmp_path}/shm tmpfs rw 0 0",
        f"x {tmp_path}/a\\040b xfs rw 0 0",
    ]
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **how: "\n".join(mounts) if path.name == "mounts" else read(path, **how),
    )
    for directory, kind in (("shm/reft", ""), ("elsewhere", "ext4"), ("a b/c", "xfs")):
        (tmp_path / directory).parent.mkdir(exist_ok=True)
        said = find_warnings(parse("--memory-dir", str(tmp_path / directory)))
        assert [f"is on {kind}, which is not memory" in text for text in said] == (
            [True] if kind else []
        )
    (said,) = find_warnings(parse("--memory-dir", str(tmp_path / "shm/typo/reft")))
    assert "typo does not exist, and is made" in said

    plain, block, other = (tmp_path / name for name in ("ds.json", "reft.json", "other.json"))
    plain.write_text('{"train_batch_size": 4}')
    block.write_text('{"train_batch_size": 4, "reft": {"enabled": true}}')
    other.write_text('{"vocabulary": 7}')
    where = ("--memory-dir", str(tmp_path / "shm/reft"))
    for words, told in (
        ([f"--deepspeed_config={plain}"], True),
        ([str(plain)], True),
        ([str(plain), str(block)], False),
        ([str(block)], False),
        ([str(other), "absent.json"], False),
    ):
        said = find_warnings(parse_options([*where, "train.py", *words]))
        assert ['has no "reft" block' in text for text in said] == ([True] if told else [])


def test_a_lost_store_is_waited_for_and_then_explained() -> None:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    endpoint = server.endpoint
    options = parse("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "join_timeout=1")
    place, late = (find_backend(options, SECRET) for _ in range(2))
    rendezvous = place.join()
    assert place.trainers_endpoint() == endpoint
    rendezvous.shutdown("node a gave up: local rank 0: ValueError")
    assert late.join().outcome() == "node a gave up: local rank 0: ValueError"
    server.close()
    with pytest.raises(JobEndedError, match=r"did not come back in 1 s.*reft rendezvous"):
        place.reconnect()


def test_what_listens_at_the_endpoint_and_never_answers_is_found_within_the_time_that_was_given() -> (
    None
):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        endpoint = f"127.0.0.1:{stranger.getsockname()[1]}"
        options = parse(
            "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "connect_timeout=1"
        )
        began = time.monotonic()
        with pytest.raises(JobEndedError, match=r"did not answer within 1 s.*connect_timeout"):
            find_backend(options, SECRET).join()
        assert time.monotonic() - began < 20.0, "a request may take 30 s"


def test_a_request_to_the_store_takes_no_longer_than_a_node_is_waited_for() -> None:
    conf = parse("--rdzv-endpoint", "x", "--rdzv-conf", "join_timeout=5").config.rdzv_configs
    assert conf["read_timeout"] == 5.0
    conf = parse(
        "--rdzv-endpoint", "x", "--rdzv-conf", "join_timeout=5,read_timeout=9"
    ).config.rdzv_configs
    assert conf["read_timeout"] == "9"


@pytest.mark.parametrize(("options", "stays"), [((), False), (("--keep-memory",), True)])
def test_a_good_end_clears_the_note_of_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], stays: bool
) -> None:
    monkeypatch.setenv("REFT_SECRET", SECRET.hex())
    with closing(RendezvousServer("127.0.0.1", 0, SECRET)) as server:
        where = ("--memory-dir", str(tmp_path), "--rdzv-endpoint", server.endpoint)
        launcher = Launcher(parse(*where, "--job-id", "job", *options))
        launcher.rendezvous = launcher.backend.join()
        store = KeyValueStore(server.endpoint, SECRET)
        store.set("reft/job/committed", "1:7")
        agent: Any = SimpleNamespace(all_ended_well=True)
        assert launcher.conclude(agent, {}) == 0
        assert store.check(["reft/job/committed"]) is stays
        assert launcher.rendezvous.outcome() == "the job ended well"


def test_a_launch_that_cannot_start_is_exit_code_2_and_leaves_no_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    where = ("--memory-dir", str(memory))
    for options, says in (
        ((str(tmp_path / "absent.py"),), "there is no script"),
        (("--stop-secs", "-1", "x.py"), "--stop-secs is -1; write 0 or more"),
        (("--grace-secs=-0.5", "x.py"), "--grace-secs is -0.5"),
        (("--monitor-interval", "-1", "x.py"), "--monitor-interval is -1"),
    ):
        assert main([*where, *options]) == 2
        assert says in capfd.readouterr().err
        assert not memory.exists()


@pytest.fixture
def hang_up_ignored() -> Iterator[None]:
    """As under ``nohup``."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("hang_up_ignored")
def test_a_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    signals = StopSignals()
    signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signals._handle
    # TorchElastic sets handlers of its own when it starts trainers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signals._handle
    assert signals.handled_names("SIGTERM,SIGINT,SIGHUP,SIGQUIT") == "SIGTERM,SIGINT,SIGQUIT"


@pytest.mark.usefixtures("hang_up_ignored")
def test_commands_that_try_a_job_are_not_ended_by_a_signal_that_was_ignored_at_their_start() -> (
    None
):
    """``reft demo``, ``reft rehearse``."""
    handle_stop_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, (
        "a second one does not disturb the end"
    )


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = "import sys; from reft.cli import main; code = main(['launch', '--help']); print(code, 'torch' in sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "0 False"
    for option in (
        "--nproc-per-node",
        "--rank-order",
        "--hostfile",
        "REFT_LOGLEVEL",
        "REFT_EVENTS",
    ):
        assert option in done.stdout


SHADOWS = ("logging", "queue", "secrets", "select", "random", "psutil", "numpy")
SAYS_PATH = """
import json, os, sys
with open(os.environ["TEST_OUT"] + "/" + os.environ["RANK"], "w") as out:
    json.dump({"path": sys.path, "warm": "reft.job.warm" in sys.orig_argv}, out)
"""


def shadow(work: Path) -> None:
    """Write modules to a directory that end whoever imports them."""
    for name in SHADOWS:
        (work / f"{name}.py").write_text(f"raise SystemExit('the working directory\\'s {name}.py')")


@pytest.mark.process
def test_a_node_that_a_command_starts_imports_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work := tmp_path / "work").mkdir()
    shadow(work)
    monkeypatch.chdir(work)
    monkeypatch.setenv("REFT_TEST_PREFORK", "0")  # what is forked has imported all before
    node = LocalNodes({}).start(
        "a", tmp_path / "memory", log := tmp_path / "log", ["--version"], ["train.py"]
    )
    assert node.process.wait(60) == 0, log.read_text()
    assert "reft" in log.read_text()


@pytest.mark.integration
@pytest.mark.parametrize("way", ["--no-warm", "--warm"])
@pytest.mark.parametrize("program", [["pkg/train.py"], ["-m", "pkg.train"]])
def test_modules_of_the_working_directory_are_the_scripts_alone(
    tmp_path: Path, way: str, program: list[str]
) -> None:
    """A trainer's path is that under torchrun; launcher, daemon and what imports ahead do not have the directory."""
    work = tmp_path / "work"
    (work / "pkg").mkdir(parents=True)
    (work / "pkg" / "train.py").write_text(SAYS_PATH)
    for name in SHADOWS:
        (work / f"{name}.py").write_text(f"raise SystemExit('the working directory\\'s {name}.py')")
    found = []
    torchrun = Path(sys.executable).parent / "torchrun"
    reft = (
        str(Path(sys.executable).parent / "reft"),
        "launch",
        way,
        "--memory-dir",
        str(tmp_path / "memory"),
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("REFT_WARM", "PYTHONPATH")}
    for launcher in ((str(torchrun),), reft):
        (out := tmp_path / str(len(found))).mkdir()
        # Not torchrun's own path: its console script has no working directory in it.
        done = subprocess.run(
            [*launcher, *program],
            cwd=work,
            env={**environ, "TEST_OUT": str(out), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "working directory's" not in done.stderr
        assert "the node daemon ended" not in done.stderr
        found.append(json.loads((out / "0").read_text()))
    theirs, ours = found
    assert ours["path"] == theirs["path"]
    assert ours["warm"] is (way == "--warm")


# -- one node ------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_good_end_removes_the_memory(tmp_path: Path) -> None:
    with single(tmp_path, "end", procs_per_node=2) as job:
        assert job.wait(240) == {0: 0}
        assert not job.job_dir(0).exists()
        first = job.events("start")[0]["env"]
        assert len(job.events("start")) == 2
    told = [first[f"REFT_{name}"] for name in ("NODE_ID", "JOB_ID", "MEMORY_DIR", "STORE", "ROUND")]
    assert told == ["node0", "local", str(job.current[0].memory_dir), job.endpoint, "1"]
    assert len(bytes.fromhex(first["REFT_SECRET"])) == 32


@pytest.mark.process
def test_errors_are_shown_restarts_counted_and_no_memory_without_a_version_is_left(
    tmp_path: Path,
) -> None:
    with single(tmp_path, "raise", options=("--max-restarts", "1")) as job:
        assert job.wait(240) == {0: 1}
        log = job.log(0)
        assert log.count("ValueError: a bad sample\n") >= 2
        assert re.search(
            r'line \d+, in train\n    raise ValueError\("a bad sample"\)\nValueError', log
        )
        assert "auto.py" not in log.split("Traceback")[1].split("ValueError")[0]
        assert "uses restart 1 of 1" in log
        assert "restarts used: 1 of 1 (--max-restarts): the job ends" in log
        counts = [e["env"]["TORCHELASTIC_RESTART_COUNT"] for e in job.events("start")]
        assert counts == ["0", "1"]
        assert not job.job_dir(0).exists()
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.process
@pytest.mark.parametrize(("code", "seen"), [(3, 3), (143, 1)])
def test_exit_codes_propagate_but_those_of_a_launcher_that_was_told_to_stop(
    tmp_path: Path, code: int, seen: int
) -> None:
    """143 is a launcher's own end by SIGTERM alone: a scheduler starts such a job again."""
    options = ("--no-daemon", "--max-restarts", "0", "--max-peer-restarts", "0")
    with single(tmp_path, "exit", str(code), options=options) as job:
        assert job.wait(240) == {0: seen}
        assert f"local rank 0: exit code {code}" in job.log(0)
        assert "the job ends" in job.log(0)


@pytest.mark.process
def test_free_restarts_are_bounded(tmp_path: Path) -> None:
    """Lost peers are free, but not for ever: 1 + 2 free + 1 counted round."""
    options = ("--max-peer-restarts", "2", "--max-restarts", "1", "--no-daemon")
    with single(tmp_path, "lose", options=options) as job:
        assert job.wait(240) == {0: 75}
        assert len(job.events("start")) == 4
        log = job.log(0)
    assert log.count("uses no restart") == 2
    assert "after 2 free restarts without progress" in log


@pytest.mark.process
def test_a_rank_that_ends_well_before_the_others_is_named_and_ends_the_job(tmp_path: Path) -> None:
    """Uneven data: the same at every start."""
    with single(tmp_path, "uneven", procs_per_node=2, options=("--no-daemon",)) as job:
        assert job.wait(240) == {0: 1}
        assert len(job.launcher_events("round")) == 2
        log = job.log(0)
    assert "rank 0 ended with exit code 0 while other ranks trained on" in log
    assert "twice" in log
    assert "drop_last" in log


@pytest.mark.integration
def test_a_node_whose_trainers_end_well_before_the_others_is_named_and_ends_the_job(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, "light.py", "uneven", nodes=2, options=("--no-daemon",)) as job:
        assert job.wait(240) == {0: 1, 1: 1}
        rounds = [event["round"] for event in job.launcher_events("round")]
        logs = job.log(0), job.log(1)
    assert max(rounds) <= 3
    assert all("rank 0 ended with exit code 0 while other ranks trained on" in log for log in logs)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_trainers_commit_and_nothing_is_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    with single(tmp_path, "wait", "graceful", procs_per_node=2) as job:
        job.wait_for("ready", 2)
        job.signal_node(0, number)
        assert job.wait(240) == {0: 128 + number}
        assert [e["number"] for e in job.events("signal")] == [number, number]
        assert len(job.events("flushed")) == 2
        assert not job.job_dir(0).exists(), "no version was taken"
        assert "Traceback" not in job.log(0)
        job.wait_until(job.none_left, 240, "the end of all processes")


_WITH_CHILDREN_OF_ITS_OWN = """
import os, signal, subprocess, sys, time
restarts, (out,) = os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1:]
none = subprocess.DEVNULL
left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=none, stderr=none)
with open(f"{out}/{restarts}.part", "w") as file:
    file.write(str(left.pid))
os.rename(file.name, f"{out}/{restarts}")
if restarts == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_what_a_killed_trainer_has_put_into_a_session_of_its_own_ends_before_the_next_starts(
    tmp_path: Path,
) -> None:
    """It would keep ports and devices. What a trainer that ends well leaves, it leaves on purpose."""
    (tmp_path / "train.py").write_text(_WITH_CHILDREN_OF_ITS_OWN)
    launch = [
        sys.executable,
        "-m",
        "reft.cli",
        "launch",
        "--no-warm",
        "--no-daemon",
        "--memory-dir",
        str(tmp_path / "m"),
    ]
    done = subprocess.run(
        [*launch, str(tmp_path / "train.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    first, second = (int((tmp_path / restarts).read_text()) for restarts in "01")
    states = process_state(first), process_state(second)
    for pid, state in zip((first, second), states, strict=True):
        if state == "S":
            os.kill(pid, signal.SIGKILL)
    assert states[0] in ("", "Z")
    assert states[1] == "S"
    assert done.returncode == 0, done.stderr
    assert re.search(rf"ended 1 process.*\({first} sleep\)", done.stderr)


_WITH_A_WORKER = """
import signal, subprocess, sys
def stop(number, frame):
    worker.communicate(b"batch")
    sys.exit(143)
if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, stop)
code = "import sys; print('ready', flush=True); print(sys.stdin.read(), flush=True)"
worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
while True:
    signal.pause()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("handles", "code", "loaded"), [("handles", 143, b"batch\n"), ("leaves", -15, b"")]
)
def test_a_trainer_told_to_stop_has_its_workers_until_it_ends(
    tmp_path: Path, handles: str, code: int, loaded: bytes
) -> None:
    """It finishes a step after the signal, for which its DataLoader's workers have to live."""
    command = [sys.executable, "-c", _WITH_A_WORKER, handles]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        trainers = Trainers(parse(), tmp_path, StopSignals())
        trainers._context = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=process)})
        trainers.end(signal.SIGTERM, 60)
        assert process.stdout.read() == loaded  # to its end: the worker has ended as well
        assert process.poll() == code


@pytest.mark.integration
def test_a_launcher_told_to_stop_takes_the_others_along(tmp_path: Path) -> None:
    """Its trainers stop those of its peers; no node takes its place, for which they would wait."""
    with cluster(tmp_path, "light.py", "wait", "graceful", nodes=2) as job:
        job.wait_for("ready", 2)
        (peers,) = job.trainers(1)
        job.signal_node(0, signal.SIGTERM)
        job.wait_for("flushed")
        peers.terminate()
        assert job.wait(240) == {0: 143, 1: 143}
        assert "node node0 was stopped by SIGTERM, and no other node replaces it" in job.log(1)
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.integration
def test_a_launcher_told_to_stop_is_replaced_where_the_others_await_it(tmp_path: Path) -> None:
    options = ("--await-replacement",)
    with cluster(tmp_path, "light.py", "wait", "graceful", nodes=2, options=options) as job:
        job.wait_for("ready", 2)
        (peers,) = job.trainers(1)
        job.signal_node(0, signal.SIGTERM)
        job.wait_for("flushed")
        peers.terminate()
        assert job.current[0].process.wait(240) == 143
        job.start_node(0)
        job.wait_for("ready", 4)
        assert job.current[1].running
        for index in job.current:
            job.signal_node(index, signal.SIGTERM)
        assert job.wait(240) == {0: 143, 1: 143}
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.integration
def test_trainers_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for the grace to pass."""
    with single(tmp_path, "wait", "stubborn", options=("--grace-secs", "100")) as job:
        job.wait_for("ready")
        job.signal_node(0, signal.SIGINT)
        job.wait_for("signal")
        deadline = time.monotonic() + 90
        while job.current[0].running:
            assert time.monotonic() < deadline, "the second Ctrl-C was not heard"
            time.sleep(0.3)
            job.signal_node(0, signal.SIGINT)
        assert job.wait(1) == {0: 130}
        job.wait_until(job.none_left, 240, "the end of all processes")


@pytest.mark.process
def test_a_killed_launcher_leaves_memory_but_no_process(tmp_path: Path) -> None:
    with single(tmp_path, "wait", "stubborn", procs_per_node=2) as job:
        job.wait_for("ready", 2)
        job.wait_until(lambda: (job.status(0) or {}).get("pid") is not None, 240, "the daemon")
        job.wait_until(
            lambda: len((job.status(0) or {}).get("workers", [])) == 2, 240, "the daemon's list"
        )
        job.signal_node(0, signal.SIGKILL)
        job.wait_until(job.none_left, 240, "the end of all processes")
        assert job.job_dir(0).is_dir()


BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(600)
"""
SAID = "by a build that has ended"


@contextmanager
def building(lock: Path) -> Iterator[subprocess.Popen[str]]:
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", BUILDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        try:
            assert builder.stdout is not None
            assert builder.stdout.readline() == "building\n"
            yield builder
        finally:
            builder.send_signal(signal.SIGKILL)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_EXTENSIONS, str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"


@pytest.mark.integration
def test_a_lock_whose_builder_is_gone_is_named_by_the_launcher_and_left_there(
    lock: Path, tmp_path: Path
) -> None:
    with building(lock):
        assert abandoned_locks() == []
    assert abandoned_locks() == [(lock, lock.stat().st_mtime)]
    with cluster(tmp_path / "left", "light.py", "end", nodes=1) as job:
        assert set(job.wait(240).values()) == {0}
        said = [line for line in job.log(0).splitlines() if SAID in line]
    assert len(said) == 1, "the launcher, and not its trainers"
    assert f"rm '{lock}'" in said[0]
    assert lock.exists()


LIVES = 4  # More than the restarts that are allowed without a new version


def one_node(directory: Path, script: str, *args: str):
    options = ("--keep-memory",)
    return cluster(directory, script, *args, nodes=1, options=options, external_rendezvous=False)


def restarts_used(job: WatchedCluster) -> list[int]:
    return [event["restarts_used"] for event in job.launcher_events("round")]


@pytest.mark.nightly
def test_trainers_that_make_progress_may_be_killed_any_number_of_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_node(tmp_path, "relapse.py", deepspeed_json(tmp_path), str(LIVES)) as job:
        assert job.wait(300) == {0: 0}
        assert restarts_used(job) == [0] + [1] * LIVES
        began = [int(line) for line in (job.events_dir / "lives").read_text().split()]
        first, *later = read_history(job.job_dir(0))
        where = ("--memory-dir", str(job.current[0].memory_dir))
        assert cli.main(["history", *where, "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert cli.main(["history", *where]) == 0
        assert "SIGKILL" in capsys.readouterr().out
        cli.main(["status", *where, "--json"])
        (status,) = json.loads(capsys.readouterr().out)["here"]
    assert (first.resumed_from, first.failures, first.nodes) == (None, [], ["node0"])
    assert [row.resumed_step for row in later] == began[1:]
    for row in later:
        assert row.failures == ["node0, rank 0, local rank 0: killed by SIGKILL"]
        assert (row.resumed_from or "").startswith("memory, ")
        assert list(row.secs) == list(PARTS), (
            "one record of what the launcher and the trainer have seen"
        )
        assert min(row.secs.values()) >= 0
        assert row.failed_unix_secs is not None
        assert (row.resumed_step or 0) >= row.newest_step > 0
    assert told["rounds"] == [vars(row) for row in (first, *later)]
    assert status["last_recovery"] == vars(later[-1])
    assert (
        status["restarts"] == f"{LIVES}; the last: node0, rank 0, local rank 0: killed by SIGKILL"
    )
    assert began == sorted(set(began)), "every life resumed from a newer version"


@pytest.mark.process
@pytest.mark.integration
def test_the_same_error_twice_before_the_first_version_ends_the_job(tmp_path: Path) -> None:
    with one_node(tmp_path, "light.py", "raise") as job:
        assert job.wait(300) == {0: 1}
        assert restarts_used(job) == [0, 1]
        last = read_history(job.job_dir(0))[-1]
        assert last.failures == ["node0, rank 0, local rank 0: ValueError: a bad sample"]
        assert last.ended == "local rank 0: ValueError: a bad sample"
        assert "the same error twice, and no version was committed: the job ends" in job.log(0)


def test_p6_a_history_that_is_torn_or_cannot_be_written_costs_a_line_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_history(tmp_path) == []
    facts = {"nodes": ["a"], "failures": [], "lost": [], "joined": [], "newest_step": -1}
    note(tmp_path, "stepped")  # of a round whose start was not noted
    note(tmp_path, "started", round=1, gathering_secs=None, **facts)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "resu\n[]\n')
    note(
        tmp_path,
        "started",
        round=2,
        gathering_secs=1.5,
        **{**facts, "lost": ["b"], "newest_step": 7},
    )
    note(tmp_path, "resumed", source="disk, /d", step=5, secs=0.0)
    first, second = read_history(tmp_path)
    assert (first.round, first.secs) == (1, {})
    assert (second.lost, second.resumed_step, second.secs["gathering"]) == (["b"], 5, 1.5)
    note(tmp_path / "gone", "stepped")
    assert "the restart history in" in caplog.text
