"""A checkout of Megatron-DeepSpeed or Megatron-LM loses nodes; a copy of Megatron-DeepSpeed's has the patches for it.

    python -m tests.megatron.program DIR [--cases PATTERN ...] [--deepspeed RELEASE] [--json FILE] [--list]

Cases that begin with ``llama2-`` are the shipped configurations, with fewer and smaller layers, on four nodes of two.
Every case is trained undisturbed, and with reft while a node is lost and replaced. In a case with ``persisted`` all
others are killed then, and ``reft persist`` writes a checkpoint of what they hold: it is compared with the one that
the program itself saves at that iteration, value by value; the program resumes from either without reft, and from
reft's with it. Each case's result is printed as it ends. Exits with 1 if a line that the program printed differs.
docs/megatron.md says what a checkout needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import date
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local_cluster import LocalClusterError
from examples.llama.indexed import IndexedWriter, token_dtype
from tests.matrix import ROOT, Row, install
from tests.megatron.checkpoints import compare_checkpoints
from tests.megatron.runs import DeepSpeedProgram, Program, judge, lost_node

ITERATIONS, KILLED_AT, VOCABULARY = 12, 6, 120
_SECS = 3000.0  # for a run of eight ranks on a busy machine
_SMALL = f"""
    --num-layers 4 --seq-length 32 --max-position-embeddings 32 --global-batch-size 8
    --seed 7 --split 80,15,5 --num-workers 0
    --eval-interval 5 --eval-iters 2 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}
    --distributed-backend gloo
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
"""
_ARGUMENTS = f"""
    {_SMALL} --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2
    --attention-dropout 0.1 --hidden-dropout 0.1
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
"""
_LENGTH = (
    f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --lr-warmup-iters 2 --log-interval 1"
)

# -- Megatron-DeepSpeed: layout, ZeRO stage, precision and options, by name --------------------------------

PATCHES = ROOT / "megatron_patches" / "4efb479"
_SAMPLES = """
    --train-samples 72 --lr-decay-samples 72 --lr-warmup-samples 8 --rampup-batch-size 4 4 32 --log-interval 1
