"""P12: a killed script goes on with reft.resume; one that loads nothing, or only a file that is not there, is told
at its first step and stopped at its restart, with everything kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attack.jobs import ran
from tests.commands import command
from tests.contact.runs import Run, losses_without_reft
from tests.job.cluster import cluster

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
    # Whether the step before was committed by then is a matter of milliseconds.
    assert re.search(rf"resumed at step ({KILLED_AT}|{KILLED_AT - 1}) from memory", log)
    assert "s after the failure (" in log
    announced = "from its first committed version on: PP1xDP1xTP1 on 1 node(s)"
    assert log.count(announced) == 2, "a line at each start"
    assert log.count("the job is protected: step") == 2
    assert each_once(job.losses()) == undisturbed


def each_once(losses: list[str]) -> list[str]:
    """A step that is made twice has the same loss both times."""
    assert len({line.split()[0] for line in losses}) == len(set(losses))
    return list(dict.fromkeys(losses))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "if_exists.py",
            "line 11: `engine.load_checkpoint(save_dir)` is called only if `os.path.exists(",
        ),
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
    # What it had is on disk, and in memory. Whether the last step was committed is a matter of milliseconds.
    held = re.search(r"the memory of job contact holds step (\d+)", second)
    assert held is not None
    assert int(held[1]) in (KILLED_AT, KILLED_AT - 1)
    assert (job.persisted / "contact" / f"global_step{held[1]}").is_dir()
    assert (
        command("persist", "--memory-dir", job.memory, "--job", "contact", "--out", job.saved).code
        == 0
    )
    if script == "if_exists.py":
        code, log = job.start({})
        assert code == 0, log
        found = "the script's own test has found what was written"
        assert each_once(job.losses()) == undisturbed, found


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def dry_run(directory: Path, block: dict[str, Any]) -> tuple[set[int], str]:
    config = json.loads((EXAMPLES / "pipeline.json").read_text()) | {
        "reft": {"enabled": True, **block}
    }
    path = directory / "pipeline.json"
    path.write_text(json.dumps(config))
    script = (str(EXAMPLES / "pipeline.py"), "--deepspeed_config", str(path))
    options = ("--rank-order", "across-nodes", "--dry-run")
    with cluster(directory, *script, procs_per_node=2, options=options) as job:
        codes = job.wait(300)
        assert not list((directory / "memory").rglob("*.arena")), "nothing was copied"
    logs = sorted(directory.glob("node*.log"))
    return set(codes.values()), "".join(log.read_text(errors="replace") for log in logs)


def test_p9_every_node_is_told_what_it_would_reserve_and_what_it_has(tmp_path: Path) -> None:
    codes, log = dry_run(tmp_path, {})
    assert codes == {0}, log[-4000:]
    assert "dry run: PP2xDP2xTP1 on 2 node(s), PipelineEngine" in log
    assert "survives 1 lost node(s)" in log
    needed = re.findall(
        r"memory of (\S+): ([\d.]+) MiB for 2 versions, ([\d.]+) MiB may be used", log
    )
    assert len({node for node, _, _ in needed}) == 2
    assert all(0 < float(mib) <= float(usable) for _, mib, usable in needed)
    assert not re.search(r"step \d+ loss", log)


def test_p9_too_little_memory_is_not_well(tmp_path: Path) -> None:
    codes, log = dry_run(tmp_path, {"memory_margin_bytes": 2**50})
    assert codes == {2}, log[-4000:]
    assert "2 of 2 node(s) have too little memory for reft" in log
    assert "raise memory_limit_bytes" in log
    assert "Traceback" not in log


REFUSED = """
import reft

def main():
    reft.attach(object(), config={"enabled": False})

main()
"""
RECORDED = REFUSED.replace(
    "def main",
    "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main",
)
OTHER = REFUSED.replace(
    "\nmain()",
    "\ntry:\n    main()\nexcept reft.ConfigError as e:\n    raise ValueError('a bad sample') from e",
)
HOOKED = "import sys\nsys.excepthook = lambda kind, *_: print('HOOK', kind.__name__)\n" + REFUSED
MESSAGE = "reft: reft.attach was called, but reft is not enabled; write"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


def run(directory: Path, source: str, *launcher: str, **env: str) -> tuple[int, str]:
    script = directory / "train.py"
    script.write_text(source)
    done = ran([sys.executable, *launcher, str(script)], directory, **env)
    return done.returncode, done.stdout


def test_python_ends_with_the_message_and_code_2(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    code, said = run(tmp_path, HOOKED, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert (code, said.count(MESSAGE)) == (2, 1), said
    assert "Traceback" not in said
    assert "HOOK" not in said
    assert json.loads(error_file.read_text())["message"]["message"].startswith(
        "ConfigError: reft.attach was"
    )


def test_other_errors_keep_traceback_and_code(tmp_path: Path) -> None:
    """One that the script has made of a refusal, too: it is the script's."""
    code, said = run(tmp_path, OTHER)
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 2
    assert said.rstrip().endswith("ValueError: a bad sample")
    code, said = run(
        tmp_path,
        HOOKED.replace("main()\n", "try:\n    main()\nexcept ValueError:\n    pass\n1 / 0\n"),
    )
    assert (code, said.split()[-2:]) == (1, ["HOOK", "ZeroDivisionError"]), (
        said
    )  # DeepSpeed says what it finds
    assert "Traceback" not in said


@pytest.mark.parametrize("source", [REFUSED, RECORDED], ids=["plain", "with @record"])
def test_torchrun_names_it(tmp_path: Path, source: str) -> None:
    code, said = run(tmp_path, source, *TORCHRUN)
    own, _, torchruns = said.partition("ChildFailedError")
    assert code == 1, "torchrun's own"
    assert own.count(MESSAGE) == 1, said
    assert "exitcode  : 2" in torchruns
    assert "ConfigError: reft.attach was called" in torchruns
    # The one that is left is torchrun's, of itself.
    assert f'File "{tmp_path / "train.py"}"' not in own
    assert ("Traceback" in torchruns) is (source is RECORDED)
