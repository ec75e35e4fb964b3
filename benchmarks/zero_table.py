"""Every ZeRO stage, precision, offload and kind of program: undisturbed against a lost node.

    .venv/bin/python benchmarks/zero_table.py OUT.json [--program NAME ...] [--row TEXT ...]

Each row trains the model of an example on two ranks, which are nodes with memory directories of
their own. The processes of the disturbed run end after some steps without closing anything, and
the memory of one node is deleted. New processes then continue from what the other node holds.
The loss of every micro-batch on both ranks is compared with that of a run without reft.
Rows are added to OUT.json, or replace those of an earlier call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from results import machine

import reft
from reft.engine.attach import find_session
from reft.engine.on_import import install
from tests.engine.ranks import be_a_rank, run_ranks

ROOT = Path(__file__).resolve().parents[1]
LOST_AFTER, STEPS = 3, 6
_SECS = 3600.0  # for all rows of a program, on a busy machine
LIVES = ("undisturbed", "until the loss", "after the loss")
HOST = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "0, none": {"stage": 0},
    "1, none": {"stage": 1},
    "1, optimizer": {"stage": 1, "offload_optimizer": HOST},
    "2, none": {"stage": 2},
    "2, optimizer": {"stage": 2, "offload_optimizer": HOST},
    "3, none": {"stage": 3},
    "3, optimizer": {"stage": 3, "offload_optimizer": HOST},
    "3, optimizer and weights": {
        "stage": 3,
        "offload_optimizer": HOST,
        "offload_param": HOST,
    },
}
ROWS = {
    f"{zero}, {precision}": (zero, precision) for precision in ("fp32", "bf16") for zero in ZERO
}
"""Stage, what is in host memory, and precision."""


class EndError(Exception):
    """The program ends here."""


# -- the programs ----------------------------------------------------------------------------------


def plain(config: Path, directory: Path) -> None:
    """The loop of examples/plain.py."""
    from examples import plain as example

    sys.argv = ["plain.py", "--deepspeed_config", str(config), "--save-dir", str(directory)]
    example.main()


def trainer(config: Path, directory: Path) -> None:
    """The Trainer of examples/trainer.py."""
    from examples import trainer as example

    forget_accelerate()
    precision = {"bf16": json.loads(config.read_text())["bf16"]["enabled"]}
    arguments = example.TrainingArguments
    example.TrainingArguments = lambda **given: arguments(**{**given, **precision})
    sys.argv = ["trainer.py", "--deepspeed_config", str(config), "--save-dir", str(directory)]
    try:
        example.main()
    finally:
        example.TrainingArguments = arguments


def accelerate(config: Path, directory: Path) -> None:
    """A loop with Accelerate, which prepares the loader."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim
    from torch.utils.data import DataLoader

    from examples.plain import Model, samples

    forget_accelerate()
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(hf_ds_config=json.loads(config.read_text()))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    torch.manual_seed(1)
    model = Model()
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    engine, _, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    loader = reft.resumable(loader)
    engine.load_checkpoint(str(directory))
    for _ in range(loader.epoch, 2):
        for (text,) in loader:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(text))


def forget_accelerate() -> None:
    """Let Accelerate read the next configuration of this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


PROGRAMS: dict[str, Callable[[Path, Path], None]] = {
    "plain loop": plain,
    "Trainer": trainer,
    "Accelerate": accelerate,
}


def configuration(program: str, row: str, block: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: that of the example, with the stage and precision of the row."""
    zero, precision = ROWS[row]
    example = "trainer.json" if program == "Trainer" else "plain.json"
    config = json.loads((ROOT / "examples" / example).read_text())
    config.pop("data_types", None)
    return {
        **config,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": ZERO[zero],
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own Adam must be compiled first
        "reft": block,
    }


# -- one rank --------------------------------------------------------------------------------------