"""
"""Batches of 4, of 8 from sample 32 on."""
_LAYOUTS = {
    "pp2dp2": (1, 2, 4, 1),
    "tp2pp2dp2": (2, 2, 4, 2),
    "dp2": (1, 1, 2, 1),
    "tp2dp2": (2, 1, 2, 2),
}
"""TP, PP, nodes, and ranks on each."""
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16acc32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
}
"""``bf16acc32`` accumulates gradients in fp32: with ZeRO stage 1 DeepSpeed gives it ``BF16_Optimizer``, but for 0.17.6
to 0.18.4."""
_OPTIONS = {
    "untied": "--untie-embeddings-and-output-weights",
    "nopipeline": "--no-pipeline-parallel",
    "sequence": "--sequence-parallel",
    "zerobubble": "--enable-zbh1-pipeline",
    "nosaverng": "--no-save-rng",
    "cyclic": "--dataloader-type cyclic",
    "recompute": "--deepspeed-activation-checkpointing --checkpoint-activations",
    "llama": """
        --attention-dropout 0 --hidden-dropout 0 --swiglu --normalization rmsnorm --disable-bias-linear
        --use-rotary-position-embeddings --untie-embeddings-and-output-weights --num-key-value-heads 2
        --ffn-hidden-size 48 --lr 1e-2
    """,
}
OF_DEEPSPEED = (
    "pp2dp2-zero0-fp32",
    "pp2dp2-zero1-fp32",
    "tp2pp2dp2-zero0-fp32",
    "tp2pp2dp2-zero1-fp32",
    "pp2dp2-zero1-bf16-untied-rampup",
    "pp2dp2-zero1-bf16acc32",
    "pp2dp2-zero0-bf16",
    "pp2dp2-zero1-fp16",
    "tp2pp2dp2-zero1-bf16-sequence",
    "dp2-zero1-fp32-nopipeline",
    "dp2-zero0-bf16-nopipeline-untied",
    "tp2dp2-zero1-bf16-nopipeline-sequence",
    "pp2dp2-zero1-fp32-zerobubble",
    "pp2dp2-zero1-fp32-recompute",
    "pp2dp2-zero0-fp32-cyclic",
    "dp2-zero1-fp32-nopipeline-cyclic",
    "dp2-zero1-fp32-nopipeline-nosaverng",
    "pp2dp2-zero1-fp32-persisted",
    "pp2dp2-zero1-bf16acc32-persisted",
    "dp2-zero1-bf16-nopipeline-persisted",
    "tp2pp2dp2-zero1-fp32-llama-relayout",
)


def patched(checkout: Path, copy: Path) -> Path:
    """A copy of a checkout with the patches, and with its helper for data compiled for this Python."""
    shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for patch in sorted(PATCHES.glob("*.patch")):
        apply = ["git", "apply", patch]
        done = subprocess.run(
            [*apply, "--reverse", "--check"], cwd=copy, capture_output=True, check=False
        )
        if done.returncode:  # the reader has not applied it
            subprocess.run(apply, cwd=copy, check=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(
        ["make", "-C", copy / "megatron" / "data"], env={**os.environ, "PATH": path}, check=True
    )
    return copy


def of_deepspeed(name: str, script: Path, scratch: Path) -> Program:
    if name in SHIPPED:
        return of_llama2(name, script, scratch)
    layout, zero, precision, *options = name.split("-")
    tp, pp, *_ = _LAYOUTS[layout]
    ramps, stage = "rampup" in options, int(zero.removeprefix("zero"))
    arguments = f"""
        {_ARGUMENTS} {_SAMPLES if ramps else _LENGTH} {" ".join(_OPTIONS.get(o, "") for o in options)}
        {"" if precision == "fp32" else f"--{precision[:4]}"} --zero-stage {stage}
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --data-path {_corpus(scratch)}
        --make-vocab-size-divisible-by {256 // tp}
    """
    config = {
        "train_batch_size": 4 if ramps else 8,  # the first one
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        **_PRECISIONS[precision],
    }
    return _deepspeed_program(script, arguments.split(), config, layout)


def _deepspeed_program(
    script: Path,
    arguments: Sequence[str],
    config: Mapping[str, Any],
    layout: str,
    block: Mapping[str, Any] = {},
) -> Program:
    *_, nodes, procs_per_node = _LAYOUTS[layout]
    env = {
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": "cpu",
        "REFT_LOGLEVEL": "INFO",
        "PYTHONPATH": _path(),
    }
    return DeepSpeedProgram(
        script=script,
        arguments=arguments,
        config=config,
        nodes=nodes,
        procs_per_node=procs_per_node,
        block=block,
        env={**env, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        secs=_SECS,
    )


_LLAMA2 = ROOT / "configs" / "llama2"
SHIPPED = tuple(f"llama2-{path.stem}" for path in sorted(_LLAMA2.glob("*.args")))


def of_llama2(name: str, script: Path, scratch: Path) -> Program:
    """A shipped configuration as it is, but for sizes, degrees, steps, the text, and kernels that CPUs lack."""
    path = _LLAMA2 / name.removeprefix("llama2-")
    lines = Path(f"{path}.args").read_text().splitlines()
    shipped = [word for line in lines if not line.startswith("#") for word in line.split()]
    heads, groups, width, inner = (
        int(shipped[shipped.index(f"--{option}") + 1])
        for option in (
            "num-attention-heads",
            "num-key-value-heads",
            "hidden-size",
            "ffn-hidden-size",
        )
    )
    # Of an option given twice the last counts.
    smaller = f"""
        {_SMALL} {_LENGTH} --hidden-size {width // 64} --ffn-hidden-size {inner // 64}
        --num-attention-heads {2 * heads // groups} --num-key-value-heads 2
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-path {_corpus(scratch)}
    """
    config = json.loads(Path(f"{path}.json").read_text())
    block = config.pop("reft")
    block["persist"]["dir"] = str(scratch / name / "checkpoints")
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 4}
    return _deepspeed_program(script, [*shipped, *smaller.split()], config, "tp2pp2dp2", block)


def _corpus(scratch: Path) -> Path:
    """Documents of random tokens, in the program's own format."""
    prefix, draws = scratch / "corpus", np.random.default_rng(3)
    if not list(scratch.glob("corpus*")):
        with IndexedWriter(prefix, token_dtype(VOCABULARY)) as corpus:
            for _ in range(400):
                corpus.add(draws.integers(0, VOCABULARY - 1, size=int(draws.integers(40, 200))))
    return prefix


def relaid_out(name: str, program: Program, scratch: Path) -> list[str]:
    """Where the losses of a job that goes on with one slice in the place of two differ from the undisturbed one's."""
    directory, stored = scratch / name, scratch / name / "stored"
    undisturbed = program.run(directory / "undisturbed", None)
    block = {"enabled": True, "persist": {"dir": str(stored), "interval_steps": 1}}
    program.run(directory / "first", block, "--exit-interval", str(KILLED_AT))
    (job,) = stored.iterdir()
    other = of_deepspeed(name.removeprefix("tp2"), program.script, scratch)
    again = {"enabled": True, "accept_changes": ["arguments"]}
    went_on = other.run(directory / "second", again, "--load", str(job))
    steps = range(KILLED_AT + 1, ITERATIONS + 1)
    told = [f"{at}: {undisturbed.losses(at)}, then {went_on.losses(at)}" for at in steps]
    print("\n".join([f"\n{name}", *told]))
    return [
        line
        for at, line in zip(steps, told, strict=True)
        if undisturbed.losses(at) != went_on.losses(at)
    ]


def persisted(name: str, program: Program, directory: Path) -> list[str]:
    """What differs between the program's own checkpoint and reft's, and behind either."""
    out, saved = directory / "persisted", directory / "saved"
    undisturbed = program.run(
        directory / "undisturbed", None, "--save", str(saved), "--save-interval", "1"
    )
    left = program.run_until_a_node_is_lost(directory / "died", lost_node(KILLED_AT))
    memory = [word for path in left for word in ("--memory-dir", str(path))]
    subprocess.run([sys.executable, "-m", "reft.cli", "persist", "--out", out, *memory], check=True)
    (written,) = (path.parent for path in out.glob("*/latest"))
    step = int((written / "latest").read_text().removeprefix("global_step"))
    found = compare_checkpoints(saved, written)
    # On a CPU the program's loaders draw random numbers between its load and its first step, from the
    # generator that its dropout draws from: its losses behind a load of its own are others.
    own = program.run(
        directory / "own", None, "--load", str(saved), "--load-tag", f"global_step{step}"
    )
    plain = program.run(directory / "plain", None, "--load", str(written))
    with_reft = program.run(directory / "with-reft", {"enabled": True}, "--load", str(written))
    if (
        not own.iterations
        or own.iterations != plain.iterations
        or own.validations != plain.validations
    ):
        found.append(f"without reft: {plain.iterations}, from its own: {own.iterations}")
    if with_reft.iterations != undisturbed.from_step(step):
        found.append(
            f"with reft: {with_reft.iterations}, undisturbed: {undisturbed.from_step(step)}"
        )
    if with_reft.resumed != [(step, "disk")]:
        found.append(f"with reft: resumed {with_reft.resumed}")
    print(f"\n{name}: persisted step {step}")
    return found


# -- Megatron-LM ---------------------------------------------------------------------------------------------

_OF_LM = """
    --mock-data --transformer-impl local --use-cpu-initialization --no-rope-fusion --no-persist-layer-norm
"""
_RAMPUP = "--train-samples 80 --lr-decay-samples 80 --lr-warmup-samples 8 --rampup-batch-size 4 4 24 --log-interval 3"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OF_LM = {
    "dp2-fp32": _LENGTH,
    "dp2-bf16": f"{_LENGTH} --bf16",
    "dp2-bf16-overlap-rampup": f"{_RAMPUP} {_OVERLAP} --bf16",
    "dp2-ep2-bf16-overlap": f"{_LENGTH} {_OVERLAP} --bf16 --num-experts 4 --expert-model-parallel-size 2 "
    "--disable-bias-linear",
    "pp2dp2-bf16": f"{_LENGTH} --bf16 --pipeline-model-parallel-size 2",
    "pp2dp2-vpp2-bf16-overlap": f"{_LENGTH} {_OVERLAP} --bf16 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "tp2dp2-bf16-distributed-sequence": f"{_LENGTH} --use-distributed-optimizer --bf16 --sequence-parallel "
    "--tensor-model-parallel-size 2",
}


def of_lm(name: str, script: Path, scratch: Path) -> Program:
    env = {"PYTHONUNBUFFERED": "1", "REFT_LOGLEVEL": "INFO", "PYTHONPATH": _path()}
    return Program(
        script=ROOT / "tests" / "megatron_core" / "pretrain_on_cpu.py",
        arguments=(str(script), *f"{_ARGUMENTS} {_OF_LM} {OF_LM[name]}".split()),
        nodes=4 if name.startswith("pp2") else 2,
        procs_per_node=2 if name.startswith("tp2") else 1,
        # The program wants one connection where there is tensor parallelism.
        env={**env, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )


# -- the command ----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.megatron.program",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="the checkout, with pretrain_gpt.py in it")
    parser.add_argument("--cases", nargs="*", help="names, * stands for anything; by default all")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument(
        "--deepspeed", default="0.17.6", help="release to run with; 0.17.6 by default"
    )
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    is_lm = (options.directory / "megatron" / "training").is_dir()
    names = tuple(OF_LM) if is_lm else (*OF_DEEPSPEED, *SHIPPED)
    wanted = [name for name in names if any(fnmatch(name, p) for p in options.cases or ["*"])]
    if options.list or not wanted:
        print("\n".join(names))
        return 0 if options.list else 2
    script: Path = options.directory.resolve() / "pretrain_gpt.py"
    if not script.is_file():
        parser.error(f"{script} does not exist; expected the directory of a checkout of Megatron")
    if not is_lm and version("deepspeed") != options.deepspeed:
        _run_with(install(f"deepspeed-{options.deepspeed}", Row(options.deepspeed)))
    scratch = Path(tempfile.mkdtemp(prefix="reft-megatron-"))
    if not is_lm:
        script = patched(script.parent, scratch / "checkout") / script.name
        sys.path.insert(0, str(script.parent))  # its checkpoints hold classes of its own
    make = of_lm if is_lm else of_deepspeed
    head = ["git", "-C", str(options.directory), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=False, capture_output=True, text=True).stdout.strip()
    facts = {
        "program": commit,
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in ("torch", "deepspeed", "reft-ckpt")},
    }
    results: list[dict[str, Any]] = []
    for name in wanted:
        results.append(_result(name, make(name, script, scratch), scratch))
        if options.json is not None:  # After every case, so that an interruption loses none
            options.json.write_text(json.dumps({**facts, "cases": results}, indent=1) + "\n")
    if wrong := [result["case"] for result in results if result["differs"]]:
        print(f"DIFFER: {', '.join(wrong)}; the logs are in {scratch}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _run_with(python: Path) -> None:
    """Go on in the environment of the DeepSpeed that was asked for."""
    if Path(sys.prefix).resolve() != python.parents[1].resolve():
        command = [str(python), "-m", "tests.megatron.program", *sys.argv[1:]]
        os.execve(python, command, {**os.environ, "PYTHONPATH": _path()})


def _result(name: str, program: Program, scratch: Path) -> dict[str, Any]:
    """Run a case, print and return its result. One that raises, as one that does not end in time does, has failed,
    and the next one is run."""
    began, directory, values, recomputed = time.monotonic(), scratch / name, 0, 0
    try:
        if name.endswith("-relayout"):
            found = relaid_out(name, program, scratch)
        elif name.endswith("-persisted"):
            found = persisted(name, program, directory)
        else:
            undisturbed = program.run(directory / "undisturbed", None)
            disturbed = program.run(
                directory / "killed", {**program.block, **lost_node(KILLED_AT)}, lost=1
            )
            found = judge(name, undisturbed, disturbed, ["memory"])
            values = sum(len(line) for lines in disturbed.iterations.values() for line in lines)
            values += sum(map(len, disturbed.validations.values()))
            recomputed = disturbed.recomputed
    except Exception as error:
        if not isinstance(
            error, (AssertionError, LocalClusterError)
        ):  # they say themselves what a job did
            traceback.print_exc()
        found = [f"{type(error).__name__}: {error}"]
    for line in found:
        print(f"  DIFFERS {line}")
    secs = round(time.monotonic() - began)
    print(f"{'DIFFERS' if found else 'EQUAL'} {name}, {secs} s", flush=True)
    return {
        "case": name,
        "differs": found,
        "values_compared": values,
        "partitions_recomputed": recomputed,
        "secs": secs,
    }


if __name__ == "__main__":
    sys.exit(main())
