"""The launchers of others, as their users call them: a job trains, is killed, and is resumed from memory by the
launcher's own restart, or by the same command."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import free_port

from .cluster import SCRIPTS
from .test_unlaunched import config, environment, run

SCRIPT = str(SCRIPTS / "unlaunched.py")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
DEEPSPEED = ("deepspeed.launcher.runner", "--num_gpus", "2")
ACCELERATE = (
    *("accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1", "--num_processes", "2"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
WAYS = {"import": "import", "hook": "", "attach": "attach"}
__all__ = ["environment"]


def command(launcher: tuple[str, ...], python: str = sys.executable) -> tuple[str, ...]:
    port = str(free_port())
    ports = {
        TORCHRUN: ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        DEEPSPEED: ("--master_port", port),
        ACCELERATE: ("--main_process_port", port),
    }
    return (python, "-m", *launcher, *ports[launcher])


def configured(directory: Path, way: str) -> str:
    """The JSON; where the script attaches reft itself, without the block."""
    path = config(directory)
    if way == "attach":
        content = json.loads(Path(path).read_text())
        del content["reft"]
        Path(path).write_text(json.dumps(content))
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "launcher", [TORCHRUN, DEEPSPEED, ACCELERATE], ids=["torchrun", "deepspeed", "accelerate"]
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
