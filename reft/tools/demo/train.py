"""The training script of ``reft demo``: a small transformer over bytes, as a DeepSpeed pipeline.

The script does nothing for snapshots: before it runs, ``reft launch`` wraps
``deepspeed.initialize``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from reft.engine.on_import import avoid_build_at_start
from reft.log import EventLog

_WIDTH, _HEADS, _LENGTH, _SYMBOLS = 64, 4, 64, 256
_CORPUS_BYTES = 2**18
_SEED, _DROPOUT = 1234, 0.1  # With dropout, losses also depend on the ranks' random states


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_SYMBOLS, _WIDTH)
        self.place = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.embed(text) + self.place
        return value


class CausalBlock(nn.TransformerEncoderLayer):
    """A transformer block in which a byte attends only to the bytes before it."""

    def __init__(self) -> None:
        super().__init__(
            _WIDTH, _HEADS, 4 * _WIDTH, _DROPOUT, "gelu", batch_first=True, norm_first=True
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(value, src_mask=self.get_buffer("mask"), is_causal=True)


def samples() -> TensorDataset:
    """Return samples from the sources of Python's standard library.

    Returns:
        Pairs of int64 tensors of shape (_LENGTH,): an input, and as its target the same text one
        byte further on.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:_CORPUS_BYTES]
    pieces = torch.tensor(list(text)).unfold(0, _LENGTH + 1, _LENGTH)
    return TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


def compute_loss(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1).float(), text.flatten())


def train(options: dict[str, Any]) -> None:
    """Train as one rank of the job.

    Args:
        options: ``steps``, ``stages``, ``layers``, ``save_dir``, and DeepSpeed's configuration as
            ``deepspeed``.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.utils import set_random_seed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    avoid_build_at_start()
    if get_accelerator().device_name() == "cpu":
        torch.set_flush_denormal(True)  # Denormals make a backward pass several times slower
    else:  # Make computations on the device deterministic
        get_accelerator().set_device(
            int(os.environ["LOCAL_RANK"]) % get_accelerator().device_count()
        )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed()
    set_random_seed(_SEED)
    layers = [
        LayerSpec(Embedding),
        *(LayerSpec(CausalBlock) for _ in range(options["layers"])),
        LayerSpec(nn.LayerNorm, _WIDTH),
        LayerSpec(nn.Linear, _WIDTH, _SYMBOLS),
    ]
    module = PipelineModule(
        layers,
        num_stages=options["stages"],
        loss_fn=compute_loss,
        partition_method=f"type:{CausalBlock.__name__}",
    )
    engine, *_ = deepspeed.initialize(
        model=module, training_data=samples(), config=options["deepspeed"]
    )
    set_random_seed(_SEED + 1 + engine.global_rank)
    engine.load_checkpoint(options["save_dir"])
    events = EventLog(engine.global_rank, writer="rank")
    while engine.global_steps < options["steps"]:
        loss = float(engine.train_batch())
        step = engine.global_steps
        events.write("step", step=step, loss=loss, loss_hex=loss.hex())
        if engine.global_rank == 0:
            print(f"step {step}/{options['steps']}  loss {loss:.4f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
