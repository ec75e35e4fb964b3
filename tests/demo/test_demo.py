"""The demonstration itself, for real: launchers, trainers, one node killed in mid-step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from reft.node.history import PARTS

REPORT = "report.json"
_MARK = "REFT_TEST_DEMO"
_TIMEOUT_SECS = 560.0
"""On two idle cores the demonstration takes a tenth of it; the machine is shared with other tests."""


class Session:
    """One ``reft demo`` and everything that descends from it, however detached."""

    def __init__(self, memory_dir: Path, folder: Path) -> None:
        self.memory_dir = memory_dir
        self.folder = folder
        self.token = uuid.uuid4().hex

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "reft.cli",
            "demo",
            "--memory-dir",
            str(self.memory_dir),
        ]
        return subprocess.Popen(
            [*command, *arguments],
            cwd=cwd,
            env={
                **os.environ,
                _MARK: self.token,
                "TMPDIR": str(self.folder),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get(_MARK) == self.token
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def left(self) -> list[str]:
        files = [*self.memory_dir.rglob("*"), *self.folder.iterdir()]
        return [*map(str, self.processes()), *(str(f) for f in files if f.name != REPORT)]

    def kill(self) -> None:
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="reft-test-demo-", dir=shm) as memory_dir:
        running = Session(Path(memory_dir), tmp_path)
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.nightly
@pytest.mark.timeout(_TIMEOUT_SECS + 30)
def test_a_node_dies_in_mid_step_and_not_a_bit_of_any_loss_changes(
    session: Session, tmp_path: Path
):
    """P1, P3, P8, and nothing stays behind."""
    path = tmp_path / REPORT
    demo = session.start("--steps", "10", "--kill", "4:1", "--json", str(path))
    out, err = demo.communicate(timeout=_TIMEOUT_SECS)
    assert demo.returncode == 0, out + err
    report = json.loads(path.read_text())
    assert report["max_abs_loss_difference"] == 0.0
    assert report["losses"] == report["reference_losses"]
    assert len(report["losses"]) == report["steps"] == 10
    assert report["losses"][-1] < report["losses"][0], "it learns"
    assert report["tolerance"] == 1
    (failure,) = report["failures"]
    assert failure["node"] == 1
    assert failure["step"] >= 4, "a busy machine kills it later than asked, never earlier"
    (recovery,) = report["recoveries"]
    assert recovery["source"] == "memory"
    assert recovery["lost_steps"] <= 2, "the step under way, and the commit that lagged behind it"
    assert recovery["version"] >= 3
    parts = recovery["failure_to_step"]
    assert list(parts) == ["detection", *PARTS]
    # Parts of the same time, on one host:
    assert sum(parts.values()) <= recovery["failure_to_step_secs"] + 1.0
    assert report["snapshots"]["committed"] >= 10
    assert session.left() == []


@pytest.mark.integration
@pytest.mark.timeout(_TIMEOUT_SECS + 30)
def test_a_small_one_loses_a_node_in_a_directory_with_modules_of_pythons_names(
    session: Session, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("work")
    for name in ("logging", "queue", "random", "numpy", "psutil"):
        (work / f"{name}.py").write_text(f"raise SystemExit('the working directory's {name}.py')")
    path = tmp_path / REPORT
    words = ("--pp", "1", "--steps", "5", "--kill", "2:1", "--json", str(path))
    demo = session.start(*words, cwd=work)
    out, err = demo.communicate(timeout=_TIMEOUT_SECS)
    assert demo.returncode == 0, out + err
    report = json.loads(path.read_text())
    assert report["max_abs_loss_difference"] == 0.0
    (recovery,) = report["recoveries"]
    assert recovery["source"] == "memory"
    assert session.left() == []


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_ctrl_c_leaves_nothing_behind(session: Session):
    demo = session.start("--kill", "none")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "training with reft" in line:
            break
    while len(session.processes()) <= 4:
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=240)
    assert demo.returncode == 130, out + err
    assert "stopped" in out
    assert session.left() == []
