"""The wheel works where reft's checkout is not: built, installed into an empty environment, used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.integration


ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
_SOURCES = (
    "reft",
    "reft_etcd",
    "reft_mpi",
    "megatron_patches",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def run(command: Sequence[str | Path], folder: Path, secs: float = 300) -> str:
    """What ``command`` prints; it must end well."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=secs,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Built from a copy of the sources: building leaves files beside them."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    run(
        (*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source),
        folder,
    )
    (built,) = folder.glob("*.whl")
    return built


COMPILED = ("reft/protect/_packets.so", "reft/memory/_stream.so")
FIND_COMPILED = """
import json, reft
from importlib.util import find_spec
found = [find_spec(name) for name in ("reft.protect._packets", "reft.memory._stream")]
print(json.dumps([reft.__file__, reft.__version__, [spec and spec.origin for spec in found]]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    compiled = [name for name in COMPILED if name in names]
    assert compiled == (list(COMPILED) if shutil.which("c++") or shutil.which("g++") else [])
    tag = wheel.stem.split("-", 2)[2]
    assert tag.startswith("py3-none-")
    assert tag.endswith("-any") == (not compiled)
    patches = {str(path.relative_to(ROOT)) for path in ROOT.glob("megatron_patches/*/*.patch")}
    assert patches | {
        "reft/py.typed",
        "reft_etcd/backend.py",
        "reft_mpi/mpi.py",
        "reft/node/status.html",
        "reft/tools/planning/clusters/h100.json",
        "reft/tools/planning/models/34b.json",
    } <= set(names)
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "benchmarks/", "examples/")) or name.endswith(".cpp")
    ]


def test_it_is_installed_into_an_empty_environment_and_used(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home)
    bin_folder = home / "bin"
    (packages,) = (home / "lib").glob("python*/site-packages")
    # What reft requires is this environment's; of reft itself there is nothing to be found that way.
    (packages / "required.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = bin_folder / "python"
    run((*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel), tmp_path)

    origin, version, compiled = json.loads(run((python, "-c", FIND_COMPILED), tmp_path))
    assert Path(origin).is_relative_to(packages)
    assert wheel.name.split("-")[1] == version
    assert [bool(path) for path in compiled] == [
        name in ZipFile(wheel).namelist() for name in COMPILED
    ]
    assert run((bin_folder / "reft", "--version"), tmp_path) == f"reft {version}\n"
    assert "enabled" in run((bin_folder / "reft", "config", "--explain"), tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_accumulation_steps": 4}))
    job = (
        "--model",
        "llama2-1.3b",
        "--cluster",
        "v100",
        "--pp",
        "4",
        "--tp",
        "4",
        "--dp",
        "8",
        "--json",
    )
    assert json.loads(run((bin_folder / "reft", "plan", "ds.json", *job), tmp_path))["well"] is True
