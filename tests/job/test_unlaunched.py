"""The block under other launchers: `import reft` and `reft hook install` make it effective."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from reft.engine.checks.start import what_is_missing
from tests.attack.test_p10_inert import LEAST
from tests.machine import free_port

from .cluster import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(SCRIPTS / "unlaunched.py")


def config(directory: Path) -> str:
    """DeepSpeed's JSON with the block, on a path for scripts' arguments."""
    block = {"enabled": True, "memory_dir": str(directory / "memory")}
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    path = directory / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": optimizer,
                "reft": block,
                "steps_per_print": None,
            }
        )
    )
    return str(path)


def run(*command: str, out: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("REFT_", "TORCHELASTIC", "PET_", "TEST_"))
    }
    own = {"TEST_OUT": str(out), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=out,
        env={**clean, **own, **(env or {})},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment of its own, with this one's packages."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    there = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(there.strip()) / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


@pytest.mark.nightly
def test_a_hook_in_the_environment_needs_no_line_in_the_script(environment: Path, tmp_path: Path) -> None:
    def hook(command: str) -> tuple[int, str]:
        done = run(str(environment), "-m", "reft.cli", "hook", command, out=tmp_path)
        return done.returncode, done.stdout

    def modules(statement: str) -> set[str]:
        """What of reft is imported by a script that has no block."""
        code = f"{statement}; import sys; print([m for m in sys.modules if m.split('.')[0] == 'reft'])"
        done = run(str(environment), "-c", code, out=tmp_path)
        assert done.returncode == 0, done.stdout
        return set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))

    assert hook("status")[0] == 1
    assert hook("install")[0] == 0
    assert hook("status")[0] == 0
    assert modules("import json") == set()
    assert modules("import deepspeed") == LEAST
    # As `srun python` starts it, with what DeepSpeed asks for.
    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = run(
        *(str(environment), SCRIPT, config(tmp_path)),
        out=tmp_path,
        env={**where, "MASTER_PORT": str(free_port())},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "`reft launch` did not start this job" in done.stdout
    assert "no node daemon runs" in done.stdout
    assert hook("remove")[0] == 0
    assert hook("status")[0] == 1
    assert modules("import deepspeed") == set()


def test_what_is_missing_without_the_launcher_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFT_LAUNCHER_PID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    said = what_is_missing(persists=False) or ""
    assert "persist" not in said
    assert "connectFullMesh" not in said
    assert '"persist" are not written' in (what_is_missing(persists=True) or "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (what_is_missing(persists=False) or "")
    monkeypatch.setenv("REFT_LAUNCHER_PID", "1")
    assert what_is_missing(persists=True) is None
