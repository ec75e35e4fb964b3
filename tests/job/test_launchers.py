"""The block under other launchers, as their users call them: `import reft` and `reft hook install` make it effective;
a job trains, is killed, and is resumed from memory by the launcher's own restart, or by the same command."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from reft.checks.start import describe_frozen, describe_missing
from reft.policy.choice import JobFacts
from reft.state.adapters import StateAdapter
from tests.attack.jobs import clean_environment
from tests.attack.test_p10_inert import MOST_MODULES
from tests.machine import free_port

from .cluster import SCRIPTS, deepspeed_json

SCRIPT = str(SCRIPTS / "unlaunched.py")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
DEEPSPEED = ("deepspeed.launcher.runner", "--num_gpus", "2")
ACCELERATE = (
    *(
        "accelerate.commands.launch",
        "--use_deepspeed",
        "--num_machines",
        "1",
        "--num_processes",
        "2",
    ),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
WAYS = {"import": "import", "hook": "", "attach": "attach"}
HOSTS = ("127.0.0.1", "127.0.0.2")


def config(directory: Path) -> str:
    """DeepSpeed's JSON with the block, on a path for scripts' arguments."""
    return deepspeed_json(
        directory, reft={"enabled": True, "memory_dir": str(directory / "memory")}
    )


def run(
    *command: str, out: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=out,
        env=clean_environment(TEST_OUT=str(out), **(env or {})),
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    there = subprocess.check_output(words, text=True)
    (Path(there.strip()) / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


@pytest.mark.nightly
def test_a_hook_in_the_environment_needs_no_line_in_the_script(
    environment: Path, tmp_path: Path
) -> None:
    def hook(command: str) -> tuple[int, str]:
        done = run(str(environment), "-m", "reft.cli", "hook", command, out=tmp_path)
        return done.returncode, done.stdout

    def modules(statement: str) -> set[str]:
        """What of reft is imported by a script that has no block."""
        code = (
            f"{statement}; import sys; print([m for m in sys.modules if m.split('.')[0] == 'reft'])"
        )
        done = run(str(environment), "-c", code, out=tmp_path)
        assert done.returncode == 0, done.stdout
        return set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))

    assert hook("status")[0] == 1
    assert hook("install")[0] == 0
    assert hook("status")[0] == 0
    assert modules("import json") == set()
    assert 0 < len(modules("import deepspeed")) <= MOST_MODULES
    # As `srun python` starts it, with what DeepSpeed asks for.
    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**where, "MASTER_PORT": str(free_port())}
    done = run(str(environment), SCRIPT, config(tmp_path), out=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "`reft launch` did not start this job" in done.stdout
    assert "no node daemon runs" in done.stdout
    assert hook("remove")[0] == 0
    assert hook("status")[0] == 1
    assert modules("import deepspeed") == set()


def test_what_is_missing_without_the_launcher_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFT_LAUNCHER_PID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    said = describe_missing(persists=False) or ""
    assert "persist" not in said
    assert "connectFullMesh" not in said
    assert '"persist" are not written' in (describe_missing(persists=True) or "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (describe_missing(persists=False) or "")
    monkeypatch.setenv("REFT_LAUNCHER_PID", "1")
    assert describe_missing(persists=True) is None


@pytest.mark.parametrize("on_device", [False, True])
def test_what_versions_of_frozen_weights_cost_is_said(on_device: bool) -> None:
    adapter = mock.Mock(spec=StateAdapter)
    adapter.expected_bytes.return_value = (2**21, 2**20)
    job = mock.Mock(spec=JobFacts, adapter=adapter, control=mock.Mock(rank=0))
    job.copies = mock.Mock(asynchronous=on_device)
    adapter.frozen_bytes.return_value = 0
    assert describe_frozen(job) is None
    adapter.frozen_bytes.return_value = 2**20
    said = describe_frozen(job) or ""
    assert said.startswith("1.0 MiB of 3.0 MiB on rank 0 are frozen weights")
    assert ("neither copied nor sent again" in said) is not on_device
    assert ("still copied from the device" in said) is on_device


def command(launcher: tuple[str, ...], python: str = sys.executable) -> tuple[str, ...]:
    port = str(free_port())
    ports = {
        TORCHRUN: ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        DEEPSPEED: ("--master_port", port),
        ACCELERATE: ("--main_process_port", port),
    }
    return (python, "-m", *launcher, *ports[launcher])


def configured(directory: Path, way: str) -> str:
    path = config(directory)
    if way == "attach":
        content = json.loads(Path(path).read_text())
        del content["reft"]
        Path(path).write_text(json.dumps(content))
    return path


LAUNCHERS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
QUICK = ("torchrun", "import")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        pytest.param(
            words,
            way,
            id=f"{name}-{way}",
            marks=() if (name, way) == QUICK else pytest.mark.nightly,
        )
        for name, words in LAUNCHERS.items()
        for way in WAYS
    ],
)
def test_a_killed_job_is_resumed(
    environment: Path, tmp_path: Path, launcher: tuple[str, ...], way: str
) -> None:
    if importlib.util.find_spec(launcher[0].partition(".")[0]) is None:
        pytest.skip("needs accelerate: pip install 'reft-ckpt[hf]'")
    python = sys.executable
    if way == "hook":
        python = str(environment)
        assert run(python, "-m", "reft.cli", "hook", "install", out=tmp_path).returncode == 0
    arguments = (SCRIPT, configured(tmp_path, way), WAYS[way], "kill")

    def start() -> subprocess.CompletedProcess[str]:
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return run(*command(launcher, python), *arguments, out=tmp_path, env=env)

    first = start()
    assert (tmp_path / "killed").exists(), first.stdout[-4000:]
    said = first.stdout
    if launcher is TORCHRUN:
        assert first.returncode == 0, first.stdout[-4000:]
    else:
        assert first.returncode != 0, "a job that was killed has not ended well"
        again = start()
        assert again.returncode == 0, again.stdout[-4000:]
        said += again.stdout
    assert "`reft launch` did not start this job" in said
    assert len(re.findall(r"rank \d loaded memory:", said)) == 2, said[-4000:]
    assert len(re.findall(r"rank \d ended at step 6", said)) == 2
    # The arenas of the other rank are its own, whatever the launcher tells of the node's ranks.
    assert "was removed" not in said
    assert len(list((tmp_path / "memory").glob("*/rank?-slot0.arena"))) == 2


# -- hosts of DeepSpeed's hostfile ---------------------------------------------------------------------


def start(folder: Path, *arguments: str) -> tuple[list[int], str]:
    """Run the job on both hosts to its end, each with a memory of its own: exit codes and all that was said."""
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    port = str(free_port())
    started = []
    for rank in range(len(HOSTS)):
        command = (
            *(
                sys.executable,
                "-m",
                "deepspeed.launcher.runner",
                "--hostfile",
                str(folder / "hostfile"),
            ),
            *(
                "--no_ssh",
                "--node_rank",
                str(rank),
                "--master_addr",
                HOSTS[0],
                "--master_port",
                port,
            ),
            *(SCRIPT, str(folder / "ds_config.json"), *arguments),
        )
        own = {"REFT_MEMORY_DIR": str(folder / f"host{rank}"), "REFT_NODE_ID": f"host{rank}"}
        env = clean_environment(TEST_OUT=str(folder), **own)
        with (folder / f"host{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(600) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait(60)
    return codes, "".join((folder / f"host{rank}.log").read_text() for rank in range(len(HOSTS)))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_host_that_is_lost_with_its_memory_is_made_whole_by_the_other(tmp_path: Path) -> None:
    config(tmp_path)
    codes, said = start(tmp_path, "import", "kill")
    assert all(codes), said[-4000:]
    assert "`reft launch` did not start this job" in said
    shutil.rmtree(tmp_path / "host1")
    codes, said = start(tmp_path, "import", "kill")
    assert codes == [0, 0], said[-4000:]
    assert len(re.findall(r"rank \d loaded memory:", said)) == 2, said[-4000:]
    assert len(re.findall(r"rank \d ended at step 6", said)) == 2


pytest.importorskip("accelerate", reason="needs accelerate: pip install 'reft-ckpt[hf]'")
LOSS = re.compile(r"(rank \d step \d+) loss (\S+)")


def start_accelerated(out: Path, *ways: str, reft: bool = True) -> tuple[int, str]:
    out.mkdir(exist_ok=True)
    path = Path(config(out))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"reft": content["reft"] | {"enabled": reft}}))
    done = run(*command(ACCELERATE), str(SCRIPTS / "accelerated.py"), str(path), *ways, out=out)
    return done.returncode, done.stdout


@pytest.mark.nightly
def test_p8_a_killed_job_goes_on_in_the_pass_of_every_rank(tmp_path: Path) -> None:
    code, undisturbed = start_accelerated(tmp_path / "undisturbed", "resumable", reft=False)
    assert code == 0, undisturbed[-4000:]
    code, first = start_accelerated(tmp_path / "job", "resumable", "kill")
    assert code != 0, "a job that was killed has not ended well"
    code, second = start_accelerated(tmp_path / "job", "resumable", "kill")
    assert code == 0, second[-4000:]
    assert len(re.findall(r"rank \d loaded memory:", second)) == 2, second[-4000:]
    assert "of the undisturbed run" not in second
    expected = dict(LOSS.findall(undisturbed))
    assert len(expected) == 2 * 14
    for said in (first, second):
        wrong = {at: loss for at, loss in LOSS.findall(said) if expected[at] != loss}
        assert wrong == {}
    assert {"rank 0 step 14", "rank 1 step 14"} <= dict(LOSS.findall(second)).keys()


@pytest.mark.nightly
def test_p12_a_loader_that_rank_0_reads_for_all_is_told_by_name(tmp_path: Path) -> None:
    code, log = start_accelerated(tmp_path / "told", "dispatch")
    assert code == 0, log[-4000:]
    said = "trains from Accelerate's DataLoaderDispatcher"
    assert said in log, log[-4000:]
    assert "DataLoaderConfiguration(dispatch_batches=False)" in log
    assert log.index(said) < log.index("rank 0 step 2 ")

    code, log = start_accelerated(tmp_path / "refused", "dispatch", "resumable")
    assert code != 0
    assert "reft: found Accelerate's DataLoaderDispatcher" in log, log[-4000:]
    assert 'accelerated.py", line' not in log, "no traceback of the script"
