"""Writes docs/support.md: what is supported, from the tables that tests run, and what is refused, from the code
that refuses it.

    python -m tests.docs.support [PATH]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"
_STATE_TESTS = ROOT / "tests" / "state"
_REFUSING = (*("support.py", "adapters.py", "optimizer.py", "catalogue.py", "gradients.py"),)

_REFUSE = ("refuse", "_refuse_apex")


@dataclass(frozen=True)
class Tested:
    """One row that a person has written, and the test that keeps it.

    Attributes:
        subject: launcher, or way to read data.
        happens: what reft does.
        test: a file below ``tests/``.
    """

    subject: str
    happens: str
    test: str


LAUNCHERS = (
    Tested(
        "`reft launch script.py`, `reft launch -m module`",
        "hooks the script, which stays as it is; node daemon, restarts, replacement of nodes",
        "job/test_nodes.py",
    ),
    Tested(
        "`reft launch --rank-order across-nodes`",
        "the same, and puts the data-parallel copies of a pipeline stage on different nodes",
        "job/test_rank_order.py",
    ),
    Tested(
        "`torchrun`, with `import reft` in the script, `reft.attach(engine)`, or `reft hook install` once for the "
        "environment",
        "snapshots and recovery from memory; no daemon, so nothing is persisted; the launcher's own restarts; said at "
        "the start",
        "job/test_launchers.py",
    ),
    Tested(
        "`deepspeed --num_gpus 2`, in the same three ways",
        "the same; DeepSpeed's launcher does not restart: the same command, started again, resumes",
        "job/test_launchers.py",
    ),
    Tested(
        "`deepspeed --hostfile FILE --no_ssh --node_rank N`, on each of the hosts",
        "the same; a host that comes back without its memory gets its state from the others",
        "job/test_hosts_of_deepspeed.py",
    ),
    Tested(
        "`deepspeed --hostfile FILE`, which starts the other hosts by `ssh`, `pdsh` or MPI",
        "not run; `reft launch --hostfile FILE`, on each of the hosts, is. DeepSpeed hands on no variable of "
        "reft's: `memory_dir` and `job_id` belong into the block, `REFT_SECRET` and others into `.deepspeed_env`",
        "job/test_hostfile.py",
    ),
    Tested(
        "`accelerate launch --use_deepspeed`, in the same three ways",
        "the same; it is torchrun underneath",
        "job/test_launchers.py",
    ),
    Tested(
        "`python` with the variables of `srun`, after `reft hook install`",
        "the same, without restarts",
        "job/test_unlaunched.py",
    ),
    Tested(
        "`mpiexec -n N reft mpi-run script.py` under Open MPI 5 and MPICH 5, with either transport",
        "a process that dies ends the MPI job; the next `mpiexec` goes on from the memory on the nodes",
        "job/test_mpi_run.py",
    ),
    Tested(
        "Hugging Face `Trainer`, with `reft.hf.resumable(trainer)`",
        "under `reft launch`: goes on at the step and the batch, within an epoch too",
        "examples/test_trainer.py",
    ),
)
LOADERS = {
    "own_loader": (
        "`train_batch()` with DeepSpeed's own loader (`training_data=`)",
        "goes on behind the last batch",
    ),
    "repeating": ("`train_batch(it)`, `it = iter(RepeatingLoader(loader))`", "goes on behind the last batch"),
    "repeating_workers": (
        "the same, the loader with worker processes",
        "goes on behind the last batch; random numbers drawn in workers begin anew",
    ),
    "loader": (
        "`loader = reft.data.loader(dataset, ...)`, with worker processes",
        "goes on behind the last batch, at another data-parallel degree too; random numbers drawn in workers are "
        "the undisturbed run's",
    ),
    "loader_repeating": (
        "`train_batch(it)`, `it = iter(RepeatingLoader(reft.data.loader(...)))`",
        "likewise",
    ),
    "resumable": ("`loader = reft.resumable(loader)`, plain engine", "goes on behind the last batch"),
    "prepared": (
        "`loader = reft.resumable(accelerator.prepare(loader))`, which reads a batch ahead",
        "goes on behind the last batch that was handed out",
    ),
    "prepared_skips": (
        "the same without reft.resumable, a loop that skips what `engine.global_steps` says was taken",
        "goes on there; checked",
    ),
    "skips": (
        "a loop that skips what `engine.global_steps` says was taken",
        "goes on there, in the order of the undisturbed run; checked",
    ),
    "starts_anew": (
        "a loop that begins its loader anew",
        "other data; a warning at the first step names the lines",
    ),
    "mixes": (
        "a generator over several loaders",
        "position unknown; a warning at the first step, unless client state is attached",
    ),
    "reads_ahead": ("`reft.resumable`, read ahead by the script", "a warning at the first step"),
    "loader_read_ahead": ("`reft.data.loader`, read ahead by the script", "a warning at the first step"),
}
_ENGINES = {"pipe": "PipelineEngine", "plain": "DeepSpeedEngine"}


def document() -> str:
    """The whole page."""
    parts = [
        "# What is supported",
        "Written by `python -m tests.docs.support`; do not edit. Tested with "
        "Python 3.11, torch 2.13 and DeepSpeed 0.19; `make matrix` runs a part of the tests with other "
        "releases. Of its row `oldest` (torch 2.4, DeepSpeed 0.17) `tests/state`, `tests/persist`, "
        "`tests/job/test_trainer_store.py` and `tests/engine` but `test_resizing.py` pass, save what DeepSpeed 0.17 does "
        "not have (gradients for `+aor`, DualPipeV); `tests/examples` has not been run to its end. Row `newest` (Python "
        "3.13, torch 2.15) passes `tests/state`; the rest of it has not been run to the end.",
        "## Engines, ZeRO stages and precisions",
        "Each row is trained, restored into a new engine, trained on and compared bit for bit by "
        "`tests/state/test_engines.py`; real processes are killed by `tests/faults`, `tests/attack` and `tests/examples`.",
        _table(
            ("engine", "ZeRO", "precision", "optimizer", "DeepSpeed's wrapper", "reft's adapter"), engines()
        ),
        "## Refused at the start",
        "The error names what was found and what to change, and ends the job with exit code 2 before a step.",
        _table(("found", "what to change"), refusals()),
        "## Launchers",
        _table(
            ("started with", "what happens", "test"),
            ((t.subject, t.happens, f"`tests/{t.test}`") for t in LAUNCHERS),
        ),
        "## Data loaders",
        "After a failure, by `tests/attack/test_p8_data.py`:",
        _table(("the script reads", "what happens"), LOADERS.values()),
        "The rows with Accelerate need the extra `hf`; `tests/job/test_accelerate.py` kills and resumes a job of "
        "two processes under `accelerate launch` that reads such a loader. A `DataLoaderDispatcher` "
        "(`dispatch_batches=True`; the default for an `IterableDataset`) is not followed: a warning at the first step "
        "names it with the lines to change, and `reft.resumable` refuses it.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: object) -> str:
    lines = [head, ["---"] * len(head), *rows]  # type: ignore[misc]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def engines() -> list[tuple[str, ...]]:
    """Engine, ZeRO stage, precision, optimizer, wrapper and adapter of every case of the state's tests."""
    sys.path.insert(0, str(_STATE_TESTS))
    try:
        from engine_cases import CASES
        from test_engines import ADAPTERS
    finally:
        sys.path.remove(str(_STATE_TESTS))
    rows = {}
    for name, (adapter, wrapper) in ADAPTERS.items():
        config = CASES[name].get("config", {})
        rows[
            (
                _ENGINES["pipe" if CASES[name].get("pipe") else "plain"],
                str(config.get("zero_optimization", {}).get("stage", 0)),
                _precision(config),
                "DeepSpeed's (`torch_adam`)" if "optimizer" in config else "given to `initialize`",
                f"`{wrapper}`",
                f"`{adapter}`",
            )
        ] = None
    return sorted(rows)


def _precision(config: dict[str, dict[str, object]]) -> str:
    precision = next((name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")), "fp32")
    gradients = config.get("data_types", {}).get("grad_accum_dtype")
    return f"{precision}, gradients in {gradients}" if gradients else precision


def refusals() -> list[tuple[str, str]]:
    """What the state adapters refuse and advise, as it is written in their sources."""
    found = {}
    for file in _REFUSING:
        for pair in _refused_in(ast.parse((ROOT / "reft" / "state" / file).read_text())):
            found[pair] = None
    return list(found)


def _refused_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFUSE:
            said = [_text(argument) for argument in node.args]
        elif (
            isinstance(node, ast.Tuple) and len(node.elts) == 3 and not isinstance(node.elts[0], ast.Constant)
        ):
            said = [_text(element) for element in node.elts[1:]]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (
                (f"`{a}*`", b)
                for k, v in pairs
                if k and (a := _text(k)).startswith("deepspeed.") and (b := _text(v))
            )
            continue
        else:
            continue
        if len(said) == 2 and said[0] and " " in said[1]:
            yield said[0], said[1]


def _text(node: ast.expr) -> str:
    """A literal string; what is put in at run time is an ellipsis. Empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(document())
