"""P1, P8: the examples, run from a wheel in an environment that holds nothing else, by the commands of
docs/quickstart.md, lose a node and print the losses of a run without reft, in all their digits.

One environment for all of them; it is fetched from a package index, torch at the version of constraints.txt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.docs.test_troubleshooting import fenced
from tests.examples.test_examples import Outcome
from tests.machine import free_port
from tests.test_wheel import ROOT, build_wheel, run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
TRAIN = {
    "plain": "examples/plain.py --deepspeed_config examples/plain.json --epochs 4",
    "pipeline": "--nproc-per-node 2 --rank-order across-nodes examples/pipeline.py --deepspeed_config "
    "examples/pipeline.json --steps 50",
    "trainer": "examples/trainer.py --deepspeed_config examples/trainer.json --epochs 4",
}
_UNREACHABLE = (
    "No matching distribution",
    "Could not find a version",
    "Connection",
    "Temporary failure",
)
_TO_THE_END = "wait $NODE_A && wait $NODE_B\nkill $RENDEZVOUS\nrm -r $MEMORY\n"


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    home = folder / "venv"
    found = home / "bin"
    venv.create(home, with_pip=True)
    install(found, wheel, folder)
    origin = run((found / "python", "-c", "import reft; print(reft.__file__)"), folder)
    assert Path(origin.strip()).is_relative_to(home)
    return found


def install(binaries: Path, wheel: Path, folder: Path) -> None:
    command = (binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[hf]")
    try:
        run(command, folder, secs=2400)
    except AssertionError as error:
        if any(text in str(error) for text in _UNREACHABLE):
            pytest.skip(f"no package index can be reached: {str(error)[-200:]}")
        raise


def test_the_wheel_is_installed_where_nothing_else_is(binaries: Path) -> None:
    assert "reft launch" in run((binaries / "reft", "launch", "--help"), binaries)


# The page removes these at its end; a run that fails, or takes too long, must not leave them either.
_AT_EXIT = "trap 'exit 1' TERM\ntrap 'kill $(jobs -p) 2> /dev/null; rm -rf \"${MEMORY:-}\"' EXIT\n"


def quickstart(binaries: Path, folder: Path, train: str, commands: str) -> Outcome:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{binaries}{os.pathsep}{environment['PATH']}"
    environment |= {"PATH": path, "PORT": str(free_port()), "TRAIN": train, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        done = subprocess.run(
            ["timeout", "900", "bash", "-u"],
            cwd=folder,
            env=environment,
            input=(_AT_EXIT + commands).encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    logs = {path.name: path.read_text(errors="replace") for path in sorted(folder.glob("*.log"))}
    said = (folder / "output").read_text(errors="replace")
    assert done.returncode == 0, said + "".join(
        f"--- {name}\n{log[-3000:]}" for name, log in logs.items()
    )
    return Outcome.of(said + "".join(logs.values()))


def examples(folder: Path, *, enabled: bool) -> Path:
    """A copy of them in a folder of its own, with or without reft."""
    folder.mkdir()
    shutil.copytree(
        ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in (folder / "examples").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"reft": {"enabled": enabled}}))
    return folder


@pytest.mark.parametrize("name", TRAIN)
def test_an_example_from_a_wheel_loses_a_node_and_keeps_its_numbers(
    binaries: Path, tmp_path: Path, name: str
) -> None:
    start, lose = fenced("bash")
    undisturbed = quickstart(
        binaries, examples(tmp_path / "without", enabled=False), TRAIN[name], start + _TO_THE_END
    )
    disturbed = quickstart(
        binaries, examples(tmp_path / "with", enabled=True), TRAIN[name], start + lose
    )

    assert {source for _, source in disturbed.resumed} == {"memory"}, disturbed.log[-4000:]
    disturbed.check_against(undisturbed)
    print(
        f"{name}: {len(undisturbed.losses)} steps, resumed at {disturbed.resumed}, all losses equal"
    )
