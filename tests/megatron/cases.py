"""What `make megatron` can try: layouts, precisions and options of a tiny GPT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 120
ITERATIONS, KILLED_AT, EVALUATED_AT = 12, 6, 5


@dataclass(frozen=True)
class Layout:
    """Degrees, and the nodes that the ranks are on.

    Attributes:
        tp: tensor-parallel degree.
        pp: stages.
        nodes: number of nodes.
        procs_per_node: ranks on each.
    """

    tp: int
    pp: int
    nodes: int
    procs_per_node: int


LAYOUTS = {
    "pp2dp2": Layout(1, 2, 4, 1),
    "tp2pp2dp2": Layout(2, 2, 4, 2),
    "dp2": Layout(1, 1, 2, 1),
    "tp2dp2": Layout(2, 1, 2, 2),
}
_PRECISIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fp32": ((), {}),
    "bf16": (("--bf16",), {"bf16": {"enabled": True}}),
    "bf16acc32": (("--bf16",), {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16": (("--fp16",), {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}),
}
"""Arguments and configuration. ``bf16acc32`` accumulates gradients in fp32: with ZeRO stage 1 DeepSpeed gives it
``BF16_Optimizer``, but for 0.17.6 to 0.18.4."""
_ITERATIONS = f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --lr-warmup-iters 2"
_SAMPLES = "--train-samples 72 --lr-decay-samples 72 --lr-warmup-samples 8 --rampup-batch-size 4 4 32"
"""Batches of 4, of 8 from sample 32 on."""
_OPTIONS = {
    "untied": "--untie-embeddings-and-output-weights",
    "nopipeline": "--no-pipeline-parallel",
    "sequence": "--sequence-parallel",
    "zerobubble": "--enable-zbh1-pipeline",
    "nosaverng": "--no-save-rng",
    "cyclic": "--dataloader-type cyclic",
    "recompute": "--deepspeed-activation-checkpointing --checkpoint-activations",
}
_ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --attention-dropout 0.1 --hidden-dropout 0.1 --seed 7
    --micro-batch-size 2 --global-batch-size 8 --split 80,15,5 --num-workers 0
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
    --log-interval 1 --eval-interval {EVALUATED_AT} --eval-iters 2
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --distributed-backend gloo
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
"""


@dataclass(frozen=True)
class Case:
    """A program that is run, and what happens to it.

    Attributes:
        layout: of :data:`LAYOUTS`.
        zero: ZeRO stage.
        precision: see above.
        options: names of further options.
        happens: ``killed``, ``evaluating``, ``restarted``, ``lost`` or ``persisted``: see :mod:`tests.megatron.program`.
    """

    layout: str
    zero: int
    precision: str
    options: tuple[str, ...] = field(default=())
    happens: str = "killed"

    @property
    def trained(self) -> str:
        """Name of what is trained, whatever happens to it."""
        return "-".join((self.layout, f"zero{self.zero}", self.precision, *self.options))

    @property
    def name(self) -> str:
        return self.trained if self.happens == "killed" else f"{self.trained}-{self.happens}"

    @property
    def degrees(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def arguments(self) -> tuple[str, ...]:
        length = _SAMPLES if "rampup" in self.options else _ITERATIONS
        further = " ".join(_OPTIONS[name] for name in self.options if name in _OPTIONS)
        return (
            *f"{_ARGUMENTS} {length} {further}".split(),
            *_PRECISIONS[self.precision][0],
            *("--tensor-model-parallel-size", str(self.degrees.tp)),
            *("--pipeline-model-parallel-size", str(self.degrees.pp), "--zero-stage", str(self.zero)),
        )

    @property
    def config(self) -> dict[str, Any]:
        """Of DeepSpeed; with rampup its batch is the first one."""
        batch = 4 if "rampup" in self.options else 8
        return {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero},
            **_PRECISIONS[self.precision][1],
        }


CASES = (
    Case("pp2dp2", 0, "fp32"),
    Case("pp2dp2", 1, "fp32"),
    Case("tp2pp2dp2", 0, "fp32"),
    Case("tp2pp2dp2", 1, "fp32"),
    Case("pp2dp2", 1, "bf16", ("untied", "rampup")),
    Case("pp2dp2", 1, "bf16acc32"),
    Case("pp2dp2", 0, "bf16"),
    Case("pp2dp2", 1, "fp16"),
    Case("tp2pp2dp2", 1, "bf16", ("sequence",)),
    Case("dp2", 1, "fp32", ("nopipeline",)),
    Case("dp2", 0, "bf16", ("nopipeline", "untied")),
    Case("tp2dp2", 1, "bf16", ("nopipeline", "sequence")),
    Case("pp2dp2", 1, "fp32", ("zerobubble",)),
    Case("pp2dp2", 1, "fp32", ("recompute",)),
    Case("pp2dp2", 0, "fp32", ("cyclic",)),
    Case("pp2dp2", 0, "fp32", ("cyclic",), happens="evaluating"),
    Case("dp2", 1, "fp32", ("nopipeline", "cyclic")),
    Case("dp2", 1, "fp32", ("nopipeline", "cyclic"), happens="evaluating"),
    Case("dp2", 1, "fp32", ("nopipeline", "nosaverng")),
    Case("pp2dp2", 1, "fp32", happens="restarted"),
    Case("pp2dp2", 1, "fp32", happens="lost"),
    Case("pp2dp2", 1, "fp32", happens="persisted"),
    Case("pp2dp2", 1, "bf16acc32", happens="persisted"),
    Case("dp2", 1, "bf16", ("nopipeline",), happens="persisted"),
)
