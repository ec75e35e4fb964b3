"""A checkout of Megatron-DeepSpeed, unmodified or with the reader's own fixes for CPUs, loses nodes.

    python -m tests.megatron.program DIR [--cases PATTERN ...] [--deepspeed 0.17.6|0.18.9] [--list]

Every case is trained undisturbed, and with reft while something happens to it:

- ``killed``: a node is lost and replaced. Without ``--save`` and ``--load``.
- ``evaluating``: the same before the first evaluation, which is not made again.
- ``restarted``: a node is lost before the program has saved anything, in a job that ends by ``--exit-interval``;
  it is started again, reads its checkpoint, and loses another node.
- ``lost``: all nodes but one are lost, so both peers of a stage: it resumes from the program's checkpoint.
- ``persisted``: a node is lost, all others are killed, and ``reft persist`` writes a checkpoint of what they hold.
  It is compared with the one that the program itself saves at that iteration, value by value; the program resumes
  from either without reft, and from reft's with it.

Each case's result is printed as it ends. Exits with 1 if a line that the program printed differs.
docs/megatron.md says what a checkout needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from examples.llama.indexed import IndexedWriter, token_dtype
from tests.matrix import ROOT, ROWS, install
from tests.megatron.cases import CASES, EVALUATED_AT, KILLED_AT, VOCABULARY, Case
from tests.megatron.checkpoints import compare_checkpoints
from tests.megatron.command import cases_parser, chosen, run_cases
from tests.megatron.runs import DeepSpeedProgram, Outcome, Program, judge, lost_node

_ENABLED = {"enabled": True}


def main() -> int:
    parser = cases_parser("python -m tests.megatron.program", __doc__)
    parser.add_argument("--deepspeed", choices=("0.17.6", "0.18.9"), default="0.17.6")
    options = parser.parse_args()
    cases = {case.name: case for case in CASES}
    script, wanted = chosen(parser, options, cases, "Megatron-DeepSpeed")
    row = f"deepspeed-{options.deepspeed}"
    _run_with(install(row, ROWS[row]))
    sys.path.insert(0, str(script.parent))  # its checkpoints hold classes of its own

    def trial(scratch: Path) -> Callable[[str], list[str] | None]:
        made = Trial(script, scratch)
        return lambda name: made.run(cases[name])

    return run_cases(wanted, trial)


def _run_with(python: Path) -> None:
    """Go on in the environment of the DeepSpeed that was asked for."""
    if Path(sys.prefix).resolve() == python.parents[1].resolve():
        return
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execve(
        python,
        [str(python), "-m", "tests.megatron.program", *sys.argv[1:]],
        {**os.environ, "PYTHONPATH": path},
    )


class Trial:
    """Runs cases of one program.

    Args:
        script: the program.
        scratch: directory for all files.
    """

    def __init__(self, script: Path, scratch: Path) -> None:
        self._script = script
        self._scratch = scratch
        self._corpus = _write_corpus(scratch / "corpus")
        self._undisturbed: dict[str, Outcome] = {}

    def run(self, case: Case) -> list[str] | None:
        """Run a case; what differs, None where the device cannot train it."""
        if case.precision == "fp16" and not _has_fp16():
            print(f"SKIPPED {case.name}: DeepSpeed says that this device has no fp16", flush=True)
            return None
        happen: dict[str, Callable[[Case, Program, Path], list[str]]] = {
            "killed": self._killed,
            "evaluating": self._killed,
            "restarted": self._restarted,
            "lost": self._lost,
            "persisted": self._persisted,
        }
        directory = self._scratch / case.name
        directory.mkdir()
        return happen[case.happens](case, self._program(case), directory)

    def _program(self, case: Case) -> Program:
        return DeepSpeedProgram(
            script=self._script,
            arguments=(*case.arguments, "--data-path", str(self._corpus)),
            config=case.config,
            nodes=case.degrees.nodes,
            procs_per_node=case.degrees.procs_per_node,
            env={
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.environ["PYTHONPATH"],
                "DS_ACCELERATOR": "cpu",
                "REFT_LOGLEVEL": "INFO",
            },
        )

    def _train_undisturbed(self, case: Case, program: Program) -> Outcome:
        if case.trained not in self._undisturbed:
            directory = self._scratch / f"undisturbed-{case.trained}"
            self._undisturbed[case.trained] = program.run(directory, None)
        return self._undisturbed[case.trained]

    # -- what happens ------------------------------------------------------------------------------

    def _killed(self, case: Case, program: Program, directory: Path) -> list[str]:
        undisturbed = self._train_undisturbed(case, program)
        at = EVALUATED_AT if case.happens == "evaluating" else KILLED_AT
        disturbed = program.run(directory / "killed", lost_node(at), lost=1)
        return judge(case.name, undisturbed, disturbed, ["memory"])

    def _restarted(self, case: Case, program: Program, directory: Path) -> list[str]:
        undisturbed = self._train_undisturbed(case, program)
        save, exits_at = str(directory / "checkpoints"), KILLED_AT + 2
        again = ("--save", save, "--load", save, "--save-interval", "1000")
        first = program.run(
            directory / "first", lost_node(KILLED_AT), *again, "--exit-interval", str(exits_at), lost=1
        )
        second = program.run(directory / "second", lost_node(exits_at + 2), *again, lost=1)
        found = (
            [] if max(first.iterations) == exits_at else [f"the first job ended at {max(first.iterations)}"]
        )
        return found + judge(case.name, undisturbed, _together(first, second), ["memory", "disk", "memory"])

    def _lost(self, case: Case, program: Program, directory: Path) -> list[str]:
        undisturbed = self._train_undisturbed(case, program)
        save = str(directory / "checkpoints")
        disturbed = program.run(
            *(directory / "lost", lost_node(KILLED_AT), "--save", save, "--load", save),
            *("--save-interval", str(KILLED_AT - 2)),
            lost=case.degrees.nodes - 1,
        )
        return judge(case.name, undisturbed, disturbed, ["disk"])

    def _persisted(self, case: Case, program: Program, directory: Path) -> list[str]:
        out, saved = directory / "persisted", directory / "saved"
        undisturbed = program.run(
            directory / "undisturbed", None, "--save", str(saved), "--save-interval", "1"
        )
        left = program.run_until_a_node_is_lost(directory / "died", lost_node(KILLED_AT))
        memory = [word for path in left for word in ("--memory-dir", str(path))]
        subprocess.run([sys.executable, "-m", "reft.cli", "persist", "--out", out, *memory], check=True)
        (persisted,) = (path.parent for path in out.glob("*/latest"))
        step = int((persisted / "latest").read_text().removeprefix("global_step"))
        found = compare_checkpoints(saved, persisted)
        # On a CPU the program's loaders draw random numbers between its load and its first step, from the
        # generator that its dropout draws from: its losses behind a load of its own are others.
        tag = ("--load-tag", f"global_step{step}")
        own = program.run(directory / "own", None, "--load", str(saved), *tag)
        plain = program.run(directory / "plain", None, "--load", str(persisted))
        with_reft = program.run(directory / "with-reft", _ENABLED, "--load", str(persisted))
        if not own.iterations or own.iterations != plain.iterations or own.validations != plain.validations:
            found.append(f"without reft: {plain.iterations}, from its own: {own.iterations}")
        if with_reft.iterations != undisturbed.from_step(step):
            found.append(f"with reft: {with_reft.iterations}, undisturbed: {undisturbed.from_step(step)}")
        if with_reft.resumed != [(step, "disk")]:
            found.append(f"with reft: resumed {with_reft.resumed}")
        print(f"\n{case.name}: persisted step {step}")
        print(f"{'iteration':>9} {'undisturbed':>14} {'with reft':>14} {'without':>14} own")
        for at in undisturbed.from_step(step):
            losses = (o.losses(at) for o in (undisturbed, with_reft, plain, own))
            print(f"{at:>9} {next(losses):>14} {next(losses):>14} {next(losses):>14} {next(losses)}")
        return found


def _together(first: Outcome, second: Outcome) -> Outcome:
    iterations = {at: list(lines) for at, lines in first.iterations.items()}
    for at, lines in second.iterations.items():
        iterations.setdefault(at, []).extend(lines)
    return Outcome(
        iterations,
        first.validations | second.validations,
        first.resumed + second.resumed,
        first.codes | second.codes,
        first.log + second.log,
    )


def _has_fp16() -> bool:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())


def _write_corpus(prefix: Path) -> Path:
    """Documents of random tokens, in the program's own format."""
    draws = np.random.default_rng(3)
    with IndexedWriter(prefix, token_dtype(VOCABULARY)) as corpus:
        for _ in range(400):
            corpus.add(draws.integers(0, VOCABULARY - 1, size=int(draws.integers(40, 200))))
    return prefix


if __name__ == "__main__":
    sys.exit(main())
