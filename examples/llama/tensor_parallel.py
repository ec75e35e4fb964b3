"""Megatron-style tensor parallelism: column and row parallel layers, vocabulary-parallel loss.

Weights are initialised from (seed, name) as the full matrix, then sliced, so that the model is the
same whatever the degrees. Activations between the layers are replicated and bit-identical on all
tensor ranks, hence also the gradients of what is not sharded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the ranks that share the matrices of a stage.

    Attributes:
        group: their process group; None where ``size`` is 1.
        rank: this rank's slice.
        size: number of slices.
        seed: global seed of the initial weights.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    seed: int = 0

    def part(self, size: int) -> slice:
        """This rank's share of a dimension of ``size``, which ``self.size`` divides."""
        if size % self.size:
            raise ValueError(
                f"dimension {size} is not divisible by {self.size} tensor-parallel ranks"
            )
        width = size // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


class _CopyToRanks(torch.autograd.Function):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grads[0].contiguous().clone(), ctx.tp), None


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        return _all_reduce(value.contiguous().clone(), tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _all_reduce(
    value: torch.Tensor, tp: TensorParallel, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    dist.all_reduce(value, op=op, group=tp.group)
    return value


def copy_to_ranks(value: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Enter a sharded region: each rank uses the whole ``value``; its gradients are summed."""
    if tp.size == 1:
        return value
    result: torch.Tensor = _CopyToRanks.apply(value, tp)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(value: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Leave a sharded region: the sum of all ranks' partial results."""
    if tp.size == 1:
        return value
    result: torch.Tensor = _SumOverRanks.apply(value, tp)  # type: ignore[no-untyped-call]
    return result


def initial_weight(
    name: str, shape: tuple[int, ...], std: float, tp: TensorParallel, shard_dim: int | None
) -> nn.Parameter:
    """This rank's slice of a normally distributed weight that depends on (seed, name) only.

    On the meta device no memory is used and nothing is drawn.

    Args:
        name: name of the full weight, unique in the model.
        shape: shape of the full weight.
        std: standard deviation.
        tp: slices and seed.
        shard_dim: the sliced dimension; None for a replicated weight.
    """
    index = [slice(None)] * len(shape)
    if shard_dim is not None:
        index[shard_dim] = tp.part(shape[shard_dim])
    if torch.empty(0).device.type == "meta":
        return nn.Parameter(torch.empty(shape)[tuple(index)])
    key = hashlib.blake2b(f"{tp.seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(key, "little") >> 1)
    full = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(
        0.0, std, generator=generator
    )
    return nn.Parameter(full[tuple(index)].clone())


class ColumnParallelLinear(nn.Module):
    """``y = x W^T`` with the rows of W (the outputs) dealt out; the input is replicated.

    The caller enters the sharded region with :func:`copy_to_ranks`, once for layers that share it.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, std: float, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.weight = initial_weight(
            f"{name}.weight", (out_features, in_features), std, tp, shard_dim=0
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, self.weight)


class RowParallelLinear(nn.Module):
    """``y = x W^T`` with the columns of W (the inputs) dealt out; the result is the ranks' sum."""

    def __init__(
        self, name: str, in_features: int, out_features: int, std: float, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = initial_weight(
            f"{name}.weight", (out_features, in_features), std, tp, shard_dim=1
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(F.linear(value, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Embedding with its rows dealt out: foreign tokens give zeros, the ranks' sum is whole."""

    def __init__(
        self, name: str, vocab_size: int, width: int, std: float, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.first = tp.part(vocab_size).start
        self.weight = initial_weight(f"{name}.weight", (vocab_size, width), std, tp, shard_dim=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return sum_over_ranks(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self.tp)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss from logits whose vocabulary is dealt out; fp32 inside."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, tp: TensorParallel
    ) -> torch.Tensor:
        values = logits.float()
        largest = _all_reduce(values.amax(dim=-1), tp, dist.ReduceOp.MAX)
        values = values - largest.unsqueeze(-1)
        local = labels - tp.rank * logits.shape[-1]
        foreign = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(foreign, 0)
        wanted = values.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        exponentials = values.exp()
        total = exponentials.sum(dim=-1)
        _all_reduce(wanted, tp)
        _all_reduce(total, tp)
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), local, foreign)
        ctx.dtype = logits.dtype
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, local, foreign = ctx.saved_tensors
        one = (~foreign).unsqueeze(-1).to(probabilities.dtype)
        result = probabilities.scatter_add(-1, local.unsqueeze(-1), -one)
        return (result * grads[0].unsqueeze(-1)).to(ctx.dtype), None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Mean cross entropy, fp32 scalar.

    Args:
        logits: (..., vocabulary / size), this rank's slice.
        labels: (...), int64, global token ids.
        tp: the slices.
    """
    if tp.size == 1:
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
    losses: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, labels, tp)  # type: ignore[no-untyped-call]
    return losses.mean()


def mark_norm_owners(module: nn.Module, sharded: set[nn.Parameter], tp: TensorParallel) -> None:
    """Tell DeepSpeed which ranks count a parameter in the gradient norm: exactly one per element.

    DeepSpeed's norms skip parameters without this mark on tensor ranks above 0 and, in fp32 without
    ZeRO, on every stage but the first; copies of tied weights are marked by the pipeline module
    (``ds_pipe_replicated``), but the fp32 norm does not look there.
    """
    for parameter in module.parameters():
        copy = getattr(parameter, "ds_pipe_replicated", False)
        owner = not copy and (parameter in sharded or tp.rank == 0)
        parameter.model_parallel = owner  # type: ignore[attr-defined]


def sharded_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of which each tensor rank holds its own slice."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    return {layer.weight for layer in module.modules() if isinstance(layer, kinds)}
