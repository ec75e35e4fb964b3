"""What the benchmarks train: a Llama-2 near a wanted size under DeepSpeed's pipeline engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama-2 shape near a wanted number of parameters."""

    hidden: int
    layers: int
    vocab: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def ffn(self) -> int:
        return -(-self.hidden * 8 // 3 // 64) * 64

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    @classmethod
    def near(cls, parameters: float, stages: int) -> Shape:
        """The shape closest to ``parameters``; among near ones the one with natural proportions."""

        def distance(shape: Shape) -> float:
            natural = abs(shape.layers - max(2, shape.hidden // 64)) / shape.layers
            return abs(shape.parameters - parameters) / parameters + 0.1 * natural

        made = [
            cls(hidden, layers, 8192 if hidden > 128 else 512)
            for hidden in (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
            for layers in range(max(2, stages), 49)
        ]
        return min(made, key=distance)


def build_engine(options: argparse.Namespace) -> tuple[Any, Iterator[Any]]:
    """DeepSpeed's pipeline engine around the benchmark's model, and endless data for it."""
    import itertools

    import torch

    from examples.llama import train
    from examples.llama.model_config import degrees_for
    from examples.llama.options import parse
    from reft.tools.planning.job import JobLayout

    shape = Shape.near(options.params, options.pp)
    wanted = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv-heads": shape.heads,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "seq": options.seq,
        "micro-batch": options.micro_batch,
        "micro-batches": options.micro_batches,
        "pp": options.pp,
        "zero": options.zero,
        "dtype": options.dtype,
        "steps": 1_000_000,
    }
    argv = [text for name, value in wanted.items() for text in (f"--{name}", str(value))]
    job = parse(argv)
    # Denormals would make a CPU's backward pass several times slower (trap 19).
    torch.set_flush_denormal(True)
    # DeepSpeed would build its fused Adam at first use where there is a compiler, in a minute or
    # more.
    train._needs_torch_adam = lambda: True
    train.import_deepspeed(options.verbose)
    with train._quiet(options.verbose):
        import deepspeed

        backend = None
        if device := getattr(options, "device", None):
            from tests.device.accelerator import use_device

            backend = use_device(device)
        deepspeed.init_distributed(backend)
    layout = JobLayout(degrees_for(options.pp * options.dp, options.pp, 1, options.dp))
    engine = train.build_engine(job, job.model_config(), layout)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(
        0,
        shape.vocab,
        (8, options.micro_batch, options.seq + 1),
        dtype=torch.int64,
        generator=generator,
    )
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    return engine, itertools.cycle(batches)


def device_name() -> str:
    """What DeepSpeed trains on, for people."""
    import torch
    from deepspeed.accelerator import get_accelerator

    name = str(get_accelerator().device_name())
    return torch.cuda.get_device_name() if name == "cuda" else name


def synchronize() -> None:
    """Wait until a device has done what it was given."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()


def inner_optimizer(engine: Any) -> Any:
    """The torch optimizer below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def masters(engine: Any) -> dict[str, Any]:
    """What the optimizer updates, where that is not the model itself: ZeRO's fp32 partitions."""
    model = {id(p) for p in engine.module.parameters()}
    return {
        f"{g}.{i}": param.data
        for g, group in enumerate(inner_optimizer(engine).param_groups)
        for i, param in enumerate(group["params"])
        if id(param) not in model
    }
