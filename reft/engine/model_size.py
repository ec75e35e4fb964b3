"""What a model computes for a token, and how many tokens a sample has, for the job's TFLOP/s.

A token costs six operations for each parameter that is trained, and four for each that is frozen: one
multiplication and one addition in the forward pass, for the gradients of the inputs, and for those of the
weights (PaLM, arXiv 2204.02311, appendix B: 6 N; Megatron-LM, arXiv 2104.04473, equation 3, has the same main
term and a third of it more, for activations that are computed again). Attention's own 12 L H Q T, and what
activation checkpointing computes again, are left out: layers and heads are not known from an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from reft.grid import Coordinate
from reft.node.progress import ProgressPage

TRAINED_FLOPS, FROZEN_FLOPS = 6, 4
EXPERTS = -1
"""In the place of a number: a token passes some of the experts, and the engine does not say how many."""


def own_flops_per_token(engine: Any, at: Coordinate) -> int:
    """Of the parameters that this rank answers for, so that all ranks together count each parameter once:
    those of the first replica, of a tied parameter the first of its stages, and of one that tensor-parallel
    ranks have alike the first of them. :data:`EXPERTS` where there are experts."""
    module = engine.module
    parameters = dict.fromkeys(module.parameters())
    if any(getattr(p, "allreduce", True) is False for p in parameters):
        return EXPERTS
    if at.dp:
        return 0
    others = set(_tied_elsewhere(module))
    return sum(
        p.numel() * (TRAINED_FLOPS if p.requires_grad else FROZEN_FLOPS)
        for p in parameters
        if p not in others and (at.tp == 0 or _is_split(p))
    )


def _is_split(parameter: Any) -> bool:
    """Whether tensor-parallel ranks have other parts of it."""
    return bool(getattr(parameter, "tensor_model_parallel", getattr(parameter, "model_parallel", False)))


def _tied_elsewhere(module: Any) -> Iterator[Any]:
    """Parameters that an earlier stage has too."""
    rank = getattr(module, "global_rank", 0)
    for comm in getattr(module, "tied_comms", {}).values():
        if rank != min(comm["ranks"]):
            names = comm["weight_attr"]
            for name in [names] if isinstance(names, str) else names:
                found = comm["module"]
                for part in name.split("."):
                    found = getattr(found, part)
                yield found


def flops_per_token(gathered: Iterable[int]) -> int:
    """Of the whole model, from what all ranks answer for."""
    found = list(gathered)
    return EXPERTS if EXPERTS in found else sum(found)


class TokensSeen:
    """Notes on a trainer's page how many tokens a sample has, from the first micro-batch of token ids.

    Args:
        page: of the trainer.
        micro_batch: samples in it.
    """

    def __init__(self, page: ProgressPage, micro_batch: int) -> None:
        self._page = page
        self._micro_batch = micro_batch
        self._known = False

    def look(self, *inputs: Any) -> None:
        """``inputs``: of a forward pass; tensors, and lists, tuples and mappings of them."""
        if self._known:
            return
        for tensor in _tensors(inputs):
            if (
                tensor.dtype in (torch.int64, torch.int32)
                and tensor.ndim == 2
                and len(tensor) == self._micro_batch
            ):
                self._known = True
                self._page.set_tokens(tensor.shape[1])
                return


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
