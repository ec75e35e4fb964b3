"""The integration tests at the ends of the versions that pyproject.toml and README claim.

    python -m tests.matrix [ROW ...]

Each row gets an environment of its own, ``.venv-ROW``. Those of DeepSpeed's releases hold nothing but that
DeepSpeed and see everything else in the environment this runs in; ``oldest`` and ``newest`` are installed in full,
which fetches some gigabytes: torch's wheels on the index bring CUDA. Not part of ``make test``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = (
    *("tests/state", "tests/engine", "tests/storage"),
    *("tests/job/test_trainer_store.py", "tests/examples/test_examples.py"),
)
"""Folders and files."""
ROOT = Path(__file__).resolve().parents[1]
_OTHER_TESTS = ("megatron-core",)
"""Of the extra ``dev``, what none of ``TESTS`` needs and what does not go with the oldest torch."""


@dataclass(frozen=True)
class Row:
    """Versions to be tested together."""

    deepspeed: str  # release
    # ``3.13``; None: the one that runs this, and everything else of its environment
    python: str | None = None
    torch: str | None = None  # release, where ``python`` is given

    @property
    def requirements(self) -> list[str]:
        """What pip installs: of the whole environment only where it is one of its own."""
        if self.python is None:
            return ["--no-deps", f"deepspeed=={self.deepspeed}"]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
        wanted = [requirement for requirement in wanted if not requirement.startswith(_OTHER_TESTS)]
        return [
            *wanted,
            f"deepspeed=={self.deepspeed}",
            f"torch=={self.torch}",
            "setuptools",
            "wheel",
        ]


ROWS = {
    "deepspeed-0.17.6": Row("0.17.6"),
    "deepspeed-0.18.9": Row("0.18.9"),
    "oldest": Row("0.17.6", "3.11", "2.4.1"),
    "newest": Row("0.19.8", "3.13", "2.15.0"),
}


def install(name: str, row: Row) -> Path:
    """Python of the row's environment."""
    home = ROOT / f".venv-{name}"
    python = home / "bin" / "python"
    ready = home / "ready"
    if ready.exists():
        return python
    own = sys.executable if row.python is None else installed(row.python)
    if own is None:
        raise FileNotFoundError(f"{name}: no python{row.python} is on PATH that starts; install it")
    print(f"installing {name}: {row}", file=sys.stderr)
    subprocess.run([own, "-m", "venv", "--clear", home], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    seen = [ROOT] if row.python is not None else [Path(sysconfig.get_paths()["purelib"]), ROOT]
    (packages / "development.pth").write_text("".join(f"{path}\n" for path in seen))
    command = [python, "-m", "pip", "install", "-q", *row.requirements]
    if row.python is None:  # setuptools is the other environment's
        options = ("--no-build-isolation", "--target", packages)
        command = [sys.executable, "-m", "pip", "install", "-q", *options, *row.requirements]
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    ready.touch()
    return python


def installed(version: str) -> str | None:
    """The first Python of this version on PATH that starts: a version manager has a name there for each that it
    knows, chosen or not."""
    for folder in os.get_exec_path():
        python = shutil.which(f"python{version}", path=folder)
        if (
            python
            and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return python
    return None


def run(name: str, row: Row) -> bool:
    """Run the tests in one row's environment; whether all have passed."""
    try:
        python = install(name, row)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return False
    probe = [
        python,
        "-c",
        "import deepspeed, torch; print(deepspeed.__version__, torch.__version__)",
    ]
    found = (
        subprocess.run(probe, check=True, capture_output=True, text=True)
        .stdout.splitlines()[-1]
        .split()
    )
    if not found[0].startswith(row.deepspeed) or not found[1].startswith(row.torch or ""):
        print(
            f"{name}: expected {row}, found deepspeed and torch {' '.join(found)}", file=sys.stderr
        )
        return False
    # An older torch starts a thread when it is imported, and what has threads is not forked.
    env = os.environ if row.python is None else {**os.environ, "REFT_TEST_PREFORK": "0"}
    return (
        subprocess.run([python, "-m", "pytest", *TESTS], cwd=ROOT, env=env, check=False).returncode
        == 0
    )


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in ROWS]:
        print(f"no row {', '.join(unknown)}; known: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    passed = []
    for name in names or list(ROWS):
        passed.append(run(name, ROWS[name]))
        print(f"{name}: {'passed' if passed[-1] else 'FAILED'}", flush=True)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
