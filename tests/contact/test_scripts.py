"""P12: a killed script goes on with reft.resume; one that loads nothing, or only a file that is not there, is told
at its first step and stopped at its restart, with everything kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reft import cli
from tests.attack.jobs import DEADLINE_SECS, launched

SCRIPTS = Path(__file__).parent / "scripts"
KILLED_AT, STEPS = 4, 8


class Run:
    """Starts of one script in one directory."""

    def __init__(self, root: Path, script: str) -> None:
        self._root, self._script = root, script
        self.memory, self.saved, self.out = root / "memory", root / "saved", root / "out"
        self.persisted = root / "persisted"

    def start(self, block: dict[str, Any] | None, *more: str) -> tuple[int, str]:
        """Run it to its end; the launcher's exit code, and what was printed."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": None,
        }
        path = self._root / "ds_config.json"
        path.write_text(
            json.dumps(config if block is None else {**config, "reft": {"enabled": True, **block}})
        )
        options = ("--memory-dir", str(self.memory), "--job-id", "contact", "--max-restarts", "5", *more)
        arguments = (str(path), str(self.saved / "contact"))
        script = SCRIPTS / self._script
        with launched(script, *arguments, cwd=self._root, out=self.out, options=options) as started:
            started.log.write_bytes(b"")
            code = started.processes[0].wait(DEADLINE_SECS)
        return code, started.log.read_text(errors="replace")

    def losses(self) -> list[str]:
        return (self.out / "losses").read_text().splitlines()


KILL = {"faults": [{"point": "during_step", "step": KILLED_AT}]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), "never_loads.py")
    code, log = run.start(None)
    assert code == 0, log
    assert len(run.losses()) == STEPS
    return run.losses()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Run]:
    return lambda script: Run(tmp_path, script)


@pytest.mark.integration
def test_p3_a_plain_loop_goes_on_with_resume(run: Callable[[str], Run], undisturbed: list[str]) -> None:
    job = run("resumes.py")
    code, log = job.start(KILL)
    assert code == 0, log
    assert f"resumed at step {KILLED_AT} from memory" in log
    assert "s after the failure (" in log
    assert log.count("the job is protected: PP1xDP1xTP1 on 1 node(s)") == 2, "a line at each start"
    assert job.losses() == undisturbed


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("if_exists.py", "line 11: `engine.load_checkpoint(save_dir)` is called only if `os.path.exists("),
        ("never_loads.py", "the script trains without calling engine.load_checkpoint(...)"),
    ],
)
def test_p12_a_script_that_does_not_load_is_told_and_stopped_at_its_restart(
    run: Callable[[str], Run], undisturbed: list[str], script: str, told: str
) -> None:
    job = run(script)
    code, log = job.start({**KILL, "persist": {"dir": str(job.persisted)}})
    assert code == 2, log
    first, _, second = log.partition("killed by SIGKILL")
    assert told in first
    assert "reft.resume(engine)" in first
    assert "the memory of job contact holds" in second
    assert told in second
    assert "Traceback" not in second
    assert "a restart would be refused again" in second
    assert job.losses() == undisturbed[:KILLED_AT], "nothing is trained twice"
    # What it had is on disk, and in memory.
    assert (job.persisted / "contact" / f"global_step{KILLED_AT}").is_dir()
    memory = ["--memory-dir", str(job.memory), "--job", "contact"]
    assert cli.main(["persist", *memory, "--out", str(job.saved)]) == 0
    if script == "if_exists.py":
        code, log = job.start({})
        assert code == 0, log
        assert job.losses() == undisturbed, "the script's own test has found what was written"
