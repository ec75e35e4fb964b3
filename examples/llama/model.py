"""Llama-2 as a list of pipeline layers: embedding, blocks, final norm, head, loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.llama.model_config import LlamaConfig
from examples.llama.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    copy_to_ranks,
    cross_entropy,
)

TIED_KEY = "embedding"


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        wide = value.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return wide.to(value.dtype) * self.weight


@lru_cache(maxsize=8)
def rotary_tables(
    length: int, head_size: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, both (length, head_size / 2).

    The angle of pair j at position p is ``p * theta^(-2j / head_size)``. Not a buffer: it is no
    state.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(
        torch.arange(length, dtype=torch.float32, device=device), theta**-exponents
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (j, j + head_size / 2) of ``value`` (batch, heads, length, head_size)."""
    first, second = value.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; ``heads / kv_heads`` query heads share one key and value head."""

    def __init__(self, config: LlamaConfig, name: str, tp: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.heads = config.heads // tp.size
        self.kv_heads = config.kv_heads // tp.size
        hidden, std = config.hidden_size, config.init_std
        self.q = ColumnParallelLinear(f"{name}.q", hidden, hidden, std, tp)
        self.k = ColumnParallelLinear(f"{name}.k", hidden, config.kv_size, std, tp)
        self.v = ColumnParallelLinear(f"{name}.v", hidden, config.kv_size, std, tp)
        self.out = RowParallelLinear(f"{name}.out", hidden, hidden, _output_std(config), tp)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, _ = value.shape
        size = self.config.head_size
        value = copy_to_ranks(value, self.tp)
        q = self.q(value).view(batch, length, self.heads, size).transpose(1, 2)
        k = self.k(value).view(batch, length, self.kv_heads, size).transpose(1, 2)
        v = self.v(value).view(batch, length, self.kv_heads, size).transpose(1, 2)
        cos, sin = rotary_tables(length, size, self.config.rope_theta, value.device, value.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, name: str, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        hidden, ffn, std = config.hidden_size, config.ffn_size, config.init_std
        self.gate = ColumnParallelLinear(f"{name}.gate", hidden, ffn, std, tp)
        self.up = ColumnParallelLinear(f"{name}.up", hidden, ffn, std, tp)
        self.down = RowParallelLinear(f"{name}.down", ffn, hidden, _output_std(config), tp)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = copy_to_ranks(value, self.tp)
        result: torch.Tensor = self.down(F.silu(self.gate(value)) * self.up(value))
        return result


def _output_std(config: LlamaConfig) -> float:
    """Smaller where a branch joins the residual stream, so that depth does not widen it."""
    return config.init_std / math.sqrt(2 * config.layers)


class LlamaBlock(nn.Module):
    """One transformer block with pre-normalisation: (batch, length, hidden) to the same."""

    def __init__(self, config: LlamaConfig, index: int, tp: TensorParallel) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, f"blocks.{index}.attention", tp)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.ffn = FeedForward(config, f"blocks.{index}.ffn", tp)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self._drop(self.attention(self.attention_norm(value)))
        return value + self._drop(self.ffn(self.ffn_norm(value)))

    def _drop(self, value: torch.Tensor) -> torch.Tensor:
        return F.dropout(value, self.dropout, self.training) if self.dropout else value


class Embedding(VocabParallelEmbedding):
    """Token ids (batch, length) to (batch, length, hidden)."""

    def __init__(self, config: LlamaConfig, tp: TensorParallel) -> None:
        super().__init__("embedding", config.vocab_size, config.hidden_size, config.init_std, tp)


class FinalNorm(RMSNorm):
    """The norm before the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.norm_epsilon)


class Head(ColumnParallelLinear):
    """(batch, length, hidden) to this rank's slice of the logits."""

    def __init__(self, config: LlamaConfig, tp: TensorParallel) -> None:
        super().__init__("head", config.hidden_size, config.vocab_size, config.init_std, tp)
        self.tp = tp

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(copy_to_ranks(value, self.tp))


def tied_head(embedding: VocabParallelEmbedding, value: torch.Tensor) -> torch.Tensor:
    """Logits from the embedding's own weight."""
    return F.linear(copy_to_ranks(value, embedding.tp), embedding.weight)


def loss_function(tp: TensorParallel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mean cross entropy of (logits, labels) over the tensor-parallel slices."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels, tp)

    return loss


def layer_specs(config: LlamaConfig, tp: TensorParallel) -> list[Any]:
    """The model as DeepSpeed layer specifications; each stage builds its own share only."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    blocks = [LayerSpec(LlamaBlock, config, index, tp) for index in range(config.layers)]
    if config.tied:
        first = TiedLayerSpec(TIED_KEY, Embedding, config, tp)
        last = TiedLayerSpec(TIED_KEY, Embedding, config, tp, forward_fn=tied_head)
    else:
        first = LayerSpec(Embedding, config, tp)
        last = LayerSpec(Head, config, tp)
    return [first, *blocks, LayerSpec(FinalNorm, config), last]


class Llama(nn.Module):
    """The same layers in one process, without DeepSpeed: for counting and comparing."""

    def __init__(self, config: LlamaConfig, tp: TensorParallel | None = None) -> None:
        super().__init__()
        tp = tp or TensorParallel()
        self.embedding = Embedding(config, tp)
        self.blocks = nn.ModuleList(LlamaBlock(config, index, tp) for index in range(config.layers))
        self.norm = FinalNorm(config)
        self.head = None if config.tied else Head(config, tp)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens)
        for block in self.blocks:
            value = block(value)
        value = self.norm(value)
        result: torch.Tensor = (
            tied_head(self.embedding, value) if self.head is None else self.head(value)
        )
        return result
