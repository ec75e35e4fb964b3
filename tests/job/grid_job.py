"""A pipeline with tensor slices, of as many replicas as the ranks of this start make, which reads by
``reft.data.loader``. The last stage's first slice says of each step what it has read and its losses.

ARGS: DeepSpeed's JSON, stages, slices. Or, as a rank of :func:`tests.engine.ranks.run_ranks`: a directory whose
``life.json`` says which steps to make again, without reft, from the samples that each replica had.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils.data import Dataset

import reft
from examples.llama.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    copy_to_ranks,
)
from reft.engine.on_import import avoid_build_at_start

avoid_build_at_start()

BATCH, MICRO, WIDTH, SAMPLES = 24, 2, 8, 480
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CONFIG: dict[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.5,
    "steps_per_print": None,
}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The input; what is wanted, with the sample's number behind it."""
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, torch.cat([x.flip(0), torch.tensor([float(index)])])


class Block(nn.Module):
    def __init__(self, name: str, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.norm = nn.LayerNorm(WIDTH)
        # Of two matrices: each slice has its part of either, one behind the other.
        self.up = ColumnParallelLinear(f"{name}.up", WIDTH, 2 * 34, 0.3, tp)
        self.down = RowParallelLinear(f"{name}.down", 34, WIDTH, 0.3, tp)
        for parameter, dimension in zip(self.parameters(), (-1, -1, 0, 1), strict=True):
            parameter.tensor_model_parallel = dimension >= 0  # as Megatron says it
            parameter.partition_dim = dimension

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        gate, inside = self.up(copy_to_ranks(self.norm(x), self.tp)).chunk(2, -1)
        return x + self.down(gate.tanh() * inside)


class Said:
    """The loss function. It says before the step is made what its micro-batches were, and their losses.
    ``replicas``: that share a step."""

    def __init__(self, replicas: int) -> None:
        self._of_a_step = BATCH // MICRO // replicas
        self._ids: list[list[int]] = []
        self._losses: list[str] = []
        self.tell: Callable[[list[list[int]], list[str]], None]

    def __call__(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(found.float(), wanted[:, :WIDTH].float())
        self._ids.append([int(i) for i in wanted[:, WIDTH]])
        self._losses.append(loss.item().hex())
        if len(self._ids) == self._of_a_step:
            self.tell(self._ids, self._losses)
            self._ids, self._losses = [], []
        return loss


def engine_of(
    config: dict[str, Any], pp: int, tp: int, blocks: int = 6, tied: Sequence[str] = ()
) -> tuple[Any, Said]:
    """An engine of a model of this many blocks. ``tied``: parameters of one more block, first and last, that
    DeepSpeed keeps equal there; none: no such block."""
    topology = reft.topology(pp, tp=tp)
    groups = (
        [dist.new_group(list(g)) for g in topology.get_axis_comm_lists("model")]
        if tp > 1
        else [None]
    )
    part = TensorParallel(groups[RANK // tp if tp > 1 else 0], RANK % tp, tp, seed=3)
    said = Said(WORLD // pp // tp)
    ends = [TiedLayerSpec("ends", Block, "ends", part, tied_weight_attr=list(tied))] if tied else []
    module = PipelineModule(
        [*ends, *(Block(f"block{i}", part) for i in range(blocks)), *ends],
        topology=topology,
        loss_fn=said,
        partition_method="uniform",
    )
    # What DeepSpeed's converter has to know of slices.
    module.universal_checkpoint_info = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r".*\.norm\..*"],
        "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*\.up\.weight"],
        "pipeline_replicated_parameter_patterns": [
            rf"tied_modules\.ends\.{re.escape(name)}" for name in tied
        ],
    }
    engine = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )[0]
    return engine, said
