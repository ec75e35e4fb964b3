"""A job of the test Slurm: examples/plain.py, submitted with one of the scripts of slurm/ as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.slurm.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "slurm"
SECS = 420.0
_LOSS = re.compile(r"step (\d+) loss (\d[\d.e+-]*)")
_RESUMED = re.compile(r"resumed at step (\d+) from (\w+)")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def environment() -> dict[str, str]:
    """For the cluster: this environment's Python and reft, and what trainers on a busy machine need."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "REFT_SECRET": os.environ["REFT_SECRET"],
    }


class SlurmJob:
    """One submitted job. ``cluster``: where it runs. ``directory``: its own. ``script``: of ``slurm/``.
    ``block``: the ``reft`` block. ``options``: further options of sbatch. ``arguments``: further arguments
    of the training script. ``env``: further variables of the submission. ``log``: name of its output; jobs
    of a chain have one directory."""

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        script: str,
        block: dict[str, Any],
        *,
        options: tuple[str, ...] = ("--nodes=3",),
        arguments: tuple[str, ...] = ("--epochs", "2"),
        env: dict[str, str] | None = None,
        log: str = "job.out",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._cluster = cluster
        self.directory = directory
        self.output = directory / log
        config = json.loads((ROOT / "examples" / "plain.json").read_text())
        (directory / "ds.json").write_text(json.dumps({**config, "reft": block}))
        sbatch = ["sbatch", "--parsable", "--gpus-per-node=1", f"--output={self.output}", *options]
        train = [str(ROOT / "examples" / "plain.py"), "--deepspeed_config", str(directory / "ds.json")]
        saves = ["--save-dir", str(directory / "checkpoints"), *arguments]
        words = [*sbatch, str(SCRIPTS / script), *train, *saves]
        pairs = [f"{name}={value}" for name, value in (env or {}).items()]
        self.number = cluster.call("env", *pairs, *words, cwd=ROOT).strip()

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def facts(self) -> dict[str, str]:
        return self._cluster.job(self.number)

    @property
    def losses(self) -> dict[int, set[str]]:
        """Every loss that was printed, by step."""
        found: dict[int, set[str]] = {}
        for step, loss in _LOSS.findall(self.log):
            found.setdefault(int(step), set()).add(loss)
        return found

    @property
    def resumed(self) -> list[tuple[int, str]]:
        """Step and source of every resumption."""
        return [(int(step), source) for step, source in _RESUMED.findall(self.log)]

    def trainers(self) -> list[str]:
        """Nodes on which trainers run."""
        return [n for n in self._cluster.hosts if any(map(_is_trainer, self._cluster.processes(n)))]

    def wait_until(self, condition: Callable[[], object], what: str, *, ends: bool = False) -> None:
        def met() -> bool:
            if condition():
                return True
            state = self.facts["JobState"]
            if state in _OVER and not ends:
                raise AssertionError(f"job {self.number} is {state}, before {what}\n{self.log[-6000:]}")
            return False

        try:
            self._cluster.wait_until(met, what, SECS)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.log[-6000:]}") from error

    def reach(self, step: int) -> None:
        self.wait_until(lambda: max(self.losses, default=0) >= step, f"step {step}")

    def tell_that_time_is_up(self) -> None:
        """As ``--signal=B:TERM@120`` does, but when a step is reached, not when minutes have passed."""
        self._cluster.call("scancel", "--batch", "--signal=TERM", self.number)

    def end(self) -> dict[str, str]:
        """Wait for its end; what Slurm says of it."""
        self.wait_until(lambda: self.facts["JobState"] in _OVER, "the end of the job", ends=True)
        return self.facts


_PRETRAIN = f"""import runpy, sys
given = dict(zip(sys.argv, sys.argv[1:]))
sys.argv = ["plain.py", "--epochs", "2", "--deepspeed_config", given["--deepspeed_config"], "--save-dir", given["--save"]]
runpy.run_path("{ROOT}/examples/plain.py", run_name="__main__")
"""
"""Stands in for Megatron's program: takes its arguments, and trains what a test can."""


class PageJob(SlurmJob):
    """The job that a page of docs/ submits by its own command, from a checkout of Megatron-DeepSpeed next to one of
    reft. Fewer nodes, no GPUs, and another program; ``model``: CLUSTER-MODEL of configs/llama2."""

    def __init__(self, cluster: SlurmCluster, directory: Path, page: str, model: str) -> None:
        self._cluster, self._page = cluster, (ROOT / "docs" / page).read_text()
        checkout = self.directory = directory / "Megatron-DeepSpeed"
        checkout.mkdir(parents=True)
        (directory / "reft").symlink_to(ROOT)
        self.output = directory / "job.out"
        shipped = ROOT / "configs" / "llama2" / f"{model}.json"
        block = {"reft": json.loads(shipped.read_text())["reft"]}
        config = json.loads((ROOT / "examples" / "plain.json").read_text()) | block
        (checkout / shipped.name).write_text(json.dumps(config))
        shutil.copy(shipped.with_suffix(".args"), checkout)
        (checkout / "pretrain_gpt.py").write_text(_PRETRAIN)
        (command,) = re.findall(r"^    (REFT_SLURM=(?:.*\\\n)*.*)", self._page, re.MULTILINE)
        command = re.sub(
            r"--nodes=\d+", f"--nodes=3 --parsable --gpus-per-node=1 --output={self.output}", command
        )
        command = command.replace("/shared", str(directory)).replace("$ORION", str(directory))
        self.number = cluster.call("bash", "-c", command, cwd=checkout).strip()

    def lose(self, node: str) -> None:
        """By the command of the page."""
        (command,) = re.findall(r"^    (srun .*pkill .*)", self._page, re.MULTILINE)
        command = re.sub(r"-w \w+", f"-w {node}", command.replace("712", self.number))
        self._cluster.call("bash", "-c", command)


def missing_lines(page: str, log: str) -> list[str]:
    """What a page of docs/ says that the output must show, and it does not; names and numbers may be others."""
    lines = re.findall(
        r"^    ((?:reft \[|rendezvous at ).*)", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    assert len(lines) >= 3
    other = {"N": r"[\w, .-]+", "0": r"[\d.]+"}
    nodes, numbers = r"node\d+(, (node\d+|\.\.\.))*", r"(?<!round )(?<!start )\d+(\.\d+)*"
    parts = [re.split("([N0])", re.sub(numbers, "0", re.sub(nodes, "N", line))) for line in lines]
    patterns = ["".join(other.get(part) or re.escape(part) for part in line) for line in parts]
    return [line for line, at in zip(lines, patterns, strict=True) if not re.search(at, log)]


def _is_trainer(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False
