"""Small corpora and launchers for the pretraining tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama import PRETRAIN
from tests.prefork import Popen

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    path = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def run_bounded(command: list[str], timeout_secs: float, cwd: Path, **extra: str):
    """Run ``command`` in a session of its own; everything it started is dead afterwards."""
    process = Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_secs)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def pretrain(*args: object, cwd: Path, timeout_secs: float = 120, **extra: str):
    """The script in one process."""
    command = [sys.executable, PRETRAIN, *map(str, args)]
    return run_bounded(command, timeout_secs, cwd, **extra)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 400 kB of real text: sources of the standard library, in folders."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(os.__file__).parent
    for name in (
        "argparse",
        "ast",
        "csv",
        "dis",
        "enum",
        "glob",
        "heapq",
        "inspect",
        "shutil",
        "socket",
    ):
        sub = folder / name[0]
        sub.mkdir(exist_ok=True)
        (sub / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder
