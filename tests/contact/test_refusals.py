"""What reft refuses ends a process in words and with exit code 2 under every launcher; other errors keep their
traceback and code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.jobs import clean_environment

pytestmark = pytest.mark.integration

REFUSED = """
import reft

def main():
    reft.attach(object(), config={"enabled": False})

main()
"""
RECORDED = REFUSED.replace(
    "def main", "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main"
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
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_python_ends_with_the_message_and_code_2(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    code, said = run(tmp_path, HOOKED, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert (code, said.count(MESSAGE)) == (2, 1), said
    assert "Traceback" not in said
    assert "HOOK" not in said
    assert json.loads(error_file.read_text())["message"]["message"].startswith("ConfigError: reft.attach was")


def test_other_errors_keep_traceback_and_code(tmp_path: Path) -> None:
    """One that the script has made of a refusal, too: it is the script's."""
    code, said = run(tmp_path, OTHER)
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 2
    assert said.rstrip().endswith("ValueError: a bad sample")
    code, said = run(
        tmp_path, HOOKED.replace("main()\n", "try:\n    main()\nexcept ValueError:\n    pass\n1 / 0\n")
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
