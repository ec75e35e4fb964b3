"""P1/P3/P8: a training on Megatron-core survives a lost node: every byte of its parameters, optimizers and random
states, and every loss, is the undisturbed run's."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_examples import Outcome, run_to_its_end
from tests.job.cluster import cluster
from tests.machine import free_port

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed: pip install 'reft-ckpt[megatron]'",
)

STEPS, KILLED_AT = 6, 4
_SECS = 400.0
_COMMAND = (str(Path(__file__).with_name("job.py")), "--steps", str(STEPS))
_PATHS = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
_ENV = {"PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}

_SHORT = {
    "ForwardPass": "F",
    "BackwardPass": "B",
    "RecvActivation": "r",
    "RecvGrad": "g",
    "SendActivation": "a",
    "SendGrad": "s",
}
State = dict[str, dict[str, Any]]  # what every rank has written at its end, by coordinate


def long(arguments: str) -> Any:
    return pytest.param(arguments, marks=pytest.mark.nightly)


def read(out: Path) -> State:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def torchrun(ranks: int, *command: str) -> str:
    launcher = (
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
    )
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECS,
        env={**os.environ, **_ENV},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def undisturbed(out: Path, ranks: int, *arguments: str) -> State:
    out.mkdir(parents=True)
    torchrun(ranks, *_COMMAND, *arguments, "--out", str(out))
    return read(out)


def disturbed(directory: Path, ranks: int, *arguments: str, stage: int = 0) -> tuple[State, str]:
    """Trained on two nodes, of which the second is lost in the step that follows ``KILLED_AT``."""
    out = directory / "out"
    out.mkdir(parents=True)
    fault = {"point": "during_step", "step": KILLED_AT, "pp": stage, "dp": 1, "action": "kill_node"}
    block = json.dumps({"faults": [fault]})
    options = ("--rank-order", "across-nodes") if "--tp" not in arguments else ()
    with cluster(
        directory,
        *(*_COMMAND, *arguments, "--out", str(out), "--reft", block),
        procs_per_node=ranks // 2,
        options=options,
        env=_ENV,
    ) as job:
        codes, log = run_to_its_end(job, _SECS, lost=1)
    assert set(codes.values()) == {0}, log[-6000:]
    return read(out), log


def differences(wanted: State, found: State) -> list[str]:
    """Names of what a disturbed run has not as the undisturbed one. Losses are compared where both have them: a
    process that was restarted has those from there on."""
    assert sorted(wanted) == sorted(found) != []
    lines = []
    for place, rank in wanted.items():
        other = found[place]
        names = sorted(rank["state"].keys() | other["state"].keys())
        lines += [f"{place} {n}" for n in names if rank["state"].get(n) != other["state"].get(n)]
        losses = {step: values for step, *values in rank["losses"]}
        assert other["losses"], f"{place} has trained nothing behind its restart"
        lines += [
            f"{place} step {step}" for step, *values in other["losses"] if losses[step] != values
        ]
    return lines


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        "--distributed --overlap --dtype bf16",
        long("--pp 2 --vpp 2 --distributed"),
        long(""),
        long("--dtype bf16"),
        long("--distributed"),
        long("--distributed --overlap"),
        long("--distributed --dtype bf16 --frozen linear_proj"),
        long("--distributed --dtype fp16"),
        long("--pp 2 --dtype bf16"),
        long("--pp 2 --vpp 2 --distributed --overlap --dtype bf16"),
        long("--tp 2 --distributed"),
        long("--tp 2 --dtype bf16"),
        long("--ep 2 --experts 4 --dtype bf16 --frozen local_experts.0"),
        long("--ep 2 --experts 4 --distributed"),
        long("--ep 2 --experts 4 --distributed --overlap --dtype bf16"),
    ],
)
def test_a_lost_node_changes_no_byte(arguments: str, tmp_path: Path) -> None:
    given = shlex.split(arguments)
    ranks = 4 if {"--pp", "--tp"} & set(given) else 2
    wanted = undisturbed(tmp_path / "undisturbed", ranks, *given)
    found, log = disturbed(tmp_path / "disturbed", ranks, *given)
    resumed = Outcome.of(log).resumed
    assert [source for _, source in resumed] == ["memory"], log[-6000:]
    assert 1 <= resumed[0][0] <= KILLED_AT
    assert differences(wanted, found) == []
    assert "the state of step" not in log, "no version was left out"
    if "--pp" in given:
        check_windows(found, given)


def check_windows(found: State, given: list[str]) -> None:
    """Windows are where Megatron waits, and nothing is in another order."""
    names = {
        place[:3]: "".join(_SHORT[name] for name in rank["instructions"])
        for place, rank in found.items()
    }
    if "--vpp" not in given:
        assert names == {
            "pp0": "Fa Fg B Fg B Fg B g B".replace(" ", ""),
            "pp1": "rFB rFB rFB rFB s".replace(" ", ""),
        }
    for order in names.values():
        passes = 8 if "--vpp" in given else 4
        assert (order.count("F"), order.count("B")) == (passes, passes)
        assert set(order) & set("rg"), "it has received"