@contextmanager
def recorded(until: int) -> Iterator[list[list[Any]]]:
    """Record step and loss of every micro-batch, and end the program after a step, where the next
    one has begun and reft has taken its version."""
    found: list[list[Any]] = []
    backward = DeepSpeedEngine.backward

    def record(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.global_steps == until:
            session = find_session(engine)
            if session is not None and not session.flush(120):
                raise RuntimeError(f"step {until} was not committed: {session.stats.last_error}")
            raise EndError
        found.append([engine.global_steps + 1, loss.item().hex()])
        return backward(engine, loss, *args, **kwargs)

    DeepSpeedEngine.backward = record
    try:
        yield found
    finally:
        DeepSpeedEngine.backward = backward


def run_row(root: Path, program: str, row: str, life: str) -> dict[str, Any]:
    started = time.monotonic()
    directory = root / row.replace(", ", "-").replace(" ", "-") / life.replace(" ", "-")
    memory = directory.parent / f"memory{os.environ['RANK']}"
    block: dict[str, Any] = {"enabled": life != LIVES[0]}
    block |= (
        {"job_id": directory.parent.name, "memory_dir": str(memory)} if life != LIVES[0] else {}
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"config{os.environ['RANK']}.json"
    path.write_text(json.dumps(configuration(program, row, block)))
    torch.manual_seed(3)
    error = ""
    with recorded(LOST_AFTER if life == LIVES[1] else STEPS) as losses:
        try:
            PROGRAMS[program](path, directory.parent / "none")
        except EndError:
            pass
        except Exception as other:
            error = f"{type(other).__name__}: {other}"
    deepspeed.comm.barrier()
    gc.collect()
    return {"losses": losses, "error": error, "secs": round(time.monotonic() - started, 1)}


def run_rank(root: Path) -> dict[str, Any]:
    install()
    told = json.loads((root / "life.json").read_text())
    return {
        row: {life: run_row(root, told["program"], row, life) for life in told["lives"]}
        for row in told["rows"]
    }


# -- the table -------------------------------------------------------------------------------------


def compare(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """One row of the table from what each rank found in every life."""
    errors = [found["error"] for rank in ranks for found in rank.values() if found["error"]]
    compared, differing, first = 0, 0, STEPS
    for rank in ranks:
        reference, lost, resumed = (rank[life]["losses"] for life in LIVES)
        first = min([first, *(step for step, _ in resumed)])
        compared += len(reference)
        differing += abs(len(reference) - len(lost + resumed))
        differing += sum(a != b for a, b in zip(reference, lost + resumed, strict=False))
    return {
        "equal": not errors and not differing and first == LOST_AFTER + 1,
        "losses": compared,
        "differing": differing,
        "resumed_at_step": first,
        "errors": errors,
        "secs": round(sum(found["secs"] for found in ranks[0].values()), 1),
    }


def run_program(program: str, rows: list[str]) -> list[dict[str, Any]]:
    """Run these rows one after the other within the same processes; after the loss in others."""
    with tempfile.TemporaryDirectory(prefix="reft-zero-") as scratch:
        root = Path(scratch)

        def run(*lives: str) -> list[dict[str, Any]]:
            told = {"program": program, "rows": rows, "lives": lives}
            (root / "life.json").write_text(json.dumps(told))
            return run_ranks(Path(__file__), root, timeout_secs=_SECS)

        before = run(*LIVES[:2])
        for memory in root.glob("*/memory1"):
            shutil.rmtree(memory)
        after = run(LIVES[2])
    found = []
    for row in rows:
        stage, offload, precision = row.split(", ")
        ranks = [b[row] | a[row] for b, a in zip(before, after, strict=True)]
        where = {"program": program, "stage": int(stage), "offload": offload}
        found.append({**where, "precision": precision, **compare(ranks)})
    return found


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("out", type=Path)
    made.add_argument("--program", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    made.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    options = made.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    result: dict[str, Any] = {"benchmark": "zero_table", "rows": []}
    with suppress(FileNotFoundError):
        result = json.loads(options.out.read_text())
    result |= {"date": date.today().isoformat(), "machine": machine()}
    result |= {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    for program in options.program:
        new = run_program(program, options.row)
        keys = ("program", "stage", "offload", "precision")
        rows = {tuple(r[k] for k in keys): r for r in [*result["rows"], *new]}
        result["rows"] = list(rows.values())
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        for row in new:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_a_rank(run_rank)
    main()
