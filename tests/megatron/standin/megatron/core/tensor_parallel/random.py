"""Random states of their own for what tensor-parallel ranks draw apart from each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        here = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(here)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        here = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(here)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _TRACKER
