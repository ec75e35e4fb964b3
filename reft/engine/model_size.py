"""Estimates operations per token and tokens per sample, for the utilization in `reft status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch

from reft.grid import Coordinate

TRAINED_FLOPS, FROZEN_FLOPS = 6, 4  # Floating-point operations for one parameter and one token
EXPERTS = -1
"""Stands for an unknown number of operations: a token passes through only some experts, and the
engine does not expose how many."""


def own_flops_per_token(engine: Any, at: Coordinate) -> int:
    """Return operations per token of the parameters that this rank reports.

    Each parameter is reported by exactly one rank, which belongs to the first replica: for a
    tied parameter, on the first stage that has it; for a parameter that all tensor-parallel
    ranks hold, the first of these ranks.

    Returns:
        The operations; :data:`EXPERTS` if the model has experts.
    """
    module = engine.module
    parameters = dict.fromkeys(module.parameters())
    if any(getattr(p, "allreduce", True) is False for p in parameters):
        return EXPERTS
    if at.dp:
        return 0
    others = set(_tied_elsewhere(module))
    return sum(
        getattr(p, "ds_numel", p.numel()) * (TRAINED_FLOPS if p.requires_grad else FROZEN_FLOPS)
        for p in parameters
        if p not in others
        # A parameter with one of these attributes is split: each tensor-parallel rank has a
        # part.
        and (at.tp == 0 or getattr(p, "tensor_model_parallel", getattr(p, "model_parallel", False)))
    )


def _tied_elsewhere(module: Any) -> Iterator[Any]:
    rank = getattr(module, "global_rank", 0)
    for comm in getattr(module, "tied_comms", {}).values():
        if rank != min(comm["ranks"]):
            names = comm["weight_attr"]
            for name in [names] if isinstance(names, str) else names:
                yield attrgetter(name)(comm["module"])


def flops_per_token(gathered: Iterable[int]) -> int:
    """Return operations per token of the complete model, from the reports of all ranks."""
    found = list(gathered)
    return EXPERTS if EXPERTS in found else sum(found)


def tokens_per_sample(micro_batch: int, inputs: Any) -> int:
    """Return the number of tokens of a sample, from the first micro-batch of token ids in the
    inputs of a forward pass.

    Args:
        micro_batch: samples in a micro-batch.
        inputs: tensors in lists, tuples and mappings.

    Returns:
        The number of tokens; 0 if there is no such tensor.
    """
    for tensor in _tensors(inputs):
        is_integer = tensor.dtype in (torch.int64, torch.int32)
        if is_integer and tensor.ndim == 2 and len(tensor) == micro_batch:
            return tensor.shape[1]
    return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
