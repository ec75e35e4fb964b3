"""The models that the engine cases train: tied, frozen, unused and late parameters, buffers."""

from __future__ import annotations

from contextlib import nullcontext

import deepspeed
import torch
from torch import nn

VERSION = tuple(int(n) for n in deepspeed.__version__.split(".")[:2])
VOCABULARY, WIDTH, BATCH = 19, 13, 3
LATE = 4  # The step from which on the parameter ``late`` gets gradients: after the snapshot


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def head(embed: Embed, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embed.weight.t()


class Block(nn.Module):
    """Odd sizes (padding), dropout (random state), a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(hidden.float().mean(dim=(0, 1)).to(self.mean.dtype), 0.25)
        inner = torch.tanh(self.inner(hidden + self.mean.to(hidden.dtype)))
        tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
        with tracker.fork("model") if tracker.get_states() else nullcontext():
            return hidden + nn.functional.dropout(inner, 0.2)


class Net(nn.Module):
    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.embed = Embed()
        self.first, self.second = Block(), Block()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.late = nn.Parameter(torch.randn(5) * 0.1)
        if empty and VERSION >= (0, 19):  # earlier ZeRO cannot hold a parameter without elements
            self.empty = nn.Parameter(torch.empty(0))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embed.weight
        self.step = 0
        self.is_last = True  # whether the micro-batch is the last one of the step
        # Further steps that use ``late``, and those of which only the last micro-batch does
        self.early: tuple[int, ...] = ()
        self.at_last: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.embed(tokens)))
        hidden = hidden + 0.1 * self.frozen(hidden)
        at_last = self.is_last and self.step in self.at_last
        if self.step >= LATE or self.step in self.early or at_last:
            hidden = hidden * (1 + self.late.sum())
        return loss_fn(self.output(hidden), labels)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy times the factor in the last column, which is infinite to make an overflow."""
    targets = labels[:, :-1].long()
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss * labels[0, -1].float()
