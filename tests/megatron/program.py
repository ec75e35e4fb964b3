"""A checkout of Megatron-DeepSpeed, unmodified or with the reader's own fixes for CPUs, loses a node.

    python -m tests.megatron.program DIR [--layout pp2dp2|tp2pp2] [--zero 0|1]

Every layout and ZeRO stage is trained undisturbed and with a node that is killed; both runs' losses are printed.
Exits with 1 if a line that the program printed differs. docs/megatron.md says what a checkout needs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from reft.tools.pretrain.indexed import IndexedWriter, token_dtype
from tests.matrix import ROOT, ROWS, install
from tests.megatron.runs import Outcome, Program, differences, lost_node

ROW = "deepspeed-0.17.6"
"""Of :mod:`tests.matrix`; later releases do not have what the program imports: ``deepspeed.compression``."""
ITERATIONS, KILLED_AT = 16, 6
LAYOUTS = {"pp2dp2": (1, 4, 1), "tp2pp2": (2, 4, 2)}
"""Tensor-parallel degree, nodes, ranks on each; two stages and two data-parallel peers each."""
_VOCABULARY = 120
_ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --seed 7
    --micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --split 80,15,5 --num-workers 0
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters {ITERATIONS} --lr-warmup-iters 2
    --weight-decay 0.01 --clip-grad 1.0
    --log-interval 1 --eval-interval 5 --eval-iters 2
    --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --distributed-backend gloo
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --pipeline-model-parallel-size 2
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron.program", description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkout, with pretrain_gpt.py in it")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="by default all")
    parser.add_argument("--zero", type=int, choices=(0, 1), action="append", help="by default both")
    options = parser.parse_args()
    script = options.directory.resolve() / "pretrain_gpt.py"
    if not script.is_file():
        parser.error(f"{script} does not exist; expected the directory of a Megatron-DeepSpeed checkout")
    python = install(ROW, ROWS[ROW])
    if Path(sys.prefix).resolve() != python.parents[1].resolve():
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        os.execve(python, [str(python), "-m", "tests.megatron.program", *sys.argv[1:]], environment)
    scratch = Path(tempfile.mkdtemp(prefix="reft-megatron-"))
    wrong = 0
    for layout in options.layout or LAYOUTS:
        for stage in options.zero or (0, 1):
            wrong += not compare(script, scratch / f"{layout}-zero{stage}", layout, stage)
    if wrong:
        print(f"the logs are in {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def compare(script: Path, directory: Path, layout: str, stage: int) -> bool:
    """Whether the run that lost a node printed what the undisturbed one printed."""
    directory.mkdir(parents=True)
    corpus = _write_corpus(directory / "corpus")
    tensor_parallel, nodes, procs_per_node = LAYOUTS[layout]
    program = Program(
        script,
        (
            *_ARGUMENTS.split(),
            *("--tensor-model-parallel-size", str(tensor_parallel), "--data-path", str(corpus)),
            *("--zero-stage", str(stage)),
        ),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        },
        nodes=nodes,
        procs_per_node=procs_per_node,
        env={"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.environ["PYTHONPATH"], "DS_ACCELERATOR": "cpu"},
    )
    undisturbed = program.run(directory / "undisturbed", None)
    disturbed = program.run(directory / "killed", lost_node(KILLED_AT), loses_node=True)
    print(f"\n{layout}, ZeRO stage {stage}: {_resumption(disturbed)}")
    print(f"{'iteration':>9} {'undisturbed':>14} killed")
    for at in range(1, ITERATIONS + 1):
        print(f"{at:>9} {_losses(undisturbed, at):>14} {_losses(disturbed, at)}")
    found = differences(undisturbed, disturbed)
    found += [] if disturbed.resumed else ["the job was not resumed"]
    found += [] if len(undisturbed.iterations) == ITERATIONS else ["the undisturbed run did not end"]
    for line in found:
        print(f"DIFFERS {line}")
    return not found


def _resumption(disturbed: Outcome) -> str:
    return ", ".join(f"resumed at step {step} from {source}" for step, source in disturbed.resumed)


def _losses(outcome: Outcome, at: int) -> str:
    return " ".join(line[-1] for line in outcome.iterations.get(at, [])) or "-"


def _write_corpus(prefix: Path) -> Path:
    """Documents of random tokens, in the program's own format."""
    draws = np.random.default_rng(3)
    with IndexedWriter(prefix, token_dtype(_VOCABULARY)) as corpus:
        for _ in range(400):
            corpus.add(draws.integers(0, _VOCABULARY - 1, size=int(draws.integers(40, 200))))
    return prefix


if __name__ == "__main__":
    sys.exit(main())
