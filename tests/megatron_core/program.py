"""A checkout of NVIDIA's Megatron-LM, unmodified, loses nodes. Without a device it is run by ``pretrain_on_cpu.py``.

    python -m tests.megatron_core.program DIR [--cases PATTERN ...] [--list]

Every case is trained undisturbed, and with reft while a node is killed and replaced; each case's result is printed as
it ends. Exits with 1 if a line that the program printed differs. docs/megatron.md says what it was tried with.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tests.matrix import ROOT
from tests.megatron.command import cases_parser, chosen, run_cases
from tests.megatron.runs import Outcome, Program, judge, lost_node

ITERATIONS, KILLED_AT = 12, 6
_ARGUMENTS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --seed 7 --micro-batch-size 2 --global-batch-size 8
    --mock-data --split 80,15,5 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 120
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
    --eval-interval 5 --eval-iters 2 --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-rope-fusion --no-persist-layer-norm
"""
_LENGTH = f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --lr-warmup-iters 2 --log-interval 1"
_RAMPUP = "--train-samples 80 --lr-decay-samples 80 --lr-warmup-samples 8 --rampup-batch-size 4 4 24 --log-interval 3"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        arguments: of the program, beside those of every case.
        nodes: number of nodes.
        procs_per_node: ranks on each.
        ends_at: it ends there by ``--exit-interval`` and is started again.
    """

    arguments: str
    nodes: int = 2
    procs_per_node: int = 1
    ends_at: int = 0


CASES = {
    "dp2-fp32": Case(_LENGTH),
    "dp2-fp32-restarted": Case(_LENGTH, ends_at=8),
    "dp2-bf16": Case(f"{_LENGTH} --bf16"),
    "dp2-bf16-overlap-rampup": Case(f"{_RAMPUP} {_OVERLAP} --bf16"),
    "dp2-ep2-bf16-overlap": Case(f"{_LENGTH} {_OVERLAP} {_EXPERTS} --bf16"),
    "pp2dp2-bf16": Case(f"{_LENGTH} --bf16 --pipeline-model-parallel-size 2", nodes=4),
    "pp2dp2-vpp2-bf16-overlap": Case(
        f"{_LENGTH} {_OVERLAP} --bf16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        nodes=4,
    ),
    "tp2dp2-bf16-distributed-sequence": Case(
        f"{_LENGTH} --use-distributed-optimizer --bf16 --tensor-model-parallel-size 2 --sequence-parallel",
        procs_per_node=2,
    ),
}


def main() -> int:
    parser = cases_parser("python -m tests.megatron_core.program", __doc__)
    script, wanted = chosen(parser, parser.parse_args(), CASES, "Megatron-LM")
    return run_cases(wanted, lambda scratch: lambda name: _run(name, script, scratch / name))


def _run(name: str, script: Path, directory: Path) -> list[str]:
    """Run a case; what differs."""
    case = CASES[name]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = Program(
        script=Path(__file__).with_name("pretrain_on_cpu.py"),
        arguments=(str(script), *shlex.split(f"{_ARGUMENTS} {case.arguments}")),
        nodes=case.nodes,
        procs_per_node=case.procs_per_node,
        env={
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": path,
            "REFT_LOGLEVEL": "INFO",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # the program wants it where there is tensor parallelism
        },
    )
    return _differences(name, case, program, directory)


def _differences(name: str, case: Case, program: Program, directory: Path) -> list[str]:
    undisturbed = program.run(directory / "undisturbed", None)
    more, sources = list[str](), ["memory"]
    if case.ends_at:
        save = str(directory / "checkpoints")
        more += ["--ckpt-format", "torch", "--save", save, "--load", save, "--save-interval", "1000"]
        end = ("--exit-interval", str(case.ends_at))
        first = program.run(directory / "first", lost_node(KILLED_AT - 2), *more, *end, lost=1)
        if [source for _, source in first.resumed] != ["memory"] or max(first.iterations) != case.ends_at:
            return [f"the first job resumed {first.resumed} and ended at {max(first.iterations)}"]
        sources = ["disk", "memory"]
        undisturbed = _behind(undisturbed, case.ends_at)
    killed_at = case.ends_at + 2 if case.ends_at else KILLED_AT
    disturbed = program.run(directory / "disturbed", lost_node(killed_at), *more, lost=1)
    return judge(name, undisturbed, disturbed, sources)


def _behind(undisturbed: Outcome, step: int) -> Outcome:
    """What is printed behind a load of the program's own. Behind the first iteration it prints an extra line, and the
    next one is the mean of both."""
    lines = {at: found for at, found in undisturbed.iterations.items() if at > step and at != step + 2}
    validations = {at: found for at, found in undisturbed.validations.items() if at > step}
    return replace(undisturbed, iterations=lines, validations=validations)


if __name__ == "__main__":
    sys.exit(main())
