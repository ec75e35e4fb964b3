"""Llama-2 written a second time, straight from the formulas: no code shared with ``reft``.

Complex rotations instead of pairs, one head after the other, an explicit mask and softmax.
"""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * gain


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """``x``: (batch, length, size); the pair (j, j + size/2) is one complex number."""
    length, size = x.shape[-2:]
    half = size // 2
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    powers = torch.tensor([theta ** (-2.0 * j / size) for j in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions * powers)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(x: torch.Tensor, w: Weights, heads: int, kv_heads: int, theta: float) -> torch.Tensor:
    length, size = x.shape[1], x.shape[2] // heads
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        q = rope(x @ w["q.weight"][head * size : (head + 1) * size].T, theta)
        k = rope(x @ w["k.weight"][shared * size : (shared + 1) * size].T, theta)
        v = x @ w["v.weight"][shared * size : (shared + 1) * size].T
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(future, float("-inf"))
        outputs.append(torch.softmax(scores, dim=-1) @ v)
    return torch.cat(outputs, dim=-1) @ w["out.weight"].T


def swiglu(x: torch.Tensor, w: Weights) -> torch.Tensor:
    gate = x @ w["gate.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w["up.weight"].T)) @ w["down.weight"].T


def _below(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def logits(tokens: torch.Tensor, w: Weights, config) -> torch.Tensor:
    """``w``: weights named as the pipeline module names them, ``<layer>.<name>``."""
    embedding = w["tied_modules.embedding.weight"] if config.tied else w["0.weight"]
    x = embedding[tokens]
    for index in range(1, config.layers + 1):
        block = _below(w, f"{index}.")
        normed = rms_norm(x, block["attention_norm.weight"], config.norm_epsilon)
        x = x + attention(
            normed, _below(block, "attention."), config.heads, config.kv_heads, config.rope_theta
        )
        normed = rms_norm(x, block["ffn_norm.weight"], config.norm_epsilon)
        x = x + swiglu(normed, _below(block, "ffn."))
    x = rms_norm(x, w[f"{config.layers + 1}.weight"], config.norm_epsilon)
    return x @ (embedding if config.tied else w[f"{config.layers + 2}.weight"]).T


def loss(tokens: torch.Tensor, w: Weights, config) -> torch.Tensor:
    """Mean over (batch, length) of -log softmax at the next token; ``tokens``: (batch, length + 1)."""
    values = logits(tokens[:, :-1], w, config)
    return -torch.log_softmax(values, dim=-1).gather(-1, tokens[:, 1:, None]).mean()


def train_sgd(batches: list[torch.Tensor], w: Weights, config, lr: float, clip: float):
    """Plain gradient descent with a clipped norm over all weights; returns (losses, weights)."""
    w = {name: value.clone().double().requires_grad_(True) for name, value in w.items()}
    losses = []
    for tokens in batches:
        value = loss(tokens, w, config)
        grads = torch.autograd.grad(value, list(w.values()))
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        scale = min(1.0, clip / (float(norm) + 1e-6))
        losses.append(float(value.detach()))
        with torch.no_grad():
            for weight, grad in zip(w.values(), grads, strict=True):
                weight.sub_(grad, alpha=lr * scale)
    return losses, {name: value.detach() for name, value in w.items()}
