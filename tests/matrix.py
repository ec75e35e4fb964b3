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
from dataclasses import dataclass
from pathlib import Path

TESTS = ("tests/state", "tests/hook", "tests/persist")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """Versions to be tested together.

    Attributes:
        deepspeed: release.
        python: ``3.13``; None: the one that runs this, and everything else of its environment.
        torch: release, where ``python`` is given.
    """

    deepspeed: str
    python: str | None = None
    torch: str | None = None

    @property
    def requirements(self) -> list[str]:
        """What pip installs: of the whole environment only where it is one of its own."""
        if self.python is None:
            return ["--no-deps", f"deepspeed=={self.deepspeed}"]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
        return [*wanted, f"deepspeed=={self.deepspeed}", f"torch=={self.torch}", "setuptools", "wheel"]


ROWS = {
    "deepspeed-0.17.6": Row("0.17.6"),
    "deepspeed-0.18.9": Row("0.18.9"),
    "oldest": Row("0.17.6", "3.11", "2.4.1"),
    "newest": Row("0.19.8", "3.13", "2.15.0"),
}


def install(name: str, row: Row) -> Path:
    """Python of the row's environment.

    Raises:
        FileNotFoundError: this machine has no such Python.
    """
    home = ROOT / f".venv-{name}"
    python = home / "bin" / "python"
    ready = home / "ready"
    if ready.exists():
        return python
    own = sys.executable if row.python is None else shutil.which(f"python{row.python}")
    if own is None:
        raise FileNotFoundError(f"{name}: no python{row.python} is installed here")
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


def run(name: str, row: Row) -> int:
    """Run the tests in one row's environment; pytest's exit status."""
    python = str(install(name, row))
    probe = [python, "-c", "import deepspeed, torch; print(deepspeed.__version__, torch.__version__)"]
    found = subprocess.run(probe, check=True, capture_output=True, text=True).stdout.splitlines()[-1].split()
    if not found[0].startswith(row.deepspeed) or not found[1].startswith(row.torch or ""):
        print(f"{name}: expected {row}, found deepspeed and torch {' '.join(found)}", file=sys.stderr)
        return 1
    # An older torch starts a thread when it is imported, and what has threads is not forked.
    env = os.environ if row.python is None else {**os.environ, "REFT_TEST_PREFORK": "0"}
    return subprocess.run([python, "-m", "pytest", *TESTS], cwd=ROOT, env=env, check=False).returncode


def main(arguments: list[str]) -> int:
    if unknown := [name for name in arguments if name not in ROWS]:
        print(f"no row {', '.join(unknown)}; known: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    failed = []
    for name in arguments or list(ROWS):
        try:
            if run(name, ROWS[name]) != 0:
                failed.append(f"{name}: FAILED")
        except FileNotFoundError as error:
            failed.append(str(error))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
