"""What ``reft demo`` trains: a small transformer over bytes, as a pipeline of DeepSpeed's.

It knows nothing of snapshots: ``reft launch`` installs them around ``deepspeed.initialize`` before it runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from reft.data.order import Order
from reft.engine.on_import import avoid_build_at_start
from reft.log import EventLog

_WIDTH, _HEADS, _LENGTH, _SYMBOLS = 64, 4, 64, 256
_CORPUS_BYTES = 2**20
_SEED, _DROPOUT = 1234, 0.1  # With dropout the random states of the ranks matter


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_SYMBOLS, _WIDTH)
        self.place = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.embed(text) + self.place
        return value


class Block(nn.Module):
    """A transformer block in which a byte sees those before it only."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, _DROPOUT, **options)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH, device=value.device)
        seen: torch.Tensor = self.layer(value, src_mask=mask, is_causal=True)
        return seen


class MicroBatches:
    """Endless ``(bytes, the bytes that follow)`` of one rank, both of shape (micro-batch, length)."""

    position_of_job = True  # Its state is the same on all replicas, and right at every degree

    def __init__(self, micro_batch: int, dp_rank: int, dp_size: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:_CORPUS_BYTES]
        self._text = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._order = Order((_CORPUS_BYTES - 1) // _LENGTH, _SEED, shuffle=True)
        self._micro_batch, self._dp_rank, self._dp_size = micro_batch, dp_rank, dp_size
        self.consumed = 0  # Samples, by the whole job

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.consumed + self._dp_rank * self._micro_batch
        self.consumed += self._dp_size * self._micro_batch
        mine = np.arange(first, first + self._micro_batch, dtype=np.int64)
        starts = [int(index) * _LENGTH for index in self._order.samples(mine)]
        text = torch.from_numpy(np.stack([self._text[at : at + _LENGTH + 1] for at in starts]))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


def loss_of(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1).float(), text.flatten())


def train(options: dict[str, Any]) -> None:
    """One rank of the job. ``options``: ``steps``, ``stages``, ``layers``, ``save_dir``; ``deepspeed``: its
    configuration."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.utils import set_random_seed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    avoid_build_at_start()
    if get_accelerator().device_name() == "cpu":
        torch.set_flush_denormal(True)  # denormals would make a backward pass several times slower
    else:  # nothing that would make two runs differ
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]) % get_accelerator().device_count())
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed()
    set_random_seed(_SEED)
    layers = [
        LayerSpec(Embedding),
        *(LayerSpec(Block) for _ in range(options["layers"])),
        LayerSpec(nn.LayerNorm, _WIDTH),
        LayerSpec(nn.Linear, _WIDTH, _SYMBOLS),
    ]
    module = PipelineModule(
        layers, num_stages=options["stages"], loss_fn=loss_of, partition_method=f"type:{Block.__name__}"
    )
    parameters = list(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=options["deepspeed"])
    set_random_seed(_SEED + 1 + engine.global_rank)
    data = MicroBatches(
        engine.train_micro_batch_size_per_gpu(),
        engine.grid.get_data_parallel_rank(),
        engine.grid.get_data_parallel_world_size(),
    )
    engine.load_checkpoint(options["save_dir"])
    # The engine counts consumed samples on every rank, also where no data is read.
    data.consumed = engine.global_samples
    events = EventLog(engine.global_rank, writer="rank")
    events.write("ready", step=engine.global_steps)
    while engine.global_steps < options["steps"]:
        loss = float(engine.train_batch(data))
        step = engine.global_steps
        events.write("step", step=step, loss=loss, loss_hex=loss.hex())
        if engine.global_rank == 0:
            print(f"step {step}/{options['steps']}  loss {loss:.4f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
