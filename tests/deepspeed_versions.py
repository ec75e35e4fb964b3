"""The integration tests against every supported DeepSpeed minor release.

    python -m tests.deepspeed_versions [VERSION ...]

Each release gets an environment of its own, ``.venv-deepspeed-VERSION``, that holds nothing but that
DeepSpeed and sees everything else in the environment this runs in. Not part of ``make test``: it takes
several minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSIONS = ("0.17.6", "0.18.9")
TESTS = ("tests/state", "tests/hook", "tests/persist")
ROOT = Path(__file__).resolve().parents[1]


def install(version: str) -> Path:
    """Python of an environment with this DeepSpeed."""
    home = ROOT / f".venv-deepspeed-{version}"
    python = home / "bin" / "python"
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if not (packages / "deepspeed").exists():
        print(f"installing deepspeed {version}", file=sys.stderr)
        venv.create(home)
        (packages / "development.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"),
                *("--target", str(packages), f"deepspeed=={version}"),
            ],
            check=True,
            env={**os.environ, "DS_BUILD_OPS": "0"},
        )
    return python


def run(version: str, tests: tuple[str, ...]) -> int:
    """Run the tests against one release; pytest's exit status."""
    python = str(install(version))
    probe = [python, "-c", "import deepspeed; print(deepspeed.__version__)"]
    found = subprocess.run(probe, check=True, capture_output=True, text=True).stdout.split()[-1]
    if not found.startswith(version):
        print(f"expected deepspeed {version} to be imported, found {found}", file=sys.stderr)
        return 1
    return subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    failed = [v for v in (arguments or VERSIONS) if run(v, TESTS) != 0]
    for version in failed:
        print(f"deepspeed {version}: FAILED", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
