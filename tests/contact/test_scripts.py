"""P12: a killed script goes on with reft.resume; one that loads nothing, or only a file that is not there, is told
at its first step and stopped at its restart, with everything kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import command
from tests.contact.runs import Run, losses_without_reft

pytestmark = pytest.mark.integration

KILLED_AT = 4
KILL = {"faults": [{"point": "during_step", "step": KILLED_AT}]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return losses_without_reft(tmp_path_factory.mktemp("undisturbed"))


def test_p12_a_wrong_block_ends_the_job_with_what_to_write(tmp_path: Path) -> None:
    job = Run(tmp_path, "resumes.py")
    code, log = job.start({"copis": 2})
    assert code == 2, log
    assert 'reft.copis: unknown key; did you mean "copies"?' in log
    assert "Traceback" not in log
    assert not (job.out / "losses").exists()


def test_p3_a_plain_loop_goes_on_with_resume(tmp_path: Path, undisturbed: list[str]) -> None:
    job = Run(tmp_path, "resumes.py")
    code, log = job.start(KILL)
    assert code == 0, log
    assert f"resumed at step {KILLED_AT} from memory" in log
    assert "s after the failure (" in log
    assert log.count("the job is protected: PP1xDP1xTP1 on 1 node(s)") == 2, "a line at each start"
    assert job.losses() == undisturbed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("if_exists.py", "line 11: `engine.load_checkpoint(save_dir)` is called only if `os.path.exists("),
        ("never_loads.py", "the script trains without calling engine.load_checkpoint(...)"),
    ],
)
def test_p12_a_script_that_does_not_load_is_told_and_stopped_at_its_restart(
    tmp_path: Path, undisturbed: list[str], script: str, told: str
) -> None:
    job = Run(tmp_path, script)
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
    assert command("persist", "--memory-dir", job.memory, "--job", "contact", "--out", job.saved).code == 0
    if script == "if_exists.py":
        code, log = job.start({})
        assert code == 0, log
        assert job.losses() == undisturbed, "the script's own test has found what was written"
